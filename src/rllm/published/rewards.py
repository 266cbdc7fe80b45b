"""Functions and names of the published reward room that nothing here has under another name."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from rllm.rewards.extraction import boxes_in
from rllm.rewards.graders import grader_named
from rllm.rewards.reward_functions import RewardOutput, code_reward_fn, math_reward_fn


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


def rllm_reward_fn_math(
    data_source: str,
    llm_solution: str,
    ground_truth: str | Sequence[str],
    extra_info: Mapping[str, Any] | None = None,
) -> RewardOutput:
    """`math_reward_fn` with its row in four arguments."""
    row = {**(extra_info or {}), "data_source": data_source, "ground_truth": ground_truth}
    return math_reward_fn(row, llm_solution)


def rllm_reward_fn_code(
    data_source: str, llm_solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> RewardOutput:
    """`code_reward_fn` with its row in four arguments."""
    row = {**(extra_info or {}), "data_source": data_source, "ground_truth": ground_truth}
    return code_reward_fn(row, llm_solution)
