"""The kind of the rows that `rllm dataset from-runs` and `from-eval` make, and where they go."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from rllm.cli.command import WordChoice, WritableFile, print_json
from rllm.cli.terminal import facts, out, print_next
from rllm.data.curation import RowKind
from rllm.data.registry import DatasetRegistry
from rllm.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., Any])

kind_option = click.option(
    "--as",
    "kind",
    type=WordChoice([str(each) for each in RowKind]),
    default=str(RowKind.SFT),
    show_default=True,
    help="What the rows are for.",
)


out_option = click.option("--out", "path", type=WritableFile(), help="File for the rows; or as --name.")
name_option = click.option("--name", default="", metavar="NAME", help="Keep them as a data set of this name.")
split_option = click.option("--split", default="train", show_default=True, help="Its split, with --name.")


def rows_place(command: _Command) -> _Command:
    """`--out FILE`, or `--name NAME` and `--split NAME` of a data set that is kept here. `--out` takes its
    name as well: a word without a dot or a folder."""
    return out_option(name_option(split_option(command)))


@dataclass(kw_only=True, slots=True, frozen=True)
class RowPlace:
    """Where rows go: to a file, or to a data set."""

    path: Path | None
    name: str
    category: str = ""
    """Category of the data set; like `description`, unused for a file."""
    description: str = ""


def hand_on_rows(
    rows: Iterable[Mapping[str, Any]],
    counts: Callable[[], Mapping[str, int]],
    place: RowPlace,
    *,
    kind: RowKind,
    splits: Callable[[list[Mapping[str, Any]]], Mapping[str, list[Mapping[str, Any]]]],
    as_json: bool,
) -> None:
    """Write them to a file, or keep them under a name, and say what became of what. `counts` is called last.

    `splits`: all rows to those of each split.
    """
    require_place(place.path, place.name)
    path, name = place.path, place.name
    if path is not None and path.name == str(path) and not path.suffix:
        path, name = None, str(path)
    row_list = list(rows)
    if path is not None:
        path.write_text(
            "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in row_list), encoding="utf-8"
        )
    else:
        for split, own in splits(row_list).items():
            if own:
                DatasetRegistry.register_dataset(
                    name,
                    own,
                    split,
                    source="rllm dataset",
                    category=place.category,
                    description=place.description,
                )
    report = {"path": str(path)} if path is not None else {"name": name}
    if as_json:
        print_json({**report, **counts()})
        return
    out().print(facts([(each.replace("_", " "), str(count)) for each, count in counts().items()]))
    if row_list:
        print_next(out(), [next_command(kind, str(path) if path is not None else name)])


def require_place(path: Path | None, name: str) -> None:
    """Raises ConfigError for no place, two, and a file that is there already."""
    if (path is None) == (not name):
        raise ConfigError("Say where the rows go: give one of --out FILE and --name NAME.")
    if path is not None and path.exists():
        raise ConfigError(f"{path} is there already; give another --out.")


def next_command(kind: RowKind, rows: str) -> tuple[list[str], str]:
    """The command to type next."""
    commands = {
        RowKind.SFT: ["rllm", "sft", rows, "--model", "builtin:tiny", "--dry-run"],
        RowKind.PREFERENCES: ["rllm", "dpo", rows, "--model", "builtin:tiny", "--dry-run"],
        RowKind.TASKS: ["rllm", "dataset", "inspect", rows],
    }
    return commands[kind], "look at the rows" if kind is RowKind.TASKS else "check the rows"
