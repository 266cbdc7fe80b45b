"""Problems can be solved, are drawn by number alone, and no two splits share one."""

import json
from collections import Counter
from itertools import permutations, product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.environments.checks import check_env
from rllm.environments.countdown import WORLD, CountdownEnv, baselines, demonstration
from rllm.environments.countdown_problems import (
    CountdownProblem,
    identity,
    kind,
    problem_of,
    random_answer,
    solutions,
    split_of,
)
from rllm.environments.countdown_tasks import SPLITS, countdown_tasks
from rllm.errors import AgentError, ConfigError
from rllm.rewards.countdown import CountdownReason, grade_countdown
from rllm.types.episode import Action

SUMS_AND_DIFFERENCES: dict[str, Any] = {"num_numbers": 2, "max_number": 99, "operators": "+-"}
"""Those of the catalogue."""


@pytest.mark.parametrize("arguments", [{}, SUMS_AND_DIFFERENCES])
def test_no_problem_is_in_two_splits_over_hundreds_of_draws(arguments: dict[str, Any]) -> None:
    drawn = {split: {identity(task) for task in countdown_tasks(split, 300, **arguments)} for split in SPLITS}
    assert all(len(each) > 100 for each in drawn.values())
    for split, problems in drawn.items():
        assert not problems & set().union(*(drawn[other] for other in SPLITS if other != split))


def test_the_first_256_tasks_of_a_split_are_as_many_problems(subtests: pytest.Subtests) -> None:
    for split in SPLITS:
        for start in (0, 1_000_192):
            with subtests.test(split=split, start=start):
                tasks = countdown_tasks(split, 256, start=start, **SUMS_AND_DIFFERENCES)
                assert len({(tuple(sorted(task["numbers"])), task["target"]) for task in tasks}) == 256


@pytest.mark.parametrize("split", SPLITS)
def test_no_answer_that_is_always_the_same_is_right_more_than_half_of_the_time(split: str) -> None:
    tasks = countdown_tasks(split, 256, **SUMS_AND_DIFFERENCES)
    right = Counter[str]()
    for task in tasks:
        first, second = task["numbers"]
        values = {
            "first + second": first + second,
            "first - second": first - second,
            "second - first": second - first,
            "larger - smaller": abs(first - second),
        }
        right.update(name for name, value in values.items() if value == task["target"])
    assert right["first + second"] == right["larger - smaller"] == 128
    assert 56 <= right["first - second"] <= 72  # equal numbers are both
    assert 56 <= right["second - first"] <= 72
    assert Counter(map(kind, tasks)) == {"sums": 128, "differences": 128}


def test_kinds_of_four_signs_are_as_many_each_and_no_problem_is_of_two() -> None:
    tasks = countdown_tasks("train", 200, num_numbers=2, max_number=20)
    assert Counter(map(kind, tasks)) == dict.fromkeys(("sums", "differences", "products", "quotients"), 50)
    assert kind({"numbers": [2, 2], "target": 4}) == "sums"
    assert kind({"numbers": [3, 1, 2], "target": 6}) == "3 numbers"


def test_baselines_are_what_chance_and_constants_really_come_to() -> None:
    tasks = countdown_tasks("validation", 60, **SUMS_AND_DIFFERENCES)
    known = WORLD.baselines
    assert known is not None
    returns = known(tasks)
    assert list(returns) == ["random", "always +", "optimum"]
    rng = Random(0)
    for task, luck, adds in zip(tasks, returns["random"], returns["always +"], strict=True):
        problem = problem_of(task)
        answers = [random_answer(problem, rng, "+-") for _ in range(200)]
        right = sum(grade_countdown(each, problem.numbers, problem.target).is_correct for each in answers)
        assert abs(right / 200 - luck) < 0.17
        assert adds == (sum(problem.numbers) == problem.target)
    assert set(returns["optimum"]) == {1.0}
    assert known([{"numbers": [3, 3], "target": 0, "operators": "+-"}])["random"] == [0.5]


def test_chance_of_three_numbers_is_counted_over_all_ways_to_join_them() -> None:
    tasks = countdown_tasks("validation", 4, operators="+-*/")
    for task, luck in zip(tasks, baselines(tasks)["random"], strict=True):
        problem, rng = problem_of(task), Random(1)
        answers = [random_answer(problem, rng) for _ in range(1_000)]
        right = sum(grade_countdown(each, problem.numbers, problem.target).is_correct for each in answers)
        assert abs(right / 1_000 - luck) < 0.04
    assert baselines([{"numbers": [1, 1], "target": 5}])["optimum"] == [0.0]


@given(numbers=st.lists(st.integers(0, 99), min_size=2, max_size=4), target=st.integers(0, 999))
def test_the_split_does_not_depend_on_the_order_of_the_numbers(numbers: list[int], target: int) -> None:
    splits = {split_of(CountdownProblem(numbers=order, target=target)) for order in permutations(numbers)}
    assert len(splits) == 1
    assert splits <= set(SPLITS)


def test_half_of_all_problems_train_and_a_quarter_each_validates_and_tests() -> None:
    counts = Counter(
        split_of(CountdownProblem(numbers=(first, second, third), target=target))
        for first, second, third in product(range(1, 10), repeat=3)
        if first <= second <= third
        for target in range(25)
    )
    total = counts.total()
    assert 0.47 < counts["train"] / total < 0.53
    assert 0.22 < counts["validation"] / total < 0.28
    assert 0.22 < counts["test"] / total < 0.28


@settings(deadline=None, max_examples=25)
@given(
    split=st.sampled_from(SPLITS),
    start=st.integers(0, 2**40).map(lambda number: number * 512),
    num_numbers=st.integers(2, 4),
    max_number=st.integers(9, 30),
    max_target=st.integers(30, 200),
    operators=st.sampled_from(["+-", "+-*", "+-*/", "*+"]),
)
def test_every_drawn_problem_has_an_answer_and_the_grader_agrees(
    split: str, start: int, num_numbers: int, max_number: int, max_target: int, operators: str
) -> None:
    tasks = countdown_tasks(
        split,
        4,
        start=start,
        num_numbers=num_numbers,
        max_number=max_number,
        max_target=max_target,
        operators=operators,
    )
    for problem in map(problem_of, tasks):
        assert len(problem.numbers) == num_numbers
        assert all(1 <= each <= max_number for each in problem.numbers)
        assert 0 <= problem.target <= max_target
        assert split_of(problem) == split
        answer = solutions(problem, operators)[0]
        assert grade_countdown(answer, problem.numbers, problem.target).is_correct
        assert set(answer) <= set(f"{operators}()0123456789")


def test_a_task_is_a_function_of_its_number_however_many_are_drawn() -> None:
    whole = countdown_tasks("test", 1030, **SUMS_AND_DIFFERENCES)
    for start, count in ((0, 1), (40, 3), (510, 5), (1024, 6), (7, 0)):
        assert (
            countdown_tasks("test", count, start=start, **SUMS_AND_DIFFERENCES)
            == whole[start : start + count]
        )


def test_tasks_go_through_json_into_environments() -> None:
    tasks = countdown_tasks("train", 5, start=7)
    assert [task["task_id"] for task in tasks] == [f"countdown-train-{index}" for index in range(7, 12)]
    for task in json.loads(json.dumps(tasks)):
        env = CountdownEnv.from_dict(task)
        observation, info = env.reset(seed=3)
        numbers = " ".join(map(str, task["numbers"]))
        assert (observation, info) == (f"{numbers} target {task['target']}", {})
        assert env.step(demonstration(task, noise=0.0, rng=np.random.default_rng(0)))[1] == 1.0


def test_all_ways_to_write_an_answer_are_found(subtests: pytest.Subtests) -> None:
    for problem, operators, wanted in [
        (CountdownProblem(numbers=(3, 7), target=10), "+-*/", {"7+3"}),
        (CountdownProblem(numbers=(3, 7), target=4), "+-*/", {"7-3"}),
        (CountdownProblem(numbers=(2, 2), target=4), "+-*/", {"2+2", "2*2"}),
        (CountdownProblem(numbers=(8, 4, 2), target=4), "/", {"8/(4/2)", "2/(4/8)"}),
        (CountdownProblem(numbers=(7, 3, 2), target=2), "+-", {"7-3-2", "7-2-3", "7-(3+2)"}),
        (CountdownProblem(numbers=(1, 1), target=5), "+-*/", set[str]()),
    ]:
        with subtests.test(problem=problem, operators=operators, wanted=wanted):
            assert set(solutions(problem, operators)) == wanted


def test_the_plainest_answer_comes_first() -> None:
    assert solutions(CountdownProblem(numbers=(3, 7, 2), target=12))[0] == "7+3+2"
    assert solutions(CountdownProblem(numbers=(3, 7, 2), target=2), "+-")[0] == "7-3-2"


@given(numbers=st.lists(st.integers(0, 6), min_size=3, max_size=3), target=st.integers(0, 40))
def test_the_search_finds_an_answer_exactly_where_there_is_one(numbers: list[int], target: int) -> None:
    tried = (
        grade_countdown(form.format(*order, *signs), numbers, target).is_correct
        for order in permutations(numbers)
        for signs in product("+-*/", repeat=2)
        for form in ("({0}{3}{1}){4}{2}", "{0}{3}({1}{4}{2})")
    )
    found = solutions(CountdownProblem(numbers=tuple(numbers), target=target))
    assert bool(found) == any(tried)
    assert all(grade_countdown(each, numbers, target).is_correct for each in found)
    assert len(set(found)) == len(found)


@given(seed=st.integers(0, 2**32), num_numbers=st.integers(2, 4))
def test_a_mistake_on_purpose_is_a_proper_expression_of_the_numbers(seed: int, num_numbers: int) -> None:
    problem = problem_of(countdown_tasks("train", 1, start=seed * 512, num_numbers=num_numbers)[0])
    answer = random_answer(problem, Random(seed))
    reason = grade_countdown(answer, problem.numbers, problem.target).reason
    assert reason in (CountdownReason.RIGHT, CountdownReason.WRONG_VALUE)


def test_noise_is_the_share_of_answers_that_are_drawn() -> None:
    tasks = countdown_tasks("train", 400)

    def right(noise: float) -> float:
        rng = np.random.default_rng(0)
        answers = [demonstration(task, noise=noise, rng=rng) for task in tasks]
        graded = [
            grade_countdown(each, task["numbers"], task["target"])
            for each, task in zip(answers, tasks, strict=True)
        ]
        return sum(grade.is_correct for grade in graded) / len(tasks)

    assert right(0.0) == 1.0
    assert right(1.0) < 0.2
    assert 0.4 < right(0.5) < 0.65


@pytest.mark.parametrize(("operators", "foreign"), [("+-", "*"), ("*-", "/"), ("+", "*")])
def test_the_habit_of_an_expert_is_wrong_and_says_nothing_of_the_right_sign(
    operators: str, foreign: str
) -> None:
    rng = np.random.default_rng(0)
    tasks = countdown_tasks("train", 200, num_numbers=2, max_number=99, max_target=9801, operators=operators)
    num_right = 0
    for task in tasks:
        small, large = sorted(task["numbers"])
        answer = demonstration(task, noise=1.0, rng=rng, habit="foreign_sign")
        assert answer == f"{large}{foreign}{small}"
        num_right += grade_countdown(answer, task["numbers"], task["target"]).is_correct
        right = demonstration(task, noise=0.0, rng=rng, habit="foreign_sign")
        assert right in solutions(problem_of(task), operators)
    assert num_right <= 2  # 1 less than n is seldom n divided by something
    with pytest.raises(ConfigError, match="`habit` is 'wrong'"):
        demonstration(tasks[0], noise=0.5, rng=rng, habit="wrong")
    with pytest.raises(ConfigError, match="sign out"):
        demonstration({**tasks[0], "operators": "+-*/"}, noise=0.5, rng=rng, habit="foreign_sign")


def test_the_environment_pays_one_for_a_right_answer_and_says_why_another_is_wrong() -> None:
    env = CountdownEnv([3, 7, 2], 12)
    check_env(env, "3+7+2")
    for answer, paid, reason in (
        ("3+7+2", 1.0, "right"),
        (Action(action="(3+7)+2"), 1.0, "right"),
        ("3*7-2", 0.0, "wrong_value"),
        ("12", 0.0, "wrong_numbers"),
        ("I think that 3+7+2", 0.0, "malformed"),
        ("", 0.0, "empty"),
    ):
        env.reset()
        _, reward, done, info = env.step(answer)
        assert (reward, done, info) == (paid, True, {"reason": reason})
    with pytest.raises(AgentError, match="reset"):
        env.step("3+7+2")


def test_what_is_no_problem_is_refused(subtests: pytest.Subtests) -> None:
    for task, named in [
        ({"numbers": [3, 7], "goal": 10}, "goal"),
        ({"numbers": [3, 7], "targets": 10}, "did you mean `target`"),
        ({"numbers": [3], "target": 3}, "numbers"),
        ({"numbers": [1, 2, 3, 4, 5], "target": 3}, "numbers"),
        ({"numbers": "37", "target": 10}, "numbers"),
        ({"numbers": [3, -7], "target": 10}, "numbers"),
        ({"numbers": [3, 7.5], "target": 10}, "numbers"),
        ({"numbers": [3, True], "target": 4}, "numbers"),
        ({"numbers": [3, 7], "target": -4}, "target"),
        ({"numbers": [3, 7], "target": "10"}, "target"),
    ]:
        with subtests.test(task=task, named=named), pytest.raises(ConfigError, match=named):
            CountdownEnv.from_dict(task)


def test_arguments_that_no_problem_can_be_drawn_with_are_refused(subtests: pytest.Subtests) -> None:
    for arguments, named in [
        ({"split": "dev"}, "split"),
        ({"start": -1}, "start"),
        ({"num_numbers": 1}, "num_numbers"),
        ({"num_numbers": 5}, "num_numbers"),
        ({"max_number": 1}, "max_number"),
        ({"max_target": -1}, "max_target"),
        ({"operators": ""}, "operators"),
        ({"operators": "+^"}, "operators"),
        ({"operators": "++"}, "operators"),
        ({"max_number": 2, "max_target": 0, "operators": "*"}, "gave no problem"),
    ]:
        with subtests.test(arguments=arguments, named=named), pytest.raises(ConfigError, match=named):
            countdown_tasks(**{"split": "train", "count": 1, **arguments})  # pyright: ignore[reportArgumentType]


def test_a_problem_that_nobody_can_solve_is_not_demonstrated() -> None:
    with pytest.raises(ConfigError, match="1 1 target 5"):
        demonstration({"numbers": [1, 1], "target": 5}, noise=0.0, rng=np.random.default_rng(0))
    with pytest.raises(ConfigError, match="noise"):
        demonstration({"numbers": [1, 1], "target": 2}, noise=1.5, rng=np.random.default_rng(0))
    with pytest.raises(ConfigError, match="target"):
        demonstration({"numbers": [1, 1]}, noise=0.0, rng=np.random.default_rng(0))
