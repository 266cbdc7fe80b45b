"""Start the ranks of a run, on this machine or where somebody else places them, and end all of them when one
ends.

    launch(words, 2) ──┬──► python -m rllm WORDS   RANK=0   the terminal is its
                       └──► python -m rllm WORDS   RANK=1   what it prints is in RUN/rank-1.log, and shown
                                                            where it alone failed
    Ctrl-C goes to all of them; SIGTERM is passed on. The first that fails says how the command ends, or all
    of them start again and go on from the last checkpoint.

torchrun does the same on several machines.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from rllm.errors import ConfigError
from rllm.errors.redaction import without_keys
from rllm.store.run_directory import is_run

POLL_S = 0.1
GRACE_S = 12.0
"""For the others to end by themselves, and to say why, once one has failed; and again once they are asked."""
BY_NPROC = "RLLM_NPROC"
"""Tells a rank that --nproc started it, and how many."""
STARTED_BY = "RLLM_RANK_STARTED_BY"
"""Tells a rank the number of the process that started it, without which it ends."""
TAIL_BYTES = 4_000
REFUSED, INTERRUPTED = 2, 130
"""Exit codes of a command: bad usage or configuration, and Ctrl-C or SIGTERM."""


class RankProcess(Protocol):
    """The process of a rank, wherever it runs; all but the last two members as of `subprocess.Popen`."""

    returncode: Any
    """None while it works."""

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...

    def interrupt(self) -> None:
        """Let it know that Ctrl-C was typed where the command has its terminal."""
        ...

    @property
    def ending(self) -> str:
        """The end that it has come to, such as `was killed by SIGKILL`."""
        ...


class RankStarter(Protocol):
    """The place where ranks run."""

    def __call__(
        self, words: Sequence[str], outputs: Sequence[IO[bytes] | None]
    ) -> AbstractContextManager[Sequence[RankProcess]]:
        """`python -m rllm WORDS` as one rank for each of `outputs`, where it prints; None is the terminal of
        the command. None of them is left behind the block."""
        ...


@dataclass(kw_only=True, slots=True)
class _Rank:
    number: int
    process: RankProcess
    output: IO[bytes] | None
    """The output of ranks other than 0."""
    num_logged: int = 0
    """Bytes of it that are in the log of the run."""

    def log(self, directory: Path, *, is_over: bool = False) -> None:
        """Append the lines printed since to the rank's log in its run, without keys. Nothing where there is
        no run: rank 0 has not made it yet, or refuses to."""
        if (
            self.output is None
            or self.output.seek(0, os.SEEK_END) == self.num_logged
            or not is_run(directory)
        ):
            return
        self.output.seek(self.num_logged)
        text = self.output.read()
        lines = text if is_over else text[: text.rfind(b"\n") + 1]  # a key may be cut in half
        with (directory / f"rank-{self.number}.log").open("ab") as log:
            log.write(without_keys(lines.decode(errors="replace")).encode())
        self.num_logged += len(lines)

    def tail(self) -> str:
        """The last that it printed."""
        if self.output is None:
            return ""
        end = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, end - TAIL_BYTES))
        return self.output.read().decode(errors="replace").strip()


def require_processes(num_ranks: int) -> None:
    """Raises ConfigError for a number of ranks that cannot be started here."""
    if num_ranks < 1:
        raise ConfigError(f"--nproc is {num_ranks}; it must be at least 1.")
    if num_ranks > 1 and os.environ.get("WORLD_SIZE"):
        raise ConfigError(
            f"--nproc is {num_ranks}, but this process is a rank of a run already (WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE']}); leave --nproc out under torchrun."
        )


def launched_words() -> list[str]:
    """The command line that starts as many ranks again as the command of this rank did."""
    return ["--nproc", os.environ[BY_NPROC]] if os.environ.get(BY_NPROC) else []


class _Process(subprocess.Popen[bytes]):
    """A rank of this machine."""

    def interrupt(self) -> None:
        """The terminal has told it as well."""

    @property
    def ending(self) -> str:
        return ending_of(self.returncode)


@contextmanager
def ranks_here(words: Sequence[str], outputs: Sequence[IO[bytes] | None]) -> Iterator[Sequence[RankProcess]]:
    """A `RankStarter`: on this machine."""
    port, processes = free_port(), list[_Process]()
    try:
        for number, output in enumerate(outputs):
            place = rank_variables(number, len(outputs), host="127.0.0.1", port=port, starter_pid=os.getpid())
            place |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(len(outputs))}
            processes.append(
                _Process(rank_command(words), env={**os.environ, **place}, stdout=output, stderr=output)
            )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def rank_command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "rllm", *words]


def rank_variables(number: int, num_ranks: int, *, host: str, port: int, starter_pid: int) -> dict[str, str]:
    """The environment of a rank that the process `starter_pid` starts; the ranks meet at `host`, where rank 0
    is."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        BY_NPROC: str(num_ranks),
        STARTED_BY: str(starter_pid),
    }


def launch(
    words: Sequence[str],
    num_ranks: int,
    directory: Path,
    *,
    restarts: int = 0,
    start: RankStarter = ranks_here,
) -> int:
    """Run `rllm WORDS` on so many ranks; returns the exit code of the first that failed, and 0 where none
    did. `directory` is the run that they write.

    So many times all of them start again where one was killed, hung or failed.
    """
    while True:
        code = _launch_once(words, num_ranks, directory, start)
        # What is refused would be refused again, and who interrupts a run wants it to end.
        if not restarts or code in (0, REFUSED, INTERRUPTED):
            return code
        restarts -= 1
        print(
            f"All {num_ranks} ranks start again and go on from the last checkpoint (`distributed.restarts`: "
            f"{restarts} left).",
            file=sys.stderr,
            flush=True,
        )


def _launch_once(words: Sequence[str], num_ranks: int, directory: Path, start: RankStarter) -> int:
    ranks: list[_Rank] = []
    with ExitStack() as logs:
        place = logs.enter_context(tempfile.TemporaryDirectory(prefix="rllm-ranks-"))
        paths = [os.path.join(place, f"rank-{number}") for number in range(1, num_ranks)]
        # Appended to, because a rank writes where this process has gone to read: both have one place in it.
        outputs = [None, *(logs.enter_context(open(path, "a+b")) for path in paths)]
        try:
            with _sigterm() as terminations, start(words, outputs) as processes:
                ranks += (
                    _Rank(number=number, process=process, output=output)
                    for number, (process, output) in enumerate(zip(processes, outputs, strict=True))
                )
                terminations.are_awaited = True
                return _wait(ranks, directory, terminations)
        finally:
            for rank in ranks:
                rank.log(directory, is_over=True)


def _wait(ranks: Sequence[_Rank], directory: Path, terminations: "_Terminations") -> int:
    first = _first_failure(ranks, directory, terminations)
    if first is None:
        return 0
    _end_others(ranks)
    code = first.process.returncode
    refused_by_all = code == REFUSED and ranks[0].process.returncode == code  # rank 0 has said why
    if code < 0 or (first.number and not _is_interruption(code) and not refused_by_all):
        _report(first, [rank for rank in ranks if rank is not first])
    # A process that was killed has a code below 0, which no command can return.
    return INTERRUPTED if _is_interruption(code) else code if code > 0 else 1


def _first_failure(ranks: Sequence[_Rank], directory: Path, terminations: "_Terminations") -> _Rank | None:
    """The first rank that ends with an error; None when all have ended well."""
    while True:
        try:
            # Passed on here and not in the handler, which may run while processes are being looked at.
            if terminations.take():
                _send(ranks, signal.SIGTERM)
            for rank in ranks:
                rank.log(directory)
            codes = [rank.process.poll() for rank in ranks]
            failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
            if failed:
                # A rank that is killed comes before those that only lost their connection to it.
                return min(failed, key=lambda rank: (rank.process.returncode > 0, rank.number))
            if all(code == 0 for code in codes):
                return None
            time.sleep(POLL_S)
        except KeyboardInterrupt:  # they save what they have
            for rank in ranks:
                rank.process.interrupt()


def _end_others(ranks: Sequence[_Rank]) -> None:
    for act in (None, signal.SIGTERM, signal.SIGKILL):
        if act is not None:
            _send(ranks, act)
        deadline_s = time.monotonic() + GRACE_S
        while time.monotonic() < deadline_s and any(rank.process.poll() is None for rank in ranks):
            try:
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                continue


def _is_interruption(code: int) -> bool:
    return code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)


def _report(rank: _Rank, others: Sequence[_Rank]) -> None:
    """Print the end of a rank that had no terminal, or no time for a word: then what another one knows of
    it."""
    print(f"Rank {rank.number} {rank.process.ending}; all ranks have ended.", file=sys.stderr)
    witness = next((each for each in (rank, *others) if each.tail()), rank)
    for line in witness.tail().splitlines():
        print(f"[rank {witness.number}] {line}", file=sys.stderr)


def ending_of(code: int) -> str:
    """The end of a process with this exit code, as `subprocess` has it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def free_port(host: str = "127.0.0.1") -> int:
    """One of this machine that nobody listens on now."""
    with socket.socket() as listening:
        listening.bind((host, 0))
        return listening.getsockname()[1]


def _send(ranks: Sequence[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


@dataclass(slots=True)
class _Terminations:
    """SIGTERM, for the loop that looks at the ranks: a handler runs in the middle of anything."""

    are_awaited: bool = False
    """Before there are ranks to save something, this process ends at once."""
    has_come: bool = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.are_awaited:
            sys.exit(INTERRUPTED)
        self.has_come = True

    def take(self) -> bool:
        has_come, self.has_come = self.has_come, False
        return has_come


@contextmanager
def _sigterm() -> Iterator[_Terminations]:
    terminations = _Terminations()
    before = signal.signal(signal.SIGTERM, terminations.handle)
    try:
        yield terminations
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
