import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.engine.attempts import EpisodeCounts, Finished, ParallelLimit, Quota, attempts_at, play_all
from rllm.errors import ConfigError, CountError
from rllm.types.episode import Episode, Outcome, Step, Trajectory


def _episode(name: str, attempt: int = 0, outcome: Outcome = Outcome.SCORED) -> Episode:
    return Episode(task_id=name, rollout_idx=attempt, outcome=outcome)


def _tasks(count: int) -> list[dict[str, Any]]:
    return [{"task_id": f"t{index}"} for index in range(count)]


async def _all(pending: list[Any], work: Any, counts: EpisodeCounts, **how: Any) -> list[Episode]:
    async with aclosing(play_all(pending, work, ParallelLimit(2), counts, **how)) as episodes:
        return [episode async for episode in episodes]


async def test_an_episode_that_a_worker_loses_stops_the_run_instead_of_hanging_it() -> None:
    pending = attempts_at(_tasks(3), 1)

    async def work(finished: Finished) -> None:
        while pending:
            identity, _ = pending.pop()
            if identity.task_id != "t1":
                finished.put_nowait(_episode(identity.task_id))
            await asyncio.sleep(0)

    counts = EpisodeCounts()
    async with asyncio.timeout(20.0):
        with pytest.raises(CountError, match="one was lost"):
            await _all(pending, work, counts)
    assert counts.in_flight == 0
    assert counts.by_outcome[Outcome.CANCELLED] == 1


async def test_what_a_worker_raises_ends_the_run_and_the_other_workers() -> None:
    pending = attempts_at(_tasks(3), 1)
    ended: list[str] = []

    async def work(finished: Finished) -> None:
        identity, _ = pending.pop()
        if identity.task_id == "t1":
            raise ConfigError("no such map")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(identity.task_id)

    counts = EpisodeCounts()
    with pytest.raises(ConfigError, match="no such map"):
        await _all(pending, work, counts)
    assert ended == ["t0"]
    assert counts.by_outcome[Outcome.CANCELLED] == counts.submitted == 3


def test_attempts_beyond_the_group_come_after_all_others() -> None:
    order = [str(identity) for identity, _ in reversed(attempts_at(_tasks(2), 2, 1.5))]
    assert order == ["t0:0", "t0:1", "t1:0", "t1:1", "t0:2", "t1:2"]
    assert len(attempts_at(_tasks(1), 10, 1.1)) == 11
    assert len(attempts_at(_tasks(1), 3, 1.1)) == 4


def test_a_group_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="`group_size` is 0"):
        attempts_at(_tasks(1), 0)


def test_a_task_id_that_no_store_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="surrogate"):
        attempts_at([{"task_id": "\ud83d", "question": "?"}], 1)


outcomes = st.sampled_from([outcome for outcome in Outcome if outcome is not Outcome.CANCELLED])


@given(finishing=st.lists(st.tuples(st.integers(0, 2), outcomes), max_size=30), group_size=st.integers(1, 4))
def test_a_quota_takes_the_first_of_each_group_and_says_when_it_is_full(
    finishing: Sequence[tuple[int, Outcome]], group_size: int
) -> None:
    stopped: list[str] = []
    quota = Quota(group_size, stopped.append)
    taken: dict[str, list[Outcome]] = {}
    for number, (task, outcome) in enumerate(finishing):
        episode = _episode(f"t{task}", number, outcome)
        if quota.takes(episode):
            taken.setdefault(episode.task_id, []).append(outcome)
    for task in range(3):
        name = f"t{task}"
        # An oracle: everything up to the one that fills the group.
        expected: list[Outcome] = []
        for other, outcome in finishing:
            if (
                other == task
                and sum(each is not Outcome.INFRASTRUCTURE_FAILURE for each in expected) < group_size
            ):
                expected.append(outcome)
        assert taken.get(name, []) == expected
        full = sum(each is not Outcome.INFRASTRUCTURE_FAILURE for each in expected) == group_size
        assert (name in stopped) == quota.is_full(name) == full
    assert len(stopped) == len(set(stopped))


async def test_cancelled_episodes_are_counted_with_their_tokens_and_not_handed_out() -> None:
    pending = attempts_at(_tasks(2), 1)

    async def work(finished: Finished) -> None:
        while pending:
            identity, _ = pending.pop()
            episode = _episode(identity.task_id)
            if identity.task_id == "t0":
                episode.outcome = Outcome.CANCELLED
                episode.trajectories = [Trajectory(steps=[Step(response_ids=[1, 2, 3])])]
            finished.put_nowait(episode)
            await asyncio.sleep(0)

    counts = EpisodeCounts()
    assert [episode.task_id for episode in await _all(pending, work, counts)] == ["t1"]
    assert (counts.by_outcome[Outcome.CANCELLED], counts.cancelled_tokens, counts.in_flight) == (1, 3, 0)


async def test_a_place_that_is_handed_to_a_worker_as_it_is_cancelled_goes_to_the_next() -> None:
    places, leave = ParallelLimit(1), asyncio.Event()
    entered: list[str] = []

    async def worker(name: str) -> None:
        async with places:
            entered.append(name)
            await leave.wait()

    names = ("first", "gone", "second", "third")
    first, gone, second, third = [asyncio.create_task(worker(name)) for name in names]
    await asyncio.sleep(0)
    gone.cancel()  # it waits, and has no place to hand on
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert entered == ["first"]
    leave.set()
    while not first.done():
        await asyncio.sleep(0)
    second.cancel()  # it has its turn, and has not run since
    await asyncio.wait_for(asyncio.gather(second, third, return_exceptions=True), 5)
    assert (entered, second.cancelled()) == (["first", "third"], True)
    entered.clear()
    leave.clear()
    two = [asyncio.create_task(worker(name)) for name in ("fourth", "fifth")]
    for _ in range(3):
        await asyncio.sleep(0)
    assert entered == ["fourth"], "there is one place, as before"
    leave.set()
    await asyncio.wait_for(asyncio.gather(*two), 5)
    assert entered == ["fourth", "fifth"]
