"""Worlds for several attempts at one task: while one is open, the next is being made.

open ── nobody else has one with these layers ──► a sandbox, made now
     ── somebody has ──► a SandboxPool of them: the sandbox that is ready, else one made now; not of images
close ── of the last ──► the pool ends, and nothing is left
"""

import threading
from dataclasses import dataclass

from rllm.rewards.swe_world import SWEWorld
from rllm.sandbox.base import Sandbox
from rllm.sandbox.pool import SandboxPool
from rllm.sandbox.types import Limits

_Key = tuple[str, Limits, str, tuple[str, ...], tuple[str, ...]]


@dataclass(kw_only=True, slots=True)
class _Attempts:
    """The shared state of open worlds with equal layers."""

    num_open: int = 0
    pool: SandboxPool | None = None


class ReadyWorlds:
    """Opens and closes worlds, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[_Key, _Attempts] = {}

    def open(self, world: SWEWorld) -> Sandbox:
        """A world that nobody has used. Give it back to `close`."""
        with self._lock:
            group = self._attempts.setdefault(_key(world), _Attempts())
            group.num_open += 1
            if group.num_open > 1 and group.pool is None and not world.image:
                group.pool = world.pool()
            pool = group.pool
        try:
            return (pool.take_ready() if pool else None) or world.open()
        except BaseException:
            self._leave(world)
            raise

    def close(self, world: SWEWorld, sandbox: Sandbox) -> None:
        try:
            sandbox.close()
        finally:
            self._leave(world)

    def _leave(self, world: SWEWorld) -> None:
        with self._lock:
            group = self._attempts[_key(world)]
            group.num_open -= 1
            last = self._attempts.pop(_key(world)) if group.num_open == 0 else None
        # Not under the lock: the pool waits for its thread, which may be making a world.
        if last is not None and last.pool is not None:
            last.pool.close()


def _key(world: SWEWorld) -> _Key:
    return world.backend, world.limits, world.image, world.layers, world.environment.packages
