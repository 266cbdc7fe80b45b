"""One rollout does what nobody thought of: it fails alone, and says so."""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.base import BaseEnv
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Action, Episode, Outcome
from rllm.types.messages import Message

BAD = "bad"
TASKS = [{"task_id": name} for name in ("good", BAD, "also good", "as good")]


class Wordless(Exception):
    """An error of a library that was made half: it cannot even be shown."""

    def __str__(self) -> str:
        raise AttributeError("no response")

    __repr__ = __str__


class Cell(BaseEnv):
    """One step; its task's name is what it shows."""

    trouble: BaseException | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self.name, {}

    def step(self, action: Any) -> Any:
        if self.name == BAD and self.trouble is not None:
            raise self.trouble
        return self.name, 1.0, True, {}

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> BaseEnv:  # type: ignore[override]
        return cls(info["task_id"])


class AsyncCell(Cell):
    async def step(self, action: Any) -> Any:
        return super().step(action)


class Speaker(ConversationAgent):
    trouble: BaseException | None = None

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        if self.chat_completions[0]["content"] == BAD and self.trouble is not None:
            raise self.trouble
        return super().update_from_model(response)


def _raising(error: BaseException) -> Callable[[Sequence[Message]], str]:
    def answer(messages: Sequence[Message]) -> str:
        if messages[0]["content"] == BAD:
            raise error
        return "go"

    return answer


async def _play(engine: AgentExecutionEngine) -> dict[str, Episode]:
    async with asyncio.timeout(20.0), aclosing(engine.run(TASKS)) as running:
        return {episode.task_id: episode async for episode in running}


Player = Callable[..., Coroutine[Any, Any, dict[str, Episode]]]


@pytest.fixture
def play() -> Player:
    """All tasks, with `trouble` met by the bad one at `place`."""

    async def playing(place: str, trouble: BaseException) -> dict[str, Episode]:
        env: type[Any] = AsyncCell if place == "async environment" else Cell

        class Env(env):
            pass

        class Agent(Speaker):
            pass

        if "environment" in place:
            Env.trouble = trouble
        if place == "agent":
            Agent.trouble = trouble
        client = ScriptedClient(_raising(trouble) if place == "model" else lambda messages: "go")
        engine = AgentExecutionEngine(
            Agent, Env, rollout_engine=client, n_parallel_agents=2, retry_limit=2, retry_wait_s=0.0
        )
        episodes = await _play(engine)
        assert engine.counts.submitted == len(episodes) == len(TASKS)
        assert client.open_sessions == 0
        return episodes

    return playing


PLACES = {
    "environment": Outcome.INFRASTRUCTURE_FAILURE,
    "async environment": Outcome.INFRASTRUCTURE_FAILURE,
    "model": Outcome.INFRASTRUCTURE_FAILURE,
    "agent": Outcome.POLICY_FAILURE,
}


@pytest.mark.parametrize("place", PLACES)
async def test_an_error_that_cannot_be_shown_fails_one_episode(play: Player, place: str) -> None:
    episodes = await play(place, Wordless())
    bad = episodes.pop(BAD)
    assert bad.outcome is PLACES[place]
    assert bad.trajectories[0].info["error"]["type"] == "Wordless"
    assert {each.outcome for each in episodes.values()} == {Outcome.SCORED}


@pytest.mark.parametrize("place", PLACES)
async def test_a_cancellation_that_nobody_asked_for_is_a_failure_of_one_episode(
    play: Player, place: str
) -> None:
    episodes = await play(place, asyncio.CancelledError("of a scope of its own"))
    assert episodes.pop(BAD).outcome is PLACES[place]
    assert {each.outcome for each in episodes.values()} == {Outcome.SCORED}


async def test_a_context_variable_of_one_rollout_is_not_seen_by_the_next() -> None:
    whose = contextvars.ContextVar("whose", default="nobody's")
    found: list[str] = []

    class Marking(Speaker):
        def update_from_env(
            self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
        ) -> None:
            if not self.trajectory.steps:
                found.append(whose.get())
            whose.set(observation)
            super().update_from_env(observation, reward, done, info)

    client = ScriptedClient(lambda messages: "go")
    await _play(AgentExecutionEngine(Marking, Cell, rollout_engine=client, n_parallel_agents=1))
    assert found == ["nobody's"] * len(TASKS)
