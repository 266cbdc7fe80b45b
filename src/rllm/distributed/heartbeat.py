"""The way ranks notice that one of them has ended, or hangs.

    this rank: beat(place) ──► "alive 41, progress 17, working, train/7" ──► store, every INTERVAL_S
    the others' beats      ──► alive stands still?     the process has ended ──► all end, within 30 s
                           └─► progress stands still while it works, for timeout_s? it hangs ──► all end

A rank that waits for the others makes no progress and is no cause: the one they wait for is. Where torch
itself lets ranks wait for each other, in every layer of a sharded model, it is found by counting: all begin
the same collectives in the same order, so who has begun more than another waits for that one. The rank that
fails by an error says which before it ends, so that the others can repeat it.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

INTERVAL_S = 1.0
DEAD_AFTER_S = 25.0
"""Without a beat: long enough for a crowded machine, and within half a minute."""
BROKEN_AFTER_S = 5.0
"""The same where a connection broke: then somebody has ended, and the question is who."""
FAILED = 1


class Store(Protocol):
    """The key-value store that torch.distributed keeps for all ranks."""

    def set(self, key: str, value: str, /) -> Any: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(slots=True)
class Beat:
    """A rank's note on itself."""

    alive: int = 0
    """Counts while the process lives."""
    progress: int = 0
    """Counts while its work goes on."""
    is_waiting: bool = False
    """Whether it waits for other ranks."""
    num_collectives: int = 0
    """Those that it has begun, of the kind that all ranks begin in the same order."""
    place: str = "its start"
    """The place where it worked last."""


@dataclass(slots=True)
class _Peer:
    beat: Beat
    alive_since_s: float
    """When `alive` last changed."""
    moved_s: float
    """When `progress` last changed, or the rank last waited for one that was not waiting itself."""


class RankWatch:
    """The verdict of one rank on the beats of all."""

    def __init__(self, size: int, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._peers = {number: _Peer(Beat(), now_s, now_s) for number in range(size)}

    def look(self, beats: Mapping[int, Beat], now_s: float) -> None:
        """Take note of the beat of every rank."""
        fewest = min(each.num_collectives for each in beats.values())
        waiting = {number: each.is_waiting or each.num_collectives > fewest for number, each in beats.items()}
        # Where all wait, none of them waits for one that works, so time runs on for each.
        somebody_works = not all(waiting.values())
        for number, beat in beats.items():
            peer = self._peers[number]
            if beat.alive != peer.beat.alive:
                peer.alive_since_s = now_s
            if beat.progress != peer.beat.progress or (waiting[number] and somebody_works):
                peer.moved_s = now_s
            peer.beat = beat

    def trouble(self, now_s: float) -> str:
        """The reason to end the run; empty while all is well."""
        for number, peer in self._peers.items():
            if now_s - peer.alive_since_s > DEAD_AFTER_S:
                return (
                    f"Rank {number} has given no sign of life for {DEAD_AFTER_S:.0f} s (it was last at "
                    f"{peer.beat.place}); {GO_ON}"
                )
        # Looked for after silent ranks, because a process that is gone makes no progress either.
        stuck = [number for number, peer in self._peers.items() if now_s - peer.moved_s > self._timeout_s]
        limit = f"for {self._timeout_s:.0f} s (`distributed.timeout_s`)"
        if len(stuck) == len(self._peers) and all(peer.beat.is_waiting for peer in self._peers.values()):
            return (
                f"All ranks wait for each other: {limit} none of them has made progress "
                f"({', '.join(f'rank {number} at {self.place(number)}' for number in stuck)}); {GO_ON}"
            )
        if stuck:
            first = min(stuck, key=lambda number: self._peers[number].beat.num_collectives)
            return (
                f"Rank {first} hangs: {limit} it has made no progress at {self.place(first)}. Raise the "
                f"limit if that may take longer; {GO_ON}"
            )
        return ""

    def most_silent(self, but: int, now_s: float) -> int:
        """The rank, other than `but`, that has been alive least recently."""
        others = [number for number in self._peers if number != but]
        return max(others, key=lambda number: now_s - self._peers[number].alive_since_s)

    def place(self, rank: int) -> str:
        return self._peers[rank].beat.place


class Heartbeat:
    """A thread that tells the others how this rank is, and watches how they are."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, num_collectives: Callable[[], int]
    ) -> None:
        """`num_collectives`: see `Beat`; called by the thread."""
        self._store, self._rank, self._size = store, rank, size
        self._num_collectives = num_collectives
        self._mine = Beat()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._wake = threading.Event()
        """Something new is to be sent at once."""
        self._watch = RankWatch(size, timeout_s, time.monotonic())
        self._thread = threading.Thread(target=self._run, name="rllm-heartbeat", daemon=True)
        self._store_is_gone = False

    def __enter__(self) -> "Heartbeat":
        self._send()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def watch(self) -> None:
        """Begin to look at the others: all of them have sent a first beat."""
        self._thread.start()

    def stop(self) -> None:
        """Neither send nor look any more."""
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def beat(self, place: str = "") -> None:
        """Note progress, at the place of the last beat where none is given; cheap, so that it can be called
        as often as there is any."""
        with self._lock:
            self._mine.progress += 1
            if place and place != self._mine.place:
                self._mine.place = place
                self._wake.set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this rank waits for the others."""
        with self._lock:
            self._mine.is_waiting = True
        try:
            yield
        finally:
            with self._lock:
                self._mine.is_waiting = False
                self._mine.progress += 1

    def report_end(self, error: BaseException) -> None:
        """Leave the cause for the others, before the connections to them close."""
        with suppress(RuntimeError):  # the store went with the rank that holds it
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._store.set(f"cause/{self._rank}", f"{cause} (at {self._mine.place})")

    def explanation(self) -> str:
        """The reason that a collective broke: which rank ended, at what, and of what, as far as that is
        known.
        """
        deadline_s = time.monotonic() + BROKEN_AFTER_S
        while time.monotonic() < deadline_s and not self._store_is_gone:
            if cause := self._posted_cause():
                return cause
            time.sleep(0.1)
        silent = self._watch.most_silent(self._rank, time.monotonic())
        # The store is in the process of rank 0 and ends with it.
        ended = 0 if self._store_is_gone and self._rank != 0 else silent
        return (
            f"Rank {ended} ended without a word, as a killed process does (it was last at "
            f"{self._watch.place(ended)}); {GO_ON}"
        )

    def _posted_cause(self) -> str:
        for other in range(self._size):
            if other == self._rank:
                continue
            try:
                if self._store.check([f"cause/{other}"]):
                    cause = self._store.get(f"cause/{other}").decode()
                    return f"Rank {other} ended of {cause}; {GO_ON}"
            except RuntimeError:
                self._store_is_gone = True
        return ""

    def _run(self) -> None:
        while True:
            self._wake.wait(INTERVAL_S)
            # Before the beat is made: what changes from here on wakes this thread once more.
            self._wake.clear()
            if self._stopped.is_set():
                return
            try:
                self._send()
                self._look()
            except RuntimeError:  # the store is gone, and rank 0 with it
                self._store_is_gone = True
                self._stopped.wait(BROKEN_AFTER_S + 1.0)  # a collective that broke says it better
                if not self._stopped.is_set():
                    end_process(f"Rank 0 ended (it was last at {self._watch.place(0)}); {GO_ON}")
                return
            if trouble := self._watch.trouble(time.monotonic()):
                end_process(trouble)

    def _send(self) -> None:
        with self._lock:
            self._mine.alive += 1
            self._mine.num_collectives = self._num_collectives()
            text = json.dumps(asdict(self._mine))
        # Outside of the lock: `beat` must not wait for the store.
        self._store.set(f"beat/{self._rank}", text)

    def _look(self) -> None:
        beats = {
            number: Beat(**json.loads(self._store.get(f"beat/{number}"))) for number in range(self._size)
        }
        self._watch.look(beats, time.monotonic())


def end_process(message: str) -> None:
    """End this process at once: its threads wait for ranks that will not come."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(FAILED)


GO_ON = "the same command goes on from the last checkpoint."
