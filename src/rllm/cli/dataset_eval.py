"""`rllm dataset from-eval`: what an evaluation showed, as rows to learn from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rllm.cli.command import (
    WordChoice,
    argument,
    example,
    json_option,
    option,
    options_of,
    print_json,
    shared,
)
from rllm.cli.dataset_rows import (
    RowPlace,
    hand_on_rows,
    kind_option,
    name_option,
    out_option,
    require_place,
    split_option,
)
from rllm.cli.published_flags import accepted_switches, refused_options
from rllm.data.curation import RowKind
from rllm.errors import ConfigError
from rllm.types.draws import draw_seed


@dataclass(kw_only=True, slots=True, frozen=True)
class FromEvalOptions:
    """The options of `rllm dataset from-eval`, as the user typed them."""

    directories: tuple[Path, ...] = argument(
        metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False)
    )
    expression: str = option(
        "--filter",
        default="",
        help="Which attempts: their fields (reward, is_correct, turns, category, task.…) and those of "
        "their task "
        "(n, n_correct, solved, avg, best, worst, pass@k, avg@k, best@k), with and, or, not, in.",
    )
    select: str = option(
        "--select",
        type=WordChoice(["correct", "best", "shortest", "all"]),
        default="correct",
        show_default=True,
        help="Which attempts at a task become sft rows.",
    )
    max_per_task: int = option(
        "--max-per-task", type=click.IntRange(0), default=0, help="Rows of one task; 0 sets no limit."
    )
    min_reward: float | None = option("--min-reward", type=float, help="Leave attempts below it out.")
    trajectory: str = option(
        "--trajectory", default="", metavar="ROLE", help="Conversations of this role alone."
    )
    metric: str = option(
        "--metric",
        type=WordChoice(["reward", "is_correct"]),
        default="reward",
        show_default=True,
        help="What avg, best and worst of the filter are of.",
    )
    val_fraction: float = option(
        "--val-fraction",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        help="Share of the tasks whose rows go to --val-split instead; with --name.",
    )
    val_split: str = option("--val-split", default="test", show_default=True, help="Its name.")
    seed: int = option("--seed", type=int, default=0, show_default=True, help="Of the draw of those tasks.")
    category: str = option("--category", default="", help="Of the data set, with --name.")
    description: str = option("--description", default="", help="Of the data set, with --name.")
    kind: str = shared(kind_option)
    path: Path | None = shared(out_option)
    name: str = shared(name_option)
    split: str = shared(split_option)
    dry_run: bool = option("--dry-run", is_flag=True, help="Count, and write nothing.")
    as_json: bool = shared(json_option)


@click.command(
    "from-eval",
    epilog=example(
        "rllm dataset from-eval runs/gsm8k-eval --filter 'solved and avg < 1' --out rows.jsonl",
        "rllm dataset from-eval runs/a runs/b --as preferences --name pairs",
        "rllm dataset from-eval runs/a --as tasks --filter 'pass@4 >= 0.5' --name not-too-hard --dry-run",
    ),
)
@options_of(
    FromEvalOptions,
    accepted_switches("--dedup"),
    refused_options({"--no-dedup": "a row that is there twice would count twice; it is left out"}),
)
def command(options: FromEvalOptions) -> None:
    """Make training rows of evaluations.

    An sft row is one conversation of an attempt that was right; preferences are a better and a worse answer
    to one prompt; tasks are the tasks themselves. Keys, addresses, telephone and card numbers are masked;
    what is there twice is left out.
    """
    from rllm.eval.export import AttemptChoice, Curation, EvaluationExport

    row_kind = RowKind(options.kind)
    if options.path is not None and (options.val_fraction or options.category or options.description):
        raise ConfigError("--val-fraction, --category and --description are of a data set; give --name.")
    if options.val_fraction and options.val_split == options.split:
        raise ConfigError(f"--val-split is {options.val_split!r}, as --split is; choose another.")
    if not options.dry_run:
        require_place(options.path, options.name)
    plan = Curation(
        kind=row_kind,
        select=AttemptChoice(options.select),
        expression=options.expression,
        max_per_task=options.max_per_task,
        min_reward=options.min_reward,
        metric=options.metric,
        trajectory=options.trajectory,
    )
    export = EvaluationExport(options.directories, plan)

    def counts() -> dict[str, int]:
        names = ("attempts", "failed", "filtered", "tasks", "rows", "double", "masked")
        return {each: export.counts[each] for each in names}

    rows = export.rows()
    if options.dry_run:
        num_rows = sum(1 for _ in rows)
        print_json({**counts(), "rows": num_rows, "written": False})
        return

    def splits(rows: list[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
        """By task, so that no task is in both."""
        own: dict[str, list[Mapping[str, Any]]] = {options.split: [], options.val_split: []}
        for row in rows:
            draw = draw_seed(options.seed, "val", task_of(row)) % 1_000_000 / 1_000_000
            own[options.val_split if draw < options.val_fraction else options.split].append(row)
        return own

    hand_on_rows(
        rows,
        counts,
        RowPlace(
            path=options.path, name=options.name, category=options.category, description=options.description
        ),
        kind=row_kind,
        splits=splits,
        as_json=options.as_json,
    )


def task_of(row: Mapping[str, Any]) -> str:
    """The task that a row was made of."""
    about = row["run"]
    return str(about.get("task_id") or about["chosen"]["task_id"])
