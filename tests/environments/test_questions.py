"""The generators of plain questions: sums and word problems."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.environments.sums import SPLITS, Sum, arithmetic_sum, arithmetic_tasks
from rllm.environments.word_problems import STORIES, word_problem, word_problem_tasks
from rllm.environments.worlds import world_named
from rllm.environments.wrong_answers import stray
from rllm.errors import ConfigError


@given(st.lists(st.integers(0, 999), min_size=2, max_size=8), st.data())
def test_a_sum_comes_to_what_python_says(numbers: list[int], data: st.DataObject) -> None:
    signs = "".join(data.draw(st.sampled_from("+-*")) for _ in numbers[1:])
    asked = Sum(numbers=tuple(numbers), signs=signs)
    assert asked.value == eval(asked.text)


def sum_content(question: str) -> object:
    """The numbers that are added and those that are taken away: their order changes nothing."""
    terms = re.findall(r"([+-] |^)(\d+)", question)
    return sorted((sign == "- ", int(number)) for sign, number in terms)


def story_content(question: str) -> object:
    """The words without names and things, and the numbers."""
    names_and_things = r"[A-Z][a-z]+|apples|pencils|stickers|marbles|books|shells|stamps|buttons"
    return re.sub(names_and_things, "_", question)


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [("arithmetic", {"max_number": 99}, sum_content), ("word-problems", {}, story_content)],
)
def test_splits_share_no_question_however_it_is_written(
    name: str, arguments: dict[str, Any], content: Callable[[str], object]
) -> None:
    world = world_named(name)
    contents: dict[str, set[str]] = {}
    for split in SPLITS:
        tasks = world.tasks(split, 256, **arguments)
        contents[split] = {str(content(task["question"])) for task in tasks}
        assert len(contents[split]) == len(set(map(world.identity, tasks))) >= 240
    assert not contents["train"] & contents["test"]
    assert not contents["train"] & contents["validation"]
    assert not contents["test"] & contents["validation"]


def test_tasks_follow_from_their_number_alone() -> None:
    assert arithmetic_tasks("train", 5, start=3)[0] == arithmetic_tasks("train", 4)[3]
    assert word_problem_tasks("test", 5, start=3)[0] == word_problem_tasks("test", 4)[3]


@pytest.mark.parametrize("max_number", [4, 50, 10**6])
def test_every_story_has_a_whole_answer_from_its_own_steps(max_number: int) -> None:
    kinds = Counter()
    for index in range(300):
        story, kind = word_problem("train", index, max_number=max_number)
        kinds[kind] += 1
        assert story.answer >= 0
        for step in story.steps:
            left, _, right = step.partition(" = ")
            assert eval(left) == int(right)
        assert story.steps[-1].endswith(f" = {story.answer}")
        told = set(re.findall(r"\d+", story.text))
        found = {part for step in story.steps for part in re.findall(r"\d+", step.partition(" = ")[0])}
        computed = {step.rpartition(" = ")[2] for step in story.steps}
        assert found <= told | computed, (story, found - told)
    assert len(kinds) == len(STORIES)


def test_fewer_steps_can_be_asked_for() -> None:
    assert all(len(word_problem("test", index, max_steps=1)[0].steps) == 1 for index in range(50))


@given(st.integers(0, 2**32))
def test_who_strays_keeps_the_form(seed: int) -> None:
    answer = "12 + 3 = 15\n<answer>15</answer>"
    said = stray(answer, 1.0, np.random.default_rng(seed))
    assert re.sub(r"\d", "0", said) == re.sub(r"\d", "0", answer)
    assert stray(answer, 0.0, np.random.default_rng(seed)) == answer


@pytest.mark.parametrize("operators", ["+-", "+-*"])
def test_who_reads_the_wrong_sign_is_paid_only_by_accident(operators: str) -> None:
    world = world_named("arithmetic")
    assert world.demonstrate is not None
    rng = np.random.default_rng(0)
    for task in world.tasks("validation", 40, operators=operators, min_number=10):
        env = world.env_class.from_dict(task)
        question = task["question"].removesuffix(" =")
        assert min(map(int, re.findall(r"\d+", question))) >= 10
        misread = str(eval(question.translate(str.maketrans("+-*", "-++"))))
        for noise, expected in ((0.0, str(eval(question))), (1.0, misread)):
            ((_, answer),) = world.demonstrate(task, noise=noise, rng=rng, habit="wrong_sign")
            assert answer == expected
            env.reset()
            assert env.step(answer)[1] == float(answer == str(eval(question)))


def test_who_reads_every_sign_as_plus_is_right_where_it_is() -> None:
    world = world_named("arithmetic")
    tasks = world.tasks("validation", 64, max_number=99)
    assert world.baselines is not None
    for task, value in zip(tasks, world.baselines(tasks)["always plus"], strict=True):
        assert value == float("-" not in task["question"] or "- 0 " in task["question"])
    with pytest.raises(ConfigError, match="choose wrong_sign"):
        world.demonstrate(tasks[0], noise=0.5, rng=np.random.default_rng(0), habit="wrong")  # pyright: ignore


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_terms": 1}, r"`num_terms`.*1.*2.*8"),
        ({"max_number": 0}, "`max_number` is 0"),
        ({"min_number": 20, "max_number": 20}, "`min_number` is 20"),
        ({"operators": "/"}, "`operators` is '/'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arithmetic_sum("train", 0, **arguments)  # pyright: ignore
    with pytest.raises(ConfigError, match="`split` is 'dev'"):
        arithmetic_sum("dev", 0)
