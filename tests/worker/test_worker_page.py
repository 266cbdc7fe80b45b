"""docs/worker.md: its contract, program, commands and Python run, in order, and print what the page says."""

import json
import re
import shlex
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
    "rllm worker serve",
    "rllm worker promote",
    "rllm dataset",
    "rllm sft",
)
"""Commands of the page that test_doors.py, test_promotion.py and test_export.py have, by their own means."""


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
