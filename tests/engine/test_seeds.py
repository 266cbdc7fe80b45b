"""Seeds and shared state: what runs beside a rollout, and who finishes first, changes nothing in it."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.base import BaseEnv
from rllm.errors import InferenceError
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.types.draws import draw_seed
from rllm.types.episode import Outcome
from rllm.types.messages import Message, ModelOutput, SamplingParams

Env = type[Any]
Agent = type[Any]


class Mirror(BaseEnv):
    """Three turns of what was said, and its own seed."""

    def __init__(self, name: str) -> None:
        self.name, self.turn = name, 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.seed = seed
        return f"{self.name} {seed}", {}

    def step(self, action: Any) -> Any:
        self.turn += 1
        return f"{self.name} said {action}", 1.0, self.turn == 3, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Mirror":
        return Mirror(info["task_id"])


class Dice(ScriptedClient):
    """Says a number that follows from the seed of the call alone, after a time that follows from chance."""

    def __init__(self, hurry: Sequence[int], failing: int) -> None:
        super().__init__([])
        self.hurry, self.failing = hurry, failing
        self.num_calls = 0

    def session(self, order: tuple[str, int]) -> Any:
        return _DiceSession(self)


class _DiceSession:
    def __init__(self, client: Dice) -> None:
        self.client = client

    async def respond(self, messages: Sequence[Message], sampling: SamplingParams) -> ModelOutput:
        number = self.client.num_calls
        self.client.num_calls += 1
        for _ in range(self.client.hurry[number % len(self.client.hurry)]):
            await asyncio.sleep(0)
        if self.client.failing and number % self.client.failing == 0:
            raise InferenceError("flaky")
        return ModelOutput(text=str(sampling.seed), completion_ids=[1], prompt_ids=[1], logprobs=[0.0])

    def prompt_tokens(self, messages: Sequence[Message]) -> int:
        return -1

    def close(self) -> None: ...


async def _told(at_once: int, hurry: Sequence[int], failing: int = 0) -> dict[str, Any]:
    engine = AgentExecutionEngine(
        ConversationAgent,
        Mirror,
        rollout_engine=Dice(hurry, failing),
        n_parallel_agents=at_once,
        api_retries=9,
        retry_wait_s=0.0,
        seed=5,
    )
    tasks = [{"task_id": f"t{index}"} for index in range(4)]
    async with aclosing(engine.run(tasks, group_size=4, purpose="train/3")) as episodes:
        return {
            episode.id: [step.chat_completions for step in episode.trajectories[0].steps]
            async for episode in episodes
        }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return asyncio.run(_told(1, [0]))


@settings(max_examples=6, deadline=None)
@given(
    at_once=st.sampled_from([2, 7, 64]),
    hurry=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    failing=st.sampled_from([0, 2, 3]),
)
def test_the_same_run_says_the_same_at_any_concurrency_in_any_order_with_any_retries(
    alone: dict[str, Any], at_once: int, hurry: list[int], failing: int
) -> None:
    assert len(alone) == 16
    assert len({str(said) for said in alone.values()}) == 16
    assert asyncio.run(_told(at_once, hurry, failing)) == alone


async def test_a_draw_is_a_function_of_seed_purpose_task_attempt_and_turn() -> None:
    told = await _told(4, [0])
    assert len(told) == 16
    for name, turns in told.items():
        task, attempt = name.split(":")
        for turn, messages in enumerate(turns):
            said = messages[-1]["content"]
            assert said == str(draw_seed(5, "train/3", task, int(attempt), turn, "sample"))


async def test_lists_and_dicts_in_arguments_and_tasks_belong_to_one_attempt(
    agent_class: Agent, env_class: Env
) -> None:
    class Hoarding(agent_class):  # type: ignore[misc, valid-type]
        def __init__(self, notes: list[str], tool: object) -> None:
            super().__init__()
            notes.append("mine")
            self.notes, self.tool = notes, tool

    class Scratching(env_class):  # type: ignore[misc, valid-type]
        @staticmethod
        def from_dict(info: dict[str, Any]) -> Any:
            info["board"]["cells"].append(1)
            assert info["board"]["cells"] == [0, 1]
            info["rules"].append("new")
            assert info["rules"] == ["new"]
            return env_class.from_dict(info)

    notes, tool = list[str](), object()
    rules, cells = list[str](), [0]
    engine = AgentExecutionEngine(
        Hoarding,
        Scratching,
        {"notes": notes, "tool": tool},
        {"rules": rules},
        rollout_engine=ScriptedClient(lambda messages: "go"),
    )
    tasks = [{"task_id": f"t{index}", "board": {"cells": cells}} for index in range(3)]
    async with aclosing(engine.run(tasks, group_size=4)) as episodes:
        outcomes = [episode.outcome async for episode in episodes]
    assert outcomes == [Outcome.SCORED] * 12
    assert (notes, rules, cells) == ([], [], [0])


async def test_interrupting_a_run_ends_it_in_seconds_though_an_environment_hangs(
    agent_class: Agent, env_class: Env, world: Any, settled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.engine.rollout.HURRY_S", 0.2)
    client = ScriptedClient(
        lambda messages: (
            ScriptedAnswer(text="go")
            if "t0" in str(messages)
            else ScriptedAnswer(text="go", wait_for=asyncio.Event().wait)
        )
    )
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=client, max_workers=1, n_parallel_agents=4
    )

    async def play() -> None:
        tasks = [
            {"task_id": "t0", "trouble": {1: {"step:1": "hang"}}},
            *({"task_id": f"t{n}"} for n in (1, 2)),
        ]
        async with aclosing(engine.run(tasks)) as episodes:
            async for _ in episodes:
                pass

    running = asyncio.create_task(play())
    await settled(lambda: any(env.actions for env in world.made))
    running.cancel()
    async with asyncio.timeout(20.0):
        with pytest.raises(asyncio.CancelledError):
            await running
    counts = engine.counts
    assert counts.submitted == counts.by_outcome[Outcome.CANCELLED] == 3
    assert (client.open_sessions, engine.live()) == (0, [])
    world.release.set()
    await settled(lambda: world.num_open == 0)  # closed all the same, as soon as the thread comes back
