"""MCPEnvironment: a rollout with the tools of servers, leased for it alone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the `mcp` extra is not installed")

from rllm.agents.tool import ToolAgent
from rllm.engine.rollout import run_trajectory
from rllm.environments.mcp import MCPEnvironment
from rllm.errors import ConfigError
from rllm.inference.scripted import ScriptedClient
from rllm.tools import tool
from rllm.tools.mcp import MCPServer, MCPServerError
from rllm.types.episode import Outcome

CALCULATOR = MCPServer(target="rllm.tools.mcp_calculator:calculator_server", shared=True)
ODD = str(Path(__file__).parents[1] / "tools" / "mcp_odd_server.py")
TASK = {"question": "What is 6 * 7?", "answer": "42"}


def is_right(task: dict[str, Any], answer: Any) -> float:
    return float(str(answer) == task["answer"])


def call(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "c0", "function": {"name": name, "arguments": arguments}}]


def said(step: tuple[Any, ...]) -> str:
    return step[0]["tool_outputs"]["c0"]


def test_an_episode_with_a_tool_call_and_an_answer() -> None:
    env = MCPEnvironment(TASK, mcp_servers={"calculator": CALCULATOR}, reward_fn=is_right)
    observation, info = env.reset()
    assert observation["question"] == "What is 6 * 7?"
    assert [each["function"]["name"] for each in info["tools"]][:3] == ["add", "subtract", "multiply"]
    stepped = env.step(call("multiply", a=6, b=7))
    assert said(stepped) == "42"
    assert stepped[1:3] == (0.0, False)
    assert env.step("42")[1:3] == (1.0, True)
    env.close()
    env.close()


def test_environments_of_one_server_share_its_pool_and_no_memory() -> None:
    info = {"task": TASK, "mcp_server_command": sys.executable, "mcp_server_args": [ODD]}
    envs = [MCPEnvironment.from_dict(info) for _ in range(2)]
    for each in envs:
        each.reset()
    assert said(envs[0].step(call("remember", word="one"))) == "one"
    assert said(envs[1].step(call("remember", word="two"))) == "two"
    envs[0].reset()
    assert said(envs[0].step(call("remember", word="again"))) == "again"
    assert said(envs[1].step(call("remember", word="kept"))) == "two kept"
    for each in envs:
        each.close()
    MCPEnvironment.cleanup_global_resources()


def test_what_the_model_does_wrong_is_told_and_a_dead_server_fails_the_episode() -> None:
    env = MCPEnvironment(TASK, sys.executable, [ODD])
    env.reset()
    assert said(env.step(call("refuse"))) == "Error: not today"
    assert said(env.step(call("rember", word="x"))).startswith(
        "Error: There is no tool `rember`; did you mean"
    )
    assert "Bad arguments" in said(env.step(call("remember", word=3)))
    with pytest.raises(MCPServerError, match=r"died .*`die`"):
        env.step(call("die"))
    env.close()


def test_two_servers_may_have_a_tool_of_one_name_when_it_is_said_which_is_meant() -> None:
    servers = {"one": CALCULATOR, "two": MCPServer(target=CALCULATOR.target, shared=True, prefix="")}
    with pytest.raises(ConfigError, match=r"one and two .*`add`"):
        MCPEnvironment(TASK, mcp_servers=servers).reset()
    names = ("add", "subtract", "multiply", "divide", "power")
    env = MCPEnvironment(TASK, mcp_servers=servers, tool_name_to_server_name=dict.fromkeys(names, "two"))
    env.reset()
    assert env.tools.names == list(names)
    env.close()
    prefixed = {"one": CALCULATOR, "two": {"target": CALCULATOR.target, "shared": True, "prefix": "exact_"}}
    env = MCPEnvironment(TASK, mcp_servers=prefixed)
    env.reset()
    assert env.tools.names == [*names, *(f"exact_{each}" for each in names)]
    env.close()


def test_tools_of_ones_own_stand_beside_those_of_servers() -> None:
    @tool
    def shout(text: str) -> str:
        """Louder."""
        return text.upper()

    env = MCPEnvironment(TASK, mcp_servers={"calculator": CALCULATOR}, tools=[shout])
    env.reset()
    assert said(env.step(call("shout", text="hey"))) == "HEY"
    assert said(env.step(call("add", a=1, b=2))) == "3"
    env.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "Give one of `mcp_server_command` and `mcp_servers`"),
        ({"mcp_servers": {"a": {"comand": "b"}}}, "did you mean `command`"),
        ({"mcp_server_command": "a", "tool_name_to_server_name": {"t": "b"}}, "names 'b'; the servers are a"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MCPEnvironment.from_dict({"task": TASK, **given})


def test_a_failing_server_gives_the_leases_of_the_others_back() -> None:
    servers = {"calculator": CALCULATOR, "broken": MCPServer(command=["no-such-program"])}
    env = MCPEnvironment(TASK, mcp_servers=servers)
    with pytest.raises(MCPServerError, match="no-such-program"):
        env.reset()
    env.close()


def written(name: str, **arguments: Any) -> str:
    """A call as the scripted model's template has it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_a_rollout_calls_the_tools_of_a_server_and_is_paid_for_its_answer() -> None:
    env = MCPEnvironment(TASK, mcp_servers={"calculator": CALCULATOR}, reward_fn=is_right)
    client = ScriptedClient([written("multiply", a=6, b="seven"), written("multiply", a=6, b=7), "42"])
    trajectory = await run_trajectory(ToolAgent(""), env, client)
    assert (trajectory.outcome, trajectory.reward, len(trajectory.steps)) == (Outcome.SCORED, 1.0, 3)
    told = [each["content"] for each in client.requests[-1] if each["role"] == "tool"]
    assert "'seven'" in told[0]
    assert told[1] == "42"
    assert client.offered[0][0]["function"]["name"] == "add"
    env.close()


async def test_a_server_that_dies_makes_a_failure_of_the_infrastructure_and_no_zero() -> None:
    env = MCPEnvironment(TASK, sys.executable, [ODD], reward_fn=is_right)
    trajectory = await run_trajectory(ToolAgent(""), env, ScriptedClient([written("die"), "42"]))
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert trajectory.reward is None
    env.close()
