"""Which tasks a step plays again, and that a run that was stopped plays the same ones."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.curriculum import Curriculum
from rllm.algorithms.task_sampler import TaskSampler
from rllm.types.episode import Episode, Outcome

TASKS = [{"task_id": f"t{number}"} for number in range(40)]


def _curriculum(replay_fraction: float = 0.5, seed: int = 0, **options: Any) -> Curriculum[dict[str, Any]]:
    sampler = TaskSampler(TASKS, seed=seed, purpose="tasks")
    return Curriculum(sampler, seed=seed, replay_fraction=replay_fraction, **options)


def _episodes(task: dict[str, Any], solved: int, of: int = 4, **changes: Any) -> list[Episode]:
    return [
        Episode(
            task_id=task["task_id"],
            rollout_idx=attempt,
            is_correct=attempt < solved,
            outcome=changes.get("outcome", Outcome.SCORED),
        )
        for attempt in range(of)
    ]


def _play(curriculum: Curriculum[dict[str, Any]], step: int, count: int = 8, solved: int = 2) -> list[str]:
    tasks = curriculum.batch(step, count)
    curriculum.observe(step, [episode for task in tasks for episode in _episodes(task, solved)])
    return [task["task_id"] for task in tasks]


def test_without_replay_tasks_come_in_their_order_and_every_one_of_them() -> None:
    plain = TaskSampler(TASKS, seed=3, purpose="tasks")
    curriculum = _curriculum(0.0, seed=3)
    played = [task_id for step in range(7) for task_id in _play(curriculum, step)]
    assert played == [task["task_id"] for task in plain.batch(0, 56)]


def test_half_of_a_step_is_played_again_as_soon_as_there_is_enough() -> None:
    curriculum = _curriculum()
    first, second = _play(curriculum, 0), _play(curriculum, 1)
    assert len(set(first)) == len(set(second)) == 8
    assert len(set(second) & set(first)) == 4
    assert set(second[:4]).isdisjoint(first), "the new ones come first"


def test_a_task_that_is_always_solved_leaves_the_pool() -> None:
    curriculum = _curriculum()
    _play(curriculum, 0, solved=2)
    assert curriculum.num_pooled == 8
    _play(curriculum, 1, solved=4)
    assert curriculum.num_pooled == 4


def test_tasks_that_are_solved_half_of_the_time_are_drawn_most() -> None:
    drawn = {1: 0, 4: 0, 0: 0}
    for seed in range(200):
        curriculum = _curriculum(seed=seed)
        tasks = curriculum.batch(0, 12)
        solved = {task["task_id"]: (0, 1, 4)[place % 3] for place, task in enumerate(tasks)}
        curriculum.observe(
            0, [each for task in tasks for each in _episodes(task, solved[task["task_id"]], 8)]
        )
        for task in curriculum.batch(1, 4)[2:]:
            drawn[solved[task["task_id"]]] += 1
    assert drawn[4] > drawn[1] > drawn[0] > 0


def test_failures_of_the_infrastructure_make_no_task_look_hard() -> None:
    curriculum = _curriculum()
    tasks = curriculum.batch(0, 4)
    lost = [each for task in tasks for each in _episodes(task, 0, outcome=Outcome.INFRASTRUCTURE_FAILURE)]
    curriculum.observe(0, [*lost, *_episodes(tasks[0], 4)])
    assert curriculum.num_pooled == 0


@given(st.integers(0, 6), st.integers(0, 2**32), st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_a_run_that_was_stopped_plays_what_it_would_have_played(
    stopped_after: int, seed: int, solved: list[int]
) -> None:
    whole, broken = _curriculum(seed=seed), _curriculum(seed=seed)
    expected = [_play(whole, step, solved=solved[step]) for step in range(8)]
    found = [_play(broken, step, solved=solved[step]) for step in range(stopped_after)]
    again = _curriculum(seed=seed)
    again.restore(json.loads(json.dumps(broken.state())))
    found += [_play(again, step, solved=solved[step]) for step in range(stopped_after, 8)]
    assert found == expected
    assert again.state() == whole.state()


def test_the_pool_forgets_what_was_played_longest_ago() -> None:
    curriculum = _curriculum(replay_fraction=0.01, capacity=10)
    for step in range(4):
        _play(curriculum, step)
    assert curriculum.num_pooled == 10
    assert [position for position, _ in curriculum.state()["pool"]] == list(range(22, 32))


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_in_which_episodes_end_changes_nothing(order: int) -> None:
    curriculum = _curriculum()
    tasks = curriculum.batch(0, 8)
    curriculum.observe(0, [each for task in tasks for each in _episodes(task, 2)][::order])
    expected = _curriculum()
    _play(expected, 0)
    assert curriculum.state() == expected.state()


def test_a_step_that_asks_for_more_gets_other_tasks() -> None:
    curriculum = _curriculum()
    _play(curriculum, 0, count=12)
    rounds = [curriculum.batch(1, 6), curriculum.batch(1, 4)]
    names = [task["task_id"] for tasks in rounds for task in tasks]
    assert len(set(names)) == 10
    curriculum.observe(1, [each for tasks in rounds for task in tasks for each in _episodes(task, 4)])
    assert curriculum.num_pooled == 12 - 5, "three and two of them were played again, and solved"


def test_tasks_without_a_name_are_told_apart_by_their_place_in_the_step() -> None:
    sampler = TaskSampler([{"question": number} for number in range(20)], seed=0, purpose="tasks")
    curriculum = Curriculum(sampler, seed=0, replay_fraction=0.5)
    curriculum.batch(0, 4)
    named = [{"task_id": str(place)} for place in range(4)]  # as an engine names them
    solved = [0, 4, 2, 4]
    curriculum.observe(
        0, [each for task, n in zip(named, solved, strict=True) for each in _episodes(task, n)]
    )
    assert [share for _, share in curriculum.state()["pool"]] == [0.0, 0.5]


def test_tasks_of_a_step_that_needed_fewer_when_it_began_anew_are_played_by_a_later_one() -> None:
    """Two steps under way, the second of them in its third round, when the run is killed."""
    broken = _curriculum(0.0)
    planned = [*broken.batch(0, 4), *broken.batch(1, 4), *broken.batch(1, 3), *broken.batch(1, 2)]
    resumed = _curriculum(0.0)
    resumed.restore(json.loads(json.dumps(broken.state())))
    names = [*_play(resumed, 0, count=4), *_play(resumed, 1, count=4), *_play(resumed, 2, count=4)]
    again = _curriculum(0.0)
    again.restore(json.loads(json.dumps(resumed.state())))
    names += _play(again, 3, count=4)
    assert sorted(names) == sorted(
        task["task_id"] for task in TaskSampler(TASKS, seed=0, purpose="tasks").batch(0, 16)
    ), "each of the first sixteen, once"
    assert {task["task_id"] for task in planned} <= set(names)
