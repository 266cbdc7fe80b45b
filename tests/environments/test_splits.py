"""Of every world that makes its tasks: no instance is in two splits, and it is known how many there are.

The fast test looks at a few tasks of each split, the slow one at those that a report is of.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from rllm.environments.world import World, task_content
from rllm.environments.worlds import WORLDS, world_named
from rllm.eval.task_facts import MIN_DISTINCT, task_facts
from rllm.eval.words import instances_sentence

SPLITS = ("train", "validation", "test")
FROM_FILES = {"task-directory", "swe", "live-web"}
SMALL = {"2048", "small-programs", "tic-tac-toe", "wordle"}
"""Worlds whose default tasks are of fewer than 200 distinct instances: their reports say so."""
NAMES = sorted(set(WORLDS) - FROM_FILES)
EXTRAS = (
    "babyai/GoToLocalS6N2",
    "reasoning-gym/chain_sum",
    "reasoning-gym/aiw",
    "reasoning-gym/letter_counting",
    "reasoning-gym/rotate_matrix",
    "textarena/LightsOut",
)


def instances_of(world: World, split: str, count: int, **arguments: Any) -> list[str]:
    return [world.identity(task) for task in world.tasks(split, count, **arguments)]


def shared(world: World, count: int, **arguments: Any) -> Iterator[tuple[str, str, str]]:
    """(split, split, instance) of all that two splits have in common."""
    found = {split: set(instances_of(world, split, count, **arguments)) for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        yield from ((one, other, instance) for instance in found[one] & found[other])


def test_no_instance_is_in_two_splits(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            assert list(shared(world_named(name), 6)) == []


def test_a_world_knows_what_an_instance_is_and_what_simple_policies_come_to(
    subtests: pytest.Subtests,
) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            world = world_named(name)
            assert world.identity is not task_content, "a task's text is not what it asks"
            assert world.baselines is not None
            tasks = world.tasks("validation", 4)
            facts = task_facts(tasks, world)
            assert {"random", "optimum"} <= set(facts.baselines)
            assert all(set(returns) == set(facts.instances) for returns in facts.baselines.values())
            means = facts.means()
            assert max(means.values()) == pytest.approx(means["optimum"]), (
                "nothing is paid more than the optimum"
            )


def test_a_task_that_is_drawn_alone_is_the_one_among_others(subtests: pytest.Subtests) -> None:
    for name in [name for name in NAMES if world_named(name).draws]:
        with subtests.test(name=name):
            world = world_named(name)
            tasks = world.tasks("train", 12)
            assert [world.tasks("train", 1, start=number)[0] for number in (11, 0, 5)] == [
                tasks[number] for number in (11, 0, 5)
            ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_split_has_enough_instances_or_its_report_says_so(name: str) -> None:
    world = world_named(name)
    assert list(shared(world, 256)) == []
    facts = task_facts(world.tasks("test", 256), world, with_baselines=False)
    assert (facts.distinct < MIN_DISTINCT) == (name in SMALL), facts.distinct
    sentence = instances_sentence(facts.to_dict())
    assert str(facts.distinct) in sentence
    assert ("are few" in sentence) == (name in SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTRAS)
def test_so_it_is_in_worlds_of_other_packages(name: str) -> None:
    pytest.importorskip(
        {"babyai": "minigrid", "reasoning-gym": "reasoning_gym"}.get(name.partition("/")[0], "textarena")
    )
    assert list(shared(world_named(name), 32)) == []
