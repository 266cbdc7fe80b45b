"""SWE-bench: whether an issue counts as resolved. Pure functions.

    {test id: status} ──FAIL_TO_PASS, PASS_TO_PASS──► full | partial | no

The rules are the published harness's, as of swebench 5: expected-failure counts as passed; a skipped test
keeps a PASS_TO_PASS promise but no FAIL_TO_PASS one; a test that is missing fails; ids that were cut in the
middle of a parameter are matched by prefix where all candidates agree.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class CaseStatus(StrEnum):
    """The result of one test."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"
    ERROR = "ERROR"
    XFAIL = "XFAIL"


class Resolution(StrEnum):
    """The verdict of the tests on a patch."""

    FULL = "full"
    """All that failed passes, and nothing that passed fails."""
    PARTIAL = "partial"
    """Some of what failed passes, and nothing that passed fails."""
    NO = "no"


@dataclass(kw_only=True, slots=True, frozen=True)
class PatchVerdict:
    """Whether an issue is resolved, and which tests say otherwise."""

    resolution: Resolution
    fail_to_pass: float
    """Share of the FAIL_TO_PASS tests that pass; 1 where there are none."""
    pass_to_pass: float
    failing: list[str] = field(default_factory=list[str])


def verdict_of(
    statuses: Mapping[str, CaseStatus],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    *,
    fail_only: bool = False,
) -> PatchVerdict:
    """`fail_only`: of repositories whose logs name failures alone, what is not named as failed has passed."""

    def passes(test: str, may_be_skipped: bool) -> bool:
        status = _status_of(test, statuses)
        if fail_only:
            return status not in (CaseStatus.FAILED, CaseStatus.ERROR)
        return status in (CaseStatus.PASSED, CaseStatus.XFAIL) or (
            may_be_skipped and status is CaseStatus.SKIPPED
        )

    fixes = [passes(test, may_be_skipped=False) for test in fail_to_pass]
    still_passing = [passes(test, may_be_skipped=True) for test in pass_to_pass]
    f2p = sum(fixes) / len(fixes) if fixes else 1.0
    p2p = sum(still_passing) / len(still_passing) if still_passing else 1.0
    resolution = Resolution.NO
    if p2p == 1.0 and f2p > 0.0:
        resolution = Resolution.FULL if f2p == 1.0 else Resolution.PARTIAL
    tests = [*zip(fail_to_pass, fixes, strict=True), *zip(pass_to_pass, still_passing, strict=True)]
    return PatchVerdict(
        resolution=resolution,
        fail_to_pass=f2p,
        pass_to_pass=p2p,
        failing=[test for test, good in tests if not good],
    )


def patch_of(answer: str) -> str | None:
    """The patch that an answer ends with: its last ```diff block, or the answer itself where it is a
    patch."""
    blocks = re.findall(r"```(?:diff|patch)\s*\n(.*?)^```\s*$", answer, re.DOTALL | re.MULTILINE)
    text = blocks[-1] if blocks else answer
    is_patch = re.search(r"^(?:diff --git |--- )", text, re.MULTILINE)
    return text.rstrip("\n") + "\n" if is_patch else None


def _status_of(test: str, statuses: Mapping[str, CaseStatus]) -> CaseStatus | None:
    if test in statuses:
        return statuses[test]
    if test.count("[") <= test.count("]"):
        return None
    candidates = {status for name, status in statuses.items() if name.startswith(test)}
    return candidates.pop() if len(candidates) == 1 else None
