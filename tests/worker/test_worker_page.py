"""docs/worker.md: its contract, program, commands and Python run, in order, and print what the page says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.contracts import read_contract
from rllm.contracts.contract import Constraints

PAGE = (Path(__file__).parents[2] / "docs" / "worker.md").read_text()
ELSEWHERE = (
    "pip",
    "curl",
    "claude",
    "echo",
    "rllm worker init guess",
    "rllm worker serve",
    "rllm worker promote",
    "rllm dataset",
    "rllm sft",
)
"""Lines that take a server, a client or a training run: the slow test has them."""
ADDRESS = "http://127.0.0.1:8090"
BESIDE = ("rllm dataset", "rllm sft")
"""Also while a server runs."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^(?:`{{3,4}}){language}\n(.*?)^`{{3,4}}$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    contract = re.findall(r"^````markdown\n(.*?)^````$", PAGE, re.MULTILINE | re.DOTALL)[0]
    Path("measure.worker.md").write_text(contract)
    program, *python_blocks = blocks("python")
    python = "".join(python_blocks)
    Path("measure.py").write_text(program)
    Path("rows.jsonl").write_text('{"run_id": "1", "text": "four"}\n{"run_id": "9", "text": ""}\n')
    printed: dict[str, str] = {}
    for line in "".join(blocks("sh")).splitlines():
        if not line.startswith(ELSEWHERE):
            result = CliRunner().invoke(front_door, shlex.split(line)[1:], catch_exceptions=False)
            assert result.exit_code == 0, (line, result.output)
            printed[line.split()[2]] = result.stdout
    shown, real = json.loads(blocks("json")[-1]), json.loads(printed["run"])
    for answer in (shown, real):
        answer["observability"] |= {"duration_ms": 0, "trace_id": ""}
    assert real == shown
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [answer["outputs"]["length"] for answer in answers] == [4, 0]
    capsys.readouterr()
    exec(compile(python, "docs/worker.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", python)


def test_the_page_names_every_constraint_and_its_default(tmp_path: Path) -> None:
    path = tmp_path / "worker.md"
    contract = re.findall(r"^````markdown\n(.*?)^````$", PAGE, re.MULTILINE | re.DOTALL)[0]
    path.write_text(re.sub(r"^- .*\n", "", contract, flags=re.MULTILINE))
    assert read_contract(path).constraints == Constraints()
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", PAGE, re.MULTILINE))
    assert set(rows) >= set(Constraints.__dataclass_fields__) - {"notes"}
    assert float(rows["timeout_seconds"]) == Constraints().timeout_seconds
    assert int(rows["max_attempts"]) == Constraints().max_attempts


@contextmanager
def served(words: list[str]) -> Iterator[tuple[str, str]]:
    """A line of the page that serves, on a free port: its address and token."""
    words[words.index("--port") + 1] = "0"
    command = [sys.executable, "-m", "rllm", *words, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            listening = json.loads(process.stdout.readline())
            yield listening["url"], listening["token"]
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's client is curl")
def test_every_command_of_the_page_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server serves the lines below it that call it; who needs its directory comes after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    Path("measure.worker.md").write_text(re.findall(r"^````markdown\n(.*?)^````$", PAGE, re.M | re.S)[0])
    Path("measure.py").write_text(blocks("python")[0])
    Path("rows.jsonl").write_text('{"run_id": "1", "text": "four"}\n')
    Path("texts.jsonl").write_text('{"text": "four", "length": 4}\n')
    Path("held-out.jsonl").write_text('{"inputs": {"text": "five!"}, "outputs": {"length": 5}}\n')
    lines = [line for line in "".join(blocks("sh")).splitlines() if not line.startswith(("pip", "claude"))]
    ended: list[tuple[str, subprocess.CompletedProcess[str]]] = []

    def run(line: str, url: str = "", token: str = "") -> None:
        done = subprocess.run(
            ["sh", "-ec", line.replace(ADDRESS, url)],
            env={**os.environ, "TOKEN": token},
            capture_output=True,
            text=True,
            check=False,
        )
        ended.append((line, done))

    starts = [place for place, line in enumerate(lines) if line.startswith("rllm worker serve")]
    for line in lines[: starts[0]]:
        run(line)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        beside, after = [
            [
                line
                for line in lines[start + 1 : end]
                if (line.startswith(BESIDE) or ADDRESS in line) is is_beside
            ]
            for is_beside in (True, False)
        ]
        with served(shlex.split(lines[start])[1:]) as server:
            for line in beside:
                run(line, *server)
        for line in after:
            run(line)
    answers = {line: json.loads(done.stdout) for line, done in ended if line.startswith("curl")}
    assert len(answers) == 3
    assert all(each.get("status", "ok") == "ok" for each in answers.values())
    for line, done in ended:
        promotes = line.startswith("rllm worker promote")
        assert done.returncode in ((0, 1) if promotes else (0,)), (line, done.stdout, done.stderr)
    assert "promoted" in ended[-1][1].stdout
    assert json.loads(Path("rows-to-learn.jsonl").read_text())["messages"][-1]["content"] == '{"length": 4}'
