"""Options that several commands of `rllm worker` have."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rllm.cli.terminal import err
from rllm.contracts.contract import Contract
from rllm.contracts.worker_file import read_contract
from rllm.errors import ConfigError

if TYPE_CHECKING:
    from rllm.worker.telemetry import Telemetry

_Command = Callable[..., Any]


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[object], None]]:
    """Says on stderr how many of `total` are done, where somebody is looking. To be called for each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda each: progress.advance(bar)


def binding_options(function: _Command) -> _Command:
    """Options that name the worker's actor: `program`, `agent`, `workflow`, `model`."""
    return _with_options(
        function,
        click.option("--program", default="", help="Who does the work: file.py:NAME."),
        click.option("--agent", default="", help="An agent instead: file.py:NAME or a built-in one."),
        click.option("--workflow", default="", help="A workflow instead: file.py:NAME."),
        click.option(
            "--model", default="", help="Model behind it: a run, a directory, builtin:tiny, a name."
        ),
    )


def running_options(function: _Command) -> _Command:
    """Those, and what every command that runs workers has: `base_url`, `directory`, `otel`."""
    return binding_options(
        _with_options(
            function,
            click.option("--base-url", default="", help="OpenAI-compatible server that knows --model."),
            click.option(
                "--directory",
                "--record",
                "directory",
                type=click.Path(path_type=Path),
                help="Where runs are kept.  [default: ~/.rllm/workers/ID]",
            ),
            click.option(
                "--otel",
                is_flag=True,
                help="Send spans by OTLP over HTTP to where OTEL_EXPORTER_OTLP_ENDPOINT says.",
            ),
        )
    )


def _with_options(function: _Command, *options: Callable[[_Command], _Command]) -> _Command:
    for option in reversed(options):
        function = option(function)
    return function


def telemetry_of(otel: bool) -> "Telemetry | None":
    """The telemetry that `--otel` asks for. Raises MissingExtraError without its packages."""
    if not otel:
        return None
    from rllm.worker.otel import OpenTelemetry

    return OpenTelemetry.over_otlp()


def bound_contracts(
    paths: tuple[Path, ...], directory: Path | None, binding: dict[str, str]
) -> tuple[list[Contract], Path]:
    """The contracts as the flags bind them, and the directory of their runs."""
    from rllm.worker.worker import bound, default_directory

    contracts = [bound(read_contract(path), **binding) for path in paths]
    if directory is None:
        if len(contracts) > 1:
            raise ConfigError("Several workers have one directory of runs: name it with --directory.")
        directory = default_directory(contracts[0])
    return contracts, directory


def as_the_file_names(name: str, path: Path) -> str:
    """A path as it is from the contract's file, `path`; another name as it is."""
    place, colon, attribute = name.rpartition(":")
    place, rest = (place, f"{colon}{attribute}") if place.endswith(".py") else (name, "")
    if not place or not Path(place).exists():
        return name
    return Path(os.path.relpath(Path(place).resolve(), path.resolve().parent)).as_posix() + rest
