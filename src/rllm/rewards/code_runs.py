"""A model's program in the sandbox: called, or run with input; and what came of that in words.

make_calls(program, calls)      ──► RunOutcome(results, how it ended)
run_with_input(program, stdin)  ──► ExecResult
"""

import base64
import functools
import json
import marshal
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from rllm.errors import RewardError
from rllm.rewards.code_asserts import AssertRun
from rllm.rewards.code_values import MalformedError, results_of
from rllm.sandbox.python_runner import PythonRunner
from rllm.sandbox.types import ExecResult, Limits, Status

PRELUDE = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
sys.setrecursionlimit(50_000)
"""
"""The imports of contests' harnesses before the program: answers there count on them."""
MIN_CHECKED = 1.0
"""The output of a checker for a right output."""
_IN_MAIN = """\
_names = {"__name__": "__main__", "__builtins__": __builtins__}
exec(compile(%r, "<prelude>", "exec"), _names)
exec(compile(%r, "<solution>", "exec", dont_inherit=True), _names)
"""
_TEXTS = {"driver": ("wire", "driver"), "examiner": ("wire", "stand_ins", "examiner")}
"""The texts that a program is made of, in this order."""
_APART = """\
import base64, marshal
exec(
    %s,
    {"__name__": "<%s>", "__builtins__": dict(vars(__import__("builtins"))), "JOB": %r},
)
"""


def script(name: str, call: str, job: Mapping[str, Any], version: str) -> str:
    """The source of a program of `rllm.rewards.programs`, with what it is to do, and builtins of its own.

    `version` of the Python that will run it: where it is ours, it is not compiled each time anew.
    """
    is_ours = version.split(".")[:2] == [str(each) for each in sys.version_info[:2]]
    return _APART % (_loader(name, call, is_ours), name, json.dumps(job))


@functools.cache
def _loader(name: str, call: str, is_compiled: bool) -> str:
    folder = resources.files("rllm.rewards.programs")
    text = "\n".join((folder / f"{each}.py").read_text(encoding="utf-8") for each in _TEXTS[name])
    text = re.sub(r"^from rllm[^\n]*$", "", text, flags=re.MULTILINE)  # it stands above in one text
    text = f"{text}\n{call}(JOB)\n"
    if not is_compiled:
        return f"compile({text!r}, '<{name}>', 'exec')"
    code = marshal.dumps(compile(text, f"<{name}>", "exec", dont_inherit=True))
    return f"marshal.loads(base64.b64decode({base64.b64encode(code)!r}))"


@dataclass(kw_only=True, slots=True, frozen=True)
class RunOutcome:
    """The results of a program's calls."""

    results: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The results of the first calls, in order, up to the last that came back."""
    end_reason: str = ""
    """The reason that there are no more, in words about the program."""
    never_ran: str = ""
    """The reason that no call was made at all, where none was."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CodeRunner:
    """Runs programs of models. Raises SandboxError where the sandbox fails, never for a program's faults."""

    python: PythonRunner
    limits: Limits
    packages: tuple[str, ...] = ()
    """The packages that programs can import beside the standard library."""

    def make_calls(
        self, program: str, calls: Sequence[Mapping[str, Any]], *, has_prelude: bool
    ) -> RunOutcome:
        """All calls in one process, in order."""
        job = {"program": program, "prelude": PRELUDE if has_prelude else "", "calls": list(calls)}
        source = script("driver", "run", job, self.python.version)
        result = self.python.run(source, limits=self.limits, wants_result=True, packages=self.packages)
        end_reason = self.why(result)
        try:
            load_error, results = results_of(result.result, len(calls))
        except MalformedError as error:
            return RunOutcome(never_ran=str(error))
        if load_error is not None:
            name, message = load_error.get("e", ("something", "", []))[:2]
            return RunOutcome(never_ran=f"the program does not load: {name}: {message}"[:400])
        if not results:
            return RunOutcome(
                end_reason=end_reason, never_ran=f"before its first test was done, {end_reason}"
            )
        return RunOutcome(results=results, end_reason=end_reason)

    def run_with_input(self, program: str, stdin: str, *, has_prelude: bool) -> ExecResult:
        """The program as a script."""
        source = _IN_MAIN % (PRELUDE, program) if has_prelude else program
        return self.python.run(source, stdin=stdin, limits=self.limits, packages=self.packages)

    def why(self, result: ExecResult) -> str:
        """The end of a program, in words about it."""
        limits = self.limits
        match result.status:
            case Status.OK:
                return "the program ended by itself"
            case Status.TIMEOUT:
                return f"the program took longer than {limits.cpu_s:g} s"
            case Status.OUT_OF_MEMORY:
                return f"the program needed more than {limits.memory_mb} MB"
            case Status.OUTPUT_LIMIT:
                return f"the program wrote more than {limits.output_kb} KB"
            case Status.ERROR:
                last = result.stderr.strip().splitlines()[-1:] or [""]
                return f"the program ended with exit code {result.exit_code}. {last[0][:300]}".strip()
            case _:
                return f"the program ended as {result.status}, exit code {result.exit_code}"

    def passes_checker(self, checker: str, run: AssertRun, stdout: str) -> bool:
        """The verdict of the task's own judge on an output. It runs in a sandbox too, without the program.

        Raises RewardError for a checker that fails on the right output as well.
        """
        verdict = self._checker_verdict(checker, run, stdout)
        if verdict is None and self._checker_verdict(checker, run, run.stdout) is None:
            raise RewardError("The task's `generated_checker` fails on the right output too.")
        return verdict is True

    def _checker_verdict(self, checker: str, run: AssertRun, stdout: str) -> bool | None:
        names: tuple[str, ...] = ("input.txt", "correct_output.txt", "solution_output.txt")
        source = f"import sys\nsys.argv = ['checker.py', *{names!r}]\n" + _IN_MAIN % ("", checker)
        files: dict[str, str] = dict(zip(names, (run.stdin, run.stdout, stdout), strict=True))
        result = self.python.run(source, files=files, limits=self.limits, packages=self.packages)
        words = result.stdout.split()
        if result.status is not Status.OK or not words:
            return None
        try:
            return float(words[-1]) >= MIN_CHECKED
        except ValueError:
            return None
