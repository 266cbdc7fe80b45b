"""Long tails: with oversampling or a deadline, a batch does not wait for its slowest episode."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest

from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.types.episode import Episode, Outcome, TerminationReason

Env = type[Any]
Agent = type[Any]


class Tails:
    """A client whose conversations of some (task, attempt) never end; it remembers who was asked."""

    def __init__(self, *slow: tuple[str, int]) -> None:
        self.slow = slow
        self.quick = ScriptedClient(lambda messages: "go")
        self.stuck = ScriptedClient(lambda messages: ScriptedAnswer(text="go", wait_for=asyncio.Event().wait))
        self.opened: list[tuple[str, int]] = []

    def session(self, order: tuple[str, int]) -> Any:
        self.opened.append(order)
        return (self.stuck if order in self.slow else self.quick).session(order)

    @property
    def open_sessions(self) -> int:
        return self.quick.open_sessions + self.stuck.open_sessions


async def _all(engine: AgentExecutionEngine, tasks: list[dict[str, Any]], **how: Any) -> list[Episode]:
    async with asyncio.timeout(30.0), aclosing(engine.run(tasks, **how)) as episodes:
        return [episode async for episode in episodes]


def _tasks(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"task_id": f"t{index}", **more} for index in range(count)]


async def test_a_batch_with_an_episode_that_never_ends_is_complete_without_it(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    client: Any = Tails(("t2", 1))
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client, oversampling=1.25)
    episodes = await _all(engine, _tasks(16), group_size=4)
    assert Counter(episode.task_id for episode in episodes) == {f"t{index}": 4 for index in range(16)}
    assert "t2:1" not in {episode.id for episode in episodes}
    assert "t2:4" in {episode.id for episode in episodes}
    assert {episode.outcome for episode in episodes} == {Outcome.SCORED}
    counts = engine.counts
    assert (counts.submitted, counts.in_flight) == (16 * 5, 0)
    assert counts.by_outcome[Outcome.CANCELLED] == 16
    assert (client.open_sessions, world.num_open) == (0, 0)
    assert engine.live() == []


async def test_attempts_beyond_the_group_are_not_begun_once_it_is_complete(
    agent_class: Agent, env_class: Env
) -> None:
    client: Any = Tails()
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client, n_parallel_agents=1)
    episodes = await _all(engine, _tasks(3), group_size=2, oversampling=2.0)
    assert len(episodes) == 6
    assert {attempt for _, attempt in client.opened} == {0, 1}
    assert engine.counts.by_outcome[Outcome.CANCELLED] == 6


async def test_failures_of_the_infrastructure_fill_no_place_in_a_group(
    agent_class: Agent, env_class: Env
) -> None:
    client: Any = Tails()
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=client, retry_limit=1, n_parallel_agents=1
    )
    task = {"task_id": "t", "trouble": {1: {"reset": OSError("gone")}}}  # of the first attempt alone
    episodes = await _all(engine, [task], group_size=2, oversampling=1.5)
    assert [episode.outcome for episode in episodes] == [
        Outcome.INFRASTRUCTURE_FAILURE,
        Outcome.SCORED,
        Outcome.SCORED,
    ]


async def test_without_oversampling_nobody_is_cancelled(agent_class: Agent, env_class: Env) -> None:
    client: Any = Tails()
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client)
    assert len(await _all(engine, _tasks(2), group_size=3)) == 6
    assert engine.counts.by_outcome[Outcome.CANCELLED] == 0


async def test_at_the_deadline_what_runs_is_truncated_and_what_waits_is_not_begun(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    client: Any = Tails(("t1", 0), ("t2", 0))
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=client, n_parallel_agents=2, deadline_s=0.5
    )
    episodes = {episode.task_id: episode for episode in await _all(engine, _tasks(5))}
    assert episodes.keys() == {"t0", "t1", "t2"}
    for name in ("t1", "t2"):
        assert episodes[name].termination_reason is TerminationReason.TIMEOUT
        assert episodes[name].outcome is Outcome.TRUNCATED
    assert engine.counts.by_outcome[Outcome.CANCELLED] == 2
    assert len(client.opened) == 3
    assert (client.open_sessions, world.num_open) == (0, 0)


async def test_an_environment_that_hangs_is_cancelled_with_its_group(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    client: Any = Tails()
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client, oversampling=2.0)
    task = {"task_id": "t", "trouble": {2: {"step:1": "hang"}}}
    (episode,) = await _all(engine, [task])
    assert episode.outcome is Outcome.SCORED
    assert engine.counts.by_outcome[Outcome.CANCELLED] == 1
    assert world.num_open == 0


@pytest.mark.slow
async def test_one_episode_fifty_times_slower_hardly_delays_a_batch_of_sixty_four(
    agent_class: Agent, env_class: Env
) -> None:
    """Finishes within 1.3 times the median episode, give or take the machine."""

    def slow_or_not(messages: Sequence[dict[str, Any]]) -> ScriptedAnswer:
        delay_s = 5.0 if str(messages[0]["content"]).startswith("t0 ") and not delayed else 0.1
        delayed.append(delay_s)
        return ScriptedAnswer(text="go", wait_for=lambda: asyncio.sleep(delay_s))

    delayed: list[float] = []
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=ScriptedClient(slow_or_not), oversampling=2.0
    )
    loop = asyncio.get_running_loop()
    started, ended = loop.time(), list[float]()
    async with aclosing(engine.run(_tasks(64, turns=5))) as episodes:
        async for _ in episodes:
            ended.append(loop.time() - started)
    assert len(ended) == 64
    assert ended[-1] < 1.3 * ended[32] + 0.2
