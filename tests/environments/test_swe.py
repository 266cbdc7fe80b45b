"""A tiny repository worked on with tools in a real sandbox, until hidden tests say what that is worth."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.agents.checks import check_agent
from rllm.agents.swe_agent import SWEAgent
from rllm.engine.rollout import RolloutLimits, run_trajectory
from rllm.environments.base import CUT_OFF, BaseEnv
from rllm.environments.swe.scaffolds import read_calls, tool_schemas
from rllm.environments.swe.swe import SWEEnv, demonstration
from rllm.errors import AgentError, ConfigError
from rllm.inference.scripted import ScriptedClient
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Outcome

sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
import itertools

from swe_projects import repository, row, usable_backend


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The row of the tiny project; RLLM_HOME is one for all tests."""
    source, commit = repository(tmp_path_factory.mktemp("source"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLM_HOME", str(tmp_path_factory.mktemp("home")))
        yield row(source, base_commit=commit)


@pytest.fixture(scope="module")
def opened(task: dict[str, Any]) -> Iterator[SWEEnv]:
    """A world that the tests of the tools share."""
    env = SWEEnv(entry=task, backend=usable_backend(), max_steps=100, step_timeout=5)
    env.reset()
    yield env
    env.close()


def function(name: str, **arguments: Any) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{parameters}</function>"


def editor(env: SWEEnv, command: str, path: str, **arguments: Any) -> str:
    return env.step(function("file_editor", command=command, path=path, **arguments))[0]


MEND = function(
    "file_editor",
    command="str_replace",
    path="/testbed/calc/__init__.py",
    old_str="    return a - b",
    new_str="    return a + b",
)


def test_a_solution_without_a_final_newline_is_imitated_as_one_with_it(task: dict[str, Any]) -> None:
    def turns(patch: str) -> object:
        return demonstration({"entry": {**task, "patch": patch}}, noise=0.0, rng=np.random.default_rng(0))

    assert turns(task["patch"].rstrip("\n")) == turns(task["patch"])


async def test_an_agent_mends_the_issue_and_is_paid(task: dict[str, Any]) -> None:
    script = [
        "I look.\n" + function("execute_bash", command="cat calc/__init__.py"),
        MEND,
        function("finish"),
    ]
    client = ScriptedClient(script)
    env = SWEEnv.from_dict({"task_id": "x", "entry": task, "backend": usable_backend(), "max_steps": 5})
    trajectory = await run_trajectory(
        SWEAgent(), env, client, limits=RolloutLimits(max_turns=5, step_timeout_s=120)
    )
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0), trajectory.info
    assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 1.0]
    assert trajectory.steps[-1].info["fail_to_pass"] == {"tests/test_add.py::test_add": "PASSED"}
    messages = trajectory.steps[-1].chat_completions
    assert "`add(1, 2)` gives -1." in messages[1]["content"]
    assert "return a - b" in messages[3]["content"]
    assert messages[3]["content"].endswith("Steps remaining: 4")


async def test_tool_calls_and_a_block_of_bash_do_the_same(task: dict[str, Any]) -> None:
    command = "sed -i 's/a - b/a + b/' calc/__init__.py && git diff --stat"
    env = SWEEnv(entry=task, backend=usable_backend(), scaffold="bash", max_steps=1)
    trajectory = await run_trajectory(
        SWEAgent(scaffold="bash"),
        env,
        ScriptedClient([f"So:\n```bash\n{command}\n```\n"]),
        limits=RolloutLimits(max_turns=3, step_timeout_s=120),
    )
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0), trajectory.info
    env = SWEEnv(entry=task, backend=usable_backend(), scaffold="sweagent")
    env.reset()
    calls = [
        {"id": "a", "function": {"name": "execute_bash", "arguments": json.dumps({"command": "echo one"})}},
        {"id": "b", "function": {"name": "search", "arguments": "{}"}},
    ]
    shown = env.step(calls)[0]
    env.close()
    assert shown["tool_outputs"]["a"] == "one\n[exit code 0]"
    assert "no tool `search`" in shown["tool_outputs"]["b"]


def test_branches_go_on_from_a_kept_state_as_if_the_others_had_not_been(task: dict[str, Any]) -> None:
    env = SWEEnv(entry=task, backend=usable_backend(), max_steps=4)
    env.reset()
    env.step(MEND)
    state = env.keep_state()
    env.step(function("execute_bash", command="rm -rf calc tests .git; echo 1 > left"))
    assert env.step(function("execute_bash", command="ls"))[0].startswith("left")
    env.return_to(state)
    editor(env, "undo_edit", "/testbed/calc/__init__.py")
    assert "a - b" in env.step(function("execute_bash", command="cat calc/__init__.py"))[0]
    env.return_to(state)
    assert env.step(function("execute_bash", command="ls -a"))[0].split()[:4] == [".", "..", ".git", "calc"]
    _, reward, done, info = env.step(function("finish"))
    assert (reward, done, info["is_correct"]) == (1.0, True, True)
    with pytest.raises(AgentError, match="closed"):
        env.return_to(state)


def test_attempts_at_one_task_get_worlds_that_are_ready_and_that_nobody_has_used(
    task: dict[str, Any],
) -> None:
    envs = [SWEEnv(entry=task, backend=usable_backend()) for _ in range(2)]
    before = sandbox_processes()
    try:
        for env in envs:
            env.reset()
            env.step(function("execute_bash", command="echo mine > left.txt"))
        deadline_s = time.monotonic() + 30
        while len(sandbox_processes() - before) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.02)  # until a third world waits
        ready = sandbox_processes() - before
        assert len(ready) == 3
        envs[0].reset()
        assert "left.txt" not in env_files(envs[0])
        assert "left.txt" in env_files(envs[1])
        assert len(ready & sandbox_processes()) == 2, "the one that waited was taken"
    finally:
        for env in envs:
            env.close()
    assert sandbox_processes() <= before


def env_files(env: SWEEnv) -> str:
    return env.step(function("execute_bash", command="ls"))[0]


def sandbox_processes() -> set[int]:
    """Processes that this one has started, by their id."""
    children: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if path.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                children.add(int(path.parent.name))
    return children


def test_nothing_done_is_worth_nothing_and_the_last_step_is_cut_off(task: dict[str, Any]) -> None:
    env = SWEEnv(dataset=[task], idx=0, backend=usable_backend(), max_steps=1)
    env.reset()
    _, reward, done, info = env.step("no call at all")
    assert (reward, done, info[CUT_OFF], info["reason"]) == (0.0, True, True, "the patch is empty")
    with pytest.raises(AgentError, match="call reset first"):
        env.step("again")


def test_the_editor_views_makes_changes_and_undoes(opened: SWEEnv) -> None:
    assert "     3\t    return a - b" in editor(opened, "view", "calc/__init__.py")
    assert editor(opened, "view", "calc/__init__.py", view_range="[1, 2]").count("\n") == 1
    assert "/testbed/calc/__init__.py" in editor(opened, "view", "/testbed")
    assert ".git" not in editor(opened, "view", "/testbed")
    assert editor(opened, "create", "new/a.py", file_text="one\ntwo\n") == "/testbed/new/a.py was made."
    assert "is there already" in editor(opened, "create", "new/a.py", file_text="x")
    assert "     2\tmiddle" in editor(opened, "insert", "new/a.py", insert_line=1, new_str="middle")
    assert "has 3 lines" in editor(opened, "insert", "new/a.py", insert_line=4, new_str="x")
    assert "whole number" in editor(opened, "insert", "new/a.py", insert_line="x", new_str="x")
    assert "does not stand" in editor(opened, "str_replace", "new/a.py", old_str="three", new_str="x")
    assert "stands 2 times" in editor(opened, "str_replace", "new/a.py", old_str="o", new_str="x")
    assert "     3\tTWO" in editor(opened, "str_replace", "new/a.py", old_str="two", new_str="TWO")
    for _ in range(2):
        assert "was undone" in editor(opened, "undo_edit", "new/a.py")
    assert opened.step(function("execute_bash", command="cat new/a.py"))[0] == "one\ntwo\n[exit code 0]"
    assert "removed again" in editor(opened, "undo_edit", "new/a.py")
    assert "no change" in editor(opened, "undo_edit", "new/a.py")
    assert "Error: /testbed/nowhere.py" in editor(opened, "view", "nowhere.py")


def test_the_shell_says_how_it_ended_and_search_finds_lines(opened: SWEEnv) -> None:
    shown = opened.step(function("execute_bash", command="echo out; echo err >&2; exit 3"))[0]
    assert shown == "out\nerr\n[exit code 3]"
    assert "took more than 5 s" in opened.step(function("execute_bash", command="sleep 60"))[0]
    long = opened.step(function("execute_bash", command="seq 100000"))[0]
    assert len(long) < 11_000
    assert "100000\n[exit code 0]" in long
    assert "calc/__init__.py:1:def add" in opened.step(function("search", search_term="def add("))[0]
    assert opened.step(function("search", search_term="no such words"))[0] == "Nothing was found."
    assert "no tool `rm`" in opened.step(function("rm"))[0]
    assert "no call" in opened.step("I think.")[0]
    network = "python -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 2)'"
    assert "[exit code 1]" in opened.step(function("execute_bash", command=network))[0]


def test_a_call_is_read_as_it_is_written() -> None:
    text = "<function=file_editor>\n<parameter=command>create</parameter>\n<parameter=file_text>"
    text += "\n\nx\n\n</parameter>"
    (call,) = read_calls(text)
    assert call.name == "file_editor"
    assert call.arguments == {"command": "create", "file_text": "\nx\n"}
    assert read_calls("nothing") == []
    assert [each["function"]["name"] for each in tool_schemas("sweagent")][1] == "str_replace_editor"


@pytest.mark.parametrize(
    "arguments", [{}, {"use_fn_calling": True}, {"scaffold": "bash"}, {"scaffold": "sweagent"}]
)
def test_the_agent_keeps_the_contract_of_agents(arguments: dict[str, Any]) -> None:
    check_agent(SWEAgent(**arguments))


def test_old_outputs_are_cut_in_one_go_and_the_newest_stay() -> None:
    agent = SWEAgent(max_history_chars=10_000, format_model_response=True, token_warning_threshold=3)
    agent.update_from_env("issue", 0.0, False, {})
    lengths: list[int] = []
    for turn in range(30):
        agent.update_from_model(f"t {function('execute_bash', command='x')} and more")
        agent.trajectory.steps[-1].prompt_ids = [0] * turn
        agent.update_from_env("o" * 1000, 0.0, False, {"max_steps": 50})
        lengths.append(sum(len(each["content"]) for each in agent.chat_completions))
    assert max(lengths) <= 11_500
    assert sum(after < before for before, after in itertools.pairwise(lengths)) <= 10
    assert agent.chat_completions[-1]["content"].startswith("o" * 1000)
    assert agent.chat_completions[-1]["content"].endswith("submit now.")
    assert agent.chat_completions[3]["content"].startswith("[An output of 1,0")
    assert agent.chat_completions[-2]["content"].endswith("</function>")


class LongOutputs(BaseEnv):
    """Answers every call with a thousand characters, ten times."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.steps = 0
        return "the issue", {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.steps += 1
        return "o" * 1000, float(self.steps == 10), self.steps == 10, {"max_steps": 10}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "LongOutputs":
        return LongOutputs()


async def test_every_token_of_a_conversation_with_cut_outputs_is_trained_on_once() -> None:
    client = ScriptedClient([f"turn {turn} {function('execute_bash', command='x')}" for turn in range(10)])
    trajectory = await run_trajectory(
        SWEAgent(max_history_chars=6000), LongOutputs(), client, limits=RolloutLimits(max_turns=10)
    )
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0)
    rows = trajectory_rows(trajectory, "task", 0, 0, 1.0)
    assert 1 < len(rows) == trajectory.info["segments"] < 8, "outputs are cut in one go, not one a turn"
    sampled = sorted(token for step in trajectory.steps for token in step.response_ids)
    trained = sorted(int(token) for each in rows for token in each.token_ids_T[each.trainable_T])
    assert trained == sampled, "none is lost, and none is there twice"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "kubernetes"}, "docker takes a row's image"),
        ({"delete_image": True}, "`delete_image` is true"),
        ({"scaffold": "openhands"}, "choose one of r2egym, sweagent, bash"),
        ({"max_steps": 0}, "`max_steps` is 0"),
        ({"dataset": [], "idx": 0}, "both `entry` and `dataset`"),
        ({"entry": None}, "give the task's row"),
        ({"entry": None, "dataset": [], "idx": 3}, "has 0 rows"),
    ],
)
def test_what_cannot_be_played_is_refused(
    task: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SWEEnv(**({"entry": task} | arguments))
    with pytest.raises(ConfigError, match="runners"):
        SWEEnv(entry=task | {"test_command": ["tox"]})
    with pytest.raises(ConfigError, match=r"calc__calc-1: `memory_mb` is 900,000; .* [\d,]+ MiB"):
        SWEEnv(entry=task, memory_mb=900_000, backend=usable_backend()).reset()
    smith = task | {"form": "swe-smith", "image": "jyangballin/swesmith.x86_64.calc"}
    with pytest.raises(ConfigError, match=r"calc__calc-1: .*swe-smith.* bug"):
        SWEEnv(entry=smith, backend="docker").reset()
    with pytest.raises(ConfigError, match="does not know `other`"):
        SWEEnv.from_dict({"entry": task, "other": 1})
