"""Fewer garbage collections while rollouts are alive.

A full collection looks at every object there is: with 8,192 live rollouts it stops the event loop for half a
second, some twenty times a batch, to find nothing, because rollouts end without cycles. It comes a hundred
times less often until the last engine is done. Young objects are looked at whenever there are ten thousand of
them: by Python's own 700 that takes an eighth of the time of the thread that plays.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LESS_OFTEN = 100
YOUNG = 10_000

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The thresholds that each running engine found: the first of them are the program's own."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """For the whole process; a program that has switched the collector off, or set its last threshold to 0,
    keeps what it has set."""
    with _lock:
        young, middle, old = gc.get_threshold()
        _before.append((young, middle, old))
        if len(_before) == 1 and young:
            # A full collection comes after some young * middle * old allocations. With `rare` in place of
            # `young` the last threshold gives back what the first one has taken: the product grows
            # LESS_OFTEN-fold.
            rare = max(young, YOUNG)
            gc.set_threshold(rare, middle, old and max(1, old * LESS_OFTEN * young // rare))
    try:
        yield
    finally:
        with _lock:
            # Engines end in any order: only the first entry and the number of them matter.
            own = _before[0]
            _before.pop()
            if not _before:
                gc.set_threshold(*own)
