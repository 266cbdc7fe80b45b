"""A tool environment makes calls, whatever they look like, until it is given an answer."""

import json
import threading
from typing import Any

import pytest

from rllm.environments import ToolEnvironment, check_env
from rllm.environments.base import CUT_OFF
from rllm.errors import AgentError, ConfigError, RewardError
from rllm.tools.base import Tool
from rllm.types import Action
from rllm.types.messages import ToolCall

TASK = {"question": "1 + 2 = ?", "ground_truth": "3"}


def add(a: int, b: int) -> int:
    """a + b."""
    return a + b


def right(task: dict[str, Any], answer: Any) -> float:
    return float(answer == task["ground_truth"])


def made(**changes: Any) -> ToolEnvironment:
    env = ToolEnvironment(TASK, **{"tools": [add], "reward_fn": right, **changes})
    env.reset()
    return env


def call(name: str = "add", arguments: Any = None, call_id: str = "c1") -> dict[str, Any]:
    arguments = {"a": 1, "b": 2} if arguments is None else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_it_keeps_the_contract_of_environments() -> None:
    check_env(ToolEnvironment(TASK, [add], reward_fn=right), [call()])
    check_env(ToolEnvironment(TASK, [add], reward_fn=right), "3")


def test_the_task_is_shown_with_the_schemas_of_the_tools() -> None:
    observation, info = ToolEnvironment(TASK, [add]).reset()
    assert observation == TASK
    assert [tool["function"]["name"] for tool in info["tools"]] == ["add"]


def test_a_call_is_made_in_whichever_form_it_comes(subtests: pytest.Subtests) -> None:
    for action in [
        call(),
        [call()],
        Action([call()]),
        call(arguments='{"a": 1, "b": 2}'),
        {"id": "c1", "name": "add", "arguments": {"a": 1, "b": 2}},
        [ToolCall(name="add", arguments={"a": 1, "b": 2}, id="c1")],
    ]:
        with subtests.test(action=action):
            observation, reward, done, info = made().step(action)
            assert observation == {"tool_outputs": {"c1": "3"}}
            assert (reward, done) == (0.0, False)
            assert info["metadata"] == {"num_calls": 1, "num_failed_calls": 0}


def test_an_answer_ends_the_episode_and_is_judged(subtests: pytest.Subtests) -> None:
    for action, reward in [
        ("3", 1.0),
        ("4", 0.0),
        (call("finish", {"response": "3"}), 1.0),
        ([call("finish", json.dumps({"response": "3"}))], 1.0),
        ([call(), call("finish", {"response": "3"})], 1.0),
        (call("finish", "3"), 1.0),
        (call("finish", "{not json"), 0.0),
        (call("finish", {}), 0.0),
    ]:
        with subtests.test(action=action, reward=reward):
            observation, paid, done, info = made().step(action)
            assert (observation, paid, done) == ({}, reward, True)
            assert info["is_correct"] is (reward == 1.0)


def test_without_a_judge_no_answer_is_paid() -> None:
    assert made(reward_fn=None).step("3")[1:3] == (0.0, True)


def test_at_the_step_limit_calls_are_cut_off_unpaid_and_an_answer_still_counts() -> None:
    env = made(max_steps=2)
    env.step(call())
    _, reward, done, info = env.step(call())
    assert (reward, done, info[CUT_OFF]) == (0.0, True, True)
    env.reset()
    env.step(call())
    assert env.step("3")[1:3] == (1.0, True)


def test_calls_run_side_by_side_and_are_told_apart_without_ids() -> None:
    meet = threading.Barrier(3, timeout=10)

    def wait(number: int) -> int:
        """Wait for the others."""
        meet.wait()
        return number

    env = made(tools=[wait])
    calls = [call("wait", {"number": number}, call_id="") for number in range(3)]
    assert list(env.step(calls)[0]["tool_outputs"].values()) == ["0", "1", "2"]
    calls = [call("wait", {"number": number}, call_id="same") for number in range(3)]
    outputs = env.step(calls)[0]["tool_outputs"]
    assert (list(outputs.values()), len(outputs)) == (["0", "1", "2"], 3)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (call("sub"), "There is no tool `sub`"),
        (call(arguments="{"), "no JSON"),
        (call(arguments={"a": 1}), "Bad arguments"),
        (call("", "<tool_call>{"), "could not be read"),
        ({"function": "add"}, "could not be read"),
    ],
)
def test_a_wrong_call_is_an_error_to_read_beside_the_results_of_the_others(wrong: Any, told: str) -> None:
    observation, _, done, info = made().step([call(call_id="good"), wrong])
    good, bad = observation["tool_outputs"].values()
    assert good == "3"
    assert bad.startswith("Error: ")
    assert told in bad
    assert not done
    assert info["metadata"]["num_failed_calls"] == 1


@pytest.mark.parametrize("action", [None, [], 3, [None], {"nothing"}])
def test_what_is_neither_an_answer_nor_a_call_is_the_agents_mistake(action: Any) -> None:
    with pytest.raises(AgentError, match=r"ToolCall or a dict|a text"):
        made().step(action)


def test_steps_before_a_reset_and_behind_the_end_are_refused() -> None:
    with pytest.raises(AgentError, match="call reset first"):
        ToolEnvironment(TASK, [add]).step("3")
    env = made()
    env.step("3")
    with pytest.raises(AgentError, match="call reset first"):
        env.step("3")


@pytest.mark.parametrize("reward", [None, float("nan"), "1", object()])
def test_a_judge_that_returns_no_number_is_named(reward: Any) -> None:
    with pytest.raises(RewardError):
        made(reward_fn=lambda task, answer: reward).step("3")


def test_tools_come_by_name_and_by_map_and_those_made_here_are_closed() -> None:
    class Counted(Tool):
        name = "counted"
        num_closed = 0

        def forward(self, number: int) -> int:
            return number

        def close(self) -> None:
            type(self).num_closed += 1

    ours = Counted()
    ToolEnvironment(TASK, [ours]).close()
    assert Counted.num_closed == 0
    env = ToolEnvironment(TASK, tool_map={"counted": Counted})
    env.close()
    assert Counted.num_closed == 1
    env = ToolEnvironment.from_dict({**TASK, "tools": ["calculator"], "max_steps": 4})
    assert (env.task, env.max_steps, env.tools.names) == (TASK, 4, ["calculator"])


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="Both `tools` and `tool_map`"):
        ToolEnvironment(TASK, [add], {"add": Tool(function=add)})
    with pytest.raises(ConfigError, match="calls itself `add`"):
        ToolEnvironment(TASK, tool_map={"sum": Tool(function=add)})
    with pytest.raises(ConfigError, match="`max_steps` is 0"):
        ToolEnvironment(TASK, max_steps=0)
    with pytest.raises(ConfigError, match="no grader"):
        ToolEnvironment({**TASK, "grader": "nonsense", "grading": {}})
    with pytest.raises(ConfigError, match="`grading` is None"):
        ToolEnvironment({**TASK, "grader": "exact"})
