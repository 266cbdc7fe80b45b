"""Functions and names of the published reward room that nothing here has under another name."""

from enum import StrEnum

from rllm.rewards.extraction import boxes_in
from rllm.rewards.graders import grader_named


class RewardType(StrEnum):
    """Kinds of tasks, as published reward functions tell them apart."""

    MATH = "MATH"
    CODE = "CODE"
    WEB = "WEB"
    UNK = "UNK"


def extract_boxed_answer(text: str) -> str | None:
    r"""The inside of the last closed `\boxed{…}`; None where there is none."""
    inside = [content for _, content, end in boxes_in(text) if end >= 0]
    return inside[-1] if inside else None


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Whether two mathematical answers are one, as the math grader compares them."""
    if not given_answer:
        return False
    return grader_named("math").grade(f"\\boxed{{{given_answer}}}", {"answer": ground_truth}).is_correct
