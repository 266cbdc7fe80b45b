"""docs/models.md runs: its commands serve a model on a free port; its Python is one program that asks it."""

import difflib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.errors import ConfigError
from rllm.inference.engines import make_client
from rllm.inference.local.client import LocalClient
from rllm.inference.openai import OpenAIClient
from rllm.inference.vllm import VLLMClient

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "models.md").read_text()
ENTRY_POINT = "import sys; from rllm.cli.main import main; sys.exit(main())"
DOCUMENTED = "http://127.0.0.1:8080"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def rllm(words: list[str], directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY_POINT, *words],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the page's commands start, on a port that is free."""
    create, serve = (line.split()[1:] for line in blocks("sh")[0].splitlines())
    monkeypatch.chdir(tmp_path)
    created = CliRunner().invoke(front_door, create, prog_name="rllm", catch_exceptions=False)
    assert created.exit_code == 0, created.output
    serve[serve.index("--port") + 1] = "0"
    with rllm([*serve, "--json"], tmp_path) as served:
        assert served.stdout is not None
        line = served.stdout.readline()
        assert line, "it did not start"
        yield json.loads(line)["url"]
        served.terminate()


def test_the_python_of_the_page_runs_from_top_to_bottom(url: str) -> None:
    programs = blocks("python")
    assert len(programs) == 5
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(programs):
        program = block.replace(DOCUMENTED, url)
        exec(compile(program, f"docs/models.md, block {number}", "exec"), namespace)


@pytest.mark.parametrize(
    ("engine", "client"), [("openai", OpenAIClient), ("vllm", VLLMClient), ("local", LocalClient)]
)
def test_the_arguments_of_an_engine_are_those_of_its_client(engine: str, client: type) -> None:
    (listed,) = re.findall(rf"^\| `{engine}` \| (.*) \|$", PAGE, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", listed))
    other_ways = {
        "self",
        "tokenizer",
        "loaded_model",
        "follows_schema",
    }  # given by rllm's own code, or beside them
    takes = {*inspect.signature(client.__init__).parameters} - other_ways
    assert named == (takes | {"model", "device", "trust_remote_code"} if engine == "local" else takes)
    with pytest.raises(ConfigError, match="does not know"):
        make_client(engine, {difflib.get_close_matches("modle", named, n=1)[0] + "x": 1})
