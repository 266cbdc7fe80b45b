"""Does a program do what a task asks? Run in a sandbox; what it gives is compared outside of it.

    task row ──► Problem(calls | exam | runs)        expected values stay on this side of the wall
    answer ────► program ──calls──► sandbox ──values as JSON──► compared here         calls, assertions
                     │                  └────► another sandbox, with the tests        loops, tolerances
                     └──stdin──► sandbox ──stdout──► compared here                    contests

What the program does wrong, crashes and limits included, is a score of 0 with its reason. A sandbox that
fails raises. Tests that cannot be taken apart run inside the program's own process: `metadata["weak"]`.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rllm.errors import ConfigError, RewardError, choices_of
from rllm.rewards.code_answers import NoProgram, program_of
from rllm.rewards.code_asserts import AssertExam, AssertRun, CallCheck
from rllm.rewards.code_exams import Examiner
from rllm.rewards.code_runs import CodeRunner, RunOutcome
from rllm.rewards.code_tasks import CodeProblem, problem_of
from rllm.rewards.code_values import MalformedError, as_node, display_text, same, same_output, truth_of
from rllm.rewards.grade import Grade, require_answer, wrong
from rllm.sandbox.interpreter import interpreter
from rllm.sandbox.packages import package_names
from rllm.sandbox.python_runner import shared_runner
from rllm.sandbox.types import Limits, Status

SCORES = ("all", "share")
WEAK = ("accept", "refuse")


@dataclass(kw_only=True, slots=True, frozen=True)
class _Verdict:
    """The number of tests that passed, and why the first that did not."""

    num_passed: int
    failure: str = ""
    is_weak: bool = False
    details: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(kw_only=True, slots=True)
class CodeGrader:
    """A `Grader` of Python programs, from any thread.

    `sandbox`: who runs them (`rllm.sandbox`); one that is not there is a ConfigError. `timeout_s` is the
    processor time of one run with input, or of all calls of a problem; twice as long may pass on the clock,
    because machines are busy. `problem_timeout_s` is for all runs. `packages` are distributions installed
    here that all programs may import, beside those that a row names in its own `packages`; one that is not
    installed is a ConfigError, or the row's mistake. `score`: 1 when `all` tests pass and else
    0, or the `share` that passes. `weak`: `refuse` raises RewardError for tests that can only run in the
    program's own process.
    """

    sandbox: str = "bubblewrap"
    timeout_s: float = 10.0
    problem_timeout_s: float = 120.0
    memory_mb: int = 512
    score: str = "all"
    weak: str = "accept"
    packages: Sequence[str] = ()
    name: str = field(default="code", init=False)
    task_fields: tuple[str, ...] = field(
        default=(
            "function|stdin_tests|asserts|entry_point|test_list|input_output|public_test_cases|"
            "private_test_cases|official_tests|public_tests|tests|ground_truth|test",
        ),
        init=False,
    )
    _runner: CodeRunner = field(init=False, repr=False)
    _examiner: Examiner = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for option, allowed_values in (("score", SCORES), ("weak", WEAK)):
            if (value := getattr(self, option)) not in allowed_values:
                raise ConfigError(f"`{option}` is {value!r}; {choices_of(value, allowed_values)}.")
        limits = Limits(
            wall_s=2.0 * self.timeout_s, cpu_s=self.timeout_s, memory_mb=self.memory_mb, output_kb=8192
        )
        self.packages = package_names(self.packages)
        interpreter(packages=self.packages)  # says what is not installed before anything is graded
        python = shared_runner(self.sandbox)
        self._runner = CodeRunner(python=python, limits=limits)
        self._examiner = Examiner(python=python, limits=limits)

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a task that cannot be read and SandboxError where the sandbox fails."""
        require_answer(answer, self.name)
        problem = problem_of(task)
        program = program_of(answer, problem)
        if isinstance(program, NoProgram):
            return wrong(program.reason, format=problem.format)
        num_tests = len(problem.tests.calls) or len(problem.tests.runs) or 1
        verdict = self._verdict(program.source, problem, self._runner_for(problem))
        is_correct = verdict.num_passed == num_tests and not verdict.failure
        share = verdict.num_passed / num_tests
        return Grade(
            score=share if self.score == "share" else float(is_correct),
            is_correct=is_correct,
            extracted=program.source,
            reason=verdict.failure or f"passed {num_tests} test{'s' * (num_tests > 1)}",
            metadata={
                "format": problem.format,
                "rule": program.rule,
                "score": self.score,
                "passed": verdict.num_passed,
                "tests": num_tests,
                "weak": verdict.is_weak,
                "sandbox": self.sandbox,
                **verdict.details,
            },
        )

    def close(self) -> None:
        """Nothing of its own: the sandbox's warm processes are shared and end with this process."""

    def _runner_for(self, problem: CodeProblem) -> CodeRunner:
        packages = package_names([*self.packages, *problem.packages])
        try:
            interpreter(packages=packages)
        except ConfigError as error:
            raise RewardError(f"The task's `packages` cannot be had: {error}") from error
        return replace(self._runner, packages=packages)

    def _verdict(self, program: str, problem: CodeProblem, runner: CodeRunner) -> _Verdict:
        tests = problem.tests
        if tests.exam is not None:
            return self._by_exam(program, problem, tests.exam, runner)
        if tests.calls:
            return self._by_calls(program, problem, tests.calls, runner)
        return self._by_runs(program, problem, tests.runs, runner)

    def _by_calls(
        self, program: str, problem: CodeProblem, calls: tuple[CallCheck, ...], runner: CodeRunner
    ) -> _Verdict:
        call_nodes = [each.call for each in calls]
        outcome = runner.make_calls(program, call_nodes, has_prelude=problem.has_prelude)
        if outcome.never_ran:
            return _Verdict(num_passed=0, failure=outcome.never_ran)
        num_passed, failure, details = 0, "", dict[str, Any]()
        for number, call in enumerate(calls):
            reason = self._call_failure(call, outcome, number)
            num_passed += not reason
            if reason and not failure:
                failure = f"test {number + 1} of {len(calls)}, {call.display_text}: {reason}"
                details = _first_failure(call, outcome, number)
        return _Verdict(num_passed=num_passed, failure=failure, details=details)

    def _call_failure(self, call: CallCheck, outcome: RunOutcome, number: int) -> str:
        """The reason that a call is not what was expected; empty where it is."""
        if number >= len(outcome.results):
            return outcome.end_reason
        result = outcome.results[number]
        if "e" in result:
            return f"raised {result['e'][0]}: {result['e'][1]}"[:300]
        if "o" in result:
            return f"gave no plain value ({result['o']})"[:300]
        try:
            is_right = _is_right(call, result["v"])
        except MalformedError as error:
            return str(error)
        return "" if is_right else f"gave {display_text(result['v'])}"

    def _by_runs(
        self, program: str, problem: CodeProblem, runs: tuple[AssertRun, ...], runner: CodeRunner
    ) -> _Verdict:
        deadline = time.monotonic() + self.problem_timeout_s
        num_passed, failure, details = 0, "", dict[str, Any]()
        for number, run in enumerate(runs):
            reason = self._run_failure(program, problem, run, runner, deadline)
            num_passed += not reason
            if reason and not failure:
                failure = f"test {number + 1} of {len(runs)}: {reason}"
                details = {"first_failure": {"stdin": run.stdin[:2000], "expected": run.stdout[:2000]}}
                # One failure settles this score, so the time of the remaining runs is saved.
                if self.score == "all":
                    break
        return _Verdict(num_passed=num_passed, failure=failure, details=details)

    def _run_failure(
        self, program: str, problem: CodeProblem, run: AssertRun, runner: CodeRunner, deadline: float
    ) -> str:
        if time.monotonic() > deadline:
            return f"all runs together took longer than {self.problem_timeout_s:g} s"
        result = runner.run_with_input(program, run.stdin, has_prelude=problem.has_prelude)
        if result.status is not Status.OK:
            return runner.why(result)
        if same_output(result.stdout, run.stdout):
            return ""
        if problem.tests.checker and runner.passes_checker(problem.tests.checker, run, result.stdout):
            return ""
        return f"wrote {result.stdout[:200]!r}"

    def _by_exam(self, program: str, problem: CodeProblem, exam: AssertExam, runner: CodeRunner) -> _Verdict:
        first = self._examiner.first_calls(exam, runner.packages)
        if first is None:
            return self._by_trust(program, problem, exam, runner)
        result = self._examiner.examine(exam, program, first, runner, has_prelude=problem.has_prelude)
        if result.failure and runner.packages and self.weak == "accept":
            # They may have looked for an array or a table of a package, which no plain value is.
            return self._by_trust(program, problem, exam, runner)
        if result.is_weak:
            self._require_weak()
        return _Verdict(num_passed=int(not result.failure), failure=result.failure, is_weak=result.is_weak)

    def _require_weak(self) -> None:
        if self.weak == "refuse":
            raise RewardError(
                "The task's tests need more than plain values, so part of them runs in the program's own "
                'process, where it could fake their result; grade it with `weak="accept"` or leave it out.'
            )

    def _by_trust(self, program: str, problem: CodeProblem, exam: AssertExam, runner: CodeRunner) -> _Verdict:
        """The tests in the program's own process: they end with a word that the program was not told."""
        self._require_weak()
        nonce = secrets.token_hex(16)
        call = {
            "do": "weak",
            "setup": exam.setup,
            "test": exam.test,
            "names": list(exam.names),
            "entry": exam.entry,
            "check": exam.has_check,
            "nonce": nonce,
        }
        whole = CallCheck(call=call, expected=(as_node(nonce),), display_text="the tests as a whole")
        outcome = runner.make_calls(program, [call], has_prelude=problem.has_prelude)
        failure = outcome.never_ran or self._call_failure(whole, outcome, 0)
        return _Verdict(num_passed=int(not failure), failure=failure, is_weak=True)


def _is_right(call: CallCheck, node: Any) -> bool:
    if call.truth is not None:
        return truth_of(node) is call.truth
    if call.is_identity:
        return any(node is each for each in call.expected)  # parsed JSON: None, True and False are one each
    return any(
        same(node, each, tuples_are_lists=call.tuples_are_lists, tolerance=call.tolerance)
        for each in call.expected
    )


def _first_failure(call: CallCheck, outcome: RunOutcome, number: int) -> dict[str, Any]:
    """For people and for environments that give feedback: what was called, what came, what was wanted."""
    result = outcome.results[number] if number < len(outcome.results) else {}
    details: dict[str, Any] = {"test": call.display_text}
    if "v" in result:
        details["got"] = display_text(result["v"])
    details["expected"] = display_text(call.expected[0]) if call.expected else str(call.truth)
    return {"first_failure": details}
