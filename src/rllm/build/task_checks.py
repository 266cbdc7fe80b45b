"""Tasks in, whether each can be solved and not cheated out.

DIR|FILE ──┬─► each row ──► rllm.rewards.swe_tampering ──────────────────────────────┬─► held or broken
           └─► each task directory ──► rllm.environments.task_directory_checks ──────┘
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from rllm.data.swe_rows import SWETask, read_swe_rows, swe_splits
from rllm.data.task_directory import is_task_collection, task_directories
from rllm.environments.task_directory_checks import examine_task_directory
from rllm.errors import ConfigError, SandboxError
from rllm.rewards.attacks import Finding
from rllm.rewards.swe_tampering import examine_task
from rllm.rewards.swe_world import SWEWorld
from rllm.sandbox.types import Limits


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskReport:
    """Findings on some tasks, and the reasons of those that could not be made."""

    by_task: dict[str, list[Finding]] = field(default_factory=dict[str, list[Finding]])
    not_made: dict[str, str] = field(default_factory=dict[str, str])

    def broken_findings(self, task: str) -> list[Finding]:
        return [each for each in self.by_task[task] if each.verdict == "broken"]

    @property
    def broken_tasks(self) -> list[str]:
        return sorted({*self.not_made, *(name for name in self.by_task if self.broken_findings(name))})


def check_tasks(
    path: Path,
    *,
    backend: str,
    timeout_s: float,
    tampering: bool,
    max_tasks: int | None,
    on_task: Callable[[str], None],
) -> TaskReport:
    """Examine the first `max_tasks` in `path`; `on_task` hears the name of each before it is looked at."""
    report = TaskReport()
    for name, examine in islice(_examinations(path, backend, timeout_s, tampering), max_tasks):
        on_task(name)
        try:
            report.by_task[name] = examine()
        except (ConfigError, SandboxError) as error:
            report.not_made[name] = str(error)
    return report


def _examinations(
    path: Path, backend: str, timeout_s: float, tampering: bool
) -> Iterator[tuple[str, Callable[[], list[Finding]]]]:
    """(task, what makes its findings), in order."""
    if is_task_collection(path):
        options = {"backend": backend, "timeout_s": timeout_s, "tampering": tampering}
        for folder in task_directories(path):
            yield folder.name, partial(examine_task_directory, folder, **options)
        return
    parts = dict.fromkeys(swe_splits(path).values()) or {path: None}
    for task in [SWETask.from_row(row) for part in parts for row in read_swe_rows(part)]:
        yield task.instance_id, partial(_row_findings, task, backend, timeout_s, tampering)


def _row_findings(task: SWETask, backend: str, timeout_s: float, tampering: bool) -> list[Finding]:
    limits = Limits(
        wall_s=timeout_s, cpu_s=timeout_s, memory_mb=2048, disk_mb=1024, output_kb=4096, processes=256
    )
    world = SWEWorld.of(task, backend=backend, limits=limits)
    return examine_task(world, None if tampering else (), timeout_s=timeout_s)
