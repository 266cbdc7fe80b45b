"""Agents and workflows behind a contract, with real sampling: the same run and record as a program."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import worker_files as files
from click.testing import CliRunner, Result

from rllm.cli.main import rllm as front_door
from rllm.contracts import read_contract
from rllm.errors import ConfigError, ContractError
from rllm.worker import Worker
from rllm.worker.host import WorkerHost

ACTORS = """
from pathlib import Path

from rllm import Episode, Workflow
from rllm.agents.base import BaseAgent
from rllm.types.episode import Action, Step, Trajectory


class Counter(BaseAgent):
    def __init__(self):
        self.reset()

    def reset(self):
        self.messages, self.trajectory_ = [], Trajectory()

    @property
    def chat_completions(self):
        return self.messages

    @property
    def trajectory(self):
        return self.trajectory_

    def update_from_env(self, observation, reward, done, info, **kwargs):
        self.messages.append({"role": "user", "content": observation})

    def update_from_model(self, response, **kwargs):
        self.trajectory_.steps.append(Step(chat_completions=list(self.messages), model_response=response))
        return Action({"length": len(self.messages)})


class Small(Counter):
    '''Say yes.'''

    def update_from_model(self, response, **kwargs):
        super().update_from_model(response)
        return Action({"result": {"answer": "yes"}})


class Yes(Workflow):
    '''Say yes.'''

    async def run(self, task, uid, **kwargs):
        messages = [{"role": "user", "content": task["question"]}]
        await self.rollout_engine.get_model_response(messages, max_tokens=2)
        return Episode(artifacts={"output": {"result": {"answer": "yes"}}})


class Chain(Workflow):
    workers = {"measure": "measure.worker.md"}

    async def run(self, task, uid, **kwargs):
        messages = [{"role": "user", "content": task["question"]}]
        await self.rollout_engine.get_model_response(messages, max_tokens=4)
        step = await self.worker("measure", {"task": task["task"]})
        return Episode(artifacts={"output": {"length": 100 + step.outputs["length"]}})


class Asking(Workflow):
    workers = {"count": "unbound.worker.md"}

    async def run(self, task, uid, **kwargs):
        step = await self.worker("count", {"task": task["task"]})
        return Episode(artifacts={"output": {"length": step.outputs["length"]}})


class Circle(Workflow):
    workers = {"chain": "circle.worker.md"}

    async def run(self, task, uid, **kwargs):
        return Episode()
"""
_BINDINGS = {
    "agent": 'agent: "actors.py:Counter", model: "builtin:tiny"',
    "chain": 'workflow: "actors.py:Chain", model: "builtin:tiny"',
    "asking": 'workflow: "actors.py:Asking", model: "builtin:tiny"',
    "circle": 'workflow: "actors.py:Circle", model: "builtin:tiny"',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    (tmp_path / "actors.py").write_text(ACTORS)
    text = files.write_worker(tmp_path).read_text()
    for name, binding in _BINDINGS.items():
        bound = text.replace('program: "program.py:solve"', binding).replace("id: measure", f"id: {name}")
        (tmp_path / f"{name}.worker.md").write_text(bound)
    unbound = text.replace('rllm: {program: "program.py:solve"}\n', "").replace("id: measure", "id: unbound")
    (tmp_path / "unbound.worker.md").write_text(unbound)
    return tmp_path


def rllm(*words: str | Path) -> Result:
    return CliRunner().invoke(
        front_door, [str(word) for word in words], prog_name="rllm", catch_exceptions=False
    )


def test_an_agent_and_a_workflow_do_the_work_of_a_contract(folder: Path) -> None:
    """The workflow's model answers, and the worker that it calls has its own run with its own record."""
    answers: dict[str, Any] = {}
    for name in ("agent", "chain"):
        worker = Worker.load(folder / f"{name}.worker.md", directory=folder / "runs")
        answers[name] = worker.run({"run_id": "a", "task": "four"}).to_dict()
        again = worker.run({"run_id": "a", "task": "four"}).to_dict()
        assert again == answers[name]
    assert answers["agent"]["outputs"] == {"run_id": "a", "status": "ok", "length": 1}
    assert answers["chain"]["outputs"] == {"run_id": "a", "status": "ok", "length": 104}
    for answer in answers.values():
        assert answer["observability"]["model_calls"] == 1
    listed = json.loads(rllm("worker", "runs", folder / "runs", "--json").stdout)["runs"]
    assert {row["worker_id"] for row in listed} == {"agent", "chain", "measure"}
    assert (folder / "calls.txt").read_text().count("\n") == 1


def test_the_published_starter_runs_as_it_stands_with_a_small_agent_behind_it(folder: Path) -> None:
    """Every field that the registry writes, and nobody bound: it can be validated, and run with an agent."""
    starter = Path(__file__).with_name("starter.worker.md")
    assert rllm("worker", "validate", starter).exit_code == 0
    asked = json.dumps({"run_id": "1", "task": "say yes", "context": {"language": "en"}})
    run = ("worker", "run", starter, "--json", "--directory", folder / "runs", "--input", asked)
    assert rllm(*run).exit_code == 2, "nobody does its work"
    done = rllm(*run, "--agent", folder / "actors.py:Small", "--model", "builtin:tiny")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["run_id"], answer["status"], answer["observability"]["attempt"]) == ("1", "ok", 1)
    assert answer["outputs"] == {"run_id": "1", "status": "ok", "result": {"answer": "yes"}}
    assert answer["observability"]["model_calls"] == 1


@pytest.mark.parametrize(("kind", "name"), [("agent", "Small"), ("workflow", "Yes")])
def test_a_contract_that_init_makes_of_an_agent_or_a_workflow_runs_as_it_is(
    folder: Path, kind: str, name: str
) -> None:
    path = folder / "made.worker.md"
    words = (f"--{kind}", folder / f"actors.py:{name}", "--model", "builtin:tiny", "--out", path)
    assert rllm("worker", "init", "made", *words).exit_code == 0
    assert read_contract(path).purpose == "Say yes."
    answer = Worker.load(path, directory=folder / "runs").run({"run_id": "1", "task": "yes?", "context": {}})
    assert (answer.outputs or {})["result"] == {"answer": "yes"}


def test_the_model_of_a_served_workflow_plays_its_workers_by_their_schemas(folder: Path) -> None:
    """An untrained model: only a grammar makes its answer fit, and the response says that it did."""
    answer = Worker.load(folder / "asking.worker.md", directory=folder / "runs").run(
        {"run_id": "a", "task": "four"}
    )
    value = answer.to_dict()
    assert answer.is_ok, value
    assert isinstance(value["outputs"]["length"], int)
    (step,) = value["artifacts"]["workers"]
    assert (step["worker"], step["status"], step["output_schema"]) == ("count", "ok", "enforced")
    assert value["observability"]["model_calls"] == 1
    path = folder / "unbound.worker.md"
    path.write_text(
        path.read_text().replace('"length": {"type": "integer"}', '"length": {"not": {"type": "null"}}')
    )
    refused = Worker.load(folder / "asking.worker.md", directory=folder / "others").run(
        {"run_id": "a", "task": "four"}
    )
    assert "broke its contract" in refused.to_dict()["error"]["message"]


def test_workers_that_call_each_other_in_a_circle_are_refused_before_any_run(folder: Path) -> None:
    with pytest.raises(ConfigError, match="circle calls circle"):
        Worker.load(folder / "circle.worker.md", directory=folder / "runs").run({"run_id": "a", "task": "x"})


@pytest.mark.parametrize(
    ("binding", "word"),
    [
        ('agent: "actors.py:Counter", program: "program.py:solve", model: m', "program and agent"),
        ('agent: "actors.py:Counter"', "`rllm.agent` needs `rllm.model`"),
    ],
)
def test_a_binding_that_contradicts_itself_is_named_with_its_line(
    folder: Path, binding: str, word: str
) -> None:
    path = folder / "measure.worker.md"
    path.write_text(path.read_text().replace('program: "program.py:solve"', binding))
    with pytest.raises(ContractError, match=word) as raised:
        read_contract(path)
    assert f"{path}:4:" in str(raised.value)


def test_a_kind_of_actor_is_called_by_its_name(folder: Path) -> None:
    result = rllm(
        *("worker", "run", folder / "measure.worker.md", "--directory", folder / "runs"),
        *("--program", f"{folder}{os.sep}actors.py:Chain", "--input", '{"run_id": "a", "task": "x"}'),
    )
    assert result.exit_code == 2
    assert "`rllm: {workflow:" in " ".join(result.stderr.split())


def test_the_graph_says_who_calls_whom(folder: Path) -> None:
    drawn = rllm("worker", "graph", folder).stdout
    assert "chain  actors.py:Chain, builtin:tiny" in drawn
    assert "└── measure  program.py:solve, 20 s, 3 attempts" in drawn
    assert "a circle" in drawn
    edges = json.loads(rllm("worker", "graph", f"{folder}{os.sep}actors.py:Chain", "--json").stdout)
    (edge,) = edges["calls"]
    assert (edge["caller"], edge["name"], edge["worker"], edge["policy"]) == (
        "Chain",
        "measure",
        "measure",
        False,
    )
    assert [each["done_by"] for each in edges["workers"]] == ["program.py:solve"]
    assert rllm("worker", "graph", f"{folder}{os.sep}program.py:solve").exit_code == 2


async def test_workers_with_one_model_share_it(folder: Path) -> None:
    contracts = [read_contract(folder / f"{name}.worker.md") for name in ("agent", "chain")]
    async with WorkerHost(contracts, folder / "runs") as host:
        models = [host.workers[name].backing.model for name in ("agent", "chain")]
        assert models[0] is not None
        assert models[1] is not None
        shared = models[0].current
        assert models[1].current is shared
        assert shared.num_users == 2
    assert shared.num_users == 0


def test_a_schema_that_no_grammar_can_follow_is_checked_and_repaired(folder: Path) -> None:
    """An untrained model fits it neither time: what happened is in the response, and both answers count."""
    path = folder / "measure.worker.md"
    text = path.read_text().replace('program: "program.py:solve"', 'model: "builtin:tiny"')
    text = text.replace('"length": {"type": "integer"}', '"length": {"not": {"type": "string"}}')
    text = text.replace("timeout_seconds: 20", "timeout_seconds: 600")  # on a busy machine it writes for long
    path.write_text(text.replace("max_attempts: 3", "max_attempts: 1") + "- repair: true\n")
    response = Worker.load(path, directory=folder / "runs").run({"run_id": "a", "task": "x"}).to_dict()
    assert response["status"] == "invalid_output"
    observed = response["observability"]
    assert (observed["output_schema"], observed["model_calls"]) == ("repaired", 2)
