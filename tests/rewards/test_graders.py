"""Graders by name, texts against their formulas, parts with weights, and graders as judges of episodes."""

import importlib
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rllm.rewards
from rllm.errors import ConfigError, MissingExtraError, RewardError
from rllm.rewards import (
    RewardInput,
    RewardMathFn,
    RewardOutput,
    f1_reward_fn,
    math_reward_fn,
    search_reward_fn,
    zero_reward,
)
from rllm.rewards.evaluator import as_evaluator, load_evaluator
from rllm.rewards.evaluators import GraderEvaluator
from rllm.rewards.extraction import Mark
from rllm.rewards.grade import Grade, Grader, wrong
from rllm.rewards.graders import GRADERS, grader_named
from rllm.rewards.readings import RULES
from rllm.rewards.text import exact_match, rouge, rouge_tokens, squad_normalised, token_f1
from rllm.types import Action, Episode, EvalOutput, Step, Trajectory

BOTH = {"strict": True, "lenient": True}
HALF_IN_A_BOX = {
    "rule": RULES[Mark.BOXED],
    "part": "0.5",
    "read_as": "the number 1/2",
    "readings": BOTH,
}
"""What an answer has that is right however it is read."""
OURS = ("math", "choice", "exact", "f1", "rouge", "bleu", "translation", "search", "countdown")
WORDS = st.lists(st.sampled_from(["cat", "dog", "sat", "the", "a", "on", "mat"]), max_size=12).map(" ".join)


def an_episode(answer: str) -> Episode:
    return Episode(task_id="t", trajectories=[Trajectory(steps=[Step(model_response=answer)])])


@pytest.mark.parametrize("name", OURS)
def test_a_grader_has_its_name_its_fields_and_a_close_that_may_come_twice(name: str) -> None:
    grader = grader_named(name)
    assert isinstance(grader, Grader)
    assert grader.name == name
    assert grader.task_fields
    grader.close()
    grader.close()


def test_a_name_or_an_option_that_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"`maths`.*`math`"):
        grader_named("maths")
    with pytest.raises(ConfigError, match=r"`kinds`.*`kind`"):
        grader_named("rouge", kinds="rouge1")
    with pytest.raises(ConfigError, match="cannot be made"):
        grader_named("f1", correct_from="high")


def test_asking_for_one_grader_imports_no_other_and_nothing_heavy() -> None:
    program = (
        "import sys\nfrom rllm.rewards.graders import grader_named\n"
        "assert grader_named('exact').grade('5', {'answer': '5'}).is_correct\n"
        "grader_named('math').grade('5', {'answer': '5'})\n"
        "heavy = {'sympy', 'math_verify', 'latex2sympy2_extended', 'sacrebleu', 'torch', 'jsonschema'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_sacrebleu_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    for name in ("translation", "bleu"):
        with pytest.raises(MissingExtraError, match=r"pip install 'rllm\[grading\]'"):
            grader_named(name)


# --- texts, beside slow and plain versions of the formulas


@cache
def longest_common(ours: tuple[str, ...], theirs: tuple[str, ...]) -> int:
    """By the definition."""
    if not ours or not theirs:
        return 0
    if ours[0] == theirs[0]:
        return 1 + longest_common(ours[1:], theirs[1:])
    return max(longest_common(ours[1:], theirs), longest_common(ours, theirs[1:]))


@given(WORDS, WORDS)
def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence(ours: str, theirs: str) -> None:
    one, other = tuple(ours.split()), tuple(theirs.split())
    length = longest_common(one, other)
    expected = 2 * length / (len(one) + len(other)) if length else 0.0
    assert rouge(ours, theirs) == pytest.approx(expected)


@given(WORDS, WORDS, st.sampled_from([1, 2]))
def test_rouge_n_counts_each_shared_gram_once(ours: str, theirs: str, size: int) -> None:
    def grams(text: str) -> list[tuple[str, ...]]:
        words = text.split()
        return [tuple(words[place : place + size]) for place in range(len(words) - size + 1)]

    left = grams(theirs)
    shared = 0
    for gram in grams(ours):
        if gram in left:
            left.remove(gram)
            shared += 1
    total = len(grams(ours)) + len(grams(theirs))
    assert rouge(ours, theirs, f"rouge{size}") == pytest.approx(2 * shared / total if shared else 0.0)


def test_rouge_reads_words_as_the_rouge_score_package_does() -> None:
    assert rouge_tokens("Don't re-run x_1 in 3.5s, naïve é!") == [
        *("don", "t", "re", "run", "x", "1", "in", "3", "5s", "na", "ve")
    ]


@given(WORDS, WORDS)
def test_scores_of_texts_are_shares_and_do_not_depend_on_the_side(ours: str, theirs: str) -> None:
    for score in (token_f1, exact_match, rouge):
        assert 0.0 <= score(ours, theirs) <= 1.0
        assert score(ours, theirs) == pytest.approx(score(theirs, ours))
    if rouge_tokens(ours):
        assert rouge(ours, ours) == 1.0
    assert token_f1(ours, ours) == exact_match(ours, ours) == 1.0


def test_texts_are_normalised_as_squad_does() -> None:
    assert squad_normalised("The  Cat, (a dog) & an 'owl'!") == "cat dog owl"
    assert token_f1("The cat sat", "a cat sat down") == pytest.approx(0.8)


@given(st.text(max_size=80))
def test_no_noise_is_paid_by_the_graders_of_texts(text: str) -> None:
    task = {"answer": "zxqj", "target": 977, "numbers": [811, 83, 83]}
    for name in ("exact", "f1", "search", "rouge", "countdown"):
        assert "zxqj" in text.lower() or grader_named(name).grade(text, task).score == 0.0
    assert (
        grader_named("choice").grade(f"I think {text}", {"answer": "B"}).score == 0.0
        or "answer" in text.lower()
    )


def test_long_texts_are_compared_in_time() -> None:
    long = "word " * 9_000
    assert grader_named("rouge").grade(long, {"answer": long}).is_correct
    assert grader_named("rouge").grade("x" * 60_000, {"answer": long}).score == 0.0
    assert 0.0 < grader_named("translation").grade(long, {"answer": long}).score <= 1.0


# --- parts with weights


def test_a_composite_adds_up_its_parts_and_shows_each() -> None:
    grader = grader_named(
        "composite", parts={"math": 0.75, "exact": {"weight": 0.25, "args": {"normalised": False}}}
    )
    grade = grader.grade(r"\boxed{0.5}", {"answer": "1/2"})
    assert (grade.score, grade.is_correct) == (0.75, False)
    assert grade.metadata["signals"] == {"math": 1.0, "exact": 0.0}
    assert grade.metadata["parts"]["exact"] == {
        "score": 0.0,
        "weight": 0.25,
        "is_correct": False,
        "extracted": "0.5",
        "reason": "different",
    }
    output = as_evaluator(grader).evaluate({"answer": "1/2"}, an_episode(r"\boxed{0.5}"))
    assert isinstance(output, EvalOutput)
    assert {signal.name: signal.value for signal in output.signals} == {"math": 1.0, "exact": 0.0}
    grader.close()


def test_one_part_may_decide_what_is_correct() -> None:
    parts = {
        "value": {"grader": "math", "weight": 0.9},
        "words": {"grader": grader_named("exact"), "weight": 0.1},
    }
    grader = grader_named("composite", parts=parts, correct_by="value")
    assert grader.grade(r"\boxed{0.5}", {"answer": "1/2"}).is_correct
    assert grader.task_fields == ("answer|answers",)


def test_weights_and_parts_that_make_no_sense_are_refused(subtests: pytest.Subtests) -> None:
    for options in [
        {"parts": {}},
        {"parts": []},
        {"parts": {"math": 0.5}},
        {"parts": {"math": 0.5, "exact": 0.6}},
        {"parts": {"math": 1.5, "exact": -0.5}},
        {"parts": {"math": 1.0, "exact": 0.0}},
        {"parts": {"math": True}},
        {"parts": {"math": float("nan")}},
        {"parts": {"math": "1"}},
        {"parts": {"math": {"weight": 1.0, "wieght": 1.0}}},
        {"parts": {"math": {}}},
        {"parts": {"maths": 1.0}},
        {"parts": {"math": 1.0}, "correct_by": "exact"},
        {"parts": {"math": {"weight": 1.0, "grader": 5}}},
    ]:
        with subtests.test(options=options), pytest.raises(ConfigError):
            grader_named("composite", **options)


def test_a_part_that_fails_fails_the_whole_by_its_name() -> None:
    grader = grader_named("composite", parts={"math": 0.5, "countdown": 0.5})
    with pytest.raises(RewardError, match=r"Part `countdown` .* `numbers`"):
        grader.grade("5", {"answer": "5"})


# --- graders as judges of episodes


def test_the_name_of_a_grader_is_an_evaluator() -> None:
    judge = as_evaluator("math")
    assert judge.name == "math"
    output = judge.evaluate({"answer": "1/2"}, an_episode(r"\boxed{0.5}"))
    assert output == EvalOutput(
        reward=1.0,
        is_correct=True,
        metadata={"grader": "math", "extracted": "0.5", "reason": "equal"} | HALF_IN_A_BOX,
    )


def test_fields_under_grading_come_before_those_of_the_row() -> None:
    row = {"question": "2+3?", "answer": "shown", "grading": {"answer": "5"}}
    assert as_evaluator("exact").evaluate(row, an_episode("5")) == EvalOutput(
        reward=1.0,
        is_correct=True,
        metadata={"grader": "exact", "extracted": "5", "reason": "equal", "gold": "5"}
        | {"rule": RULES[Mark.WHOLE], "part": "5", "readings": BOTH},
    )


def test_a_grader_of_ones_own_is_an_evaluator_too() -> None:
    class Never:
        name = "never"
        task_fields: tuple[str, ...] = ()

        def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
            return wrong("never", answer)

        def close(self) -> None: ...

    for judge in (Never(), Never, GraderEvaluator(Never())):
        output = as_evaluator(judge).evaluate({}, an_episode("x"))
        assert isinstance(output, EvalOutput)
        assert (output.reward, output.metadata["extracted"]) == (0.0, "x")


def test_a_misspelt_grader_is_told_apart_from_an_entry_point() -> None:
    with pytest.raises(ConfigError, match=r"`mth`.*`math`"):
        load_evaluator("mth")
    with pytest.raises(ConfigError, match="write package"):
        load_evaluator("something-else")


def test_a_row_without_its_field_ends_in_an_error_and_not_in_a_zero() -> None:
    with pytest.raises(RewardError, match=r"`answer`, .*`anser`"):
        as_evaluator("math").evaluate({"anser": "5"}, an_episode("5"))


# --- the names of published programs


@pytest.mark.parametrize("name", ["math", "exact", "f1", "rouge"])
def test_an_integer_that_python_does_not_write_out_is_a_mistake_in_the_data(name: str) -> None:
    with pytest.raises(RewardError, match="`answer`"):
        grader_named(name).grade("\\boxed{4}", {"answer": 10**5000})


def test_published_names_are_the_same_graders() -> None:
    assert math_reward_fn({"ground_truth": "1/2"}, r"\boxed{0.5}") == RewardOutput(
        reward=1.0, is_correct=True, metadata={"extracted": "0.5", "reason": "equal"} | HALF_IN_A_BOX
    )
    assert math_reward_fn({"ground_truth": ["1", "2"]}, Action(r"\boxed{2}")).is_correct
    assert RewardMathFn(tolerance=0.1)(RewardInput({"answer": "10"}, "10.5")).reward == 1.0
    assert RewardMathFn()({"answer": "10"}, "10.5").reward == 0.0
    assert search_reward_fn({"ground_truth": ["Paris"]}, "<answer>paris</answer>").reward == 1.0
    assert f1_reward_fn({"answer": "cat sat"}, "cat").reward == pytest.approx(2 / 3)
    assert zero_reward({}, "anything") == RewardOutput(reward=0.0)
    assert rllm.rewards.countdown_reward.compute_score("3+7+2", {"numbers": [3, 7, 2], "target": 12}) == 1.0


def test_an_action_that_is_no_text_is_the_callers_mistake() -> None:
    with pytest.raises(RewardError, match="be text"):
        math_reward_fn({"answer": "5"}, 5)


def test_every_name_of_the_room_leads_somewhere() -> None:
    for name in dir(rllm.rewards):
        assert getattr(rllm.rewards, name) is not None
    with pytest.raises(AttributeError):
        _ = rllm.rewards.no_such_name


def test_every_grader_is_where_the_table_says(subtests: pytest.Subtests) -> None:
    for home in GRADERS.values():
        with subtests.test(home=home):
            module, _, attribute = home.partition(":")
            assert callable(getattr(importlib.import_module(module), attribute))


def test_a_number_that_python_does_not_write_out_is_the_row_s_mistake() -> None:
    huge = 10**5000
    for row in (
        {"answer": huge, "choices": ["a", "b"]},
        {"answer": huge},
        {"answer": "A", "choices": [huge, 1]},
        {"answer": "A", "choices": huge},
        {"answer": {"is": huge}, "choices": ["a", "b"]},
    ):
        with pytest.raises(RewardError, match="choice grader"):
            grader_named("choice").grade("A", row)
    with pytest.raises(RewardError, match="exact grader"):
        grader_named("exact").grade("A", {"answer": [{"is": huge}]})
