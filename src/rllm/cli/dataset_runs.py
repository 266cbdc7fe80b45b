"""`rllm dataset from-runs`: what workers did in service, as rows to learn from."""

import json
from pathlib import Path

import click

from rllm.cli.command import example, json_option, print_json
from rllm.cli.terminal import facts, out, print_next
from rllm.errors import ConfigError


@click.command(
    "from-runs",
    epilog=example(
        "rllm dataset from-runs served --filter 'status == \"ok\" and score >= 0.5' --out rows.jsonl",
        "rllm sft rows.jsonl --model builtin:tiny",
    ),
)
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--filter",
    "expression",
    default='status == "ok"',
    show_default=True,
    help="Which runs: comparisons of their fields, with and, or, not, in.",
)
@click.option("--out", "path", type=click.Path(path_type=Path), required=True, help="File for the rows.")
@json_option
def command(directory: Path, expression: str, path: Path, as_json: bool) -> None:
    """Make training rows of the runs that a worker served.

    DIRECTORY is where it keeps them; the server may go on. A row is one conversation with its answer,
    as rllm sft takes it, or with corrected outputs where somebody sent some. Addresses, telephone numbers,
    card numbers, keys and tokens are masked; what is there twice is left out.
    """
    from rllm.worker.export import OUTCOMES, RunExport
    from rllm.worker.filters import RunFilter

    if path.exists():
        raise ConfigError(f"{path} is there already; give another --out.")
    export = RunExport(directory, RunFilter(expression))
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in export.rows())
    path.write_text(text, encoding="utf-8")
    counts = {name: export.counts[name] for name in ("runs", "rows", *OUTCOMES, "masked")}
    if as_json:
        print_json({"path": str(path), **counts})
        return
    out().print(facts([(name.replace("_", " "), str(count)) for name, count in counts.items()]))
    print_next(
        out(), [(["rllm", "sft", str(path), "--model", "builtin:tiny", "--dry-run"], "check the rows")]
    )
