from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.filters import (
    Solution,
    are_solved_alike,
    continued_group_weight,
    has_signal,
    overlong_cost,
    overlong_rewards,
    rejected_groups,
    solution_of,
)
from rllm.errors import CountError
from rllm.types.episode import Episode, Outcome, Step, Trajectory, TrajectoryGroup

REWARDS = st.lists(st.floats(-3.0, 3.0).map(lambda value: round(value, 3)), min_size=1, max_size=6)


def _group(task_id: str, rewards: list[float | None]) -> tuple[tuple[str, str], TrajectoryGroup]:
    trajectories = [
        Trajectory(uid=f"{task_id}/{number}", reward=reward) for number, reward in enumerate(rewards)
    ]
    return (task_id, "agent"), TrajectoryGroup(task_id=task_id, role="agent", trajectories=trajectories)


@given(REWARDS, st.floats(-5.0, 5.0), st.permutations(range(6)))
def test_a_group_has_signal_exactly_where_two_attempts_were_paid_differently(
    rewards: list[float], shift: float, order: list[int]
) -> None:
    assert has_signal(rewards) == (max(rewards) > min(rewards))
    shuffled = [rewards[place] for place in order if place < len(rewards)]
    assert has_signal(shuffled) == has_signal(rewards)
    assert not has_signal([shift] * len(rewards))


@given(REWARDS)
def test_rewards_that_deviate_by_no_more_than_the_limit_have_none(rewards: list[float]) -> None:
    spread = float(np.std(rewards))
    assert not has_signal(rewards, spread)
    if spread > 1e-6:
        assert has_signal(rewards, spread * 0.99)


def test_groups_that_tie_or_stand_alone_are_rejected_and_those_with_a_broken_reward_are_not() -> None:
    groups = dict(
        [
            _group("differ", [0.0, 1.0]),
            _group("tie", [1.0, 1.0]),
            _group("alone", [1.0]),
            _group("nearly", [0.5, 0.6]),
            _group("broken", [float("nan"), 1.0]),
            _group("unpaid", [None, None]),
            _group("paid otherwise", [1.0, 1.0]),
        ]
    )
    otherwise = {"paid otherwise/0": 0.0}
    assert [key[0] for key in rejected_groups(groups, otherwise, 0.0)] == ["tie", "alone"]
    assert [key[0] for key in rejected_groups(groups, otherwise, 0.1)] == ["tie", "alone", "nearly"]
    assert [key[0] for key in rejected_groups(groups, {}, 0.0)] == ["tie", "alone", "paid otherwise"]


def test_an_overlong_answer_costs_more_the_further_it_goes_into_the_buffer(subtests: pytest.Subtests) -> None:
    for num_tokens, cost in ((0, 0.0), (12, 0.0), (13, 0.25), (14, 0.5), (16, 1.0), (99, 1.0)):
        with subtests.test(num_tokens=num_tokens, cost=cost):
            # DAPO, equation 13, with L_max = 16 and L_cache = 4.
            assert overlong_cost(num_tokens, limit=16, buffer=4, penalty=1.0) == cost
            assert overlong_cost(num_tokens, limit=16, buffer=4, penalty=0.5) == cost / 2


def test_the_longest_answer_of_a_trajectory_counts_and_failures_are_left_as_they_are() -> None:
    def episode(name: str, lengths: list[int], reward: float | None, outcome: Outcome) -> Episode:
        steps = [Step(response_ids=[7] * length) for length in lengths]
        trajectory = Trajectory(uid=name, name=name, steps=steps, reward=reward)
        return Episode(task_id=name, trajectories=[trajectory], outcome=outcome)

    episodes = [
        episode("short", [3, 2], 1.0, Outcome.SCORED),
        episode("long", [3, 8, 1], 1.0, Outcome.TRUNCATED),
        episode("half", [6], 0.25, Outcome.SCORED),
        episode("roomy", [8], 1.0, Outcome.SCORED),
        episode("failed", [8], 1.0, Outcome.POLICY_FAILURE),
        episode("unpaid", [8], None, Outcome.SCORED),
        episode("silent", [], 1.0, Outcome.SCORED),
    ]
    less = overlong_rewards(
        episodes,
        {"half": 0.5},
        limit_of=lambda role: 100 if role == "roomy" else 8,
        buffer=4,
        penalty=2.0,
    )
    assert less == {"long": -1.0, "half": -0.5}


# ---- groups that stop after their first attempts --------------------------------------------------------

SOLVED: tuple[Solution, Solution] = ((("agent", 1.0),), (("agent", 0.5),))


@given(st.lists(st.sampled_from([None, *SOLVED]), min_size=3, max_size=7), st.data())
def test_groups_that_are_played_on_stand_on_average_for_those_that_are_not(
    solutions: list[Solution | None], data: st.DataObject
) -> None:
    """Over all choices of which attempts come first."""
    first = data.draw(st.integers(2, len(solutions) - 1))
    choices = list(combinations(solutions, first))
    num_continued = sum(not are_solved_alike(each) for each in choices)
    if are_solved_alike(solutions):
        assert num_continued == 0
        with pytest.raises(CountError, match="all solved alike"):
            continued_group_weight(solutions, first)
    else:
        weight = continued_group_weight(solutions, first)
        assert num_continued / len(choices) * weight == pytest.approx(1.0)


def _attempt(
    *paid: tuple[str, float | None], is_correct: bool = True, outcome: Outcome = Outcome.SCORED
) -> Episode:
    trajectories = [
        Trajectory(uid=str(number), name=role, reward=reward) for number, (role, reward) in enumerate(paid)
    ]
    return Episode(trajectories=trajectories, is_correct=is_correct, outcome=outcome)


def test_an_attempt_solves_its_task_where_it_is_correct_and_every_role_is_paid_one_amount() -> None:
    assert solution_of(_attempt(("b", 1.0), ("a", 0.5), ("b", 1.0)), {}) == (("a", 0.5), ("b", 1.0))
    assert solution_of(_attempt(("a", 1.0)), {"0": 0.75}) == (("a", 0.75),)
    assert solution_of(_attempt(("a", 1.0)), {}, {"0"}) is None
    for attempt in (
        _attempt(("a", 1.0), is_correct=False),
        _attempt(("a", 1.0), outcome=Outcome.INFRASTRUCTURE_FAILURE),
        _attempt(("a", 1.0), ("a", 0.0)),
        _attempt(("a", None)),
        _attempt(("a", float("nan"))),
        _attempt(),
    ):
        assert solution_of(attempt, {}) is None
