"""Start the ranks of a run on this machine, and end all of them when one ends.

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from rllm.errors import ConfigError
from rllm.redaction import without_keys
from rllm.store.run_directory import is_run

POLL_S = 0.1
GRACE_S = 12.0
"""For the others to end by themselves, and to say why, once one has failed; and again once they are asked."""
BY_NPROC = "RLLM_NPROC"
"""Tells a rank that --nproc started it, and how many."""
TAIL_BYTES = 4_000
REFUSED, INTERRUPTED = 2, 130
"""Exit codes of a command: bad usage or configuration, and Ctrl-C or SIGTERM."""


@dataclass(kw_only=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
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
        printed = self.output.read()
        lines = printed if is_over else printed[: printed.rfind(b"\n") + 1]  # a key may be cut in half
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


def launch(words: Sequence[str], num_ranks: int, directory: Path, *, restarts: int = 0) -> int:
    """Run `rllm WORDS` on so many ranks of this machine; returns the exit code of the first that failed, and
    0 where none did. `directory` is the run that they write.

    So many times all of them start again where one was killed, hung or failed.
    """
    while True:
        code = _launch_once(words, num_ranks, directory)
        if not restarts or code in (0, REFUSED, INTERRUPTED):
            return code
        restarts -= 1
        print(
            f"All {num_ranks} ranks start again and go on from the last checkpoint (`distributed.restarts`: "
            f"{restarts} left).",
            file=sys.stderr,
            flush=True,
        )


def _launch_once(words: Sequence[str], num_ranks: int, directory: Path) -> int:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), BY_NPROC: str(num_ranks)}
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="rllm-ranks-") as logs, _passing_on_sigterm(ranks):
        try:
            for number in range(num_ranks):
                output = open(os.path.join(logs, f"rank-{number}"), "w+b") if number else None  # noqa: SIM115
                process = subprocess.Popen(
                    [sys.executable, "-m", "rllm", *words],
                    env={**os.environ, **place, "RANK": str(number), "LOCAL_RANK": str(number)},
                    stdout=output,
                    stderr=output,
                )
                ranks.append(_Rank(number=number, process=process, output=output))
            return _wait(ranks, directory)
        finally:
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.process.kill()
                rank.process.wait()
                rank.log(directory, is_over=True)
                if rank.output is not None:
                    rank.output.close()


def _wait(ranks: Sequence[_Rank], directory: Path) -> int:
    first = _first_failure(ranks, directory)
    if first is None:
        return 0
    _end_others(ranks)
    code = first.process.returncode
    refused_by_all = code == REFUSED and ranks[0].process.returncode == code  # rank 0 has said why
    if code < 0 or (first.number and not _is_interruption(code) and not refused_by_all):
        _report(first, [rank for rank in ranks if rank is not first])
    return INTERRUPTED if _is_interruption(code) else code if code > 0 else 1


def _first_failure(ranks: Sequence[_Rank], directory: Path) -> _Rank | None:
    """The first rank that ends with an error; None when all have ended well."""
    while True:
        try:
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
        except KeyboardInterrupt:  # the ranks got it as well: they save what they have
            continue


def _end_others(ranks: Sequence[_Rank]) -> None:
    for act in (None, signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            if act is not None and rank.process.poll() is None:
                rank.process.send_signal(act)
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
    code = rank.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"Rank {rank.number} {how}; all ranks have ended.", file=sys.stderr)
    witness = next((each for each in (rank, *others) if each.tail()), rank)
    for line in witness.tail().splitlines():
        print(f"[rank {witness.number}] {line}", file=sys.stderr)


def free_port() -> int:
    """One of this machine that nobody listens on now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextmanager
def _passing_on_sigterm(ranks: Sequence[_Rank]) -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
