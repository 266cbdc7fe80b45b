"""`rllm doctor grader`: a grader by name in, what it pays to those who cheat out.

NAME ──► a sample task and its oracle ──► rllm.rewards.attacks ──► held, noted or broken
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.text import Text

from rllm.cli.command import example, json_option, print_json
from rllm.cli.grade import load_grader, options_of, options_option, read_task, read_text
from rllm.cli.terminal import out, print_next, print_sentence, table
from rllm.errors import ConfigError, RllmError

if TYPE_CHECKING:
    from rllm.rewards.attacks import Finding

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
        ctx.exit(_examine_tests(as_json))
    from rllm.rewards.attacks import AttackVerdict, attacks_on, examine, sample_named

    if (task_path is None) != (oracle_path is None):
        raise ConfigError("--task and --oracle belong together: a task, and the right answer to it.")
    grader_options = options_of(options)
    if task_path is not None and oracle_path is not None:
        task, oracle, almost = read_task(task_path), read_text(oracle_path), ""
    else:
        sample = sample_named(name)
        task, oracle, almost = sample.task, sample.oracle, sample.almost
        grader_options = {**sample.options, **grader_options}
    grader = load_grader(name, grader_options)
    try:
        attacks = attacks_on(task, oracle, almost=almost, is_code=grader.name == "code")
        findings = examine(grader, attacks, task, limit_s=limit_s)
    finally:
        grader.close()
    is_sound = all(each.verdict is not AttackVerdict.BROKEN for each in findings)
    if as_json:
        print_json({"grader": name, "sound": is_sound, "findings": [asdict(each) for each in findings]})
    else:
        _print_findings(name, findings)
        if is_sound:
            words = ["rllm", "grade", name, "--task", "task.json", "--answer", "answer.txt"]
            print_next(out(), [(words, "grade one answer")])
    if not is_sound:
        ctx.exit(1)


def _examine_tests(as_json: bool) -> int:
    """The tests of a task under attack, on each backend; the exit code. Says what was not run."""
    from rllm.rewards.attacks import AttackVerdict, Finding
    from rllm.rewards.tampering import examine_tests
    from rllm.sandbox import BACKENDS

    user = "root" if os.geteuid() == 0 else "a plain user"
    findings: dict[str, list[Finding]] = {}
    not_run = {"the other user": f"this was run as {user}; run it as {_OTHER[user]} as well"}
    for backend in BACKENDS:
        why = _why_not(backend)
        if why is None:
            findings[backend] = examine_tests(backend)
        else:
            not_run[backend] = why
    is_sound = all(each.verdict is not AttackVerdict.BROKEN for group in findings.values() for each in group)
    if as_json:
        as_dicts = {backend: [asdict(each) for each in group] for backend, group in findings.items()}
        print_json(
            {
                "grader": TASK_DIRECTORY,
                "user": user,
                "sound": is_sound,
                "findings": as_dicts,
                "not_run": not_run,
            }
        )
        return int(not is_sound)
    for backend, group in findings.items():
        _print_findings(f"{TASK_DIRECTORY} on {backend} as {user}", group)
    for name, why in not_run.items():
        print_sentence(out(), f"not run: {name}: {why}", style="yellow")
    return int(not is_sound)


_OTHER = {"root": "a plain user", "a plain user": "root"}


def _why_not(backend: str) -> str | None:
    """The reason that a backend has no writable root here; None where it has."""
    from rllm.sandbox import Root, open_sandbox

    try:
        open_sandbox(backend, root=Root()).close()
    except RllmError as error:
        return str(error)
    return None


def _print_findings(title: str, findings: "Sequence[Finding]") -> None:
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
