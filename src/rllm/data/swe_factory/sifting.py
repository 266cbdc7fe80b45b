"""A candidate becomes a task, or is dropped for one reason.

    candidate ── tests that run its lines ──► none fails: survived
        └── some fail ── all tests, again ──► the same fail, the rest passes ── its calls ──► Verdict

"Twice" is: with the bug its relevant tests and then all tests; without it all tests in order and in reverse.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rllm.data.swe_factory.baseline import TRACE_FACTOR, Baseline
from rllm.data.swe_factory.bench import BenchJob, BenchLimits, JobResult, TestBench
from rllm.data.swe_factory.candidates import Candidate
from rllm.data.swe_factory.operators import changes_meaning
from rllm.data.swe_factory.project import Project
from rllm.data.swe_factory.statement import statement

KEPT = "kept"
REASONS = (
    *("same_meaning", "not_covered", "survived", "not_importable", "timeout", "out_of_memory", "crashed"),
    *("breaks_most", "unsteady", "no_statement"),
)
"""The reasons for which candidates are dropped."""
FEW, MOST_FRACTION = 10, 0.5
"""More failing tests than this fraction of all, where they are more than a few, are no bug but a ruin."""
CPU_FACTOR, CPU_SPARE_S = 5.0, 5.0
"""The factor, and the further seconds, by which tests may take longer with a bug than without it."""
TRACED_TESTS = 4
"""Failing tests whose calls are looked at."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SiftVerdict:
    """The decision about a candidate."""

    key: str
    reason: str
    """`kept`, or one of REASONS."""
    fail_to_pass: tuple[str, ...] = ()
    problem_statement: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "SiftVerdict":
        return cls(**{**value, "fail_to_pass": tuple(value["fail_to_pass"])})


@dataclass(kw_only=True, slots=True, frozen=True)
class Sieve:
    """The measures that candidates of one project are judged by."""

    project: Project
    baseline: Baseline
    texts: Mapping[str, str]
    """Plain sources."""
    test_texts: Mapping[str, str]
    limits: BenchLimits

    def verdicts(self, bench: TestBench, candidates: Sequence[Candidate]) -> list[SiftVerdict]:
        """One for each candidate, in their order."""
        verdicts: dict[str, SiftVerdict] = {}
        waiting: dict[str, tuple[Candidate, set[str]]] = {}
        for each in candidates:
            tests = self._relevant(each)
            if not all(changes_meaning(text, self.texts[path]) for path, text in each.files.items()):
                verdicts[each.key] = SiftVerdict(key=each.key, reason="same_meaning")
            elif not tests:
                verdicts[each.key] = SiftVerdict(key=each.key, reason="not_covered")
            else:
                waiting[each.key] = (each, tests)
        jobs = [self._job(each, tests) for each, tests in waiting.values()]
        failing: dict[str, set[str]] = {}
        for result in bench.run(jobs):
            candidate, tests = waiting[result.name]
            reason, failing[result.name] = self._screen(result, tests)
            if reason:
                verdicts[result.name] = SiftVerdict(key=candidate.key, reason=reason)
        promising = [candidate for key, (candidate, _) in waiting.items() if key not in verdicts]
        for verdict in self._confirm(bench, promising, failing):
            verdicts[verdict.key] = verdict
        return [verdicts[each.key] for each in candidates]

    def _relevant(self, candidate: Candidate) -> set[str]:
        names: set[str] = set()
        for path, lines in candidate.lines.items():
            names |= self.baseline.tests_of(path, lines)
        return names

    def _job(self, candidate: Candidate, tests: set[str]) -> BenchJob:
        return BenchJob(
            name=candidate.key,
            files=dict(candidate.files),
            tests=tuple(sorted(tests)),
            cpu_s=self.baseline.seconds_of(tests) * CPU_FACTOR + CPU_SPARE_S,
            memory_mb=self.limits.memory_mb,
        )

    def _screen(self, result: JobResult, tests: set[str]) -> tuple[str, set[str]]:
        """The reason to drop it, or nothing; and the tests that fail."""
        if result.why:
            return ("not_importable" if result.why == "runner_failed" else result.why), set()
        if any(each["kind"] == "MemoryError" for each in result.failures.values()):
            return "out_of_memory", set()
        if result.errors.keys() - self.baseline.errors.keys() or tests - result.outcomes.keys():
            return "not_importable", set()
        failing = tests - result.passing()
        if not failing:
            return "survived", set()
        if len(failing) > max(FEW, MOST_FRACTION * len(self.baseline.tests)):
            return "breaks_most", set()
        return "", failing

    def _confirm(
        self, bench: TestBench, candidates: Sequence[Candidate], failing: Mapping[str, set[str]]
    ) -> Iterator[SiftVerdict]:
        """All tests once more, and the calls of some of those that fail, with the bug and without."""
        jobs = [job for each in candidates for job in self._confirming_jobs(each, failing[each.key])]
        results = iter(bench.run(jobs))
        for each in candidates:
            yield self._confirmed_one(each, failing[each.key], next(results), next(results), next(results))

    def _confirming_jobs(
        self, candidate: Candidate, failing: set[str]
    ) -> tuple[BenchJob, BenchJob, BenchJob]:
        sample = self._failing_sample(failing)
        trace_job = BenchJob(
            name=f"{candidate.key} calls",
            files=dict(candidate.files),
            tests=sample,
            trace="calls",
            cpu_s=self.baseline.seconds_of(set(sample)) * CPU_FACTOR * TRACE_FACTOR + CPU_SPARE_S,
            memory_mb=self.limits.memory_mb,
        )
        plain = replace(trace_job, name=f"{candidate.key} plain calls", files={})
        return self._job(candidate, set(self.baseline.tests)), trace_job, plain

    def _failing_sample(self, failing: set[str]) -> tuple[str, ...]:
        """Those of the failing tests that run the fewest lines; seconds would differ from build to build."""
        num_lines = self.baseline.num_lines()
        return tuple(sorted(failing, key=lambda each: (num_lines[each], each))[:TRACED_TESTS])

    def _confirmed_one(
        self, candidate: Candidate, failing: set[str], again: JobResult, with_bug: JobResult, plain: JobResult
    ) -> SiftVerdict:
        if again.why or set(self.baseline.tests) - again.passing() != failing:
            return SiftVerdict(key=candidate.key, reason="unsteady")
        text = statement(
            {
                each: with_bug.failures.get(each) or again.failures[each]
                for each in self._failing_sample(failing)
            },
            plain.calls,
            with_bug.calls,
            paths=self.project.paths,
            test_texts=[self.test_texts[each] for each in sorted({_file_of(test) for test in failing})],
        )
        if not text:
            return SiftVerdict(key=candidate.key, reason="no_statement")
        return SiftVerdict(
            key=candidate.key, reason=KEPT, fail_to_pass=tuple(sorted(failing)), problem_statement=text
        )


def _file_of(test: str) -> str:
    return test.partition("::")[0]
