"""Tests with loops, helpers and tolerances, on a program that they never meet.

    tests ──► examiner: which calls? ──► program: their values ──► examiner: right? which more? ──► … verdict
              (a sandbox with the        (a sandbox with the
               expected values)           model's code)

Which calls tests make first does not depend on the program, so that is found out once for each task.
"""

import functools
import json
from dataclasses import dataclass, field, replace
from typing import Any

from rllm.errors import RewardError
from rllm.rewards.code_asserts import AssertExam
from rllm.rewards.code_runs import CodeRunner, script
from rllm.sandbox.python_runner import PythonRunner
from rllm.sandbox.types import Limits, Status

MAX_ROUNDS = 150
"""The number of rounds of tests whose calls depend on the values of earlier calls."""
PATIENCE = 3.0
"""The factor by which tests may take longer when they are tried again."""
_REMEMBERED = 4_096


@dataclass(kw_only=True, slots=True, frozen=True)
class ExamResult:
    """The verdict of an exam on a program."""

    failure: str = ""
    """The reason that it does not pass; nothing where it does."""
    is_weak: bool = False
    """Whether it was asked to compare objects of its own."""


@dataclass(kw_only=True, slots=True)
class Examiner:
    """Runs the tests of tasks. Raises SandboxError where the sandbox fails."""

    python: PythonRunner
    limits: Limits
    first_calls: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.first_calls = functools.lru_cache(maxsize=_REMEMBERED)(self._first_calls)

    def examine(
        self,
        exam: AssertExam,
        program: str,
        calls: tuple[dict[str, Any], ...],
        runner: CodeRunner,
        *,
        has_prelude: bool,
    ) -> "ExamResult":
        """Whether the program passes. The tests see the packages of `runner`, as the program does."""
        calls_made = list(calls)
        for _ in range(MAX_ROUNDS):
            outcome = runner.make_calls(program, calls_made, has_prelude=has_prelude)
            if outcome.never_ran:
                return ExamResult(failure=outcome.never_ran)
            reply = self._examine(exam, calls_made[: len(outcome.results)], outcome.results, runner.packages)
            if reply is None:
                return ExamResult(failure="the tests come to no end with the values that the program gave")
            if reply["verdict"] == "passed":
                return ExamResult(is_weak=reply["weak"])
            if reply["verdict"] != "open" and reply["missing"]:
                raise RewardError(
                    f"The task's tests need {reply['missing'][0]}, which the sandbox does not have."
                )
            if reply["verdict"] != "open":
                return ExamResult(failure=reply["reason"])
            # After the verdict: tests may fail on the values that came before the program was stopped.
            if len(outcome.results) < len(calls_made):
                missing = f"call {len(outcome.results) + 1} of {len(calls_made)}"
                return ExamResult(failure=f"{missing}: {outcome.end_reason}")
            calls_made = reply["calls"]
        return ExamResult(failure=f"the tests made other calls in each of {MAX_ROUNDS} rounds")

    def _first_calls(self, exam: AssertExam, packages: tuple[str, ...]) -> tuple[dict[str, Any], ...] | None:
        """The calls that are made when nothing is known; None where the tests cannot be run apart.

        Raises RewardError for tests that fail, or never end, without the program.
        """
        reply = self._examine(exam, [], [], packages)
        if reply is None:
            raise RewardError(
                f"The task's tests come to no end within {PATIENCE * self.limits.cpu_s:g} s, before the "
                "program had any part in it; raise `timeout_s`."
            )
        if reply["verdict"] == "broken":
            raise RewardError(f"The task's tests do not run: {reply['reason']}")
        if reply["verdict"] == "impossible":
            return None
        if not reply["calls"]:
            raise RewardError(
                "The task's tests never call the program: "
                + (reply["reason"] or "whatever it does, they pass")
                + "."
            )
        return tuple(reply["calls"])

    def _examine(
        self,
        exam: AssertExam,
        calls_made: list[dict[str, Any]],
        results: list[dict[str, Any]],
        packages: tuple[str, ...],
    ) -> dict[str, Any] | None:
        """The results of the tests; None where they come to no end within the limits."""
        job = {
            "setup": exam.setup,
            "test": exam.test,
            "names": list(exam.names),
            "entry": exam.entry,
            "check": exam.has_check,
            "made": calls_made,
            "results": results,
            "has_numpy": "numpy" in packages,
        }
        source = script("examiner", "examine", job, self.python.version)
        for limits in (self.limits, _longer(self.limits)):
            result = self.python.run(source, limits=limits, wants_result=True, packages=packages)
            if result.status is Status.OK and result.result is not None:
                return json.loads(result.result)
            if result.status is Status.ERROR and not calls_made:
                raise RewardError(f"The task's tests cannot be run: {result.stderr[-500:]}")
        return None


def _longer(limits: Limits) -> Limits:
    """For a second try: the first may have met a busy machine."""
    return replace(limits, wall_s=PATIENCE * limits.wall_s, cpu_s=PATIENCE * limits.cpu_s)
