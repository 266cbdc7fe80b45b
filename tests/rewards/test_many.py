"""One answer in, one result out, in order, whatever the grader does."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.errors import ConfigError, RewardError
from rllm.rewards.grade import Grade, Grader, right
from rllm.rewards.parallel_grading import GradeFailure, grade_many

HANG_S = 2.0
TIMEOUT_S = HANG_S / 2
"""Far above what the others take, also on a busy machine; who hangs takes longer still."""


class Moody:
    """Does what the answer says."""

    name = "moody"
    task_fields = ("number",)

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        match answer:
            case "raise":
                raise ValueError("a bug")
            case "refuse":
                raise RewardError("a bad row")
            case "exit":
                raise SystemExit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "memory":
                raise MemoryError
            case "junk":
                return 0.7  # pyright: ignore[reportReturnType]
            case "nothing":
                return None  # pyright: ignore[reportReturnType]
            case "nan":
                return Grade(score=float("nan"), is_correct=True)
            case "hang":
                time.sleep(HANG_S)
            case "slow":
                time.sleep(HANG_S / 100)
            case _:
                pass
        return right(answer, str(task["number"]))

    def close(self) -> None:
        pass


QUICK_FAULTS = ("raise", "refuse", "exit", "interrupt", "memory", "junk", "nothing", "nan")
FAULTS = (*QUICK_FAULTS, "hang")


def require_own_results(answers: list[str], threads: int, timeout_s: float) -> None:
    rows = [(answer, {"number": number}) for number, answer in enumerate(answers)]
    results = grade_many(Moody(), rows, threads=threads, timeout_s=timeout_s)
    assert len(results) == len(answers)
    for number, (answer, result) in enumerate(zip(answers, results, strict=True)):
        if answer in FAULTS:
            assert isinstance(result, GradeFailure), answer
        else:
            assert isinstance(result, Grade)
            assert result.extracted == str(number)


@settings(max_examples=15)
@given(st.lists(st.sampled_from([*QUICK_FAULTS, "fine", "slow"]), max_size=12), st.integers(1, 5))
def test_each_answer_has_its_own_result_in_its_own_place(answers: list[str], threads: int) -> None:
    require_own_results(answers, threads, timeout_s=30.0)


def test_so_it_has_beside_those_that_hang() -> None:
    answers = ["fine", "hang", "slow", "raise", "hang", "fine", "nan", "slow"]
    require_own_results(answers, threads=3, timeout_s=TIMEOUT_S)


def test_a_failure_says_what_happened() -> None:
    said = [str(each) for each in grade_many(Moody(), [(fault, {}) for fault in FAULTS], timeout_s=TIMEOUT_S)]
    assert said[0] == "ValueError: a bug"
    assert said[1] == "RewardError: a bad row"
    assert said[2] == "SystemExit: 3"
    assert "0.7 (a float)" in said[5]
    assert "score nan" in said[7]
    assert "within 1 s" in said[8]


def test_a_row_that_is_no_pair_is_a_failure_of_its_own() -> None:
    rows: Any = [("fine", {"number": 0}), "odd", None, ("fine", None)]
    results = grade_many(Moody(), rows)
    assert isinstance(results[0], Grade)
    assert [type(result) for result in results[1:]] == [GradeFailure] * 3


def test_many_answers_are_graded_at_once() -> None:
    together = threading.Barrier(4)

    class Waiting(Moody):
        def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
            together.wait(timeout=20)
            return right(answer)

    grader: Grader = Waiting()
    assert all(isinstance(each, Grade) for each in grade_many(grader, [("x", {})] * 8, threads=4))


def test_a_number_of_threads_or_a_limit_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError):
        grade_many(Moody(), [], threads=0)
    with pytest.raises(ConfigError):
        grade_many(Moody(), [], timeout_s=0)


def test_a_grade_is_a_finite_number(subtests: pytest.Subtests) -> None:
    for score in (None, "1", True, float("inf"), float("nan"), [1.0]):
        with subtests.test(score=score), pytest.raises(RewardError, match="finite"):
            Grade(score=score, is_correct=False)
