"""`rllm runs replay`: a finished run in, whether it comes out again bit for bit.

RUN ──► replay: its updates, from its stored episodes ──► same numbers? same parameters? ──► 0 yes, 1 no
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from rllm.cli.command import example, json_option, print_json
from rllm.cli.terminal import err, facts, out, print_next, table
from rllm.config.loader import load_config
from rllm.distributed import rank_from_environment
from rllm.distributed.launch import launch, require_processes
from rllm.errors import ConfigError
from rllm.store.run_directory import RunDirectory

if TYPE_CHECKING:
    from rllm.trainer.replay import ReplayResult

MOST_DIFFERENCES_SHOWN = 5
_PHASE_TITLES = {"warm_start": "warm start", "train": "training"}


@click.command(
    "replay",
    epilog=example(
        "rllm runs replay runs/frozenlake-seed0                 is it what it says it is?",
        "rllm runs replay runs/frozenlake-seed0 --json && echo 'the same, bit for bit'",
        "rllm runs replay runs/two --nproc 2                    a run of two processes",
    ),
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--nproc", metavar="N", default=1, help="Processes on this machine, as many as the run was trained by."
)
@click.option("--force", is_flag=True, help="Start also where too little memory is free.")
@json_option
@click.pass_context
def command(ctx: click.Context, run: Path, nproc: int, force: bool, as_json: bool) -> None:
    """Compute a finished run's updates again from its stored episodes, and compare.

    Nothing is sampled and nothing is changed. Every number in metrics.jsonl that follows from the episodes
    is computed anew, and in the end the parameters are compared with those of the run's model. Ends with
    exit code 0 when all are identical, with 1 otherwise. On another machine, or with another number of
    threads, the last digits may differ.
    """
    require_processes(nproc)
    # Here and not above: they bring torch and gymnasium, which the other commands on runs do not need.
    from rllm.build.training import build_run
    from rllm.trainer.replay import replay

    run_config = RunDirectory.read(run).config()
    if "kind" in run_config:
        raise ConfigError(
            f"{run} is a run of `rllm {run_config['kind']}`, which has no rollouts to replay; the same "
            "command with another --output makes it again."
        )
    config = load_config(run_config)
    training_run = build_run(config, run)
    training_run.force = force
    if nproc > 1:
        training_run.require_ranks_can(nproc)
        flags = [*(["--json"] if as_json else []), *(["--force"] if force else [])]
        sys.exit(launch(["runs", "replay", str(run), *flags], nproc, run))
    with _progress() as progress:
        bar = progress.add_task(f"replaying {run}", total=config.warm_start.steps + config.steps)

        def advance(phase: str, step: int) -> None:
            progress.update(bar, advance=1, description=f"replaying {run}: {_PHASE_TITLES[phase]}")

        result = replay(training_run, on_step=advance)
    if rank_from_environment():  # rank 0 shows what all of them found
        return
    if as_json:
        print_json({"run": str(run), "identical": result.is_identical, **asdict(result)})
    else:
        _print_result(run, result)
    if not result.is_identical:
        ctx.exit(1)


def _progress() -> Progress:
    console = err()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
    )


def _print_result(run: Path, result: "ReplayResult") -> None:
    console = out()
    console.print(f"\nReplay of {run}", style="bold", soft_wrap=True)
    num_steps = result.num_warm_steps + result.num_train_steps
    differing = len(result.differences)
    console.print(
        facts(
            [
                (
                    "steps",
                    f"{num_steps}: {result.num_warm_steps} warm start, {result.num_train_steps} training",
                ),
                (
                    "numbers",
                    _verdict(not differing, f"{result.num_compared:,} compared, {differing:,} differ"),
                ),
                ("parameters", _parameters(result)),
            ]
        )
    )
    if result.is_identical:
        console.print("\nIdentical, bit for bit.", style="green")
        return
    if result.differences:
        console.print("\nFirst differences", style="bold")
        difference_table = table(
            "phase", "step", "number", "recorded", "replayed", right=("step", "recorded", "replayed")
        )
        for each in result.differences[:MOST_DIFFERENCES_SHOWN]:
            difference_table.add_row(
                each.phase, str(each.step), each.metric, _value(each.recorded), _value(each.replayed)
            )
        console.print(difference_table)
        first = result.differences[0]
        if first.phase == "train":
            words = ["rllm", "runs", "show", str(run), "--phase", "train", "--step", str(first.step)]
            print_next(console, [(words, "the episodes of the first step that differs")])


def _parameters(result: "ReplayResult") -> Text:
    if result.recorded_sha256 == result.replayed_sha256:
        return _verdict(True, f"identical, sha256 {result.replayed_sha256[:16]}")
    return _verdict(
        False,
        f"differ, sha256 {result.recorded_sha256[:16]} recorded, {result.replayed_sha256[:16]} replayed",
    )


def _verdict(good: bool, words: str) -> Text:
    return Text(words, style="green" if good else "red")


def _value(number: Any) -> str:
    """All digits, because it may be the last one that differs."""
    return "not recorded" if number is None else repr(number)
