"""An agent that offers tools: its schemas go out with each call, and what was called comes back to it."""

import json
import random
from typing import Any

import pytest

from rllm.agents.base import BaseAgent
from rllm.agents.tool import ToolAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.engine.rollout import RolloutLimits, run_trajectory
from rllm.environments.tool import ToolEnvironment
from rllm.errors import InferenceError, RllmError
from rllm.inference.local.client import LocalClient
from rllm.inference.scripted import ScriptedClient
from rllm.models.builtin import create_model
from rllm.models.directory import load_model
from rllm.tools.base import Tool
from rllm.tools.multi import MultiTool
from rllm.types.budget import TokenBudget
from rllm.types.episode import Outcome, Step, TerminationReason, Trajectory
from rllm.types.messages import Message, ModelOutput, SamplingParams, ToolCall
from rllm.workflows import MultiTurnWorkflow


def add(a: int, b: int) -> int:
    """a + b."""
    return a + b


def call(name: str = "add", **arguments: Any) -> str:
    """A call as the scripted client's template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def env(answer: str = "5", **changes: Any) -> ToolEnvironment:
    return ToolEnvironment(
        {"question": "2 + 3 = ?"},
        tools=[add],
        reward_fn=lambda task, given: float(given == answer),
        **changes,
    )


async def test_a_call_is_made_and_its_result_is_the_next_message() -> None:
    client = ScriptedClient([call(a=2, b=3), "5"])
    trajectory = await run_trajectory(ToolAgent("rules"), env(), client)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0)
    assert client.offered == [MultiTool([add]).json] * 2
    assert client.requests[0] == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "2 + 3 = ?"},
    ]
    answer, result = client.requests[1][2:]
    (made,) = answer["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 2, "b": 3})
    assert result == {"role": "tool", "tool_call_id": made["id"], "name": "add", "content": "5"}
    assert [step.reward for step in trajectory.steps] == [0.0, 1.0]
    assert trajectory.steps[1].info["is_correct"] is True
    assert "segments" not in trajectory.info


async def test_parallel_calls_are_answered_in_their_order() -> None:
    client = ScriptedClient([call(a=1, b=1) + "\n" + call(a=2, b=2) + "\n" + call(a=3, b=3), "6"])
    trajectory = await run_trajectory(ToolAgent(""), env("6"), client)
    results = [message for message in client.requests[1] if message["role"] == "tool"]
    assert [message["content"] for message in results] == ["2", "4", "6"]
    assert len({message["tool_call_id"] for message in results}) == 3
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("ad", a=1, b=2), "There is no tool `ad`"),
        (call(a="one", b=2), "Bad arguments for `add`"),
        (call(a=1), "Bad arguments for `add`"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1,', "could not be read"),
        ('<tool_call>\n{"name": "add", "arguments": [1, 2]}\n</tool_call>', "could not be read"),
        ("<tool_call>\nadd(1, 2)\n</tool_call>", "could not be read"),
    ],
)
async def test_a_call_that_is_wrong_goes_back_to_the_model_as_an_error(said: str, told: str) -> None:
    client = ScriptedClient([said, call(a=2, b=3), "5"])
    trajectory = await run_trajectory(ToolAgent(""), env(), client)
    (result,) = [message for message in client.requests[1] if message["role"] == "tool"]
    assert told in result["content"]
    assert result["content"].startswith("Error: ")
    assert trajectory.reward == 1.0
    assert trajectory.steps[0].info.get("unparsed_markup", False) is ("not be read" in told)
    assert trajectory.steps[0].info["metadata"]["num_failed_calls"] == 1
    assert "segments" not in trajectory.info


async def test_of_a_good_call_and_an_unreadable_one_both_are_answered() -> None:
    client = ScriptedClient([call(a=2, b=3) + '\n<tool_call>\n{"name"', "5"])
    trajectory = await run_trajectory(ToolAgent(""), env(), client)
    results = [message["content"] for message in client.requests[1] if message["role"] == "tool"]
    assert results[0] == "5"
    assert "not be read" in results[1]
    assert trajectory.reward == 1.0
    assert "segments" not in trajectory.info


async def test_finish_is_a_tool_of_its_own_and_ends_the_episode() -> None:
    trajectory = await run_trajectory(ToolAgent(""), env(), ScriptedClient([call("finish", response="5")]))
    assert (trajectory.outcome, trajectory.reward, len(trajectory.steps)) == (Outcome.SCORED, 1.0, 1)


async def test_who_never_answers_is_cut_off_and_paid_nothing() -> None:
    client = ScriptedClient(lambda messages: call(a=2, b=3))
    trajectory = await run_trajectory(ToolAgent(""), env(max_steps=3), client)
    assert trajectory.outcome is Outcome.TRUNCATED
    assert trajectory.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert (trajectory.reward, len(trajectory.steps)) == (0.0, 3)


async def test_that_the_tools_are_broken_is_a_failure_of_the_infrastructure_and_no_reward() -> None:
    class Gone(Tool):
        name = "add"

        def forward(self, a: int, b: int) -> int:
            raise RllmError("the server is gone")

    broken = ToolEnvironment({"question": "?"}, tools=[Gone()])
    trajectory = await run_trajectory(ToolAgent(""), broken, ScriptedClient([call(a=1, b=2)]))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_FAILURE, None)
    assert trajectory.info["error"]["message"].startswith("the server is gone (")
    assert trajectory.steps[0].response_ids, "what was sampled is on record"


async def test_tools_may_change_on_the_way_and_then_a_new_segment_begins() -> None:
    class Growing(ToolAgent):
        @property
        def tool_schemas(self) -> list[dict[str, Any]]:
            return super().tool_schemas * len(self.chat_completions)

    trajectory = await run_trajectory(Growing(""), env(), ScriptedClient([call(a=2, b=3), "5"]))
    assert trajectory.info["segments"] == 2
    assert trajectory.info["segment_reason"] == "tools_changed"


async def test_the_budget_counts_the_tools_of_a_prompt() -> None:
    client = ScriptedClient(["5"])
    num_prompt = len(
        client.renderer.render([{"role": "user", "content": "2 + 3 = ?"}], MultiTool([add]).json)
    )
    for most, outcome in ((num_prompt, Outcome.SCORED), (num_prompt - 1, Outcome.TRUNCATED)):
        limits = RolloutLimits(budget=TokenBudget(max_prompt_tokens=most, max_response_tokens=100))
        trajectory = await run_trajectory(ToolAgent(""), env(), client, limits=limits)
        assert trajectory.outcome is outcome


async def test_a_client_that_takes_no_tools_is_refused_and_not_asked() -> None:
    class Deaf:
        num_asked = 0

        async def respond(self, messages: Any, sampling: SamplingParams) -> ModelOutput:
            self.num_asked += 1
            return ModelOutput(text="5")

        def close(self) -> None: ...

    deaf: Any = Deaf()
    trajectory = await run_trajectory(ToolAgent(""), env(), ScriptedClient([]), session=deaf)
    error = trajectory.info["error"]
    assert (error["type"], error["place"]) == ("ConfigError", "model")
    assert "Deaf takes none" in error["message"]
    assert deaf.num_asked == 0


async def test_an_agent_without_tools_is_asked_and_told_as_ever() -> None:
    class Plain(BaseAgent):
        """Would stumble over an argument that it does not know."""

        def __init__(self) -> None:
            self.steps: list[Step] = []

        @property
        def chat_completions(self) -> list[Message]:
            return [{"role": "user", "content": "x"}]

        @property
        def trajectory(self) -> Any:
            return Trajectory(steps=self.steps)

        def update_from_env(self, *told: Any, **kwargs: Any) -> None: ...

        def update_from_model(self, response: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.steps.append(Step())
            return response

        def reset(self) -> None: ...

    client = ScriptedClient(["<tool_call>5"])
    trajectory = await run_trajectory(Plain(), env("<tool_call>5"), client)
    assert trajectory.reward == 1.0
    assert client.offered == [[]]


async def test_an_engine_of_the_published_kind_is_given_the_tools_and_its_calls_are_made() -> None:
    class Published:
        def __init__(self) -> None:
            self.asked: list[dict[str, Any]] = []

        async def get_model_response(self, messages: Any, **sampling: Any) -> ModelOutput:
            self.asked.append({"messages": messages, **sampling})
            if messages[-1]["role"] == "tool":
                return ModelOutput(text=messages[-1]["content"], content=messages[-1]["content"])
            return ModelOutput(tool_calls=[ToolCall(name="add", arguments={"a": 2, "b": 3}, id="x1")])

    published: Any = Published()
    engine = AgentExecutionEngine(
        ToolAgent,
        ToolEnvironment,
        {"system_prompt": "", "tools": [add]},
        {"tools": [add], "reward_fn": lambda task, said: float(said == "5")},
        rollout_engine=published,
    )
    (trajectory,) = await engine.execute_tasks([{"question": "2 + 3 = ?"}])
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0)
    first, second = published.asked
    assert first["tools"] == second["tools"] == MultiTool([add]).json
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "x1", "name": "add", "content": "5"}


async def test_in_a_workflow_tools_are_offered_and_called_alike() -> None:
    class Env(ToolEnvironment):
        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Env":
            return Env(info, tools=[add], reward_fn=lambda task, said: float(said == "5"))

    client = ScriptedClient([call(a=2, b=3), "5"])
    args = {"agent_cls": ToolAgent, "env_cls": Env, "agent_args": {"system_prompt": ""}}
    engine = AgentWorkflowEngine(MultiTurnWorkflow, args, client)
    (episode,) = await engine.execute_tasks([{"question": "2 + 3 = ?"}])
    assert (episode.outcome, episode.is_correct) == (Outcome.SCORED, True)
    first, second = episode.trajectories[0].steps
    known = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(known)] == known
    tools = MultiTool([add]).json
    assert first.prompt_ids == client.renderer.render([{"role": "user", "content": "2 + 3 = ?"}], tools)
    assert second.chat_completions[-2]["content"] == "5"


async def test_one_bad_apple_among_tool_rollouts_spoils_no_other() -> None:
    """Bad calls, dead tools, dead models and answers without a word, one in five each: the others are as they
    would have been, and every rollout is counted once."""
    rng = random.Random(0)
    kinds = [rng.choice(["good", "bad_call", "dead_tool", "dead_model", "mute"]) for _ in range(80)]

    def flaky(a: int, b: int) -> int:
        """a + b."""
        if a < 0:
            raise RllmError("the server is gone")
        return a + b

    def script(messages: Any) -> Any:
        kind, number = messages[0]["content"].split()
        if messages[-1]["role"] == "tool" and not messages[-1]["content"].startswith("Error"):
            return messages[-1]["content"]
        if kind == "dead_model":
            return InferenceError("the server died")
        if kind == "bad_call" and messages[-1]["role"] == "user":
            return "<tool_call>\n{"
        if kind == "mute":
            return ""
        return call("flaky", a=-1 if kind == "dead_tool" else int(number), b=1)

    class Env(ToolEnvironment):
        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Env":
            number = info["question"].split()[1]
            return Env(info, tools=[flaky], reward_fn=lambda task, said: float(said == str(int(number) + 1)))

    engine = AgentExecutionEngine(
        ToolAgent,
        Env,
        {"system_prompt": ""},
        rollout_engine=ScriptedClient(script),
        n_parallel_agents=16,
        retry_limit=1,
        api_retries=0,
        max_response_length=0,
        max_prompt_length=0,
    )
    tasks = [{"question": f"{kind} {number}"} for number, kind in enumerate(kinds)]
    trajectories = await engine.execute_tasks(tasks)
    assert len(trajectories) == len(kinds)
    for kind, trajectory in zip(kinds, trajectories, strict=True):
        broken = kind in ("dead_tool", "dead_model")
        assert trajectory.outcome is (Outcome.INFRASTRUCTURE_FAILURE if broken else Outcome.SCORED)
        assert trajectory.reward == (None if broken else float(kind != "mute"))
        if kind == "bad_call":
            assert len(trajectory.steps) == 3


async def test_on_the_built_in_model_calls_are_read_in_its_own_format(tmp_path: Any) -> None:
    """What it samples makes no sense yet: every token is on record all the same, and nothing fails."""
    create_model(tmp_path / "model")
    client = LocalClient(load_model(tmp_path / "model"), lockstep=True)
    try:
        trajectory = await run_trajectory(
            ToolAgent(""), env(), client, sampling=SamplingParams(max_tokens=16, seed=3)
        )
        assert trajectory.outcome is Outcome.SCORED
        (step,) = trajectory.steps
        asked = [{"role": "user", "content": "2 + 3 = ?"}]
        assert step.prompt_ids == client.renderer.render(asked, MultiTool([add]).json)
        assert len(step.logprobs) == len(step.response_ids) > 0
    finally:
        await client.close()
