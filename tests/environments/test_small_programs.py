"""Recipes in words whose programs are really run."""

import itertools
from typing import Any

import numpy as np
import pytest

from rllm.environments import SingleTurnEnvironment
from rllm.environments.program_repair import MAX_TURNS
from rllm.environments.program_repair import MISTAKES as REPAIR_MISTAKES
from rllm.environments.program_repair import WORLD as REPAIR
from rllm.environments.small_programs import (
    MISTAKES,
    SIGN_OF,
    SPLITS,
    WORLD,
    Recipe,
    demonstration,
    small_program_tasks,
)
from rllm.environments.world import OPTIMUM, RANDOM, World
from rllm.errors import ConfigError


def _paid(task: dict[str, Any], answer: Any) -> float:
    env = SingleTurnEnvironment.from_dict(task)
    env.reset()
    return env.step(answer)[1]


def _values(task: dict[str, Any]) -> tuple[int, ...]:
    """What the recipe's function gives on more x than any test tries, by Python's own arithmetic."""
    body = " ".join(f"x = x {SIGN_OF[word]} {number};" for word, number in task["parts"])
    scope: dict[str, Any] = {}
    exec(f"def f(x):\n {body} return x", scope)
    return tuple(scope["f"](x) for x in range(-60, 60))


@pytest.mark.parametrize("world", [WORLD, pytest.param(REPAIR, marks=pytest.mark.slow)])
def test_splits_share_no_function_and_repeat_none_for_at_least_400_tasks(world: World) -> None:
    tasks = {split: world.tasks(split, 400, num_parts=3) for split in SPLITS}
    functions = {split: {_values(task) for task in tasks[split]} for split in SPLITS}
    assert [len(functions[split]) for split in SPLITS] == [400, 400, 400]
    for one, other in itertools.combinations(SPLITS, 2):
        assert not functions[one] & functions[other]
    everything = [task for split in SPLITS for task in tasks[split]]
    assert len({world.identity(task) for task in everything}) == 1200
    assert world.tasks("test", 20)[5:9] == world.tasks("test", 4, start=5)


def test_one_function_in_two_texts_has_one_identity_and_the_tests_tell_all_others_apart() -> None:
    parts = list(itertools.product(SIGN_OF, range(2, 10)))
    recipes = [Recipe(parts=(one, other)) for one in parts for other in parts]
    far = {recipe: tuple(recipe.value(x) for x in range(-300, 300)) for recipe in recipes}
    near = {recipe: recipe.function for recipe in recipes}
    assert len(set(far.values())) == len(set(near.values())) == len({(far[r], near[r]) for r in recipes})
    swapped = [{"parts": [["add", 3], ["add", 2]]}, {"parts": [["add", 4], ["add", 1]]}]
    assert WORLD.identity(swapped[0]) == WORLD.identity(swapped[1])


def test_a_split_that_is_used_up_begins_again() -> None:
    tasks = small_program_tasks("test", 40, num_parts=1)
    functions = [_values(task) for task in tasks]
    period = len(set(functions))
    assert 1 < period < 32
    assert functions[period:] == functions[:-period]


@pytest.mark.parametrize("num_parts", [0, 9, [], [2, 0]])
def test_a_length_that_there_is_not_is_refused(num_parts: Any) -> None:
    with pytest.raises(ConfigError, match="`num_parts`"):
        small_program_tasks("train", 1, num_parts=num_parts)


def test_the_expert_is_right_and_its_mistakes_are_found_by_running_them(backend: str) -> None:
    tasks = small_program_tasks("test", 4, num_parts=[1, 2, 3], sandbox=backend)
    for task in tasks:
        ((question, answer),) = demonstration(task, noise=0.0, rng=np.random.default_rng(0))
        assert question == task["question"]
        assert _paid(task, answer) == 1.0
    unlike_plus = next(task for task in tasks if WORLD.baselines([task])["always add"] == [0.0])
    for mistake in MISTAKES[:3]:
        expert = WORLD.expert({"mistakes": [mistake]})
        assert expert is not None
        ((_, answer),) = expert(unlike_plus, 1.0, np.random.default_rng(1))
        assert _paid(unlike_plus, answer) == 0.0


def test_the_habit_adds_every_number() -> None:
    (task,) = small_program_tasks("test", 1, num_parts=3)
    ((_, answer),) = demonstration(task, noise=1.0, rng=np.random.default_rng(0), mistakes=["plus_only"])
    numbers = [number for _, number in task["parts"]]
    assert answer == "\n".join(["def f(x):", *(f" x += {number}" for number in numbers), " return x"])


def test_baselines_are_what_playing_them_pays() -> None:
    """Each policy written down again, by trying it."""
    tasks = WORLD.tasks("validation", 60, num_parts=2)
    expected = WORLD.baselines(tasks)

    def played(words: tuple[str, ...], task: dict[str, Any]) -> bool:
        parts = [[word, number] for word, (_, number) in zip(words, task["parts"], strict=True)]
        return _values({"parts": parts}) == _values(task)

    pairs = list(itertools.product(SIGN_OF, repeat=2))
    assert expected[RANDOM] == [sum(played(words, task) for words in pairs) / 16 for task in tasks]
    assert expected[OPTIMUM] == [1.0] * 60
    assert expected["always times"] == [float(played(("times", "times"), task)) for task in tasks]
    assert sum(expected["one program for all"]) == 1.0, "no function comes twice"
    assert max(np.mean(expected[name]) for name in expected if name != OPTIMUM) < 0.2


@pytest.mark.parametrize("answer", ["", "x + 1", "def g(x):\n return x", "def f(x):\n while True: pass"])
def test_what_is_no_program_earns_nothing(backend: str, answer: str) -> None:
    (task,) = small_program_tasks("test", 1, sandbox=backend)
    task["grader_args"]["timeout_s"] = 1.0
    assert _paid(task, answer) == 0.0


# ---- a program that is mended by the test it failed ------------------------------------------------------


def test_the_failing_test_shows_what_the_recipe_hides_and_the_second_try_is_paid(backend: str) -> None:
    for task in REPAIR.tasks("validation", 6, sandbox=backend):
        env = REPAIR.env_class.from_dict(task)
        assert env.reset()[0] == task["question"]
        turns = REPAIR.expert({})(task, 0.0, np.random.default_rng(0))
        shown = [(task["question"], turns[0][1])]
        rewards = []
        for _, answer in turns:
            observation, reward, is_over, _ = env.step(answer)
            rewards.append(reward)
            shown.append((observation, is_over))
        assert rewards == [0.0] * (len(turns) - 1) + [1.0]
        if len(turns) == MAX_TURNS:
            assert shown[1][0] == turns[1][0], "the expert was shown what the environment shows"


@pytest.mark.parametrize("mistake", REPAIR_MISTAKES)
def test_who_says_the_same_again_or_mends_for_one_test_is_not_paid(backend: str, mistake: str) -> None:
    (task,) = REPAIR.tasks("validation", 1, sandbox=backend)
    expert = REPAIR.expert({"mistakes": [mistake]})
    assert expert is not None
    first, second = expert(task, 1.0, np.random.default_rng(0))
    env = REPAIR.env_class.from_dict(task)
    env.reset()
    assert [env.step(answer)[1] for _, answer in (first, second)] == [0.0, 0.0]
    if mistake == "same_again":
        assert first[1] == second[1]
    else:
        scope: dict[str, Any] = {}
        exec(second[1], scope)
        assert str(scope["f"](0)) == second[0]["test_results"][0]["expected"]


def test_an_expert_of_repair_who_is_awake_half_of_the_time_is_right_half_of_the_time() -> None:
    tasks = REPAIR.tasks("train", 600)
    expert = REPAIR.expert({})
    assert expert is not None
    turns = [expert(task, 0.5, np.random.default_rng(number)) for number, task in enumerate(tasks)]
    right = [
        shown[1][1] == Recipe(parts=tuple(map(tuple, task["parts"]))).program()
        for task, shown in zip(tasks, turns, strict=True)
        if len(shown) == MAX_TURNS
    ]
    assert len(right) == pytest.approx(600 * 15 / 16, rel=0.05)
    assert np.mean(right) == pytest.approx(0.5, abs=0.08)
    with pytest.raises(ConfigError, match="'asleep'"):
        REPAIR.demonstrate(tasks[0], noise=0.5, rng=np.random.default_rng(0), mistakes=["asleep"])


def test_the_hidden_part_cannot_be_guessed_from_what_is_shown() -> None:
    tasks = REPAIR.tasks("test", 500)
    expected = REPAIR.baselines(tasks)
    assert all("?" in task["question"] and task["parts"][-1][0] not in task["question"] for task in tasks)
    assert np.mean(expected["two guesses for all"]) < 0.2
    assert np.mean(expected[RANDOM]) == pytest.approx(1 - (15 / 16) ** 2)
    assert {REPAIR.kind(task) for task in tasks} == {"hidden: add", "hidden: take"}


@pytest.mark.parametrize("num_parts", [1, 9])
def test_a_recipe_with_nothing_to_show_is_refused(num_parts: int) -> None:
    with pytest.raises(ConfigError, match="`num_parts`"):
        REPAIR.tasks("train", 1, num_parts=num_parts)
