"""`rllm dataset`: rows that are kept here: pulled, registered, looked at, handed on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from rllm.build.agent_places import agent_object_named
from rllm.build.judges import require_grader
from rllm.cli import dataset_build, dataset_eval, dataset_runs
from rllm.cli.command import (
    Group,
    WritableFile,
    argument,
    example,
    json_option,
    option,
    options_of,
    print_json,
    shared,
)
from rllm.cli.published_flags import accepted_switches
from rllm.cli.terminal import err, facts, out, print_next, print_sentence, table
from rllm.data.dataset import Dataset
from rllm.data.registry import DatasetRegistry, require_dataset
from rllm.data.rows import format_of, plain, write_rows
from rllm.data.sources import HubSource, Split, pull
from rllm.errors import ConfigError
from rllm.eval.catalogue import Benchmark, benchmark_named, benchmark_names, benchmarks
from rllm.eval.tasks import pull_benchmark, task_of_row

split_option = click.option(
    "--split", default="", metavar="NAME", help="Which part; the one that is measured on."
)


@click.group("dataset", cls=Group)
def command() -> None:
    """Rows that are kept here: pull, register, inspect, export, build."""


command.add_command(dataset_build.command)
command.add_command(dataset_runs.command)
command.add_command(dataset_eval.command)


@command.command("list", epilog=example("rllm dataset list", "rllm dataset list --all --json"))
@accepted_switches("--local")
@click.option("--all", "with_catalogue", is_flag=True, help="What could be pulled as well.")
@json_option
def list_datasets(with_catalogue: bool, as_json: bool) -> None:
    """List the data sets on this machine."""
    entries = [_entry(name) for name in DatasetRegistry.get_dataset_names()]
    here = {each["name"] for each in entries}
    if with_catalogue:
        entries += [_not_here(each) for each in benchmarks() if not each.offline and each.name not in here]
    if as_json:
        print_json({"datasets": entries, "count": len(entries)})
        return
    console = out()
    if not entries:
        console.print("No data set is here yet.")
    else:
        entry_table = table("data set", "here", "category", "rows", "source", right=("rows",))
        for each in entries:
            rows = ", ".join(
                f"{name} {count if count is not None else '?'}" for name, count in each["splits"].items()
            )
            entry_table.add_row(
                each["name"], "yes" if each["here"] else "no", each["category"], rows, each["source"]
            )
        console.print(entry_table)
    print_next(
        console,
        [
            (["rllm", "dataset", "pull", "gsm8k"], "fetch one of the catalogue"),
            (["rllm", "dataset", "register", "mine", "rows.jsonl"], "keep rows of your own"),
        ],
    )


@command.command(
    "pull",
    epilog=example(
        "rllm dataset pull gsm8k",
        "rllm dataset pull mmlu --split validation",
        "rllm dataset pull gsm8k --revision 0123456789abcdef0123456789abcdef01234567",
    ),
)
@click.argument("name")
@click.option("--split", "splits", multiple=True, metavar="NAME", help="Only this part; may be given again.")
@click.option("--revision", default="", metavar="COMMIT", help="Another state of a data set on the hub.")
@json_option
def pull_command(name: str, splits: tuple[str, ...], revision: str, as_json: bool) -> None:
    """Fetch the rows of a benchmark and keep them.

    Downloads are checked against their checksums and go on where they broke off. What was pulled is used
    from then on, without a network.
    """
    benchmark = benchmark_named(name)
    if benchmark.source is None:
        # Programs that pull before they load go on: the rows are there.
        if as_json:
            print_json({"name": benchmark.name, "pulled": False, "splits": list(benchmark.splits)})
        else:
            out().print(f"{benchmark.name} makes its tasks itself: there is nothing to fetch.")
            print_next(
                out(), [(["rllm", "eval", benchmark.name, "--model", "MODEL"], "measure a model on it")]
            )
        return
    for split in splits or benchmark.splits:
        with _progress(f"{name} {split}") as on_progress:
            pull_benchmark(benchmark, split, revision=revision, on_progress=on_progress)
    _tell(name, as_json, [(["rllm", "dataset", "inspect", name], "look at its rows")])


@command.command("info", epilog=example("rllm dataset info gsm8k"))
@click.argument("name")
@json_option
def info(name: str, as_json: bool) -> None:
    """Say what is kept under a name: rows, columns, where from, checksums."""
    _rows_kept(name)
    _tell(name, as_json, [(["rllm", "dataset", "inspect", name], "look at its rows")])


@command.command(
    "inspect",
    epilog=example("rllm dataset inspect gsm8k", "rllm dataset inspect gsm8k -n 1 --as-tasks"),
)
@click.argument("name")
@split_option
@click.option(
    "-n",
    "--num-rows",
    "count",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How many rows.",
)
@click.option("--start", type=click.IntRange(min=0), default=0, show_default=True, help="The first of them.")
@click.option("--as-tasks", is_flag=True, help="What a model is asked, and what it is graded by.")
@json_option
def inspect(name: str, split: str, count: int, start: int, as_tasks: bool, as_json: bool) -> None:
    """Show rows in the terminal, as they are published or as the tasks that are made of them."""
    rows = _rows_kept(name, split)
    if start >= len(rows):
        raise ConfigError(f"`{name}` has {len(rows)} rows in {rows.split}, the first is 0: {start} is none.")
    numbered_rows = [(number, rows[number]) for number in range(start, min(start + count, len(rows)))]
    if as_tasks:
        benchmark = benchmark_named(name)
        numbered_rows = [
            (number, task_of_row(benchmark, rows.split or "", number, row)) for number, row in numbered_rows
        ]
    if as_json:
        row_dicts = [{"row": number, "values": plain(row)} for number, row in numbered_rows]
        print_json({"name": name, "split": rows.split, "rows": len(rows), "shown": row_dicts})
        return
    console = out()
    for number, row in numbered_rows:
        console.print(f"\n{name} {rows.split}, row {number} of {len(rows)}", style="bold")
        console.print(facts((column, _short(value)) for column, value in row.items()))
    print_next(console, [(["rllm", "eval", name, "--model", "MODEL"], "measure a model on it")])


@dataclass(kw_only=True, slots=True, frozen=True)
class RegisterOptions:
    """The options of `rllm dataset register`, as the user typed them."""

    name: str = argument()
    source: str = argument(metavar="FILE|HUB-ID", required=False, default="")
    file: str = option("--file", default="", metavar="FILE", help="The same as SOURCE.")
    split: str = option("--split", default="test", show_default=True, metavar="NAME", help="What part it is.")
    config_name: str = option(
        "--config", default="default", show_default=True, help="Of a data set on the hub."
    )
    hub_split: str = option(
        "--hub-split", default="", metavar="NAME", help="What the hub calls the part; as --split."
    )
    question: str = option("--question", default="", metavar="COLUMN", help="Column with the question.")
    answer: str = option("--answer", default="", metavar="COLUMN", help="Column with the right answer.")
    prompt: str = option(
        "--prompt", default="", metavar="TEXT", help="What the model is asked, with {{column}} filled in."
    )
    evaluator: str = option(
        "--evaluator", default="exact", show_default=True, metavar="NAME", help="The grader."
    )
    agent: str = option(
        "--agent", default="conversation", show_default=True, metavar="NAME", help="Who answers."
    )
    category: str = option("--category", default="", help="For lists.")
    description: str = option("--description", default="", help="For people.")
    as_json: bool = shared(json_option)


@command.command(
    "register",
    epilog=example(
        "rllm dataset register mine rows.jsonl",
        "rllm dataset register mine rows.csv --question problem --answer solution --evaluator math",
        "rllm dataset register mine org/name --config main --hub-split train --split train",
    ),
)
@options_of(RegisterOptions)
def register(options: RegisterOptions) -> None:
    """Keep rows of your own under a name that every command takes.

    The rows come from a JSONL, JSON, CSV or Parquet file, or from the hub. The file is copied: later
    changes of it change nothing here. Every row is tried out: one that lacks a field is named.
    """
    if bool(options.source) == bool(options.file):
        raise ConfigError("Give the rows once: rllm dataset register NAME FILE.")
    source = options.source or options.file
    if options.name in benchmark_names():
        raise ConfigError(f"`{options.name}` is in the catalogue; choose another name for your own rows.")
    _require_players(options.agent, options.evaluator)
    rows, facts_of_split = _rows_of(source, options.config_name, options.hub_split or options.split)
    fields = {
        key: value for key, value in (("question", options.question), ("answer", options.answer)) if value
    }
    benchmark_fields = {
        "fields": fields,
        "prompt": options.prompt or "{{question}}",
        "evaluator": options.evaluator,
        "agent": options.agent,
    }
    _try_out(options.name, options.split, rows, benchmark_fields, options.description, options.category)
    DatasetRegistry.register_dataset(
        options.name,
        rows,
        options.split,
        source=source,
        description=options.description,
        category=options.category or "own",
        details={**facts_of_split, "benchmark": benchmark_fields},
    )
    _tell(
        options.name,
        options.as_json,
        [(["rllm", "eval", options.name, "--model", "MODEL"], "measure a model on it")],
    )


@command.command(
    "remove", epilog=example("rllm dataset remove mine", "rllm dataset remove mine --split test")
)
@click.argument("name")
@click.option("--split", default="", metavar="NAME", help="Only this part.")
@json_option
def remove(name: str, split: str, as_json: bool) -> None:
    """Forget a data set and delete its rows from this machine."""
    require_dataset(name, split)
    if split:
        DatasetRegistry.remove_dataset_split(name, split)
    else:
        DatasetRegistry.remove_dataset(name)
    if as_json:
        print_json({"removed": name, "split": split or None})
        return
    out().print(f"Removed {name}{f' ({split})' if split else ''}.")
    print_next(out(), [(["rllm", "dataset", "list"], "what is left")])


@command.command("export", epilog=example("rllm dataset export gsm8k rows.parquet --split train"))
@click.argument("name")
@click.argument("file", type=WritableFile())
@split_option
@json_option
def export(name: str, file: Path, split: str, as_json: bool) -> None:
    """Write rows to a JSONL, JSON, CSV or Parquet file."""
    format_of(file.name)
    rows = _rows_kept(name, split)
    write_rows(file, rows)
    if as_json:
        print_json({"name": name, "split": rows.split, "rows": len(rows), "file": str(file)})
        return
    out().print(f"Wrote {len(rows)} rows of {name} ({rows.split}) to {file}.")
    print_next(
        out(), [(["rllm", "dataset", "register", f"{name}-2", str(file)], "keep them under another name")]
    )


def _rows_kept(name: str, split: str = "") -> Dataset:
    """The rows that are here. Raises ConfigError: of a benchmark's name, that tells how its rows get here."""
    if not DatasetRegistry.dataset_exists(name) and name in benchmark_names():
        source = benchmark_named(name).source
        if source is None:
            raise ConfigError(
                f"`{name}` makes its tasks itself and has no rows; `rllm benchmark info {name}`."
            )
        raise ConfigError(f"The rows of `{name}` are not here yet; fetch them: rllm dataset pull {name}")
    return require_dataset(name, split)


def _require_players(agent: str, evaluator: str) -> None:
    """Raises ConfigError with the nearest name for an agent or a grader that there is not."""
    agent_object_named(agent)
    require_grader(evaluator)


def _rows_of(source: str, config_name: str, hub_split: str) -> tuple[Dataset, dict[str, Any]]:
    """The rows of a file or of a data set on the hub, and where they are from."""
    path = Path(source)
    if path.exists() or source.count("/") != 1 or path.suffix in (".jsonl", ".json", ".csv", ".parquet"):
        return Dataset.load_data(path), {"address": str(path.resolve())}
    with _progress(source) as on_progress:
        pull_result = pull(
            HubSource(repo=source, configs=(config_name,)),
            Split(published=hub_split),
            on_progress=on_progress,
        )
    return Dataset(pull_result.rows, source), pull_result.facts


def _try_out(
    name: str, split: str, rows: Dataset, benchmark_fields: Mapping[str, Any], description: str, category: str
) -> None:
    """Make a task of every row, so that a row that lacks a field is found now and not in an evaluation."""
    benchmark = Benchmark(
        name=name,
        description=description,
        category=category or "own",
        licence="unknown",
        citation="",
        agent=benchmark_fields["agent"],
        evaluator=benchmark_fields["evaluator"],
        splits={split: Split(rows=len(rows))},
        transform="own",
        fields=benchmark_fields["fields"],
        prompt=benchmark_fields["prompt"],
    )
    for number, row in enumerate(rows):
        task_of_row(benchmark, split, number, row)


@contextmanager
def _progress(what: str) -> Iterator[Any]:
    """Says on stderr which file is being fetched, where somebody is looking."""
    console = err()
    if not console.is_terminal:
        yield lambda name: None
        return
    with console.status(Text(f"pulling {what}")) as status:
        yield lambda name: status.update(Text(f"pulling {what}: {name}"))


def _entry(name: str) -> dict[str, Any]:
    info = DatasetRegistry.get_dataset_info(name) or {}
    return {
        "name": name,
        "here": True,
        "category": info.get("category", ""),
        "source": info.get("source", ""),
        "splits": {split: each["rows"] for split, each in info.get("splits", {}).items()},
    }


def _not_here(benchmark: Benchmark) -> dict[str, Any]:
    return {
        "name": benchmark.name,
        "here": False,
        "category": benchmark.category,
        "source": "" if benchmark.source is None else benchmark.source.address,
        "splits": {name: split.rows for name, split in benchmark.splits.items()},
    }


def _tell(name: str, as_json: bool, following: list[tuple[list[str], str]]) -> None:
    """Print the rows that are kept under a name."""
    info = DatasetRegistry.get_dataset_info(name) or {}
    if as_json:
        print_json({"name": name, **info})
        return
    console = out()
    console.print(f"\n{name}", style="bold")
    if info["description"]:
        print_sentence(console, info["description"])
    console.print(facts([("source", info["source"]), ("category", info["category"])]))
    split_table = table(
        "split", "rows", "bytes", "of", "sha256", "columns", right=("rows", "bytes"), prose=("columns",)
    )
    for split, each in info["splits"].items():
        of = str(each.get("revision") or each.get("file_sha256") or "")[:12]
        columns = ", ".join(each["columns"])
        split_table.add_row(
            split, str(each["rows"]), str(each["bytes"]), of, each["sha256"][:12], _short(columns, 60)
        )
    console.print(split_table)
    print_next(console, following)


def _short(value: Any, chars: int = 300) -> str:
    """One value on few lines; pictures by their size."""
    text = f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)
    return text if len(text) <= chars else f"{text[:chars]}… ({len(text)} characters)"
