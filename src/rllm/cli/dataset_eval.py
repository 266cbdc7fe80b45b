"""`rllm dataset from-eval`: what an evaluation showed, as rows to learn from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rllm.cli.command import WordChoice, example, json_option, print_json
from rllm.cli.dataset_rows import RowPlace, hand_on_rows, kind_option, require_place, rows_place
from rllm.cli.published_flags import accepted_switches, refused_options
from rllm.data.curation import RowKind
from rllm.errors import ConfigError
from rllm.types.draws import draw_seed


@click.command(
    "from-eval",
    epilog=example(
        "rllm dataset from-eval runs/gsm8k-eval --filter 'solved and avg < 1' --out rows.jsonl",
        "rllm dataset from-eval runs/a runs/b --as preferences --name pairs",
        "rllm dataset from-eval runs/a --as tasks --filter 'pass@4 >= 0.5' --name not-too-hard --dry-run",
    ),
)
@click.argument(
    "directories", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False)
)
@click.option(
    "--filter",
    "expression",
    default="",
    help="Which attempts: their fields (reward, is_correct, turns, category, task.…) and those of their task "
    "(n, n_correct, solved, avg, best, worst, pass@k, avg@k, best@k), with and, or, not, in.",
)
@click.option(
    "--select",
    type=WordChoice(["correct", "best", "shortest", "all"]),
    default="correct",
    show_default=True,
    help="Which attempts at a task become sft rows.",
)
@click.option("--max-per-task", type=click.IntRange(0), default=0, help="Rows of one task; 0 sets no limit.")
@click.option("--min-reward", type=float, help="Leave attempts below it out.")
@click.option("--trajectory", default="", metavar="ROLE", help="Conversations of this role alone.")
@click.option(
    "--metric",
    type=WordChoice(["reward", "is_correct"]),
    default="reward",
    show_default=True,
    help="What avg, best and worst of the filter are of.",
)
@click.option(
    "--val-fraction",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Share of the tasks whose rows go to --val-split instead; with --name.",
)
@click.option("--val-split", default="test", show_default=True, help="Its name.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draw of those tasks.")
@click.option("--category", default="", help="Of the data set, with --name.")
@click.option("--description", default="", help="Of the data set, with --name.")
@accepted_switches("--dedup")
@refused_options({"--no-dedup": "a row that is there twice would count twice; it is left out"})
@kind_option
@rows_place
@click.option("--dry-run", is_flag=True, help="Count, and write nothing.")
@json_option
def command(
    directories: tuple[Path, ...],
    kind: str,
    path: Path | None,
    name: str,
    split: str,
    dry_run: bool,
    as_json: bool,
    val_fraction: float,
    val_split: str,
    seed: int,
    category: str,
    description: str,
    **curation: Any,
) -> None:
    """Make training rows of evaluations.

    An sft row is one conversation of an attempt that was right; preferences are a better and a worse answer
    to one prompt; tasks are the tasks themselves. Keys, addresses, telephone and card numbers are masked;
    what is there twice is left out.
    """
    from rllm.eval.export import AttemptChoice, Curation, EvaluationExport

    row_kind = RowKind(kind)
    if path is not None and (val_fraction or category or description):
        raise ConfigError("--val-fraction, --category and --description are of a data set; give --name.")
    if val_fraction and val_split == split:
        raise ConfigError(f"--val-split is {val_split!r}, as --split is; choose another.")
    if not dry_run:
        require_place(path, name)
    plan = Curation(kind=row_kind, **{**curation, "select": AttemptChoice(curation["select"])})
    export = EvaluationExport(directories, plan)

    def counts() -> dict[str, int]:
        names = ("attempts", "failed", "filtered", "tasks", "rows", "double", "masked")
        return {each: export.counts[each] for each in names}

    rows = export.rows()
    if dry_run:
        num_rows = sum(1 for _ in rows)
        print_json({**counts(), "rows": num_rows, "written": False})
        return

    def splits(rows: list[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
        """By task, so that no task is in both."""
        own: dict[str, list[Mapping[str, Any]]] = {split: [], val_split: []}
        for row in rows:
            draw = draw_seed(seed, "val", task_of(row)) % 1_000_000 / 1_000_000
            own[val_split if draw < val_fraction else split].append(row)
        return own

    hand_on_rows(
        rows,
        counts,
        RowPlace(path=path, name=name, category=category, description=description),
        kind=row_kind,
        splits=splits,
        as_json=as_json,
    )


def task_of(row: Mapping[str, Any]) -> str:
    """The task that a row was made of."""
    about = row["run"]
    return str(about.get("task_id") or about["chosen"]["task_id"])
