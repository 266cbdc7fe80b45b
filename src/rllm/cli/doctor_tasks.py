"""`rllm doctor tasks`: tasks in, whether each can be solved and not cheated out."""

from dataclasses import asdict
from pathlib import Path

import click
from rich.text import Text

from rllm.build.task_checks import TaskReport, check_tasks
from rllm.cli.command import WordChoice, example, json_option, print_json
from rllm.cli.terminal import err, out, print_next, table

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
    report = check_tasks(
        path,
        backend=backend,
        timeout_s=timeout_s,
        tampering=tampering,
        max_tasks=max_tasks,
        on_task=lambda name: err().print(f"{name} …", style="dim", markup=False, soft_wrap=True),
    )
    if as_json:
        tasks = {name: [asdict(each) for each in findings] for name, findings in report.by_task.items()}
        broken_tasks = report.broken_tasks
        print_json(
            {"tasks": tasks, "not_made": report.not_made, "broken": broken_tasks, "sound": not broken_tasks}
        )
    else:
        _print_tasks(path, report)
    if report.broken_tasks:
        ctx.exit(1)


def _print_tasks(path: Path, report: TaskReport) -> None:
    console = out()
    tasks_table = table("task", "", "what", "reason", prose=("reason",))
    for name, findings in report.by_task.items():
        broken_findings = report.broken_findings(name)
        if not broken_findings:
            tasks_table.add_row(name, Text("held", style=_STYLES["held"]), f"{len(findings)} checks", "")
        for each in broken_findings:
            reason = each.reason.replace("\n", " ")[:_SHOWN_CHARS]
            tasks_table.add_row(name, Text("broken", style=_STYLES["broken"]), each.name, Text(reason))
    for name, why in report.not_made.items():
        tasks_table.add_row(name, Text("broken", style=_STYLES["broken"]), "cannot be made", Text(why))
    console.print(tasks_table)
    num_tasks, num_broken = len(report.by_task) + len(report.not_made), len(report.broken_tasks)
    if num_broken:
        console.print(f"{num_broken} of {num_tasks} tasks are broken.", style="red")
    else:
        words = ["rllm", "eval", str(path), "--model", "builtin:tiny"]
        print_next(console, [(words, "let a model work on them")])
