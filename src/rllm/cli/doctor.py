"""`rllm doctor`: is this machine ready to train? What is there, and how to mend what is not."""

from dataclasses import asdict

import click
from rich.padding import Padding
from rich.text import Text

from rllm.build.machine_checks import (
    DoctorFinding,
    DoctorStatus,
    examine_browser,
    examine_machine,
    is_ready,
)
from rllm.cli import doctor_algorithm, doctor_grader, doctor_tasks
from rllm.cli.command import Group, example, json_option, print_json
from rllm.cli.terminal import facts, out, print_next


@click.group(
    "doctor",
    cls=Group,
    invoke_without_command=True,
    epilog=example(
        "rllm doctor",
        "rllm doctor --json",
        "rllm doctor algorithm my_file.py:my_loss    check an algorithm",
        "rllm doctor grader math                     attack a grader",
        "rllm doctor tasks my-tasks                  check software-engineering tasks",
        "rllm doctor web                             check the browser",
    ),
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check that this machine is ready to train.

    Looks at Python, packages, devices and disk, then lets a tiny model sample a few tokens and compares their
    log-probabilities with a plain forward pass. Exit code 1 when something that is needed is broken.
    """
    if ctx.invoked_subcommand is not None:
        return
    findings = examine_machine()
    if as_json:
        print_json({"findings": [asdict(each) for each in findings], "ready": is_ready(findings)})
    else:
        _print_findings(findings)
    if any(each.status is DoctorStatus.BROKEN for each in findings):
        ctx.exit(1)


command.add_command(doctor_algorithm.command)
command.add_command(doctor_grader.command)
command.add_command(doctor_tasks.command)


@command.command("web", epilog=example("rllm doctor web", "rllm doctor web --json"))
@json_option
@click.pass_context
def check_web(ctx: click.Context, as_json: bool) -> None:
    """Check that websites can be played here.

    Says which Chromium was found and how to get one, starts it, and clicks on a page of its own. Exit code
    1 when something is missing.
    """
    findings = examine_browser()
    ready = all(each.status is not DoctorStatus.BROKEN for each in findings)
    if as_json:
        rows = [{"name": each.name, "status": each.status, "detail": each.detail} for each in findings]
        print_json({"findings": rows, "ready": ready})
    else:
        out().print(_findings_table(findings))
        if ready:
            words = ["rllm", "eval", "miniwob/click-test-2", "--model", "builtin:tiny", "--num-tasks", "8"]
            print_next(out(), [(words, "play in it")])
    ctx.exit(0 if ready else 1)


_STYLES = {
    DoctorStatus.OK: "green",
    DoctorStatus.MISSING: "yellow",
    DoctorStatus.WARNING: "yellow",
    DoctorStatus.BROKEN: "bold red",
}


def _findings_table(findings: list[DoctorFinding]) -> Padding:
    return facts(
        (each.name, Text.assemble((f"{each.status:<8}", _STYLES[each.status]), each.detail))
        for each in findings
    )


def _print_findings(findings: list[DoctorFinding]) -> None:
    console = out()
    console.print(_findings_table(findings))
    if is_ready(findings):
        steps = [(["rllm", "train", "frozenlake"], "train an agent, in minutes")]
        if any(each.status is DoctorStatus.MISSING for each in findings):
            steps.append((["pip", "install", "rllm[gateway]"], "what programs and `rllm serve` need"))
        print_next(console, steps)
    elif any(each.status is DoctorStatus.BROKEN for each in findings):
        console.print("\nSomething that is needed does not work: mend what is marked broken.", style="red")
    else:
        print_next(console, [(["pip", "install", "rllm[train]"], "what training needs")])
