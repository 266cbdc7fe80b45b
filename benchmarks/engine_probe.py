"""What `engine.py` asks of every contestant, measured alike: the world, the clocks, the loop, the memory.

    corridor: 5 observations of a small grid ──► the same answer each time ──► done
    LoopLag: a probe asks the loop for a turn every 5 ms ──► how late each turn came, by both clocks

Standard library only: the peer runs it with the Python of its own environment.
"""

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TURNS = 5
ANSWER = "Right"
SYSTEM = "You walk over a frozen lake. Answer with one word: Left, Down, Right or Up."
PROBE_S = 0.005
"""Between two turns of the loop that a probe asks for."""


def observation(turn: int) -> str:
    """What the environment shows: a grid of 4 x 4 with the player somewhere else in each turn."""
    cells = list("SFFFFHFHFFFHHFFG")
    cells[turn % 16] = "P"
    return "\n".join("".join(cells[row : row + 4]) for row in range(0, 16, 4))


@dataclass(slots=True)
class LoopLag:
    """How late the event loop is. A probe that is late stands for all those that it kept from being asked.

    By the clock on the wall, and by what the loop's own thread had computed meanwhile: on a machine that is
    shared, the rest of a lag is the neighbours'.
    """

    late_s: list[float] = field(default_factory=list[float])
    computed_s: list[float] = field(default_factory=list[float])
    _task: "asyncio.Task[None] | None" = None

    async def __aenter__(self) -> "LoopLag":
        self._task = asyncio.create_task(self._probe())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _probe(self) -> None:
        while True:
            asked, computed = time.perf_counter(), time.thread_time()
            await asyncio.sleep(PROBE_S)
            late_s = max(0.0, time.perf_counter() - asked - PROBE_S)
            computed_s = min(late_s, time.thread_time() - computed)
            add(self.late_s, late_s)
            add(self.computed_s, computed_s)


def add(lags_s: list[float], late_s: float) -> None:
    while late_s >= 0.0:
        lags_s.append(late_s)
        late_s -= PROBE_S


def share_ms(lags_s: list[float], share: float) -> float:
    """The lag that `share` of all moments stay below."""
    ordered = sorted(lags_s) or [0.0]
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def memory_bytes(name: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the most since the start, or since `reset_peak`) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status does not say {name}; this benchmark needs Linux.")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Measured:
    """Everything about one run, from `with` to its end; `said` is what a contestant prints."""

    def __init__(self, episodes: int, at_once: int, lag: LoopLag) -> None:
        self.episodes, self.at_once, self.lag = episodes, at_once, lag

    def __enter__(self) -> "Measured":
        reset_peak()
        self._base = memory_bytes("VmRSS")
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        wall_s, cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        turns = self.episodes * TURNS
        self.said: dict[str, Any] = {
            "episodes": self.episodes,
            "wall_s": wall_s,
            "trajectories_per_s": self.episodes / wall_s,
            "cpu_us_per_turn": 1e6 * cpu_s / turns,
            "lag_p50_ms": share_ms(self.lag.late_s, 0.5),
            "lag_p99_ms": share_ms(self.lag.late_s, 0.99),
            "lag_computed_p99_ms": share_ms(self.lag.computed_s, 0.99),
            "kb_per_live": (memory_bytes("VmHWM") - self._base) / self.at_once / 1000,
            "load": os.getloadavg()[0],
        }
