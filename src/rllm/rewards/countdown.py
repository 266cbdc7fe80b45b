"""Is an answer to a countdown task right? An expression parser of our own, exact arithmetic, no `eval`.

    answer ──► without thoughts ──► inside the last <answer> ──► tokens ──► numbers, value ──► CountdownGrade

Right is what uses each given number exactly once with + - * / and brackets, and comes to the target exactly.
All else is wrong, and the grade says why. Numbers are compared before anything is computed, so no answer can
make the grader work longer than it takes to read it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from numbers import Integral
from typing import Any

from rllm.errors import RewardError

MAX_EXPRESSION_CHARS = 200
"""The length of an expression. The longest that people write for four numbers has a few dozen."""
_TOKEN = re.compile(r"[ \t\r\n]*([0-9]+|[-+*/()=×÷−])")
_BLANKS = " \t\r\n"
_SIGN_OF = {"×": "*", "÷": "/", "−": "-"}
"""The signs of printed books, each with its plain form."""
_OPEN_ANSWER, _CLOSE_ANSWER = "<answer>", "</answer>"
_OPEN_THOUGHT, _CLOSE_THOUGHT = "<think>", "</think>"
_BINDS = {"+": 1, "-": 1, "*": 2, "/": 2}
_APPLY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": Fraction.__add__,
    "-": Fraction.__sub__,
    "*": Fraction.__mul__,
    "/": Fraction.__truediv__,
}


class CountdownReason(StrEnum):
    """The reason for a grade."""

    RIGHT = "right"
    WRONG_VALUE = "wrong_value"
    """A proper expression of the right numbers that comes to something else."""
    WRONG_NUMBERS = "wrong_numbers"
    """A given number is missing or used twice, or another one is used."""
    DIVISION_BY_ZERO = "division_by_zero"
    MALFORMED = "malformed"
    """Not one expression and nothing else."""
    UNFINISHED = "unfinished"
    """Thoughts or answer were begun and never closed."""
    EMPTY = "empty"


@dataclass(kw_only=True, slots=True, frozen=True)
class CountdownGrade:
    """One answer, judged."""

    is_correct: bool
    reason: CountdownReason
    expression: str = ""
    """The expression that was taken for the answer."""
    value: Fraction | None = None
    """The value of it, where that could be computed."""


def grade_countdown(answer: str, numbers: Sequence[int], target: int) -> CountdownGrade:
    """Judge a model's answer: a bare expression, or text that ends with `<answer>…</answer>`.

    Thoughts up to the last `</think>` are left out. "expression = target" is read as the expression. Raises
    RewardError for what is no task: that is a mistake in the data and says nothing about the answer.
    """
    goal = _require_task(answer, numbers, target)
    expression = final_expression(answer)
    if isinstance(expression, CountdownReason):
        return CountdownGrade(is_correct=False, reason=expression)
    reason, value = _judge(expression, goal, int(target))
    return CountdownGrade(
        is_correct=reason is CountdownReason.RIGHT, reason=reason, expression=expression, value=value
    )


def compute_score(
    answer: str, ground_truth: Mapping[str, Any], *, score: float = 1.0, format_score: float = 0.0
) -> float:
    """`score` for a right answer to `{"target": …, "numbers": …}`, 0 for any other.

    `format_score` is paid for a proper expression that misses: of the right numbers, with the wrong value.
    """
    try:
        numbers, target = ground_truth["numbers"], ground_truth["target"]
    except (KeyError, TypeError) as error:
        raise RewardError(
            f"compute_score was given {ground_truth!r:.200} as `ground_truth`; "
            'it must be a mapping such as {"target": 24, "numbers": [4, 6]}.'
        ) from error
    grade = grade_countdown(answer, numbers, target)
    if grade.is_correct:
        return score
    return format_score if grade.reason is CountdownReason.WRONG_VALUE else 0.0


def final_expression(answer: str) -> str | CountdownReason:
    """The part of an answer that is to be judged, or why there is none.

    Only the last `<answer>` counts, and it must end the text: a guess on the way is no answer.
    """
    if answer.rfind(_OPEN_THOUGHT) > answer.rfind(_CLOSE_THOUGHT):
        return CountdownReason.UNFINISHED
    text = (
        answer[answer.rfind(_CLOSE_THOUGHT) + len(_CLOSE_THOUGHT) :] if _CLOSE_THOUGHT in answer else answer
    )
    text = text.strip(_BLANKS)
    begin = text.rfind(_OPEN_ANSWER)
    if begin >= 0:
        end = text.find(_CLOSE_ANSWER, begin)
        if end < 0:
            return CountdownReason.UNFINISHED
        if end + len(_CLOSE_ANSWER) != len(text):
            return CountdownReason.MALFORMED
        text = text[begin + len(_OPEN_ANSWER) : end].strip(_BLANKS)
    return text or CountdownReason.EMPTY


def _judge(expression: str, numbers: Sequence[int], target: int) -> tuple[CountdownReason, Fraction | None]:
    tokens = _tokens(expression)
    if tokens is None:
        return CountdownReason.MALFORMED, None
    if tokens[-2:] == ["=", str(target)]:
        tokens = tokens[:-2]
    postfix = _postfix(tokens)
    if postfix is None:
        return CountdownReason.MALFORMED, None
    if sorted(token for token in postfix if isinstance(token, int)) != sorted(numbers):
        return CountdownReason.WRONG_NUMBERS, None
    value = _value(postfix)
    if value is None:
        return CountdownReason.DIVISION_BY_ZERO, None
    return CountdownReason.RIGHT if value == target else CountdownReason.WRONG_VALUE, value


def _tokens(expression: str) -> list[str] | None:
    """Numbers, signs and brackets; None for anything else, and for what is too long to be an answer."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        return None
    tokens: list[str] = []
    place = 0
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            return None
        token = match.group(1)
        if token[0] == "0" and len(token) > 1:
            return None
        tokens.append(_SIGN_OF.get(token, token))
        place = match.end()
    return tokens


def _postfix(tokens: Sequence[str]) -> list[int | str] | None:
    """Numbers before their sign (Dijkstra's shunting yard), or None for what is no expression.

    Signs stand between two values, so "-3" is none: countdown knows no negative numbers to begin with.
    """
    output: list[int | str] = []
    waiting: list[str] = []
    wants_value = True
    for token in tokens:
        if wants_value != (token == "(" or token.isdigit()):
            return None
        if token.isdigit():
            output.append(int(token))
            wants_value = False
        elif token == "(":
            waiting.append(token)
        elif token == ")":
            while waiting and waiting[-1] != "(":
                output.append(waiting.pop())
            if not waiting:
                return None
            waiting.pop()
        elif token in _BINDS:
            # Also at equal strength: signs that bind alike apply from the left, so 8 - 3 - 2 is 3.
            while waiting and _BINDS.get(waiting[-1], 0) >= _BINDS[token]:
                output.append(waiting.pop())
            waiting.append(token)
            wants_value = True
        else:
            return None
    if wants_value or "(" in waiting:
        return None
    return output + waiting[::-1]


def _value(postfix: Sequence[int | str]) -> Fraction | None:
    """The exact value of it; None where it divides by zero."""
    stack: list[Fraction] = []
    for token in postfix:
        if isinstance(token, int):
            stack.append(Fraction(token))
            continue
        right, left = stack.pop(), stack.pop()
        if token == "/" and right == 0:
            return None
        stack.append(_APPLY[token](left, right))
    return stack.pop()


def _require_task(answer: Any, numbers: Any, target: Any) -> list[int]:
    if not isinstance(answer, str):
        raise RewardError(
            f"The countdown grader was given {answer!r:.200} (a {type(answer).__name__}) as the answer; "
            "it must be text."
        )
    if not isinstance(target, Integral) or isinstance(target, bool):
        raise RewardError(
            f"The countdown grader was given {target!r:.200} as `target`; it must be an integer."
        )
    given_numbers = list(numbers) if isinstance(numbers, Sequence) and not isinstance(numbers, str) else []
    if not given_numbers or not all(
        isinstance(each, Integral) and not isinstance(each, bool) and int(each) >= 0 for each in given_numbers
    ):
        raise RewardError(
            f"The countdown grader was given {numbers!r:.200} as `numbers`; they must be a list of one or "
            "more integers, none of them negative."
        )
    return [int(each) for each in given_numbers]
