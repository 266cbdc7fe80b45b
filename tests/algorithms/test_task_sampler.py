from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.task_sampler import TaskSampler
from rllm.errors import ConfigError


def _tasks(count: int) -> list[dict[str, Any]]:
    return [{"task_id": f"task-{index}", "size": index} for index in range(count)]


def _sampler(count: int, seed: int = 0, purpose: str = "tasks") -> TaskSampler:
    return TaskSampler(_tasks(count), seed=seed, purpose=purpose)


@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 2**62),
    cuts=st.lists(st.integers(0, 17), min_size=1, max_size=12),
)
def test_the_order_does_not_depend_on_where_a_run_was_stopped_and_resumed(
    count: int, seed: int, cuts: list[int]
) -> None:
    in_pieces: list[dict[str, Any]] = []
    for piece in cuts:
        in_pieces += _sampler(count, seed).batch(len(in_pieces), piece)
    assert in_pieces == _sampler(count, seed).batch(0, sum(cuts))


@given(count=st.integers(1, 40), seed=st.integers(0, 2**62), epoch=st.integers(0, 4))
def test_every_epoch_visits_every_task_once(count: int, seed: int, epoch: int) -> None:
    visited = _sampler(count, seed).batch(epoch * count, count)
    assert sorted(task["size"] for task in visited) == list(range(count))


@given(count=st.integers(1, 10), start=st.integers(0, 40), length=st.integers(0, 40))
def test_no_two_tasks_of_a_batch_share_an_identity_even_across_epochs(
    count: int, start: int, length: int
) -> None:
    ids = [task["task_id"] for task in _sampler(count).batch(start, length)]
    assert len(set(ids)) == length


def test_epochs_seeds_and_purposes_have_orders_of_their_own() -> None:
    def order(epoch: int, **named: Any) -> list[int]:
        return [task["size"] for task in _sampler(50, **named).batch(epoch * 50, 50)]

    orders = [order(0), order(1), order(0, seed=1), order(0, purpose="demonstrations")]
    assert len({tuple(each) for each in orders}) == 4
    assert order(0) != sorted(order(0))


def test_a_later_visit_is_named_after_the_task_and_the_epoch_and_leaves_the_task_alone() -> None:
    tasks = _tasks(3)
    later = TaskSampler(tasks, seed=0, purpose="tasks").batch(3, 3)
    assert sorted(task["task_id"] for task in later) == ["task-0@1", "task-1@1", "task-2@1"]
    assert tasks == _tasks(3)


def test_a_task_without_a_name_is_named_after_its_place_in_the_data_set() -> None:
    nameless = [{"size": index} for index in range(5)]
    for task in TaskSampler(nameless, seed=4, purpose="tasks").batch(5, 10):
        assert task["task_id"].split("@")[0] == str(task["size"])


def test_no_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="no training tasks"):
        TaskSampler([], seed=0, purpose="tasks")
