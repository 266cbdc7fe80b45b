"""`rllm eval`: a benchmark or program and a model in, success with its interval and every count out."""

import asyncio
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rllm.build import ProgramNames, evaluate_model, evaluate_program, model_directory
from rllm.cli.command import example, json_option, print_json
from rllm.cli.programs import is_program
from rllm.cli.terminal import err, out, print_next, rate, rate_with_interval, table
from rllm.eval.catalogue import benchmark_named
from rllm.store.run_directory import is_run


@click.command(
    "eval",
    epilog=example(
        "rllm eval frozenlake --model runs/frozenlake-seed0",
        "rllm eval frozenlake --model path/to/model --num-tasks 1000 --json",
        "rllm eval my_flow.py:solve --evaluator my_flow.py:score --dataset my.jsonl --model runs/solve-seed0",
        "rllm eval my_flow.py:solve --evaluator my_flow.py:score --dataset my.jsonl \\",
        "    --base-url http://127.0.0.1:8000/v1 --model NAME        on another server",
    ),
)
@click.argument("benchmark", metavar="BENCHMARK|PROGRAM")
@click.option(
    "--model",
    default="",
    metavar="DIR",
    help="A run, for its trained model, or a model directory in Hugging Face format. With --base-url, the "
    "name that the server knows it by.",
)
@click.option("--evaluator", default="", metavar="NAME", help="What judges a program, as my_flow.py:score.")
@click.option("--dataset", default="", metavar="FILE", help="A program's tasks, as JSONL.")
@click.option(
    "--base-url",
    default="",
    metavar="URL",
    help="An OpenAI-compatible server to run a program against; its key is read from OPENAI_API_KEY.",
)
@click.option(
    "--num-tasks", type=click.IntRange(min=1), default=256, show_default=True, help="How many tasks to try."
)
@click.option(
    "--split",
    type=click.Choice(["test", "validation"]),
    default="test",
    show_default=True,
    help="Which tasks of a benchmark.",
)
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
    model: str,
    evaluator: str,
    dataset: str,
    base_url: str,
    num_tasks: int,
    split: str,
    seed: int,
    threads: int,
    as_json: bool,
) -> None:
    """Measure a model on a benchmark's held-out tasks.

    Every task is tried twice: sampled at temperature 1, and greedy. A failed episode counts as no success;
    the counts say how many there were. Ends with exit code 1 when every episode failed.

    A PROGRAM, named as for `rllm train`, is run on the tasks of --dataset. With --base-url it is run once a
    task, against that server, and says itself how to sample.
    """
    program = None
    if is_program(benchmark, evaluator, dataset, base_url):
        program = ProgramNames(program=benchmark, evaluator=evaluator, dataset=dataset)
        program.require_all()
    else:
        benchmark_named(benchmark)  # a misspelt name is not worth loading a model for
    if not model:
        raise click.UsageError("Say which model: --model with a run or a model directory.", ctx)
    shown = model if base_url else str(model_directory(Path(model)))
    with _progress() as progress:
        bar = progress.add_task(f"evaluating {model}", total=None if program else 2 * num_tasks)
        work = (
            evaluate_model(
                benchmark,
                Path(model),
                num_tasks=num_tasks,
                split=split,
                seed=seed,
                threads=threads,
                on_episode=lambda episode: progress.advance(bar),
            )
            if program is None
            else evaluate_program(
                program,
                model=None if base_url else Path(model),
                base_url=base_url,
                model_name=model if base_url else "",
                num_tasks=num_tasks,
                seed=seed,
                threads=threads,
                on_episode=lambda episode: progress.advance(bar),
            )
        )
        reports = asyncio.run(work)
    if as_json:
        told = {"benchmark": benchmark, "split": split} if program is None else {"program": benchmark}
        print_json({**told, "model": shown, "seed": seed, **reports})
    else:
        tasks = f"{split} tasks" if program is None else dataset
        following = _following(benchmark, program, model, base_url)
        _print_reports(f"{benchmark}, {tasks}: {model}", reports, following)
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


def _print_reports(title: str, reports: dict[str, dict[str, Any]], following: tuple[list[str], str]) -> None:
    console = out()
    console.print(f"\n{title}", style="bold", soft_wrap=True)
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
    print_next(console, [following])


def _following(name: str, program: ProgramNames | None, model: str, base_url: str) -> tuple[list[str], str]:
    """What to type next, and what it does."""
    if not base_url and is_run(Path(model)):
        return ["rllm", "runs", "show", model], "look at how it got there"
    words = [] if program is None else ["--evaluator", program.evaluator, "--dataset", program.dataset]
    start = "builtin:tiny" if base_url else model
    return ["rllm", "train", name, *words, "--set", f"model.path={start}", "--fresh"], "train it further"
