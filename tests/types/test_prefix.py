"""A turn's view of a growing list is a list to whoever reads it, and one's own to whoever changes it."""

import copy
import json
import math
import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.types import ModelOutput, Prefix, Step, Trajectory
from rllm.types.prefix import shared

ROWS = st.lists(st.integers(0, 5), max_size=12)


@given(row=ROWS, length=st.integers(0, 12), start=st.integers(-14, 14), stop=st.integers(-14, 14))
def test_it_reads_like_the_list_of_its_items(row: list[int], length: int, start: int, stop: int) -> None:
    length = min(length, len(row))
    view, items = Prefix(row, length), row[:length]
    assert (view == items, items == view, view != items) == (True, True, False)
    assert (list(view), len(view), bool(view), repr(view)) == (items, length, bool(items), repr(items))
    for step in (1, 2, -1):
        assert view[start:stop:step] == items[start:stop:step]
    assert (view + [7], [7] + view) == ([*items, 7], [7, *items])  # noqa: RUF005
    assert all((each in view) == (each in items) for each in range(7))
    for place in range(-length, length):
        assert view[place] == items[place]
    for place in (-length - 1, length):
        with pytest.raises(IndexError):
            _ = view[place]
    for twin in (copy.copy(view), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert twin == items


@given(row=ROWS, length=st.integers(0, 12), value=st.integers(0, 9))
def test_who_changes_it_gets_a_list_of_his_own(row: list[int], length: int, value: int) -> None:
    before, length = list(row), min(length, len(row))
    view, other = Prefix(row, length), Prefix(row)
    view.append(value)
    view.extend([1, 2])
    view[0] = 9
    del view[1:2]
    expected = [*before[:length], value, 1, 2]
    expected[0] = 9
    del expected[1:2]
    assert view == expected
    assert (row, other) == (before, before)


@given(first=ROWS, second=ROWS, third=ROWS)
def test_two_that_go_on_differently_do_not_meet(
    first: list[int], second: list[int], third: list[int]
) -> None:
    begun = Prefix(list(first))
    one = begun.followed_by(second)
    other = begun.followed_by(third)
    assert (begun, one, other) == (first, first + second, first + third)
    assert one.shares_row_with(begun)


def test_a_step_shares_the_history_of_the_step_before_and_says_what_it_said() -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(6)]
    plain = [
        Step(prompt_ids=list(range(20, 20 + 2 * turn)), chat_completions=messages[: 2 * turn])
        for turn in (1, 2, 3)
    ]
    ids = list(range(20, 30))
    steps = [
        Step(
            prompt_ids=ids[: 2 * turn],
            chat_completions=messages[: 2 * turn],
            id=plain[turn - 1].id,
            model_output=ModelOutput(prompt_ids=ids[: 2 * turn]),
        )
        for turn in (1, 2, 3)
    ]
    for earlier, later in zip([None, *steps], steps, strict=False):
        later.share_history(earlier)
    for before, after in zip(plain, steps, strict=True):
        after.model_output, output = None, after.model_output
        assert before == after
        assert json.loads(json.dumps(after.to_dict())) == before.to_dict()
        assert output is not None
        assert output.prompt_ids is after.prompt_ids
        assert json.dumps(output.to_dict()["prompt_ids"]) == json.dumps(before.prompt_ids)
    assert isinstance(steps[0].prompt_ids, Prefix)
    assert all(steps[0].prompt_ids.shares_row_with(step.prompt_ids) for step in steps)
    rewritten = [{"role": "user", "content": "0"}, {"role": "user", "content": "else"}]
    assert shared(steps[0].chat_completions, rewritten) == rewritten


def test_the_text_of_a_trajectory_grows_with_its_turns_and_not_with_their_square() -> None:
    """asyncio.run() makes it of whatever a coroutine returns, be it asked for or not."""
    row, messages = list(range(8_000)), [{"role": "user", "content": str(turn)} for turn in range(800)]

    def text_of(num_turns: int) -> str:
        steps = [
            Step(
                prompt_ids=Prefix(row, 10 * turn),  # type: ignore[arg-type]
                chat_completions=Prefix(messages, turn),  # type: ignore[arg-type]
            )
            for turn in range(num_turns)
        ]
        return repr(Trajectory(steps=steps))

    assert len(text_of(800)) < 2.5 * len(text_of(400))
    assert repr(Prefix(row)) == "[0, 1, 2, … 7994 more …, 7997, 7998, 7999]"


def test_a_row_is_shared_at_the_cost_of_a_comparison_of_lists() -> None:
    """With a Python object made of each id, this was most of what a long episode cost."""
    row, times = list(range(1000, 301_000)), {"lists": math.inf, "shared": math.inf}
    for _ in range(7):
        earlier, later = Prefix(row[:-10]), list(row)
        for name, does in (
            ("lists", lambda: list(later[: len(earlier)]) == earlier[:]),  # noqa: B023
            ("shared", lambda: shared(earlier, later, by_value=True)),  # noqa: B023
        ):
            started = time.thread_time()
            assert does()
            times[name] = min(times[name], time.thread_time() - started)
    assert times["shared"] < 4.0 * times["lists"], times
