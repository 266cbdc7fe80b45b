"""`rllm doctor grader`: a grader by name in, what it pays to those who cheat out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from rllm.build.graders import AttackReport, TaskInHand, attack_grader, attack_task_tests
from rllm.cli.command import example, json_option, print_json
from rllm.cli.grade import options_of, options_option, read_task, read_text
from rllm.cli.terminal import out, print_next, print_sentence, table
from rllm.errors import ConfigError

_STYLES = {"held": "green", "noted": "yellow", "broken": "bold red"}
SHOWN_CHARS = 80
TASK_DIRECTORY = "task-directory"


@click.command(
    "grader",
    epilog=example(
        "rllm doctor grader math",
        "rllm doctor grader code --option sandbox=unshare",
        "rllm doctor grader task-directory",
        "rllm doctor grader my_file.py:MyGrader --task task.json --oracle right.txt",
    ),
)
@click.argument("name")
@click.option("--task", "task_path", metavar="FILE", help="A task of yours: one JSON object.")
@click.option("--oracle", "oracle_path", metavar="FILE", help="The right answer to it.")
@options_option
@click.option(
    "--limit-s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="For one answer; a grader that takes longer is broken.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    task_path: str | None,
    oracle_path: str | None,
    options: Sequence[str],
    limit_s: float,
    as_json: bool,
) -> None:
    """Attack a grader: does it pay for the right answer, and for nothing else?

    Nothing, noise, claims, the answer in the wrong place, the oracle minus one, unfinished thinking; for code
    programs that exit, fake their output and patch what grades them. `task-directory` is the tests of a task:
    agents tamper with them, on every sandbox backend of this machine. Exit code 1 when an attack is paid, the
    oracle is not, or the grader raises or hangs.
    """
    if name == TASK_DIRECTORY:
        if task_path or oracle_path or options:
            raise ConfigError("`task-directory` is looked at with a task of its own; leave the options out.")
        report = attack_task_tests()
        if as_json:
            print_json(_tests_json(report))
        else:
            _print_tests(report)
        ctx.exit(int(not report.is_sound))
    if (task_path is None) != (oracle_path is None):
        raise ConfigError("--task and --oracle belong together: a task, and the right answer to it.")
    in_hand = None
    if task_path is not None and oracle_path is not None:
        in_hand = TaskInHand(task=read_task(task_path), oracle=read_text(oracle_path))
    report = attack_grader(name, options_of(options), in_hand, limit_s=limit_s)
    if as_json:
        findings = [asdict(each) for each in report.by_target[name]]
        print_json({"grader": name, "sound": report.is_sound, "findings": findings})
    else:
        _print_findings(name, report, name)
        if report.is_sound:
            words = ["rllm", "grade", name, "--task", "task.json", "--answer", "answer.txt"]
            print_next(out(), [(words, "grade one answer")])
    if not report.is_sound:
        ctx.exit(1)


def _tests_json(report: AttackReport) -> dict[str, Any]:
    by_backend = {name: [asdict(each) for each in findings] for name, findings in report.by_target.items()}
    return {
        "grader": TASK_DIRECTORY,
        "user": report.user,
        "sound": report.is_sound,
        "findings": by_backend,
        "not_run": report.not_run,
    }


def _print_tests(report: AttackReport) -> None:
    for backend in report.by_target:
        _print_findings(f"{TASK_DIRECTORY} on {backend} as {report.user}", report, backend)
    for name, why in report.not_run.items():
        print_sentence(out(), f"not run: {name}: {why}", style="yellow")


def _print_findings(title: str, report: AttackReport, target: str) -> None:
    findings = report.by_target[target]
    finding_table = table("answer", "", "score", "reason", right=("score",), prose=("reason",))
    for each in findings:
        score = "–" if each.score is None else f"{each.score:.3g}"
        reason = each.reason.replace("\n", " ")[:SHOWN_CHARS]
        finding_table.add_row(each.name, Text(each.verdict, style=_STYLES[each.verdict]), score, Text(reason))
    console = out()
    console.print(f"\n{title}, {len(findings)} answers", style="bold", soft_wrap=True)
    console.print(finding_table)
    counts = Counter(str(each.verdict) for each in findings)
    if counts["broken"]:
        console.print(f"{counts['broken']} of {len(findings)} went wrong: mend those first.", style="red")
    else:
        console.print(f"{counts['held']} held, {counts['noted']} noted, none broken.")
