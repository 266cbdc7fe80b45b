"""Engines of several ranks: whoever plays, all ranks get the same episodes, each once, and the same counts.

A rank is a thread here: what real processes add is theirs to test (tests/distributed, tests/cluster).
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rllm.agents.base import BaseAgent
from rllm.distributed import RankGroup
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.attempts import EpisodeEngine
from rllm.engine.split import SplitEngine, WriterEngine
from rllm.environments.base import BaseEnv
from rllm.errors import ConfigError
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.store.encoding import EncodedEpisode, EncodedEpisodes, encode_episode
from rllm.types.episode import Episode, Outcome

TASKS = [{"task_id": f"task-{number}", "turns": 1 + number % 3} for number in range(5)]


class ThreadRanks(RankGroup):
    """Of one process: they meet at a barrier."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._table = barrier, table

    def gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait()
        gathered = list(self._table)
        self._barrier.wait()
        return gathered


def whole_episodes(
    make: Callable[[RankGroup], EpisodeEngine], size: int, tasks: Sequence[Any] = TASKS
) -> list[tuple[list[Episode], Any]]:
    """(episodes, counts) of each rank."""
    barrier, table = threading.Barrier(size), [None] * size

    async def play(rank: int) -> tuple[list[Episode], Any]:
        engine = make(ThreadRanks(rank, size, barrier, table))
        episodes = [each async for each in engine.run(tasks, group_size=2, purpose="train/0")]
        return sorted(episodes, key=lambda each: (each.task_id, each.rollout_idx)), engine.counts

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: asyncio.run(play(rank)), range(size)))


def played(make: Callable[[RankGroup], EpisodeEngine], size: int) -> list[tuple[list[Any], Any]]:
    """(episodes as values, counts) of each rank."""
    return [
        ([(each.task_id, each.rollout_idx, each.reward) for each in episodes], counts)
        for episodes, counts in whole_episodes(make, size)
    ]


def test_tasks_without_an_id_are_named_by_their_place_on_any_rank(
    agent_class: type[BaseAgent], env_class: type[BaseEnv], world: Any
) -> None:
    def make(ranks: RankGroup) -> EpisodeEngine:
        client = ScriptedClient(lambda messages: "go")
        return SplitEngine(AgentExecutionEngine(agent_class, env_class, rollout_engine=client), ranks)

    nameless = [{"turns": each["turns"]} for each in TASKS]
    (mine, _), (alike, _) = whole_episodes(make, 2, nameless)
    assert [each.task_id for each in mine] == [each.task_id for each in alike]
    assert len({each.task_id for each in mine}) == len(nameless)


def test_two_tasks_of_one_id_are_refused_though_each_rank_plays_one(
    agent_class: type[BaseAgent], env_class: type[BaseEnv], world: Any
) -> None:
    def make(ranks: RankGroup) -> EpisodeEngine:
        client = ScriptedClient(lambda messages: "go")
        return SplitEngine(AgentExecutionEngine(agent_class, env_class, rollout_engine=client), ranks)

    with pytest.raises(ConfigError, match="task_id"):
        whole_episodes(make, 2, [TASKS[0], TASKS[0]])
    assert world.made == []


@pytest.mark.parametrize("look_every_s", [3600.0, 0.0])
def test_other_ranks_hear_that_one_has_begun_and_then_of_every_move(
    look_every_s: float,
    agent_class: type[BaseAgent],
    env_class: type[BaseEnv],
    world: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beats = list[tuple[int, str]]()
    monkeypatch.setattr(ThreadRanks, "beat", lambda self, place: beats.append((self.rank, place)))
    monkeypatch.setattr("rllm.engine.split.LOOK_EVERY_S", look_every_s)

    def make(ranks: RankGroup) -> EpisodeEngine:
        client = ScriptedClient(lambda messages: "go")
        return SplitEngine(AgentExecutionEngine(agent_class, env_class, rollout_engine=client), ranks)

    whole_episodes(make, 2)
    assert set(beats) == {(rank, "the episodes of train/0") for rank in range(2)}
    assert (len(beats) == 2) == (look_every_s > 0.0)


async def test_an_engine_that_stands_still_is_not_told_of_as_one_that_moves(
    agent_class: type[BaseAgent], env_class: type[BaseEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = list[str]()
    monkeypatch.setattr("rllm.engine.split.LOOK_EVERY_S", 0.0)
    ranks = ThreadRanks(0, 1, threading.Barrier(1), [None])
    monkeypatch.setattr(ranks, "beat", beats.append)
    may_go_on = asyncio.Event()
    client = ScriptedClient(lambda _: ScriptedAnswer(text="go", wait_for=may_go_on.wait))
    engine = SplitEngine(AgentExecutionEngine(agent_class, env_class, rollout_engine=client), ranks)

    async def play() -> None:
        _ = [each async for each in engine.run(TASKS[:1], purpose="train/0")]

    playing, numbers = asyncio.create_task(play()), list[int]()
    async with asyncio.timeout(20.0):
        while not client.requests:
            await asyncio.sleep(0)
        for _ in range(2):
            for _ in range(50):
                await asyncio.sleep(0)
            numbers.append(len(beats))
        may_go_on.set()
        await playing
    assert numbers[0] == numbers[1] < len(beats)


@pytest.mark.parametrize("kind", ["each its share", "rank 0 all"])
def test_all_ranks_get_every_episode_once(
    kind: str, agent_class: type[BaseAgent], env_class: type[BaseEnv], world: Any
) -> None:
    def engine() -> AgentExecutionEngine:
        return AgentExecutionEngine(
            agent_class, env_class, rollout_engine=ScriptedClient(lambda messages: "go")
        )

    def make(ranks: RankGroup) -> EpisodeEngine:
        if kind == "each its share":
            return SplitEngine(engine(), ranks)
        return WriterEngine(engine() if ranks.is_writer else None, ranks)

    (expected, counts), *others = played(make, 3)
    assert [each[:2] for each in expected] == [
        (task["task_id"], attempt) for task in TASKS for attempt in (0, 1)
    ]
    assert all(reward == 1.0 for *_, reward in expected)
    assert [episodes for episodes, _ in others] == [expected, expected]
    assert counts.by_outcome[Outcome.SCORED] == counts.submitted == 10
    assert [theirs.by_outcome for _, theirs in others] == [counts.by_outcome, counts.by_outcome]
    assert len(world.made) == 10


@pytest.mark.parametrize("kind", ["each its share", "rank 0 all"])
def test_a_rank_hands_on_what_it_played_itself_and_reads_the_rest_with_the_same_values(
    kind: str, agent_class: type[BaseAgent], env_class: type[BaseEnv]
) -> None:
    kept: list[list[Episode]] = [[], []]

    class Noting(AgentExecutionEngine):
        async def run(self, tasks: Any, **wishes: Any) -> AsyncGenerator[Episode, None]:
            async for episode in super().run(tasks, **wishes):
                kept[self.env_args["rank"]].append(episode)
                yield episode

    def make(ranks: RankGroup) -> EpisodeEngine:
        client = ScriptedClient(lambda messages: "go")
        engine = Noting(agent_class, env_class, env_args={"rank": ranks.rank}, rollout_engine=client)
        if kind == "each its share":
            return SplitEngine(engine, ranks)
        return WriterEngine(engine if ranks.is_writer else None, ranks)

    parts = [{each.episode_id: each for each in episodes} for episodes, _ in whole_episodes(make, 2)]
    assert parts[0].keys() == parts[1].keys()
    for rank, own in enumerate(kept):
        assert all(parts[rank][each.episode_id] is each for each in own)
    assert len(kept[0]) + len(kept[1]) == len(parts[0])
    for identity, mine in parts[0].items():
        theirs = parts[1][identity]
        assert mine is not theirs
        assert encode_episode(mine) == encode_episode(theirs)


@pytest.mark.parametrize("kind", ["each its share", "rank 0 all"])
def test_the_rank_that_stores_has_the_rows_of_every_episode(
    kind: str, agent_class: type[BaseAgent], env_class: type[BaseEnv]
) -> None:
    encoded = [EncodedEpisodes(), EncodedEpisodes()]

    def make(ranks: RankGroup) -> EpisodeEngine:
        engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient(lambda _: "go"))
        if kind == "each its share":
            return SplitEngine(engine, ranks, encoded[ranks.rank])
        return WriterEngine(engine if ranks.is_writer else None, ranks, encoded[ranks.rank])

    (episodes, _), _ = whole_episodes(make, 2)
    assert [len(each) for each in encoded] == [len(episodes), 0]
    for each in episodes:
        assert encoded[0].of(each) == EncodedEpisode.of(each)


async def test_a_rank_alone_attempts_each_task_once_and_refuses_what_is_no_task(
    agent_class: type[BaseAgent], env_class: type[BaseEnv]
) -> None:
    ranks = ThreadRanks(0, 1, threading.Barrier(1), [None])
    num_tasks = len(asyncio.all_tasks())
    for kind in (SplitEngine, WriterEngine):
        engine = kind(
            AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient(lambda _: "on")), ranks
        )
        assert sorted([each.task_id async for each in engine.run(TASKS)]) == [
            each["task_id"] for each in TASKS
        ]
        for tasks in ("ab", [1]):
            with pytest.raises(ConfigError):
                _ = [each async for each in engine.run(tasks)]  # type: ignore[arg-type]
        assert engine.counts.submitted == len(TASKS)
        assert list(engine.live()) == []
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == num_tasks, "nobody tells other ranks of a run that is over"
