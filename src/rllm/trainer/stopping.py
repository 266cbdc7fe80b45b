"""The early end of a run: somebody stops it, or nothing moves any more.

    Ctrl-C, SIGTERM ──► CancelledError ──┐
    no progress ──► StallError ──────────┴──► checkpoint, if state and weights belong together ──► the error

A step that was not finished is repeated when the run goes on, so it ends as if it had never been stopped.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rllm.config.schema import TrainConfig
from rllm.engine.attempt_state import LiveRollout
from rllm.engine.attempts import EpisodeCounts
from rllm.engine.supervision import ProgressWatchdog


@asynccontextmanager
async def saved_when_stopped(
    engine: Any,
    save_if_whole: Callable[[], None],
    *,
    limit_s: float,
    report_path: Path,
    clients: Iterable[Any] = (),
) -> AsyncIterator[None]:
    """Guards a run. Raises StallError, naming the oldest rollouts, when none in `engine`, and no built-in
    engine behind `clients`, has moved for `limit_s`; all stacks are then in `report_path`."""
    watchdog = ProgressWatchdog(
        _Watched(engine, clients),
        limit_s=limit_s,
        on_stall=save_if_whole,
        report_path=report_path,
    )
    try:
        async with watchdog:
            yield
    except asyncio.CancelledError:
        save_if_whole()
        raise


def stall_limit_s(config: TrainConfig) -> float:
    """Seconds without progress after which a run ends: longer than any episode may take of its own time."""
    return config.rollout.stall_timeout_s or max(600.0, 2.0 * config.rollout.episode_timeout_s)


class _Watched:
    """An engine for the watchdog; one that does not know its live rollouts is seen by its counts alone."""

    def __init__(self, engine: Any, clients: Iterable[Any]) -> None:
        self._engine = engine
        self._samplers = [client.engine for client in clients if getattr(client, "is_built_in", False)]
        self._live = getattr(engine, "live", list[LiveRollout])

    @property
    def counts(self) -> EpisodeCounts:
        return self._engine.counts

    @property
    def model_steps(self) -> int:
        """Steps that built-in engines have made."""
        return sum(sampler.counts.steps for sampler in self._samplers)

    def live(self) -> list[LiveRollout]:
        return self._live()
