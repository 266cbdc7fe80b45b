"""docs/gateway.md runs: its commands against the model that it serves, its Python as one program.

```sh      `rllm serve model …` ──► a server on a free port ◄── `curl …`, line by line, and all is answered
```python  one program in the same directory
tables     the record's fields, the segments' reasons, the metrics: all there are, and no others
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.gateway.server.counts import Counts
from rllm.gateway.server.metrics import prometheus_text
from rllm.gateway.upstream.continuity import UpstreamSegmentReason
from rllm.rendering.chat import SegmentReason
from rllm.types.wire import CallRecord

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "gateway.md").read_text()
ENTRY_POINT = "import sys; from rllm.cli.main import main; sys.exit(main())"
DOCUMENTED = "http://127.0.0.1:8080"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def lines_of(command: str) -> list[str]:
    """Shell lines that begin with it, continued ones joined."""
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(command)]


@dataclass
class Served:
    directory: Path
    url: str

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.directory, env=environment(), capture_output=True, text=True, check=False
        )


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(CHECKOUT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What the first block starts, on a port that is free."""
    directory = tmp_path_factory.mktemp("page")
    create, serve = (line.split()[1:] for line in blocks("sh")[0].splitlines())
    place = Served(directory, "")
    with contextlib.chdir(directory):
        created = CliRunner().invoke(front_door, create, prog_name="rllm", catch_exceptions=False)
    assert created.exit_code == 0, created.output
    serve[serve.index("--port") + 1] = "0"
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY_POINT, *serve, "--json"],
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    place.url = json.loads(line)["url"]
    yield place
    process.terminate()
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands are curl's")
def test_the_session_of_the_page_is_created_asked_and_read(served: Served) -> None:
    told: list[Any] = []
    for line in lines_of("curl"):
        assert DOCUMENTED in line
        done = served.run("sh", "-c", line.replace(DOCUMENTED, served.url))
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    session, answer, traces = told
    assert session["session_id"] == "demo/1"
    (trace,) = traces
    assert (trace["id"], trace["session"], trace["sampling"]["temperature"]) == (answer["id"], "demo/1", 0.7)
    shown = json.loads(blocks("json")[0])
    assert shown.keys() <= trace.keys()
    assert (trace["prompt_ids"], trace["sampling"]) == (shown["prompt_ids"], shown["sampling"])


def test_the_python_of_the_page_runs_from_top_to_bottom(served: Served) -> None:
    program = served.directory / "page.py"
    program.write_text("\n\n".join(blocks("python")).replace(DOCUMENTED, served.url))
    done = served.run(sys.executable, str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("chatcmpl-") == 2


def first_cells(title: str) -> set[str]:
    """Names in the first column of the table under a title."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_page_names_every_field_of_a_record() -> None:
    assert first_cells("What is captured") == {field.name for field in fields(CallRecord)}


def test_the_page_names_every_reason_of_a_segment() -> None:
    assert first_cells("Token in, token out") == {*SegmentReason, *UpstreamSegmentReason}


def test_the_metrics_of_the_page_exist() -> None:
    text = prometheus_text(Counts(), {}, in_flight=0, sessions=0, uptime_s=0.0)
    named = set(re.findall(r"rllm_gateway_\w+", PAGE))
    assert named
    assert named <= set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
