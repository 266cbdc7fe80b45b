"""Mathematical answers: exact where numbers are, and never paid for noise. The corpus has case by case."""

import asyncio
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rllm.environments.judging import judge_of
from rllm.errors import ConfigError, MissingExtraError, RewardError
from rllm.rewards.grade import Grade
from rllm.rewards.graders import grader_named
from rllm.rewards.math import MathGrader
from rllm.rewards.math_arithmetic import NoValue, arithmetic_value
from rllm.rewards.parallel_grading import grade_many
from rllm.rewards.workers import WorkerPool, WorkerReply, WorkerStatus

MATH = MathGrader()
GOLD = r"\frac{7391}{113}"
FRAGMENTS = [
    *(
        r"\frac",
        r"\sqrt",
        r"\boxed",
        r"\text",
        r"\left",
        r"\right",
        r"\cup",
        r"\infty",
        r"\pm",
        r"\pi",
        "x",
        "^",
    ),
    *(
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "$",
        "\\",
        "_",
        "=",
        "<",
        ",",
        ";",
        "+",
        "-",
        "*",
        "/",
        "!",
        "%",
        "|",
        "&",
        ".",
    ),
    *(
        "0",
        "1",
        "25",
        "9^9",
        "and",
        "or",
        " ",
        "\n",
        "the",
        r"\{",
        r"\}",
        r"\le",
        r"\in",
        r"\begin{pmatrix}",
        "é",
        "√",
    ),
    *(
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "½",
        "²",
        "∞",
        "\x00",
        "\u202e",
        "😀",
        r"\cdot",
        "e",
        "i",
        "'",
    ),
]


def graded(answer: str, gold: Any, **options: Any) -> Grade:
    grader = MathGrader(**options) if options else MATH
    return grader.grade(answer, {"answer": gold})


@given(st.text(max_size=200))
@example("\ud800")
def test_no_noise_is_paid(text: str) -> None:
    for answer in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        assert graded(answer, GOLD).score == 0.0


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_no_noise_in_the_language_of_mathematics_is_paid(parts: list[str]) -> None:
    text = "".join(parts)
    for answer in (text, f"\\boxed{{{text}}}"):
        assert graded(answer, GOLD).score == 0.0


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_are_compared_exactly(one: Fraction, other: Fraction) -> None:
    written = rf"\boxed{{\frac{{{3 * other.numerator}}}{{{3 * other.denominator}}}}}"
    assert (graded(written, str(one)).score == 1.0) is (one == other)
    assert graded(rf"\boxed{{{one.numerator}/{one.denominator}}}", str(one)).is_correct


@given(st.decimals(allow_nan=False, allow_infinity=False, places=9), st.integers(1, 10**9))
def test_a_billionth_is_a_difference(number: Any, parts: int) -> None:
    assert graded(f"\\boxed{{{number:f}}}", f"{number:f}").is_correct
    off = Fraction(number) + Fraction(1, parts * 10**9)
    assert graded(f"\\boxed{{\\frac{{{off.numerator}}}{{{off.denominator}}}}}", f"{number:f}").score == 0.0


def expressions() -> st.SearchStrategy[tuple[str, Fraction | None]]:
    """Arithmetic as people write it, and its value by Python's fractions; None where it divides by zero."""
    numbers = st.integers(0, 99).map(lambda number: (str(number), Fraction(number)))

    def joined(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        def build(left: Any, right: Any, sign: str) -> tuple[str, Fraction | None]:
            (one, one_value), (other, other_value) = left, right
            text = {
                "+": f"({one}+{other})",
                "-": f"({one}-{other})",
                "*": rf"{{{one}}}\cdot({other})",
                "/": rf"\frac{{{one}}}{{{other}}}",
                "^": f"({one})^{{2}}",
            }[sign]
            if one_value is None or other_value is None or (sign == "/" and other_value == 0):
                return text, None
            value = {
                "+": lambda: one_value + other_value,
                "-": lambda: one_value - other_value,
                "*": lambda: one_value * other_value,
                "/": lambda: one_value / other_value,
                "^": lambda: one_value**2,
            }[sign]()
            return (f"({text})" if sign in "*/" else text), value

        return st.builds(build, children, children, st.sampled_from("+-*/^"))

    return st.recursive(numbers, joined, max_leaves=6)


@given(expressions())
def test_arithmetic_comes_to_what_python_says(written: tuple[str, Fraction | None]) -> None:
    text, value = written
    if value is None:  # "^" drops its right side, and what is wrong with it
        assume(isinstance(arithmetic_value(text), NoValue))
    else:
        assert arithmetic_value(text) == value


@settings(max_examples=10)
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=4), st.integers(-3, 3))
def test_a_polynomial_is_the_same_in_any_order_and_another_one_is_not(
    coefficients: list[int], change: int
) -> None:
    terms = [f"({number})x^{{{power}}}" for power, number in enumerate(coefficients)]
    gold = "+".join(terms)
    random.Random(len(terms)).shuffle(terms)
    assert graded(rf"\boxed{{{'+'.join(terms)}}}", gold).is_correct
    assert graded(rf"\boxed{{{gold}+({change})x}}", gold).is_correct is (change == 0)


def test_towers_are_refused_before_anything_is_computed(subtests: pytest.Subtests) -> None:
    for answer in [
        *("9^{9^{9^{9}}}", "9^9^9^9", "x^{9^{9^9}}", "2^{-9^{9^9}}", "9" * 900, "5" + "!" * 300),
        "(" * 300 + "5" + ")" * 300,
    ]:
        with subtests.test(answer=answer):
            begun = time.process_time()
            for gold in ("5", "x+1"):
                assert graded(f"\\boxed{{{answer}}}", gold).score == 0.0
            assert time.process_time() - begun < 1.0


def test_what_keeps_the_worker_busy_is_not_paid_and_the_next_answer_is_graded() -> None:
    grader = MathGrader(timeout_s=1.5, workers=1)
    hard = r"\boxed{\int_0^1 \sin(\cos(\tan(x^x)))^{\ln(x+2)} dx}"
    begun = time.monotonic()
    (result,) = grade_many(grader, [(hard, {"answer": r"\sqrt{2}"})])
    assert time.monotonic() - begun < 60.0
    if isinstance(result, Grade):
        assert (result.score, result.reason) == (0.0, "too_slow")
    else:  # on a busy machine nobody can tell whose fault it was
        assert "memory or processor" in str(result)
    assert graded(r"\boxed{\frac{2}{\sqrt{2}}}", r"\sqrt{2}").is_correct


async def test_threads_and_asyncio_get_the_same_grades() -> None:
    rows = [(rf"\boxed{{(x+{number})^2}}", rf"x^2+{2 * number}x+{number * number}") for number in range(6)]
    with ThreadPoolExecutor(8) as threads:
        of_threads = list(threads.map(lambda row: graded(*row), rows))
    of_tasks = await asyncio.gather(*(asyncio.to_thread(graded, *row) for row in rows))
    assert [grade.score for grade in of_threads] == [1.0] * 6
    assert of_threads == of_tasks


class Replying(WorkerPool):
    """Workers that end as they are told to."""

    def __init__(self, reply: WorkerReply) -> None:
        super().__init__("nowhere:nothing")
        self.reply = reply

    def call(self, *args: Any) -> WorkerReply:
        return WorkerReply(status=WorkerStatus.OK, value={"same": True}) if args[0] == args[1] else self.reply


@pytest.mark.parametrize(
    "reply",
    [
        WorkerReply(status=WorkerStatus.TIMEOUT, cpu_s=0.01),
        WorkerReply(status=WorkerStatus.CRASHED, detail="SIGKILL"),
        WorkerReply(status=WorkerStatus.JUNK),
        WorkerReply(status=WorkerStatus.OK, value={"same": "yes"}),
    ],
)
def test_what_the_machine_did_to_a_worker_is_no_zero(reply: WorkerReply) -> None:
    grader = MathGrader()
    grader.pool = Replying(reply)
    with pytest.raises(RewardError):
        grader.grade(r"\boxed{x+x}", {"answer": "2x"})


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (WorkerReply(status=WorkerStatus.TIMEOUT, cpu_s=2.9), "too_slow"),
        (WorkerReply(status=WorkerStatus.TIMEOUT), "too_slow"),
        (WorkerReply(status=WorkerStatus.RAISED, detail="MemoryError"), "too_large"),
        (WorkerReply(status=WorkerStatus.RAISED, detail="TypeError"), "unreadable"),
        (WorkerReply(status=WorkerStatus.CRASHED, detail="SIGSEGV"), "too_large"),
    ],
)
def test_what_the_answer_did_to_a_worker_is_wrong(reply: WorkerReply, reason: str) -> None:
    grader = MathGrader()
    grader.pool = Replying(reply)
    grade = grader.grade(r"\boxed{x+x}", {"answer": "2x"})
    assert (grade.score, grade.reason) == (0.0, reason)


def test_plain_numbers_need_no_worker() -> None:
    grader = MathGrader(timeout_s=7.0)
    for answer in ("5", "6", r"\boxed{\frac{10}{2}}", r"\boxed{50\%}", "(1,2)", "not 5"):
        grader.grade(answer, {"answer": "5"})
    assert grader.pool.num_replaced == 0
    assert grader.pool._alive == set()  # pyright: ignore[reportPrivateUsage]


def test_the_same_question_has_the_same_grade() -> None:
    rows = [(r"\boxed{\sqrt{8}+x}", r"2\sqrt{2}+x"), (r"\boxed{x}", "y"), (r"\boxed{f(x)}", "f(y)")]
    assert [graded(*row) for row in rows] == [graded(*row) for row in rows]


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in ({"reading": "anywhere"}, {"percent": "any"}, {"tolerance": 1.5}, {"tolerance": -1.0}):
        with pytest.raises(ConfigError):
            MathGrader(**wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"`tolerence`.*`tolerance`"):
        grader_named("math", tolerence=0.1)


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rllm\[grading\]'"):
        MathGrader()


def test_an_answer_that_is_no_text_is_the_callers_mistake() -> None:
    with pytest.raises(RewardError, match="be text"):
        MATH.grade(5, {"answer": "5"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(RewardError, match="mapping"):
        MATH.grade("5", "5")  # pyright: ignore[reportArgumentType]


def test_a_row_with_a_formula_starts_the_workers_before_its_answer_comes() -> None:
    grader = MathGrader(workers=1, timeout_s=4.5)  # settings of its own, so a pool of its own
    grader.prepare({"answer": "72"})
    assert not grader.pool.is_warm
    judge_of(
        {"grader": "math", "grader_args": {"workers": 1, "timeout_s": 4.5}, "grading": {"answer": "x^2+1"}}
    )
    assert grader.pool.is_warm
    assert grader.grade(r"\boxed{1+x^2}", {"answer": "x^2+1"}).score == 1.0
    grader.prepare({})  # the row is at fault, and its grade says so
