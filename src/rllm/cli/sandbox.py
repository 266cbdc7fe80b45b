"""`rllm sandbox`: run one Python program behind walls, say which walls this machine has, clear up."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from rllm.build.sandboxes import ProgramRun, default_limits, remove_leftovers, why_unusable
from rllm.cli.command import Group, WordChoice, example, json_option, print_json
from rllm.cli.terminal import err, facts, out, print_next, print_sentence, table
from rllm.errors import ConfigError

WALLS = {
    "bubblewrap": "own user, files, processes and network; no capabilities; seccomp",
    "unshare": "the same, without the bwrap program",
    "docker": "a container without network or capabilities",
    "subprocess": "UNSAFE: none. Limits only, for programs that you trust",
}

_LIMITS = default_limits()


@click.group("sandbox", cls=Group)
def command() -> None:
    """Run programs that nobody vouches for, behind walls."""


@command.command(
    "run",
    epilog=example(
        "rllm sandbox run answer.py",
        "rllm sandbox run answer.py --wall-s 5 --cpu-s 4 --memory-mb 512 --output-kb 1024 \\",
        "    --disk-mb 64 --processes 64 --stdin input.txt --json",
    ),
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--backend",
    type=WordChoice(list(WALLS)),
    default="bubblewrap",
    show_default=True,
    help="The walls. `subprocess` has none: it is UNSAFE. What is asked for and missing is an error.",
)
@click.option(
    "--wall-s", type=float, default=_LIMITS["wall_s"], show_default=True, help="Seconds to the end."
)
@click.option(
    "--cpu-s",
    type=float,
    default=_LIMITS["cpu_s"],
    show_default=True,
    help="Seconds of processor time, all told.",
)
@click.option(
    "--memory-mb",
    type=int,
    default=_LIMITS["memory_mb"],
    show_default=True,
    help="MiB over all processes.",
)
@click.option(
    "--output-kb",
    type=int,
    default=_LIMITS["output_kb"],
    show_default=True,
    help="KiB of stdout and stderr.",
)
@click.option(
    "--disk-mb", type=int, default=_LIMITS["disk_mb"], show_default=True, help="MiB of all its files."
)
@click.option(
    "--processes",
    type=int,
    default=_LIMITS["processes"],
    show_default=True,
    help="Processes and threads at once.",
)
@click.option(
    "--stdin",
    "stdin_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file to read from; nothing by default.",
)
@click.option(
    "--package",
    "packages",
    multiple=True,
    metavar="NAME",
    help="A package installed here that the program may import, with what it requires. Repeatable.",
)
@click.option("--image", help="Docker image; it must have python3.")
@click.option(
    "--allow-root", is_flag=True, help="Let `subprocess` run it as root, on a machine that may be lost."
)
@json_option
def run(
    file: Path,
    backend: str,
    stdin_file: Path | None,
    packages: tuple[str, ...],
    image: str | None,
    allow_root: bool,
    as_json: bool,
    **limits: Any,
) -> None:
    """Run the Python program FILE and say how it ended.

    status is ok, error, timeout, out_of_memory, killed, output_limit or crashed. The exit code is 0 whenever
    the program was run, however it ended; 1 where the sandbox itself failed, 2 for bad usage or a missing
    backend.
    """
    program = ProgramRun(
        source=_text_of(file).removeprefix("\ufeff"),  # as Python itself reads a file
        stdin=_text_of(stdin_file) if stdin_file else "",
        backend=backend,
        limits=limits,
        packages=packages,
        image=image,
        allow_root=allow_root,
    )
    program.require_usable()
    if backend == "subprocess":
        err().print("UNSAFE: `subprocess` has no walls; the program can do whatever you can.", style="yellow")
    result = program.run()
    fields = asdict(result)
    del fields["result"]  # a channel that programs of a person do not have
    if as_json:
        print_json(fields)
    else:
        _print_ended(**fields)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"`{path}` is not UTF-8 ({error.reason} at byte {error.start}).") from error


def _print_ended(
    status: str, exit_code: int | None, wall_s: float, stdout: str, stderr: str, *, truncated: bool
) -> None:
    cut = "  (cut: it wrote more)" if truncated else ""
    console = out()
    console.print(
        facts(
            [
                ("status", status),
                ("exit code", "–" if exit_code is None else str(exit_code)),
                ("seconds", f"{wall_s:.3f}"),
                ("stdout", f"{len(stdout):,} characters{cut}"),
                ("stderr", f"{len(stderr):,} characters{cut}"),
            ]
        )
    )
    for text in (stdout, stderr):
        if text:
            console.print()
            console.print(text.rstrip("\n"), soft_wrap=True)


@command.command("list", epilog=example("rllm sandbox list"))
@json_option
def list_backends(as_json: bool) -> None:
    """Say which backends work on this machine: each is started once."""
    backends = [
        {"backend": name, "walls": WALLS[name], "works": why_unusable(name) or "yes"} for name in WALLS
    ]
    if as_json:
        print_json({"backends": backends})
        return
    rows = table("backend", "works here", "walls", prose=("walls",))
    for row in backends:
        rows.add_row(row["backend"], "yes" if row["works"] == "yes" else "no", row["walls"])
    out().print(rows)
    for row in backends:
        if row["works"] != "yes":
            print_sentence(out(), f"{row['backend']}: {row['works']}")
    print_next(out(), [(["rllm", "sandbox", "run", "FILE"], "run a program")])


@command.command("reap", epilog=example("rllm sandbox reap"))
@json_option
def reap_leftovers(as_json: bool) -> None:
    """Remove what owners left that were killed: processes, directories, containers.

    Every program that opens a sandbox does this first, so that it is seldom needed.
    """
    num_removed = remove_leftovers()
    if as_json:
        print_json({"removed": num_removed})
        return
    out().print(f"{num_removed} removed.")
