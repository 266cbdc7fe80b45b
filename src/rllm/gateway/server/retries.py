"""Which request is a retry, and of which call: for an answer that was lost, no second sample is made.

    Idempotency-Key: K            the call with the same key and body, in flight or recorded
    x-stainless-retry-count: 1    an equal request of the session that lost its answer; else the latest
    neither                       a call of its own, however often the same was asked before

SDKs mark a retry but not the request that it repeats, so every call gets a key: the digest of its session
and body, and a number where the same was asked before.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rllm.gateway.ledger import Ledger
from rllm.types.wire import CallRecord, Dialect

_REQUESTS_REMEMBERED = 50_000

CallT = TypeVar("CallT")


@dataclass(slots=True)
class _Entry:
    """The state of equal requests of one session."""

    count: int = 0
    num_lost: int = 0
    """Ended without an answer, and their retries did not come yet."""
    undelivered_keys: list[str] = field(default_factory=list[str])
    """Keys of answers that are recorded, but whose client was gone."""


@dataclass(slots=True)
class Placement(Generic[CallT]):
    """The treatment of a request: join a call, answer with records, or make a new call under `key`."""

    key: str = ""
    digest: bytes = b""
    call: CallT | None = None
    records: list[CallRecord] = field(default_factory=list[CallRecord])


class Retries(Generic[CallT]):
    """Remembers calls in flight by their keys, and the requests asked last."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._in_flight: dict[str, CallT] = {}
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def place(
        self, session: str, dialect: Dialect, headers: Mapping[str, str], body: bytes
    ) -> Placement[CallT]:
        digest = _digest(session, dialect, body)
        key_of_client = headers.get("Idempotency-Key")
        if key_of_client:
            # With the digest of the body: the same key with another body is another request. No digest in hex
            # begins with `i`, so keys of the two kinds never meet.
            key = "i-" + _digest(key_of_client, dialect, digest).hex()
            return self._placement(session, digest, [key]) or Placement(key, digest)
        entry = self._entries.get(digest)
        if _is_marked(headers):
            placement = self._retry_of(session, digest, entry)
            if placement is not None:
                return placement
        if entry is None:
            entry = self._remember(digest)
        entry.count += 1
        return Placement(_key(digest, entry.count - 1), digest)

    def begin(self, key: str, call: CallT) -> None:
        self._in_flight[key] = call

    def end(self, key: str, call: CallT) -> None:
        """A cancelled call may end late: its key may be that of its retry by then, which keeps it."""
        if self._in_flight.get(key) is call:
            del self._in_flight[key]

    def note_loss(self, digest: bytes) -> None:
        """A call ended without an answer: its retry is a call of its own."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.num_lost += 1

    def note_undelivered(self, digest: bytes, key: str) -> None:
        """An answer is recorded, but its client was gone: its retry gets this one."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.undelivered_keys.append(key)

    def unused_key(self, session: str, digest: bytes) -> str:
        """Where a number turned out to be taken, because this process does not know all that was asked
        before."""
        number = 1
        while self._ledger.retry_of(session, _key(digest, number)):
            number += 1
        entry = self._entries.get(digest) or self._remember(digest)
        entry.count = max(entry.count, number + 1)
        return _key(digest, number)

    def _retry_of(self, session: str, digest: bytes, entry: _Entry | None) -> Placement[CallT] | None:
        if entry is None:
            return self._placement(session, digest, self._recorded_keys(session, digest))
        if entry.undelivered_keys:
            return self._placement(session, digest, [entry.undelivered_keys.pop()])
        if entry.num_lost:
            entry.num_lost -= 1
            return None
        # The latest first: an SDK marks the retry of what it asked last.
        keys = [_key(digest, number) for number in reversed(range(entry.count))]
        return self._placement(session, digest, keys)

    def _recorded_keys(self, session: str, digest: bytes) -> list[str]:
        """After a restart: the latest of those in the ledger."""
        number = 0
        while self._ledger.retry_of(session, _key(digest, number)):
            number += 1
        return [_key(digest, number - 1)] if number else []

    def _placement(self, session: str, digest: bytes, keys: list[str]) -> Placement[CallT] | None:
        """The first of `keys` that is in flight, else the first that is recorded."""
        for key in keys:
            call = self._in_flight.get(key)
            if call is not None:
                return Placement(key, digest, call=call)
        for key in keys:
            records = self._ledger.retry_of(session, key)
            if records:
                return Placement(key, digest, records=records)
        return None

    def _remember(self, digest: bytes) -> _Entry:
        entry = self._entries[digest] = _Entry()
        if len(self._entries) > _REQUESTS_REMEMBERED:
            self._entries.popitem(last=False)
        return entry


def _is_marked(headers: Mapping[str, str]) -> bool:
    count = headers.get("x-stainless-retry-count", "0").strip()
    return count.isdecimal() and count.strip("0") != ""


def _key(digest: bytes, number: int) -> str:
    return f"{digest.hex()}-{number}" if number else digest.hex()


def _digest(session: str, dialect: Dialect, body: bytes) -> bytes:
    name = session.encode("utf-8", "surrogatepass")
    # The length stands before the name, so that no other name and body make the same bytes.
    running = hashlib.sha256(b"%d:%b:%b:" % (len(name), name, dialect.encode()))
    running.update(body)
    return running.digest()[:16]
