"""`rllm eval`: a benchmark and a model in, success with its interval and every count out."""

import asyncio
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rllm.build import evaluate_model, model_directory
from rllm.cli.command import example, json_option, print_json
from rllm.cli.terminal import err, out, print_next, rate, rate_with_interval, table
from rllm.eval.catalogue import benchmark_named
from rllm.store.run_directory import is_run


@click.command(
    "eval",
    epilog=example(
        "rllm eval frozenlake --model runs/frozenlake-seed0",
        "rllm eval frozenlake --model path/to/model --num-tasks 1000 --json",
    ),
)
@click.argument("benchmark")
@click.option(
    "--model",
    required=True,
    type=click.Path(path_type=Path),
    help="A run, for its trained model, or a model directory in Hugging Face format.",
)
@click.option(
    "--num-tasks", type=click.IntRange(min=1), default=256, show_default=True, help="How many tasks to try."
)
@click.option("--split", type=click.Choice(["test", "validation"]), default="test", show_default=True)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the sampling."
)
@click.option(
    "--threads", type=click.IntRange(min=0), default=0, help="Threads of torch; 0 takes one per core."
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    benchmark: str,
    model: Path,
    num_tasks: int,
    split: str,
    seed: int,
    threads: int,
    as_json: bool,
) -> None:
    """Measure a model on a benchmark's held-out tasks.

    Every task is tried twice: sampled at temperature 1, and greedy. A failed episode counts as no success;
    the counts say how many there were. Ends with exit code 1 when every episode failed.
    """
    benchmark_named(benchmark)  # a misspelt name is not worth loading a model for
    directory = model_directory(model)
    with _progress() as progress:
        bar = progress.add_task(f"evaluating {model}", total=2 * num_tasks)
        reports = asyncio.run(
            evaluate_model(
                benchmark,
                model,
                num_tasks=num_tasks,
                split=split,
                seed=seed,
                threads=threads,
                on_episode=lambda episode: progress.advance(bar),
            )
        )
    if as_json:
        print_json({"benchmark": benchmark, "model": str(directory), "split": split, "seed": seed, **reports})
    else:
        _print_reports(benchmark, model, split, reports)
    if all(report["failed"] == report["attempted"] for report in reports.values()):
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


def _print_reports(benchmark: str, model: Path, split: str, reports: dict[str, dict[str, Any]]) -> None:
    console = out()
    console.print(f"\n{benchmark}, {split} tasks: {model}", style="bold", soft_wrap=True)
    counts = ("attempted", "scored", "truncated", "failed")
    made = table("", "success [95 % interval]", "without failed", *counts, "turns", right=(*counts, "turns"))
    for name, report in reports.items():
        made.add_row(
            name,
            rate_with_interval(report["success"], report["success_interval"]),
            rate(report["success_without_failed"]),
            *(str(report[count]) for count in counts),
            f"{report['mean_turns']:.1f}",
        )
    console.print(made)
    console.print("attempted = scored + truncated + failed; a failure counts as no success.", style="dim")
    if is_run(model):
        following = (["rllm", "runs", "show", str(model)], "look at how it got there")
    else:
        following = (
            ["rllm", "train", benchmark, "--set", f"model.path={model}", "--fresh"],
            "train it further",
        )
    print_next(console, [following])
