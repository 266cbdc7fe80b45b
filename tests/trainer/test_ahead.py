"""The order and the bound of steps that are sampled ahead, under any service times."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.trainer.ahead import StepsAhead
from rllm.trainer.rollouts import Rollouts

TURNS = st.lists(st.integers(0, 12), min_size=1, max_size=24)
"""Of the event loop, that each step takes to sample."""


class _Game:
    """Steps that take so many turns of the event loop; what is published is what was learned from."""

    def __init__(self, turns: Sequence[int], learning_turns: int, steps_ahead: int) -> None:
        self.turns, self.learning_turns = turns, learning_turns
        self.began_at_version: dict[int, int] = {}
        self.learned: list[int] = []
        self.ended = set[int]()
        self.cancelled = set[int]()
        self.ahead = StepsAhead(self.sample, steps_ahead=steps_ahead, num_steps=len(turns))

    async def sample(self, step: int) -> Rollouts:
        self.began_at_version[step] = len(self.learned)
        try:
            for _ in range(self.turns[step]):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.add(step)
            raise
        self.ended.add(step)
        return Rollouts(tasks=[step])

    async def play(self, until: int | None = None) -> None:
        for step in range(len(self.turns) if until is None else until):
            rollouts = await self.ahead.step(step)
            assert rollouts.tasks == [step]
            for _ in range(self.learning_turns):
                await asyncio.sleep(0)
            self.learned.append(step)
        await self.ahead.close()


@given(turns=TURNS, learning=st.integers(0, 6), ahead=st.integers(0, 5))
def test_every_step_is_learned_from_in_order_and_none_begins_before_its_time(
    turns: list[int], learning: int, ahead: int
) -> None:
    game = _Game(turns, learning, ahead)
    asyncio.run(game.play())
    assert game.learned == list(range(len(turns)))
    assert game.ended == set(range(len(turns)))
    for step, version in game.began_at_version.items():
        assert 0 <= step - version <= ahead


@given(turns=TURNS, ahead=st.integers(0, 5), data=st.data())
def test_what_a_run_that_ends_early_had_begun_is_cancelled_and_nothing_is_lost(
    turns: list[int], ahead: int, data: st.DataObject
) -> None:
    until = data.draw(st.integers(1, len(turns)))
    game = _Game(turns, 0, ahead)
    asyncio.run(game.play(until))
    begun, waiting = set(game.began_at_version), game.ended - set(game.learned)
    assert game.learned == list(range(until))
    assert begun == set(game.learned) | waiting | game.cancelled
    assert len(waiting | game.cancelled) <= ahead


def test_the_bound_is_reached_where_learning_is_slow() -> None:
    game = _Game([1] * 20, 9, 4)
    asyncio.run(game.play())
    assert max(step - version for step, version in game.began_at_version.items()) == 4


def test_the_error_of_a_step_is_raised_when_it_is_its_turn_and_not_before() -> None:
    learned: list[int] = []

    async def sample(step: int) -> Rollouts:
        await asyncio.sleep(random.Random(step).random() / 1000)
        if step == 2:
            raise RuntimeError("the world of step 2 is gone")
        return Rollouts(tasks=[step])

    async def play() -> None:
        ahead = StepsAhead(sample, steps_ahead=3, num_steps=6)
        try:
            for step in range(6):
                await ahead.step(step)
                learned.append(step)
        finally:
            await ahead.close()

    with pytest.raises(RuntimeError, match="step 2"):
        asyncio.run(play())
    assert learned == [0, 1]
