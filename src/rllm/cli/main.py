"""The front door of the `rllm` command: words in, an exit code out.

    rllm WORD … ──► COMMANDS[WORD] ──imported now──► its command ──► 0 done
                                                          │
                    1 failed, 2 bad usage or configuration, 130 interrupted ◄── exceptions, mapped here alone

Only the command that was typed is imported, nothing heavy before it: `rllm --help` does not wait for torch.
"""

import faulthandler
import gc
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import click

from rllm.build.installed import extra_of, rllm_version
from rllm.cli.command import CONTEXT, REASON_FILE, Group, example, fold, stderr_width
from rllm.cli.machine_errors import sentence_of, shortage_behind
from rllm.cli.published_flags import REFUSED_COMMANDS
from rllm.errors import MissingExtraError, RllmError, printable

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130
INTERRUPTION = "Interrupted"
"""The word in place of an error's class when the user stopped the work."""

COMMANDS = {
    "train": ("rllm.cli.train", "Train an agent on a benchmark, or go on with a run that was stopped."),
    "sft": ("rllm.cli.sft", "Fine-tune a model on conversations, or on what a stored run did well."),
    "dpo": ("rllm.cli.dpo", "Train a model to prefer better answers to worse ones, by DPO or a variant."),
    "distill": ("rllm.cli.distill", "Make a student like its teacher, on the student's own answers."),
    "eval": ("rllm.cli.eval", "Measure a model on a benchmark's held-out tasks."),
    "chat": ("rllm.cli.chat", "Talk with a model, which is here or on a server."),
    "benchmark": ("rllm.cli.benchmark", "List the benchmarks and tasks to measure and to train on."),
    "dataset": ("rllm.cli.dataset", "Rows that are kept here: pull, register, inspect, export, build."),
    "grade": ("rllm.cli.grade", "Grade one answer, and say why."),
    "sandbox": ("rllm.cli.sandbox", "Run programs that nobody vouches for, behind walls."),
    "serve": ("rllm.cli.serve", "Serve a model or an environment, or capture calls to other servers."),
    "worker": ("rllm.cli.worker", "Bounded workers from worker.md files: check, run and serve them."),
    "runs": ("rllm.cli.runs", "List, show, compare and replay runs, down to single episodes."),
    "view": ("rllm.cli.view", "Look at runs, evaluations and episodes in the browser."),
    "model": (
        "rllm.cli.model",
        "Set up models on servers, pull or create small ones here, and say what one holds.",
    ),
    "agent": ("rllm.cli.agent", "List agents, say what one of them takes, and give your own names."),
    "init": ("rllm.cli.init", "Write a small project of your own that trains at once."),
    "cluster": ("rllm.cli.cluster", "Show the nodes of a Ray cluster, and whether they fit together."),
    "doctor": ("rllm.cli.doctor", "Check that this machine is ready to train."),
}
"""Name -> where the command is, and its one line of help: said here too, so that help imports no command."""


class FrontDoor(Group):
    """Imports a command when it is asked for, and turns whatever it raises into an exit code."""

    successors = REFUSED_COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(COMMANDS[cmd_name][0]).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        options["standalone_mode"] = False
        sys.exit(
            exit_code_of(lambda: super(FrontDoor, self).main(words, *rest, **options), "--json" in words)
        )


def exit_code_of(work: Callable[[], Any], as_json: bool) -> int:
    """Run `work`, print what it raises, and say how the process ends. What nobody foresaw flies on."""
    try:
        return work() or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return BAD_USAGE
    except click.UsageError as error:
        hint = f"\n  {error.ctx.command_path} --help says more." if error.ctx else ""
        _print_error("UsageError", error.format_message(), as_json, hint)
        return BAD_USAGE
    except click.ClickException as error:
        _print_error(type(error).__name__, error.format_message(), as_json)
        return BAD_USAGE
    except RllmError as error:
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        _print_error(type(error).__name__, shortage_behind(error) or message, as_json)
        return error.exit_code
    except ModuleNotFoundError as error:
        extra = extra_of(error.name)
        if extra is None:
            raise
        missing = MissingExtraError(str(error.name), extra)
        _print_error(type(missing).__name__, str(missing), as_json)
        return missing.exit_code
    except click.Abort as stop:
        _print_error(INTERRUPTION, str(stop) or "Interrupted.", as_json)
        return INTERRUPTED
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        kind, sentence = type(error).__name__, sentence_of(error)
        if sentence is None:
            raise
    # Printed out here, where the work that failed holds no memory any more: printing takes some.
    gc.collect()
    _print_error(kind, sentence, as_json)
    return FAILED


def _print_error(kind: str, message: str, as_json: bool, hint: str = "") -> None:
    if os.environ.get(REASON_FILE):
        _leave_reason(message + hint)
    elif as_json:
        click.echo(json.dumps({"error": {"type": kind, "message": message}}), err=True)
    else:
        mark = "" if kind == INTERRUPTION else "error:"
        text = fold(f"{mark} {printable(message)}".lstrip(), stderr_width()).removeprefix(mark)
        click.echo(f"{click.style(mark, fg='red', bold=True) if mark else ''}{text}{hint}", err=True)


def _leave_reason(reason: str) -> None:
    """Write the reason that this command fails for into the file that its starter reads. The first of
    several processes has the cause; the others may only have lost their connection to it."""
    with suppress(FileExistsError), open(os.environ[REASON_FILE], "x", encoding="utf-8") as file:
        file.write(printable(reason))


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"rllm {rllm_version()}")
        ctx.exit()


@click.group(
    cls=FrontDoor,
    context_settings=CONTEXT,
    epilog=example(
        "rllm train frozenlake                                  train, and see before and after",
        "rllm eval frozenlake --model runs/frozenlake-seed0     measure the result again",
        "rllm runs show runs/frozenlake-seed0                   look at what happened",
    ),
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
def rllm() -> None:
    """Reinforcement learning for language agents.

    Every command has --help with an example, and --json for programs. Exit codes: 0 done, 1 the work failed,
    2 bad usage or configuration, 130 interrupted.
    """


class _Remark(logging.Formatter):
    """A log line of a library or a room, exceptions of libraries among them."""

    def format(self, record: logging.LogRecord) -> str:
        text = printable(super().format(record))
        return text if record.exc_info else fold(text, stderr_width())


def _print_unforeseen(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback, as Python prints it."""
    text = "".join(traceback.format_exception(kind, error, trace))
    click.echo(printable(text), err=True, nl=False)


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback of the error that ends this process."""
    _print_unforeseen(kind, error, trace)
    if os.environ.get(REASON_FILE):
        _leave_reason("".join(traceback.format_exception_only(error)).strip())


def _print_of_thread(args: threading.ExceptHookArgs) -> None:
    """A traceback of somebody's thread. SystemExit ends the thread in silence, as Python has it."""
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread is not None else "unknown"
    click.echo(f"Exception in thread {printable(name)}:", err=True)
    if args.exc_value is not None:
        _print_unforeseen(args.exc_type, args.exc_value, args.exc_traceback)


def _print_unraisable(args: "sys.UnraisableHookArgs") -> None:
    """A traceback of what nobody can catch, such as an error in `__del__`."""
    click.echo(
        f"{args.err_msg or 'Exception ignored'}: {printable(type(args.object).__qualname__)}", err=True
    )
    if args.exc_value is not None:
        _print_unforeseen(args.exc_type, args.exc_value, args.exc_traceback)


def _open_closed_streams() -> None:
    """Put /dev/null where this process was started without stdin, stdout or stderr.

    Otherwise the next files that are opened, such as a run's metrics, get these numbers, and everything that
    a library or a child process prints goes into them.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _escape_what_streams_cannot_hold() -> None:
    """Print a letter that the locale has no code for as `\\u2500`: by default it ends the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    _open_closed_streams()
    _escape_what_streams_cannot_hold()
    sys.excepthook = _print_uncaught
    threading.excepthook = _print_of_thread
    sys.unraisablehook = _print_unraisable
    remarks = logging.StreamHandler()
    remarks.setFormatter(_Remark())
    logging.basicConfig(handlers=[remarks], level=logging.WARNING)
    faulthandler.enable()  # code of others that crashes this process is named: the stack of every thread
    # Schedulers send SIGTERM: it does what Ctrl-C does, also before and after the work that saves itself.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rllm(prog_name="rllm")


if __name__ == "__main__":
    main()
