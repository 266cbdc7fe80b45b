"""`rllm runs compare`: several runs in, their results side by side and the settings in which they differ.

RUN/config.json, metrics.jsonl, summary.json, of each ──► a table, differing_keys, a picture of all curves
"""

from pathlib import Path

import click
from rich.text import Text

from rllm.cli.command import WritableFile, example, json_option, print_json
from rllm.cli.terminal import FittingTable, out, print_next, rate_with_interval, table
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.view.comparison_page import differing_keys
from rllm.view.run_facts import REPORTS, RunFacts, facts_of


@click.command(
    "compare",
    epilog=example("rllm runs compare runs/frozenlake-seed0 runs/frozenlake-seed1 --picture seeds.png"),
)
@click.argument("runs", metavar="RUN RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--picture", type=WritableFile(), help="Draw their learning curves into this PNG file.")
@json_option
def command(runs: tuple[Path, ...], picture: Path | None, as_json: bool) -> None:
    """Compare runs: success before and after, and the settings in which they differ."""
    if len(set(runs)) < 2:
        raise click.UsageError("Give two runs or more to compare.")
    directories = [RunDirectory.read(path) for path in dict.fromkeys(runs)]
    facts_of_runs = [facts_of(directory) for directory in directories]
    differing = differing_keys(
        {each.run: run.config() for each, run in zip(facts_of_runs, directories, strict=True)}
    )
    if picture is not None:
        _draw(directories, facts_of_runs, picture)
    if as_json:
        picture_fields = {} if picture is None else {"picture": str(picture)}
        print_json(
            {"runs": [each.to_dict() for each in facts_of_runs], "differences": differing, **picture_fields}
        )
        return
    console = out()
    console.print(_comparison_table(facts_of_runs))
    for key, values in differing.items():
        console.print(Text.assemble((f"{key}  ", "dim"), " | ".join(map(str, values.values()))))
    if picture is not None:
        console.print(f"\nPicture  {picture}", soft_wrap=True)
    else:
        words = ["rllm", "runs", "compare", *map(str, runs), "--picture", "comparison.png"]
        print_next(console, [(words, "draw their curves")])


def _comparison_table(runs: list[RunFacts]) -> FittingTable:
    comparison = table("run", "", "sampled", "greedy")
    for each in runs:
        names = [name for name in REPORTS if name != "untrained" or name in each.reports]
        for index, name in enumerate(names):
            report = each.reports.get(name, {})
            comparison.add_row(
                each.run if index == 0 else "",
                name,
                rate_with_interval(report.get("success"), report.get("success_interval")),
                rate_with_interval(report.get("greedy"), report.get("greedy_interval")),
                end_section=index == len(names) - 1,
            )
    return comparison


def _draw(directories: list[RunDirectory], facts_of_runs: list[RunFacts], picture: Path) -> None:
    from rllm.tracking.picture import draw_comparison

    names = [run.name for run in directories]
    labels = names if len(set(names)) == len(names) else [str(run.path) for run in directories]
    curves = {label: read_metrics(run.metrics_path) for label, run in zip(labels, directories, strict=True)}
    summaries = {label: run.summary() for label, run in zip(labels, directories, strict=True)}
    tasks = dict.fromkeys(each.environment for each in facts_of_runs if each.environment)
    title = f"Success on {', '.join(tasks)}" if tasks else "Runs compared"
    draw_comparison(curves, picture, summaries=summaries, title=title)
