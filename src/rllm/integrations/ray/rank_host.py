"""The actor that holds a rank of the trainer: its process is a child of the actor's and ends with it.

    start(words) ──► python -m rllm WORDS ──stdout, stderr──► look() ──► the command that placed it
    send_signal(SIGTERM) ──► the process saves what is whole

Ray's own jobs work like this. So a rank has a main thread, signals and an exit code of its own, and drives
the cluster as the command would. Needs no Ray: it is a plain class until somebody makes an actor of it.
"""

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from rllm.distributed.launch import free_port, rank_command
from rllm.errors import ClusterError
from rllm.integrations.ray.job import Machine, this_machine

LOOK_S = 1.0
"""The most that `look` waits for something new."""
LAST_WORDS_S = 5.0
"""For what a rank has started, and what holds on to its output, to let go of that once the rank has ended."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RankOutput:
    """The output of a rank since it was looked at last."""

    stdout: bytes
    stderr: bytes
    code: int | None
    """Its exit code as `subprocess` has it; None while it works or has more to say."""


class RankHost:
    """Methods may be called while `look` waits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []
        self._news = threading.Condition()
        self._output = {"stdout": bytearray(), "stderr": bytearray()}

    def __repr__(self) -> str:
        return self._name  # which Ray puts before its lines

    def machine(self) -> Machine:
        return this_machine()

    def free_port(self) -> int:
        """A port of this node that nobody listens on now."""
        return free_port("")

    def unreadable(self, paths: Sequence[str]) -> list[str]:
        """Those of `paths` that are not here."""
        return [each for each in paths if not os.path.exists(each)]

    def start(self, words: Sequence[str], variables: Mapping[str, str], directory: str) -> None:
        """Run `rllm WORDS` in `directory`, with these beside the node's own environment variables."""
        self._process = subprocess.Popen(
            rank_command(words),
            cwd=directory,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            assert stream is not None, "it is a pipe"
            self._readers.append(threading.Thread(target=self._read, args=(name, stream), daemon=True))
            self._readers[-1].start()

    def look(self) -> RankOutput:
        """Its output since the last look; waits a moment for some."""
        process = self._running()
        with self._news:
            self._news.wait_for(lambda: self._has_news(process), timeout=LOOK_S)
        code = process.poll()
        # What it wrote last may still be in its pipes.
        if code is not None:
            for reader in self._readers:
                reader.join(LAST_WORDS_S)
        with self._news:
            text = {name: bytes(each) for name, each in self._output.items()}
            for each in self._output.values():
                each.clear()
        return RankOutput(**text, code=code)

    def send_signal(self, number: int) -> None:
        self._running().send_signal(number)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ClusterError(f"{self._name} holds no rank yet.")
        return self._process

    def _has_news(self, process: subprocess.Popen[bytes]) -> bool:
        return any(self._output.values()) or process.poll() is not None

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                with self._news:
                    self._output[name] += chunk
                    self._news.notify_all()
        with self._news:
            # The end is news as well, for which `look` may be waiting.
            self._news.notify_all()
