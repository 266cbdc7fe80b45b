"""A project's tests, run in a sandbox: many jobs one after the other, each with files of its own.

Job(files, tests) ──► TestBench ──► sandbox: inside/run_tests.py ──► JobResult
                          └── the sandbox is one for many jobs, and replaced where a job ends it
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Self

from rllm.data.swe_environment import Environment
from rllm.data.swe_factory.project import Project
from rllm.errors import SandboxError
from rllm.sandbox.archive import pack_links_and_all
from rllm.sandbox.backends import open_sandbox
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import Limits, Root, Snapshot

TESTBED, WORK = "/testbed", "/work"
WALL_FACTOR = 12.0
"""The factor by which a run may take longer by the clock than its seconds of processor time, for all that it
waits for but a processor."""
BUSY_FACTOR = 50.0
"""The same for all runs of a sandbox, which do wait for processors on a busy machine."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BenchLimits:
    """Limits of one run of tests."""

    cpu_s: float = 120.0
    """Seconds of processor time of a run of all tests without a bug."""
    memory_mb: int = 1024
    disk_mb: int = 512


@dataclass(kw_only=True, slots=True, frozen=True)
class BenchJob:
    """One run of tests on changed files."""

    name: str
    files: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """Path -> its text in this run; None for a file that is not there."""
    tests: tuple[str, ...] | None = None
    """Ids; None for all."""
    trace: str = ""
    """`lines` of the sources that each test runs, or its `calls` into them."""
    reverse: bool = False
    """The last test first."""
    cpu_s: float
    memory_mb: int

    @property
    def wall_s(self) -> float:
        return self.cpu_s * WALL_FACTOR + 10


@dataclass(kw_only=True, slots=True, frozen=True)
class JobResult:
    """The results of a job's tests."""

    name: str
    why: str = ""
    """The reason that there are no outcomes: `timeout`, `out_of_memory`, `crashed`, `runner_failed`."""
    line: str = ""
    outcomes: dict[str, str] = field(default_factory=dict[str, str])
    """Test -> `passed`, `failed` or `skipped`."""
    failures: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Test -> how it failed: kind, where (source, test, elsewhere), line, comparison."""
    errors: dict[str, str] = field(default_factory=dict[str, str])
    """Files that could not be collected -> the last line of why."""
    random: list[str] = field(default_factory=list[str])
    """Tests that draw their own inputs (Hypothesis)."""
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict[str, dict[str, list[int]]])
    """Test -> source -> lines that it ran."""
    calls: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, list[dict[str, Any]]])
    """Test -> calls of the sources from outside, in order."""
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])

    def passing(self) -> set[str]:
        return {name for name, status in self.outcomes.items() if status == "passed"}


class TestBench:
    """One sandbox with the project in it. One call at a time."""

    __test__ = False  # of no test runner's concern, whatever it is called

    def __init__(
        self, tree: Path, project: Project, environment: Environment, backend: str, limits: BenchLimits
    ) -> None:
        self._tree, self._project, self._environment = tree, project, environment
        self._backend, self._limits = backend, limits
        self._sandbox: Sandbox | None = None
        self._is_closed = False

    def run(self, jobs: Sequence[BenchJob]) -> list[JobResult]:
        """The results, in the order of the jobs.

        A job that ends the sandbox has `crashed`; the rest goes on in a new one. Raises SandboxError where
        the sandbox fails before any job.
        """
        results: list[JobResult] = []
        waiting = list(jobs)
        while waiting:
            done, why = self._run(waiting)
            results += done
            waiting = waiting[len(done) :]
            if waiting:
                self._end_sandbox()
                if why is None:
                    raise SandboxError(f"The tests of {self._project.name} did not start: no job was begun.")
                results.append(JobResult(name=waiting[0].name, why="crashed", line=why))
                waiting = waiting[1:]
        return results

    def _run(self, jobs: Sequence[BenchJob]) -> tuple[list[JobResult], str | None]:
        """Run the jobs. Returns their results, and the error of the program that ran them."""
        sandbox = self._sandbox = self._sandbox or self._open_sandbox()
        if self._is_closed:
            self._end_sandbox()
            raise SandboxError("The tests' sandbox was closed.")
        job_s = sum(each.wall_s for each in jobs) + 60
        limits = Limits(
            wall_s=job_s * BUSY_FACTOR,
            cpu_s=job_s * 2,
            memory_mb=self._limits.memory_mb * 2,
            disk_mb=self._limits.disk_mb,
            output_kb=256,
            processes=128,
        )
        plan = {
            "root": TESTBED,
            "folder": WORK,
            "paths": self._project.paths,
            "sources": self._project.sources,
            "test_files": self._project.test_files,
            "options": self._project.options,
            "jobs": [{**asdict(each), "wall_s": each.wall_s} for each in jobs],
        }
        sandbox.write(f"{WORK}/plan.json", json.dumps(plan))
        sandbox.write(f"{WORK}/results.jsonl", "")
        variables = {
            "PYTHONPATH": self._environment.site,
            "PYTHONHASHSEED": "0",
            "PYTHONUTF8": "1",
            "HOME": f"{WORK}/home",
        }
        command = [self._environment.python, "-S", f"{WORK}/run_tests.py", f"{WORK}/plan.json"]
        result = sandbox.exec(command, env=variables, cwd=TESTBED, limits=limits)
        lines = sandbox.read(f"{WORK}/results.jsonl").decode("utf-8", "replace").split("\n")
        # What follows the last line end was cut off by a crash.
        results = [JobResult(**json.loads(each)) for each in lines[:-1]]
        if len(results) < len(jobs) and not results and result.status == "error":
            last = (result.stderr.strip().split("\n") or [""])[-1]
            raise SandboxError(f"The tests of {self._project.name} could not be started: {last:.400}")
        return results, f"{result.status}: {result.stderr[-300:]}"

    def _open_sandbox(self) -> Sandbox:
        sandbox = open_sandbox(
            self._backend,
            limits=Limits(
                wall_s=600, cpu_s=600, memory_mb=self._limits.memory_mb, disk_mb=self._limits.disk_mb
            ),
            root=Root(folders=(TESTBED, WORK, f"{WORK}/home"), layers=(str(self._environment.layer),)),
            packages=self._environment.packages,
        )
        try:
            sandbox.restore(Snapshot(tar=pack_links_and_all(self._tree, TESTBED), base="/"))
            code = resources.files("rllm.data.swe_factory.inside") / "run_tests.py"
            sandbox.write(f"{WORK}/run_tests.py", code.read_text(encoding="utf-8"))
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def close(self) -> None:
        """End what is running, also from another thread; nothing is begun any more."""
        self._is_closed = True
        self._end_sandbox()

    def _end_sandbox(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
