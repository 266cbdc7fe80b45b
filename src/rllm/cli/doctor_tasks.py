"""`rllm doctor tasks`: tasks in, whether each can be solved and not cheated out.

DIR|FILE ──┬─► each row ──► rllm.rewards.swe_tampering ──────────────────────────────┬─► held or broken
           └─► each task directory ──► rllm.environments.task_directory_checks ──────┘
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from rllm.cli.command import WordChoice, example, json_option, print_json
from rllm.cli.terminal import err, out, print_next, table
from rllm.errors import ConfigError, SandboxError

if TYPE_CHECKING:
    from rllm.data.swe_rows import SWETask
    from rllm.rewards.attacks import Finding

_STYLES = {"held": "green", "broken": "bold red"}
_SHOWN_CHARS = 100


@click.command(
    "tasks",
    epilog=example(
        "rllm doctor tasks my-tasks                       every tampering on every task",
        "rllm doctor tasks my-tasks --no-tampering        reference and nothing alone",
        "rllm doctor tasks terminal-bench/tasks           task directories, of Harbor's or Terminal-Bench 1",
        "rllm doctor tasks my-tasks --max-tasks 1 --json",
    ),
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--max-tasks", type=click.IntRange(min=1), help="Look at the first of them alone.")
@click.option(
    "--tampering/--no-tampering",
    default=True,
    help="Try to cheat the tests of each task.  [default: on]",
)
@click.option(
    "--backend",
    type=WordChoice(("bubblewrap", "unshare")),
    default="bubblewrap",
    show_default=True,
    help="The sandbox.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="For one run of a task's tests.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    path: Path,
    max_tasks: int | None,
    tampering: bool,
    backend: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Check tasks: the reference passes, nothing fails, and so does every tampering.

    PATH is a file of rows, a directory with a `rows.jsonl`, or one that `rllm dataset build swe` made; or a
    task directory of Harbor's or Terminal-Bench 1, or a directory of such.

    Each task gets worlds of its own. The reference is run twice, which finds tests that are flaky. A task
    that cannot be made is broken, with its reason; the others are looked at all the same. Exit code 1 when a
    task is broken.
    """
    findings_by_task: dict[str, list[Finding]] = {}
    failed: dict[str, str] = {}
    for name, examine in islice(_examinations(path, backend, timeout_s, tampering), max_tasks):
        err().print(f"{name} …", style="dim", markup=False, soft_wrap=True)
        try:
            findings_by_task[name] = examine()
        except (ConfigError, SandboxError) as error:
            failed[name] = str(error)
    broken = sorted({*failed, *(name for name, each in findings_by_task.items() if _is_broken(each))})
    if as_json:
        tasks = {name: [asdict(each) for each in findings] for name, findings in findings_by_task.items()}
        print_json({"tasks": tasks, "not_made": failed, "broken": broken, "sound": not broken})
    else:
        _print_tasks(path, findings_by_task, failed, broken)
    if broken:
        ctx.exit(1)


def _examinations(
    path: Path, backend: str, timeout_s: float, tampering: bool
) -> "Iterator[tuple[str, Callable[[], list[Finding]]]]":
    """(task, what makes its findings), in order."""
    from rllm.data.task_directory import is_task_collection, task_directories

    if is_task_collection(path):
        from rllm.environments.task_directory_checks import examine_task_directory

        options = {"backend": backend, "timeout_s": timeout_s, "tampering": tampering}
        for folder in task_directories(path):
            yield folder.name, partial(examine_task_directory, folder, **options)
        return
    from rllm.data.swe_rows import SWETask, read_swe_rows, swe_splits

    parts = dict.fromkeys(swe_splits(path).values()) or {path: None}
    for task in [SWETask.from_row(row) for part in parts for row in read_swe_rows(part)]:
        yield task.instance_id, partial(_row_findings, task, backend, timeout_s, tampering)


def _row_findings(task: "SWETask", backend: str, timeout_s: float, tampering: bool) -> "list[Finding]":
    from rllm.rewards.swe_tampering import examine_task
    from rllm.rewards.swe_world import SWEWorld
    from rllm.sandbox.types import Limits

    limits = Limits(
        wall_s=timeout_s, cpu_s=timeout_s, memory_mb=2048, disk_mb=1024, output_kb=4096, processes=256
    )
    world = SWEWorld.of(task, backend=backend, limits=limits)
    return examine_task(world, None if tampering else (), timeout_s=timeout_s)


def _is_broken(findings: "list[Finding]") -> bool:
    return any(each.verdict == "broken" for each in findings)


def _print_tasks(
    path: Path, findings_by_task: "dict[str, list[Finding]]", failed: dict[str, str], broken: list[str]
) -> None:
    console = out()
    tasks_table = table("task", "", "what", "reason", prose=("reason",))
    for name, findings in findings_by_task.items():
        broken_findings = [each for each in findings if each.verdict == "broken"]
        if not broken_findings:
            tasks_table.add_row(name, Text("held", style=_STYLES["held"]), f"{len(findings)} checks", "")
        for each in broken_findings:
            reason = each.reason.replace("\n", " ")[:_SHOWN_CHARS]
            tasks_table.add_row(name, Text("broken", style=_STYLES["broken"]), each.name, Text(reason))
    for name, why in failed.items():
        tasks_table.add_row(name, Text("broken", style=_STYLES["broken"]), "cannot be made", Text(why))
    console.print(tasks_table)
    if broken:
        console.print(
            f"{len(broken)} of {len(findings_by_task) + len(failed)} tasks are broken.", style="red"
        )
    else:
        words = ["rllm", "eval", str(path), "--model", "builtin:tiny"]
        print_next(console, [(words, "let a model work on them")])
