"""A patch against the tests that its author could see: the repository's, and those that it brings along.

    patch ──► a fresh world with the repository ──► the row's runner over what is there ──► VisibleTests

Nothing hidden is there, and nothing is paid by it: it only says which of several patches looks best. What the
patch changes of tests and their configuration holds, so one may deceive it; who is paid is judged elsewhere.
"""

from dataclasses import dataclass

from rllm.rewards.swe_grading import run_tests
from rllm.rewards.swe_world import SWEWorld
from rllm.rewards.swebench import CaseStatus


@dataclass(kw_only=True, slots=True, frozen=True)
class VisibleTests:
    """The end of a run of visible tests."""

    num_passed: int = 0
    num_failed: int = 0
    """Errors included."""
    fault: str = ""
    """The reason that there are no counts: the patch does not apply, or the run did not come to its end."""

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Higher is better: a run that came to its end, fewer failures, more tests that pass."""
        return not self.fault, -self.num_failed, self.num_passed


def run_visible_tests(world: SWEWorld, patch: str, *, timeout_s: float = 300.0) -> VisibleTests:
    """Run them on a patch, which may be empty. Raises SandboxError where the sandbox fails."""
    test_run = run_tests(world, patch, timeout_s=timeout_s, with_hidden=False)
    if test_run.fault:
        return VisibleTests(fault=test_run.fault)
    num_passed = sum(test_run.counts.get(each, 0) for each in (CaseStatus.PASSED, CaseStatus.XFAIL))
    num_failed = sum(test_run.counts.get(each, 0) for each in (CaseStatus.FAILED, CaseStatus.ERROR))
    return VisibleTests(num_passed=num_passed, num_failed=num_failed)
