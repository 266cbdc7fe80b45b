"""`rllm dataset build swe`: software-engineering tasks made out of projects with tests."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from rllm.cli.command import Group, argument, example, json_option, option, options_of, print_json, shared
from rllm.cli.terminal import err, out, print_next, print_sentence, table
from rllm.data.swe_factory import BenchLimits, Progress, Settings, build


@click.group("build", cls=Group)
def command() -> None:
    """Make tasks out of code of one's own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SweOptions:
    """The options of `rllm dataset build swe`, as the user typed them."""

    sources: tuple[str, ...] = argument(nargs=-1, required=True, metavar="SOURCE...")
    directory: Path = option(
        "--out",
        required=True,
        type=click.Path(path_type=Path),
        help="Directory for the tasks; the same command goes on with one that is unfinished.",
    )
    max_tasks: int = option("--max-tasks", default=20, show_default=True, help="Tasks of each source.")
    seed: int = option(
        "--seed", default=0, show_default=True, help="Which bugs are tried first, and the splits."
    )
    workers: int = option(
        "--workers", default=0, metavar="N", help="Sandboxes at a time; 0 takes one for each processor."
    )
    requirements: tuple[str, ...] = option(
        "--with",
        multiple=True,
        metavar="REQUIREMENT",
        help="What the tests import beside what the project names; may be given again.",
    )
    cpu_s: float = option(
        "--cpu-s", default=120.0, show_default=True, help="Processor seconds of one run of all tests."
    )
    memory_mb: int = option("--memory-mb", default=1024, show_default=True, help="MiB of one run of tests.")
    sandbox: str = option("--sandbox", default="bubblewrap", show_default=True, help="bubblewrap or unshare.")
    as_json: bool = shared(json_option)


@command.command(
    "swe",
    epilog=example(
        "rllm dataset build swe ./project --out tasks",
        "rllm dataset build swe pypi:toolz==1.0.0 project-2.1.tar.gz --out tasks --max-tasks 50 --json",
    ),
)
@options_of(SweOptions)
def swe(options: SweOptions) -> None:
    """Make software-engineering tasks out of Python projects with tests.

    SOURCE is a directory, a git repository (path or URL), an sdist, or pypi:NAME==VERSION. Bugs are made by
    changing the syntax tree, and by taking commits back; each is kept only if tests fail with it and pass
    without it, twice each, and all others keep passing. Tests run in a sandbox.
    """
    settings = Settings(
        max_tasks=options.max_tasks,
        seed=options.seed,
        extra_requirements=options.requirements,
        limits=BenchLimits(cpu_s=options.cpu_s, memory_mb=options.memory_mb),
    )
    with _progress() as on_progress:
        manifest = build(
            options.sources,
            options.directory,
            settings,
            backend=options.sandbox,
            workers=options.workers or os.cpu_count() or 1,
            on_progress=on_progress,
        )
    if options.as_json:
        print_json({"out": str(options.directory), **manifest})
        return
    _tell(manifest, options.directory)


def _tell(manifest: dict[str, Any], directory: Path) -> None:
    console = out()
    sources_table = table(
        "source",
        "tests",
        "bugs tried",
        "kept",
        "dropped",
        right=("tests", "bugs tried", "kept"),
        prose=("dropped",),
    )
    for each in manifest["sources"]:
        drop_counts = ", ".join(
            f"{name.replace('_', ' ')} {count}" for name, count in each["dropped"].items()
        )
        sources_table.add_row(
            Text(each["name"]),
            str(each["tests"]["passing"]),
            str(each["tried"]),
            str(each["kept"]),
            drop_counts,
        )
    console.print(sources_table)
    splits = ", ".join(f"{name} {count}" for name, count in manifest["splits"].items())
    print_sentence(console, f"{manifest['tasks']} tasks in {directory}: {splits}.")
    for each in manifest["sources"]:
        for file, reason in each["not_importable"].items():
            print_sentence(console, Text(f"{each['name']}: {file} does not import ({reason})"))
    if manifest["tasks"]:
        print_next(
            console,
            [
                (["rllm", "doctor", "tasks", str(directory / "train"), "--no-tampering"], "grade them"),
                (["rllm", "eval", str(directory / "train"), "--model", "MODEL"], "let a model work on them"),
            ],
        )


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Says on stderr what is being done: in one line on a terminal, else a line for each step."""
    console = err()
    if console.is_terminal:
        with console.status(Text("")) as status:
            yield lambda progress: status.update(Text(_line(progress)))
        return
    last: list[str] = []

    def tell(progress: Progress) -> None:
        line = f"{progress.source}: {progress.doing}"
        if line not in last:
            last.append(line)
            print_sentence(console, Text(line))

    yield tell


def _line(progress: Progress) -> str:
    line = f"{progress.source}: {progress.doing}"
    if progress.max_tasks:
        line += f", {progress.num_tried} tried, {progress.num_kept} of {progress.max_tasks} kept"
    return line
