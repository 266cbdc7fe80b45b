"""Sandboxes that are ready before anybody asks: each is used once, and the next one is already being made.

filler thread ── open_sandbox ──► ready (at most `size`) ──► take() ──► yours to close
"""

import queue
import threading
from collections.abc import Sequence
from typing import Self

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox.backends import open_sandbox, require_backend
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import DEFAULT_LIMITS, Limits, Root, Snapshot

LOOK_S = 0.2
"""The interval at which a waiting thread looks whether the pool still lives."""


class SandboxPool:
    """Keeps `size` sandboxes ready. Any thread may take; what is taken belongs to the taker."""

    def __init__(
        self,
        backend: str = "bubblewrap",
        *,
        size: int = 2,
        limits: Limits = DEFAULT_LIMITS,
        snapshot: Snapshot | None = None,
        image: str | None = None,
        packages: Sequence[str] = (),
        root: Root | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"`size` is {size}; a pool keeps 1 or more sandboxes ready.")
        require_backend(backend)
        self.backend = backend
        self._open = lambda: open_sandbox(
            backend, limits=limits, snapshot=snapshot, image=image, packages=packages, root=root
        )
        self._ready: queue.Queue[Sandbox | Exception] = queue.Queue()
        self._free_slots = threading.Semaphore(size)
        self._closed = threading.Event()
        self._filler = threading.Thread(target=self._fill, name=f"sandbox-pool-{backend}", daemon=True)
        self._filler.start()

    def take(self) -> Sandbox:
        """A fresh sandbox; waits where none is ready yet. Raises what making it raised."""
        while not self._closed.is_set():
            sandbox = self._take(timeout_s=LOOK_S)
            if sandbox is not None:
                return sandbox
        raise SandboxError("This SandboxPool is closed.")

    def take_ready(self) -> Sandbox | None:
        """A fresh sandbox; None where none is ready yet. Raises what making it raised."""
        return self._take(timeout_s=0)

    def _take(self, timeout_s: float) -> Sandbox | None:
        try:
            ready = self._ready.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None
        # Before anything can raise: a slot that is not given back is never filled again.
        self._free_slots.release()
        if isinstance(ready, Exception):
            raise ready
        if ready.is_alive:
            return ready
        ready.close()  # died while it waited
        return None

    def _fill(self) -> None:
        while True:
            self._free_slots.acquire()
            if self._closed.is_set():
                return
            try:
                self._ready.put(self._open())
            except Exception as error:  # noqa: BLE001  it is raised where somebody takes
                self._ready.put(error)

    def close(self) -> None:
        """Close every sandbox that nobody has taken. Closing twice is harmless."""
        self._closed.set()
        # Wakes the filler, which may be waiting for somebody to take one.
        self._free_slots.release()
        self._filler.join()
        while not self._ready.empty():
            ready = self._ready.get()
            if isinstance(ready, Sandbox):
                ready.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
