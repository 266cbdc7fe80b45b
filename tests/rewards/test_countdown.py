"""A right answer to a countdown task is paid, and nothing else is."""

import re
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rllm.errors import RewardError
from rllm.rewards.countdown import CountdownReason, grade_countdown
from rllm.rewards.countdown_reward import compute_score

THOUGHTS = "<think>3 + 7 = 10, and 10 + 2 = 12. (3+7+2)</think>"

RIGHT = [
    ("3+7+2", [3, 7, 2], 12),
    ("2+7+3", [3, 7, 2], 12),
    ("(3+7)+2", [3, 7, 2], 12),
    ("3+(7+2)", [3, 7, 2], 12),
    ("((3+7+2))", [3, 7, 2], 12),
    ("(((3)))+(7)+2", [3, 7, 2], 12),
    ("  3 + 7\t+ 2 \n", [3, 7, 2], 12),
    ("3+7+2=12", [3, 7, 2], 12),
    ("3 + 7 + 2 = 12", [3, 7, 2], 12),
    ("(3+7)*2", [3, 7, 2], 20),
    ("2*(3+7)", [3, 7, 2], 20),
    ("(7+3)×2", [3, 7, 2], 20),
    ("7−3−2", [3, 7, 2], 2),
    ("7-3-2", [3, 7, 2], 2),
    ("7-(3+2)", [3, 7, 2], 2),
    ("7-(3-2)", [3, 7, 2], 6),
    ("3-7+6", [3, 6, 7], 2),
    ("(3-7)*(2-6)", [2, 3, 6, 7], 16),
    ("8/4/2", [8, 4, 2], 1),
    ("8/(4/2)", [8, 4, 2], 4),
    ("8÷4÷2", [8, 4, 2], 1),
    ("8/3*6", [8, 3, 6], 16),
    ("6*8/3", [8, 3, 6], 16),
    ("8/(3-8/3)", [8, 8, 3, 3], 24),
    ("6/(1-3/4)", [1, 3, 4, 6], 24),
    ("1/3+2/3", [1, 2, 3, 3], 1),
    ("(1+1+1)*8", [1, 1, 1, 8], 24),
    ("5-5", [5, 5], 0),
    ("0*7", [0, 7], 0),
    ("0/7", [0, 7], 0),
    ("12*12", [12, 12], 144),
    ("100*75-25/50*6", [100, 75, 25, 50, 6], 7497),
    ("2-3", [2, 3], -1),
    ("7", [7], 7),
    ("99999999999999999999*1", [1, 99999999999999999999], 99999999999999999999),
    (f"{THOUGHTS}<answer>3+7+2</answer>", [3, 7, 2], 12),
    (f"{THOUGHTS}\n\n3+7+2", [3, 7, 2], 12),
    ("It is easy.</think>3+7+2", [3, 7, 2], 12),
    ("So the answer is <answer>3+7+2</answer>", [3, 7, 2], 12),
    ("So the answer is <answer> 3+7+2 = 12 </answer>\n", [3, 7, 2], 12),
    ("<answer>3*7*2</answer> No! <answer>3+7+2</answer>", [3, 7, 2], 12),
    ("<think>one</think>hm<think>two</think><answer>3+7+2</answer>", [3, 7, 2], 12),
]

WRONG = {
    CountdownReason.WRONG_VALUE: [
        "3+7-2",
        "3*7+2",
        "(3+7)*2",
        "7+3*2",
        "7-3-2",
        "2-7-3",
        "3/7/2",
        "(3+7)*2=12",
        "<answer>3*7*2</answer>",
        "<answer>3+7+2</answer><answer>3*7*2</answer>",
        f"{THOUGHTS}<answer>3-7-2</answer>",
    ],
    CountdownReason.WRONG_NUMBERS: [
        "12",
        "3+7",
        "3+9",
        "10+2",
        "3+7+2+0",
        "3+7+2*1",
        "3+7+2+2-2",
        "3+3+3+3",
        "3*7+2-(3+7+2)+1",
        "37-25",
        "372",
        "32+7",
        "6+6",
        "12=12",
        "(12)",
        "4*3",
        "24/2",
        "7+5",
        "3+7+2+3-3",
        "3+7+2-0",
        "1+11",
    ],
    CountdownReason.MALFORMED: [
        "+",
        "3+7+",
        "+3+7+2",
        "-3+7+2",
        "3+7+-2",
        "3--7+2",
        "3++7+2",
        "3+7+(2",
        "3+7+2)",
        "(3+7+2",
        ")3+7+2(",
        "()3+7+2",
        "3+7+2()",
        "(3+7)(2)",
        "2(3+7)",
        "(3+7)2",
        "3 7 2",
        "3+7 2",
        "3+7+ 2 2",
        "3**7+2",
        "3//7+2",
        "3%7+2",
        "3^7+2",
        "3&7|2",
        "3<7<2",
        "~3+7+2",
        "3+7+2!",
        "3.0+7+2",
        "3+7+2.",
        "3,7,2",
        "3+7,2",
        "[3+7+2]",
        "{3+7+2}",
        "3+7+02",
        "03+7+2",
        "3_0+7+2",
        "3e0+7+2",
        "0x3+7+2",
        "3j+7+2",
        "３+7+2",
        "3+７+2",
        "३+7+2",
        "3+7+²",
        "3·7+2",
        "3x7+2",
        "3:7+2",
        "3+7+2=",
        "=3+7+2",
        "12=3+7+2",
        "3+7+2==12",
        "3+7+2=13",
        "(3+7)*2=20",
        "3+7+2=12=12",
        "3+7=10+2=12",
        "3+7+2=+12",
        "3+7+2=012",
        "3+7+2=12.0",
        "3+7+2=(12)",
        "3+7+2;",
        "3+7+2#",
        "3+7+2 # right",
        "3+7+2\n3+7+2",
        "3+7+2 or 3*7",
        "The answer is 3+7+2",
        "3+7+2 is the answer",
        "3+7+2 = 12, so it is right",
        "answer: 3+7+2",
        "$3+7+2$",
        "`3+7+2`",
        '"3+7+2"',
        "three plus seven plus two",
        "12 is 3+7+2",
        "int(3+7+2)",
        "abs(3+7+2)",
        "__import__('os')",
        "lambda:12",
        "True*12",
        "3+7+2\x00",
        "3+7+2\u200b",
        "3\u00a0+7+2",
        "3+7+2\u2028",
        "nan",
        "inf",
        "<answer>The answer is 3+7+2</answer>",
        "<answer>3+7+2</answer> or so",
        "<answer>3+7+2</answer></answer>",
        "<answer>3+7+2</answer> 3+7+2",
        "<ANSWER>3+7+2</ANSWER>",
        "<answer >3+7+2</answer >",
        "<answer>3+7+2</answer >.</answer>",
        "3+7+2</answer>",
        "\\boxed{3+7+2}",
        "(" * 5000 + "3+7+2" + ")" * 5000,
        "3+7+2" + "+0" * 5000,
        "9" * 100_000,
    ],
    CountdownReason.UNFINISHED: [
        "<think>3+7+2",
        "<think>3+7+2\n12",
        "<think><answer>3+7+2</answer>",
        "<think>first</think><think>then <answer>3+7+2</answer>",
        "<answer>3+7+2",
        "<answer>3+7+2</answe",
        "<answer>3+7+2</answer><answer>3+7+2",
        "<answer>3+7+2<answer>",
        f"{THOUGHTS}<answer>3+7+2",
        f"{THOUGHTS}<answer>",
    ],
    CountdownReason.EMPTY: [
        "",
        " \n\t ",
        THOUGHTS,
        "</think>",
        "<answer></answer>",
        "<answer> </answer>",
        f"{THOUGHTS}<answer></answer>",
        "3+7+2<answer></answer>",
    ],
}


def test_a_right_answer_is_right_and_for_no_other_target_and_with_no_other_numbers() -> None:
    for answer, numbers, target in RIGHT:
        grade = grade_countdown(answer, numbers, target)
        assert grade.reason is CountdownReason.RIGHT, answer
        assert grade.is_correct
        assert grade.value == target
        assert compute_score(answer, {"target": target, "numbers": numbers}) == 1.0
        for other in (target - 1, target + 1, -target - 1, 10 * target + 1):
            assert not grade_countdown(answer, numbers, other).is_correct, answer
        assert not grade_countdown(answer, [*numbers, numbers[0]], target).is_correct, answer
        assert not grade_countdown(answer, [numbers[0] + 1, *numbers[1:]], target).is_correct, answer


def test_any_other_answer_to_3_7_2_target_12_is_wrong_and_the_grade_says_why() -> None:
    for reason, answers in WRONG.items():
        for answer in answers:
            grade = grade_countdown(answer, [3, 7, 2], 12)
            assert grade.reason is reason, answer
            assert not grade.is_correct
            assert compute_score(answer, {"target": 12, "numbers": [3, 7, 2]}) == 0.0


@pytest.mark.parametrize("answer", ["3/0+7*2", "3/(7-7)", "7/(3-3)+2", "3/(7-7)=12"])
def test_division_by_zero_is_wrong(answer: str) -> None:
    numbers = [int(each) for each in re.findall("[0-9]+", answer.partition("=")[0])]
    assert grade_countdown(answer, numbers, 12).reason is CountdownReason.DIVISION_BY_ZERO


def test_arithmetic_is_exact() -> None:
    assert not grade_countdown("1000000000000000000/3*3", [10**18, 3, 3], 10**18 + 1).is_correct
    assert grade_countdown("1000000000000000000/3*3", [10**18, 3, 3], 10**18).is_correct
    assert grade_countdown("1/49*49", [1, 49, 49], 1).is_correct  # floats say 0.9999999999999999


_pieces = st.sampled_from([*"0123456789+-*/() ", "=", "**", "//", "12", "\n"])


@given(pieces=st.lists(_pieces, max_size=14), right=st.lists(st.integers(0, 12), min_size=1, max_size=4))
@example(pieces=list("3+7+2"), right=[3, 7, 2])
@example(pieces=list("-3+7"), right=[3, 7])
def test_nothing_is_right_that_python_computes_otherwise(pieces: list[str], right: list[int]) -> None:
    answer = "".join(pieces)
    numbers = [int(each) for each in re.findall("[0-9]+", answer)] or right
    value = python_value(answer)
    for target in {0, 12, int(value) if value is not None else 1}:
        if grade_countdown(answer, numbers, target).is_correct:
            assert value == target


def python_value(answer: str) -> Fraction | None:
    """What Python itself makes of an answer: an oracle that knows nothing of the grader."""
    if "**" in answer:  # a power tower would never end
        return None
    exact = re.sub("[0-9]+", lambda number: f"Fraction({int(number[0])})", answer.partition("=")[0])
    try:
        value = eval(exact.strip(), {"Fraction": Fraction, "__builtins__": {}})
        return value if isinstance(value, Fraction) else None
    except (SyntaxError, TypeError, ZeroDivisionError, OverflowError, ValueError):
        return None


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    """Bracketed more than is needed, with blanks wherever they may stand."""
    blank = st.sampled_from(["", " ", "  "])
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return str(draw(st.integers(0, 20)))
    left, right = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    sign = draw(st.sampled_from("+-*/"))
    bare = f"{left}{draw(blank)}{sign}{draw(blank)}{right}"
    return f"({bare})" if draw(st.booleans()) else bare


@given(expressions())
def test_every_proper_expression_is_worth_what_python_says(expression: str) -> None:
    numbers = [int(each) for each in re.findall("[0-9]+", expression)]
    value = python_value(expression)
    if value is None:
        assert grade_countdown(expression, numbers, 1).reason is CountdownReason.DIVISION_BY_ZERO
    else:
        grade = grade_countdown(expression, numbers, int(value))
        assert grade.value == value
        assert grade.is_correct == (value == int(value))


@given(st.text(max_size=60))
def test_any_text_gets_a_grade(answer: str) -> None:
    assert not grade_countdown(answer, [3, 7, 2], 12).is_correct


def test_a_proper_expression_that_misses_may_be_paid_a_little() -> None:
    truth = {"target": 12, "numbers": [3, 7, 2]}
    assert compute_score("3*7-2", truth, format_score=0.1) == 0.1
    assert compute_score("3+7", truth, format_score=0.1) == 0.0
    assert compute_score("nothing", truth, format_score=0.1) == 0.0
    assert compute_score("3+7+2", truth, score=2.0, format_score=0.1) == 2.0


def test_what_is_no_task_is_an_error_and_never_a_zero(subtests: pytest.Subtests) -> None:
    for answer, truth, named in [
        (None, {"target": 12, "numbers": [3]}, "None"),
        (12, {"target": 12, "numbers": [3]}, "12"),
        ("3", {"numbers": [3]}, "ground_truth"),
        ("3", {"target": 3}, "ground_truth"),
        ("3", None, "ground_truth"),
        ("3", {"target": None, "numbers": [3]}, "target"),
        ("3", {"target": 3.0, "numbers": [3]}, "target"),
        ("3", {"target": "3", "numbers": [3]}, "target"),
        ("1", {"target": True, "numbers": [1]}, "target"),
        ("3", {"target": 3, "numbers": []}, "numbers"),
        ("3", {"target": 3, "numbers": "3"}, "numbers"),
        ("3", {"target": 3, "numbers": 3}, "numbers"),
        ("3", {"target": 3, "numbers": [3.0]}, "numbers"),
        ("1", {"target": 1, "numbers": [True]}, "numbers"),
        ("3", {"target": 3, "numbers": [-3]}, "numbers"),
    ]:
        with subtests.test(answer=answer, truth=truth, named=named), pytest.raises(RewardError, match=named):
            compute_score(answer, truth)
