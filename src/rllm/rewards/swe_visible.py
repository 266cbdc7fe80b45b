"""A patch against the tests that its author could see: the repository's, and those that it brings along.

    patch ──► a fresh world with the repository ──► pytest over what is there ──► VisibleTests

Nothing hidden is there, and nothing is paid by it: it only says which of several patches looks best. What the
patch changes of tests and their configuration holds, so one may deceive it; who is paid is judged elsewhere.
"""

import re
import shlex
from dataclasses import dataclass, replace
from typing import Final

from rllm.data.swe_repository import PLACE
from rllm.rewards.swe_grading import pytest_words
from rllm.rewards.swe_world import GIT, SWEWorld
from rllm.sandbox.types import Status

_REPORT, _PATCH = "/tmp/visible.xml", "/tmp/model.patch"
_MOST_REPORT_BYTES: Final = 32 << 20
_COUNTS = re.compile(r"<testsuite\b[^>]*>")
_NUMBER = re.compile(r'\b(errors|failures|skipped|tests)="(\d+)"')


@dataclass(kw_only=True, slots=True, frozen=True)
class VisibleTests:
    """The end of a run of visible tests."""

    passed: int = 0
    failed: int = 0
    """Errors included."""
    fault: str = ""
    """The reason that there are no counts: the patch does not apply, or the run did not come to its end."""

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Higher is better: a run that came to its end, fewer failures, more tests that pass."""
        return not self.fault, -self.failed, self.passed


def run_visible_tests(world: SWEWorld, patch: str, *, timeout_s: float = 300.0) -> VisibleTests:
    """Run them on a patch, which may be empty. Raises SandboxError where the sandbox fails."""
    limits = replace(world.limits, wall_s=timeout_s, cpu_s=timeout_s, output_kb=16_384)
    with world.open() as sandbox:
        if patch.strip():
            sandbox.write(_PATCH, patch.encode("utf-8", "surrogateescape"))
            applied = sandbox.exec(["git", "apply", "--whitespace=nowarn", _PATCH], cwd=PLACE, env=GIT)
            if applied.status is not Status.OK:
                return VisibleTests(fault="the patch does not apply")
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={_REPORT}"]
        words = [world.environment.python, "-m", "pytest", *pytest_words(world.task), *options]
        ran = sandbox.exec(shlex.join(words), cwd=PLACE, env=world.variables, limits=limits)
        try:
            report = sandbox.read(_REPORT, most_bytes=_MOST_REPORT_BYTES).decode("utf-8", "replace")
        except OSError:
            return VisibleTests(fault=f"the tests did not run to their end ({ran.status})")
    head = _COUNTS.search(report)
    counts = dict.fromkeys(("errors", "failures", "skipped", "tests"), 0)
    counts |= {name: int(value) for name, value in _NUMBER.findall(head[0] if head else "")}
    failed = counts["errors"] + counts["failures"]
    return VisibleTests(passed=counts["tests"] - failed - counts["skipped"], failed=failed)
