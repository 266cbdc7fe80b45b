"""`rllm dataset from-runs`: what workers did in service, as rows to learn from."""

from pathlib import Path

import click

from rllm.cli.command import example, json_option
from rllm.cli.dataset_rows import RowPlace, hand_on_rows, kind_option, rows_place
from rllm.data.curation import RowKind


@click.command(
    "from-runs",
    epilog=example(
        "rllm dataset from-runs served --filter 'status == \"ok\" and score >= 0.5' --out rows.jsonl",
        "rllm sft rows.jsonl --model builtin:tiny",
        "rllm dataset from-runs served --as preferences --out pairs.jsonl",
        "rllm dataset from-runs served --as tasks --filter 'score == 1' --out held-out.jsonl",
    ),
)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--filter",
    "expression",
    default="",
    help="Which runs: comparisons of their fields, with and, or, not, in.  [default: those that are ok; of "
    "preferences all]",
)
@kind_option
@rows_place
@json_option
def command(
    directory: Path, expression: str, kind: str, path: Path | None, name: str, split: str, as_json: bool
) -> None:
    """Make training rows of the runs that a worker served.

    DIRECTORY is where it keeps them; the server may go on. An sft row is one conversation with its answer, or
    with corrected outputs where somebody sent some; preferences are a better and a worse answer to one
    prompt; tasks are inputs with the outputs that are right. Addresses, telephone numbers, card numbers, keys
    and tokens are masked; what is there twice is left out.
    """
    from rllm.data.row_filter import RowFilter
    from rllm.worker.export import OUTCOMES, RUN_FIELDS, RunExport

    row_kind = RowKind(kind)
    filter_text = expression or ("true" if row_kind is RowKind.PREFERENCES else 'status == "ok"')
    export = RunExport(directory, RowFilter(filter_text, RUN_FIELDS), row_kind)
    hand_on_rows(
        export.rows(),
        lambda: {each: export.counts[each] for each in ("runs", "rows", *OUTCOMES, "masked")},
        RowPlace(path=path, name=name),
        kind=row_kind,
        splits=lambda rows: {split: rows},
        as_json=as_json,
    )
