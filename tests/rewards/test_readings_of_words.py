"""Graders that compare words read a marked answer in both ways, as those of mathematics do."""

import pytest

from rllm.errors import ConfigError
from rllm.rewards import grader_named
from rllm.rewards.grade import Grade

GRADERS = ("f1", "rouge", "search", "translation", "bleu")
GOLD = "the cat sat on the mat"


def graded(name: str, text: str, reading: str = "strict") -> Grade:
    return grader_named(name, reading=reading).grade(text, {"answer": GOLD})


@pytest.mark.parametrize("name", GRADERS)
def test_what_follows_a_marked_answer_counts_for_the_strict_reader_alone(name: str) -> None:
    both = {"strict": True, "lenient": True}
    for text in (GOLD, f"<answer>{GOLD}</answer>", f"So <answer>{GOLD}</answer>. I hope this helps!"):
        grade = graded(name, text)
        assert grade.score == 1.0, text
        assert grade.metadata["readings"] == both, text
    followed = f"<answer>{GOLD}</answer>, since 3 of the 4 documents say that it did in 1789."
    strict, lenient = graded(name, followed), graded(name, followed, "lenient")
    assert (strict.score, strict.is_correct, strict.reason) == (0.0, False, "not_last")
    assert (lenient.score, lenient.is_correct, lenient.extracted) == (1.0, True, GOLD)
    assert strict.metadata["readings"] == lenient.metadata["readings"] == {"strict": False, "lenient": True}


@pytest.mark.parametrize("name", GRADERS)
def test_no_reader_pays_what_is_taken_back_or_one_of_several(name: str) -> None:
    for text in (
        f"<answer>{GOLD}</answer>. Wait, that is wrong.",
        f"<answer>a</answer> <answer>b</answer> <answer>{GOLD}</answer>, since 1789 or so it is said.",
        f"<answer>{GOLD}</answer> <answer>",
        "",
    ):
        grade = graded(name, text, "lenient")
        assert (grade.score, grade.metadata["readings"]) == (0.0, {"strict": False, "lenient": False}), text


def test_a_share_of_the_words_is_paid_under_the_reading_that_takes_them() -> None:
    followed = "<answer>the cat sat</answer>, since 3 of the 4 documents say that it did in 1789."
    for name in ("f1", "search"):
        assert graded(name, followed).score == 0.0
        assert 0.0 < graded(name, followed, "lenient").score < 1.0


def test_a_sentence_of_a_translation_that_speaks_of_an_answer_is_no_mark() -> None:
    text = "The answer is no. He left, and the door fell shut behind him."
    grade = grader_named("translation", reading="lenient").grade(text, {"answer": text})
    assert (grade.score, grade.extracted) == (1.0, text)


@pytest.mark.parametrize("name", GRADERS)
def test_a_reading_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="`reading` is 'loose'"):
        grader_named(name, reading="loose")
