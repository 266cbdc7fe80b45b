"""A project as it is: which of its tests can be relied on, and which lines each of them runs.

tests in order, traced ──┐
                         ├─► passed both times ──► Baseline: tests, covering, seconds
tests in reverse order ──┘        else: failing, flaky, skipped, random, not importable: counted
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rllm.data.swe_factory.bench import BenchJob, BenchLimits, JobResult
from rllm.errors import ConfigError

TRACE_FACTOR = 10.0
"""The factor by which a traced run may take longer than one without a trace."""

_COUNTED = {"passed": "passing", "failed": "failing", "skipped": "skipped"}


@dataclass(kw_only=True, slots=True, frozen=True)
class Baseline:
    """The findings of the two runs."""

    tests: tuple[str, ...]
    """Passed in both, in the order of their ids."""
    covering: dict[str, dict[int, list[int]]]
    """Source -> line -> places in `tests` of those that run it."""
    cpu_s: dict[str, float]
    """Test -> seconds of processor time."""
    counts: dict[str, int]
    """The numbers of tests that are passing, failing, flaky, skipped, random; and of files that do not
    import."""
    errors: dict[str, str] = field(default_factory=dict[str, str])
    """Test file that does not import -> why."""

    def tests_of(self, path: str, lines: range) -> set[str]:
        """Those that run any of these lines."""
        by_line = self.covering.get(path, {})
        return {self.tests[place] for line in lines for place in by_line.get(line, ())}

    def num_lines(self) -> dict[str, int]:
        """Test -> lines of the sources that it runs: what it costs, as far as that is the same every time."""
        counts = Counter(
            place for lines in self.covering.values() for places in lines.values() for place in places
        )
        return {name: counts[place] for place, name in enumerate(self.tests)}

    def seconds_of(self, tests: set[str]) -> float:
        return sum(self.cpu_s.get(each, 0.0) for each in tests)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Baseline":
        covering = {
            path: {int(line): places for line, places in by_line.items()}
            for path, by_line in value["covering"].items()
        }
        return cls(**{**value, "tests": tuple(value["tests"]), "covering": covering})


def baseline_jobs(limits: BenchLimits) -> tuple[BenchJob, BenchJob]:
    """Two runs of all tests; each belongs into a sandbox of its own."""
    with_trace = BenchJob(
        name="traced", trace="lines", cpu_s=limits.cpu_s * TRACE_FACTOR, memory_mb=limits.memory_mb
    )
    reverse = BenchJob(name="reverse", reverse=True, cpu_s=limits.cpu_s, memory_mb=limits.memory_mb)
    return with_trace, reverse


def baseline_of(with_trace: JobResult, reverse: JobResult, *, project: str, limits: BenchLimits) -> Baseline:
    """Raises ConfigError where a run did not end, or no test passes in both."""
    for result in (with_trace, reverse):
        if result.why:
            raise ConfigError(_refusal(result, project, limits))
    random = {*with_trace.random, *reverse.random}
    counts: Counter[str] = Counter()
    test_names: list[str] = []
    for name in sorted(with_trace.outcomes.keys() | reverse.outcomes.keys()):
        statuses = (with_trace.outcomes.get(name, "missing"), reverse.outcomes.get(name, "missing"))
        if statuses[0] != statuses[1]:
            counts["flaky"] += 1
        elif statuses[0] == "passed" and name in random:
            counts["random"] += 1
        else:
            counts[_COUNTED[statuses[0]]] += 1
            if statuses[0] == "passed":
                test_names.append(name)
    errors = {**with_trace.errors, **reverse.errors}
    counts["files_not_importable"] = len(errors)
    if not test_names:
        raise ConfigError(_nothing_passes(counts, errors, with_trace, project))
    covering: dict[str, dict[int, list[int]]] = {}
    for place, name in enumerate(test_names):
        for path, lines in with_trace.lines.get(name, {}).items():
            for line in lines:
                covering.setdefault(path, {}).setdefault(line, []).append(place)
    return Baseline(
        tests=tuple(test_names),
        covering=covering,
        # Of the run without a trace, because a trace makes tests many times slower.
        cpu_s={name: reverse.cpu_s.get(name, 0.0) for name in test_names},
        counts=dict(sorted(counts.items())),
        errors=errors,
    )


def _refusal(result: JobResult, project: str, limits: BenchLimits) -> str:
    if result.why == "timeout":
        return (
            f"The tests of {project} were not done after {limits.cpu_s:g} s of processor time; allow them "
            "more with --cpu-s, or leave slow tests out of the project that you give."
        )
    if result.why in ("out_of_memory", "crashed"):
        return (
            f"The tests of {project} ended early ({result.why}: {result.line or 'no message'}); they had "
            f"{limits.memory_mb} MiB, allow them more with --memory-mb."
        )
    return f"The tests of {project} cannot be run: {result.line}"


def _nothing_passes(counts: Counter[str], errors: dict[str, str], run: JobResult, project: str) -> str:
    summary = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in sorted(counts.items()) if count
    )
    reason = next(iter(errors.items()), None)
    if reason is None and run.failures:
        name, failure = next(iter(run.failures.items()))
        reason = (name, str(failure["line"]))
    why = f" First: {reason[0]}: {reason[1]:.300}" if reason else ""
    return (
        f"{project} has no test that passes twice ({summary or 'none was collected'}), so nothing could say "
        f"that a bug is mended.{why} What tests import beside the project is added with --with."
    )
