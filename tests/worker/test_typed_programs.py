"""Functions of typed inputs behind a contract: their signature is its schemas."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rllm.cli.main import rllm as front_door
from rllm.contracts import read_contract
from rllm.worker import Worker

PROGRAMS = """
from dataclasses import dataclass
from enum import Enum

from rllm import AgentConfig, Task


class Unit(Enum):
    CHARACTERS = "characters"
    WORDS = "words"


@dataclass
class Length:
    length: int
    unit: str


def measure(text: str, unit: Unit = Unit.CHARACTERS) -> Length:
    '''Say how long a text is.'''
    assert isinstance(unit, Unit)
    return Length(len(text.split() if unit is Unit.WORDS else text), unit.value)


async def double(number: int) -> int:
    return 2 * number


def untyped(text):
    return {}


def solve(t: Task, c: "AgentConfig"):
    return {"length": len(t.metadata["text"])}
"""


def rllm(*words: str) -> Result:
    return CliRunner().invoke(front_door, words, prog_name="rllm", catch_exceptions=False)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    Path("programs.py").write_text(PROGRAMS)


def test_a_contract_is_made_of_a_signature_and_runs() -> None:
    assert rllm("worker", "init", "measure", "--program", "programs.py:measure").exit_code == 0
    contract = read_contract(Path("measure.worker.md"))
    assert contract.purpose == "Say how long a text is."
    assert contract.input_schema.required == ["run_id", "text"]
    assert contract.input_schema.properties["text"] == {"type": "string"}
    assert contract.input_schema.properties["unit"]["enum"] == ["characters", "words"]
    assert contract.output_schema.properties["length"] == {"type": "integer"}
    worker = Worker.load("measure.worker.md", directory="runs")
    words = worker.run({"run_id": "1", "text": "two words", "unit": "words"})
    assert words.outputs == {"run_id": "1", "status": "ok", "length": 2, "unit": "words"}
    default = worker.run({"run_id": "2", "text": "four"})
    assert (default.outputs or {})["length"] == 4
    assert worker.run({"run_id": "3", "text": "four", "unit": "lines"}).status == "invalid_request"


def test_a_result_that_is_no_object_is_called_result() -> None:
    assert rllm("worker", "init", "double", "--program", "programs.py:double").exit_code == 0
    done = rllm("worker", "run", "double.worker.md", "--input", '{"run_id": "1", "number": 21}', "--json")
    assert json.loads(done.stdout)["outputs"]["result"] == 42


def test_a_function_without_types_is_no_program() -> None:
    refused = rllm("worker", "init", "other", "--program", "programs.py:untyped")
    assert refused.exit_code == 2
    assert "task" in refused.stderr


def test_a_task_and_a_configuration_are_these_by_any_name() -> None:
    assert rllm("worker", "init", "solve", "--program", "programs.py:solve").exit_code == 0
    contract = read_contract(Path("solve.worker.md"))
    assert set(contract.input_schema.properties) == {"run_id", "task", "context"}
