"""`rllm doctor grader`: a grader by name in, what it pays to those who cheat out.

NAME ──► a sample task and its oracle ──► rllm.rewards.attacks ──► held, noted or broken
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.text import Text

from rllm.cli.command import example, json_option, print_json
from rllm.cli.grade import load_grader, options_of, options_option, read_task, read_text
from rllm.cli.terminal import out, print_next, table
from rllm.errors import ConfigError

_STYLES = {"held": "green", "noted": "yellow", "broken": "bold red"}
SHOWN_CHARS = 80


@click.command(
    "grader",
    epilog=example(
        "rllm doctor grader math",
        "rllm doctor grader code --option sandbox=unshare",
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
    programs that exit, fake their output and patch what grades them. Exit code 1 when an attack is paid, the
    oracle is not, or the grader raises or hangs.
    """
    from rllm.rewards.attacks import Verdict, attacks_on, examine, sample_named

    if (task_path is None) != (oracle_path is None):
        raise ConfigError("--task and --oracle belong together: a task, and the right answer to it.")
    chosen = options_of(options)
    if task_path is not None and oracle_path is not None:
        task, oracle, almost = read_task(task_path), read_text(oracle_path), ""
    else:
        sample = sample_named(name)
        task, oracle, almost = sample.task, sample.oracle, sample.almost
        chosen = {**sample.options, **chosen}
    grader = load_grader(name, chosen)
    try:
        attacks = attacks_on(task, oracle, almost=almost, is_code=grader.name == "code")
        findings = examine(grader, attacks, task, limit_s=limit_s)
    finally:
        grader.close()
    broken = [each for each in findings if each.verdict is Verdict.BROKEN]
    if as_json:
        print_json({"grader": name, "sound": not broken, "findings": [asdict(each) for each in findings]})
    else:
        made = table("answer", "", "score", "reason", right=("score",))
        for each in findings:
            score = "–" if each.score is None else f"{each.score:.3g}"
            reason = each.reason.replace("\n", " ")[:SHOWN_CHARS]
            made.add_row(each.name, Text(each.verdict, style=_STYLES[each.verdict]), score, Text(reason))
        console = out()
        console.print(f"\n{name}, {len(findings)} answers", style="bold", soft_wrap=True)
        console.print(made)
        counts = Counter(each.verdict for each in findings)
        if broken:
            console.print(f"{len(broken)} of {len(findings)} went wrong: mend those first.", style="red")
        else:
            console.print(f"{counts[Verdict.HELD]} held, {counts[Verdict.NOTED]} noted, none broken.")
            words = ["rllm", "grade", name, "--task", "task.json", "--answer", "answer.txt"]
            print_next(console, [(words, "grade one answer")])
    if broken:
        ctx.exit(1)
