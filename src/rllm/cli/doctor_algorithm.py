"""`rllm doctor algorithm`: a loss or an estimator by name in, a table of verdicts out."""

from dataclasses import asdict

import click
from rich.text import Text

from rllm.cli.command import WordChoice, example, json_option, print_json
from rllm.cli.terminal import out, print_next, table

KINDS = ("loss", "estimator")
_STYLES = {"passed": "green", "failed": "bold red", "noted": "yellow"}


@click.command(
    "algorithm",
    epilog=example(
        "rllm doctor algorithm my_file.py:my_loss          a loss: (tokens: TokenInputs) -> Tensor [M]",
        "rllm doctor algorithm my_file.py:my_advantages    an estimator: rewards_G -> advantages_G",
        "rllm doctor algorithm gspo --json                 a built-in one",
    ),
)
@click.argument("name")
@click.option("--kind", type=WordChoice(KINDS), help="Which of the two, where its signature does not tell.")
@json_option
@click.pass_context
def command(ctx: click.Context, name: str, kind: str | None, as_json: bool) -> None:
    """Check an algorithm of your own: is it what the trainer counts on?

    A loss: its gradient against finite differences, its direction, and that neither the order of rows, nor
    the split into micro-batches, nor untrained tokens change it. An estimator: that the order of attempts
    changes nothing, and what shifting, scaling and equal rewards do. Then both from episodes to the gradient,
    as the trainer applies them: what ties count, and the update that is to be expected beside the gradient of
    the expected reward. Exit code 1 when a check fails.
    """
    from rllm.build.algorithm_checks import check_algorithm  # brings torch

    report = check_algorithm(name, kind)
    if as_json:
        checks = [asdict(each) for each in report.checks]
        print_json({"algorithm": name, "kind": report.kind, "sound": not report.failures, "checks": checks})
    else:
        check_table = table("check", "verdict", "detail", prose=("detail",))
        for each in report.checks:
            check_table.add_row(each.name, Text(each.verdict, style=_STYLES[each.verdict]), Text(each.detail))
        console = out()
        article = "an" if report.kind == "estimator" else "a"
        console.print(f"\n{name}, {article} {report.kind}", style="bold", soft_wrap=True)
        console.print(check_table)
        if report.failures:
            num_failures, num_checks = len(report.failures), len(report.checks)
            console.print(f"{num_failures} of {num_checks} checks failed: mend those first.", style="red")
        else:
            words = ["rllm", "train", "frozenlake"]
            for assignment in report.training_assignments:
                words += ["--set", assignment]
            print_next(console, [(words, "train with it")])
    if report.failures:
        ctx.exit(1)
