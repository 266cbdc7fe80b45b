"""`rllm benchmark`: list the benchmarks and tasks to measure and to train on."""

from collections.abc import Mapping
from typing import Any

import click

from rllm.cli.command import Group, example, json_option, print_json
from rllm.cli.terminal import facts, out, print_next, print_sentence, table
from rllm.data.registry import DatasetRegistry
from rllm.eval.catalogue import Benchmark, benchmark_named, benchmarks
from rllm.eval.tasks import instance_counts
from rllm.eval.words import instances_sentence


@click.group("benchmark", cls=Group)
def command() -> None:
    """List the benchmarks and tasks to measure and to train on."""


@command.command(
    "list",
    epilog=example(
        "rllm benchmark list --offline",
        "rllm benchmark list --category math --json",
        "rllm benchmark list --search translation",
    ),
)
@click.option("--category", default="", metavar="NAME", help="Only this category, such as math or games.")
@click.option("--offline", is_flag=True, help="Only what runs without a network.")
@click.option("--hosted", is_flag=True, help="Only what has to be pulled first.")
@click.option(
    "--search", default="", metavar="TEXT", help="Only what has this in its name, category or description."
)
@json_option
def list_benchmarks(category: str, offline: bool, hosted: bool, search: str, as_json: bool) -> None:
    """List the catalogue.

    Filters narrow it down together. Your own data sets are in `rllm dataset list`.
    """
    if offline and hosted:
        raise click.UsageError("Nothing is both --offline and --hosted; give one of them, or none for all.")
    where = "offline" if offline else "hosted" if hosted else None
    everything = benchmarks()
    categories = sorted({each.category for each in everything})
    if category and category not in categories:
        raise click.BadParameter(f"`{category}` is none of {', '.join(categories)}.", param_hint="--category")
    matches = [each for each in everything if _matches(each, category, where, search)]
    if as_json:
        print_json({"benchmarks": [each.summary() for each in matches], "count": len(matches)})
        return
    _print_list(matches, search)


@command.command("info", epilog=example("rllm benchmark info gsm8k", "rllm benchmark info gsm8k --json"))
@click.argument("name")
@json_option
def info(name: str, as_json: bool) -> None:
    """Say all there is to know about a benchmark.

    NAME may also be a data set of your own, or a directory of tasks.
    """
    benchmark = benchmark_named(name)
    local_splits = DatasetRegistry.get_dataset_splits(benchmark.name)
    instances = instance_counts(benchmark)
    if as_json:
        print_json(
            {**benchmark.summary(), **_details(benchmark), "instances": instances, "pulled": local_splits}
        )
        return
    console = out()
    console.print(f"\n{benchmark.name}", style="bold")
    print_sentence(console, f"{benchmark.description}\n")
    console.print(facts(_lines(benchmark, local_splits, instances)))
    if instances is not None and instances["few"]:
        tasks = f"{instances['reported']} {instances['split']} tasks"
        print_sentence(console, f"\nOf {tasks} {instances_sentence(instances)}", style="yellow")
    if benchmark.prompt:
        console.print("\nPrompt:", style="dim")
        console.print(benchmark.prompt, soft_wrap=True)
    commands = [
        (["rllm", "eval", name, "--model", "MODEL"], "measure a model on it"),
        (["rllm", "train", name], "train on it"),
    ]
    if benchmark.source is not None and not benchmark.offline and benchmark.eval_split not in local_splits:
        commands.insert(0, (["rllm", "dataset", "pull", name], "fetch its rows now"))
    print_next(console, [each for each in commands if each[0][1] != "train" or "train" in benchmark.splits])


def _matches(benchmark: Benchmark, category: str, where: str | None, search: str) -> bool:
    if category and benchmark.category != category:
        return False
    if where is not None and benchmark.offline != (where == "offline"):
        return False
    return search.lower() in f"{benchmark.name} {benchmark.category} {benchmark.description}".lower()


def _print_list(matches: list[Benchmark], search: str) -> None:
    console = out()
    if not matches:
        console.print(f"Nothing in the catalogue fits{f' `{search}`' if search else ''}; leave out a filter.")
        return
    benchmark_table = table(
        "benchmark", "category", "runs", "tasks", "splits", "evaluator", "licence", right=("tasks",)
    )
    for each in sorted(matches, key=lambda one: (one.category, one.name)):
        runs = "offline" if each.offline else "hosted"
        splits = ", ".join(each.splits)
        benchmark_table.add_row(
            each.name, each.category, runs, str(each.size), splits, each.evaluator, each.licence
        )
    console.print(benchmark_table)
    offline = sum(each.offline for each in matches)
    console.print(
        f"{len(matches)} benchmarks, {offline} of them run without a network; hosted ones are pulled when "
        "they are first used.",
        style="dim",
    )
    print_next(console, [(["rllm", "benchmark", "info", matches[0].name], "all there is to know about one")])


def _details(benchmark: Benchmark) -> dict[str, Any]:
    source = benchmark.source
    return {
        "description": benchmark.description,
        "citation": benchmark.citation,
        "environment": benchmark.environment,
        "extra": benchmark.extra or None,
        "source": None if source is None else source.address,
        "rows": {name: split.rows for name, split in benchmark.splits.items()},
        **{
            name: value for name, value in benchmark.stamp().items() if name not in ("benchmark", "evaluator")
        },
    }


def _lines(
    benchmark: Benchmark, local_splits: list[str], instances: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    rows = {name: split.rows for name, split in benchmark.splits.items()}
    splits = ", ".join(name if count is None else f"{name} ({count})" for name, count in rows.items())
    lines = [
        ("category", benchmark.category),
        ("splits", splits),
        ("agent", benchmark.agent),
        ("evaluator", benchmark.evaluator),
        ("published reading", benchmark.published_reading or "–"),
        ("licence", benchmark.licence),
        ("citation", benchmark.citation),
        ("runs", "without a network" if benchmark.offline else "after its rows were pulled"),
    ]
    if instances is not None:
        lines.insert(
            2, ("instances", f"{instances['distinct']} in {instances['reported']} {instances['split']} tasks")
        )
    if benchmark.keep:
        lines.append(("rows asked", benchmark.keep))
    if benchmark.source is not None:
        lines.append(("source", benchmark.source.address))
    if benchmark.extra:
        lines.append(("needs", f"pip install 'rllm[{benchmark.extra}]'"))
    if local_splits:
        lines.append(("pulled", ", ".join(local_splits)))
    return lines
