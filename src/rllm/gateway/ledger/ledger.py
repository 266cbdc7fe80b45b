"""Every captured model call, on disk before its answer leaves: one writer, any number of readers.

    await append(records) ──► on disk ──► traces(session), call(completion_id), retry_of(session, key)

Appends that wait at the same time share one transaction and one fsync. What was appended is there after
kill -9, and after a power cut on a disk that keeps its word. A call of a long conversation is stored as what
differs from an earlier one, so the file grows with what was said, not with how often it was repeated. The
space of deleted sessions is reused.
"""

import json
import sqlite3
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rllm.errors import ConfigError
from rllm.files.locks import release_lock
from rllm.gateway.ledger.file import (
    LEDGER,
    damage,
    hold,
    ledger_errors,
    name_bytes,
    name_of,
    open_for_reading,
)
from rllm.gateway.ledger.rows import CallRow, decode_call, require_json
from rllm.gateway.ledger.writer import LedgerWriter, add_to_totals
from rllm.types.wire import CallRecord, CallStatus

_COLUMNS = f"call, {', '.join(CallRow._fields)}"
_IDLE_READERS = 4
# A parent has a lower number than what goes on from it, so in this order it is decoded first.
_CHAIN = f"""
    WITH RECURSIVE chain (number) AS (
        SELECT ?1
        UNION
        SELECT calls.parent FROM chain JOIN calls ON calls.call = chain.number WHERE calls.parent IS NOT NULL
    )
    SELECT {_COLUMNS} FROM chain JOIN calls ON calls.call = chain.number ORDER BY call
"""


class Ledger:
    """May be used from several threads and event loops at once.

    Reading takes no lock. `create_session` and `delete_session` hold their thread up until they are on disk.
    """

    def __init__(self, directory: Path, *, lock_descriptor: int | None, writer: LedgerWriter | None) -> None:
        self.path = directory / LEDGER
        self._lock_descriptor = lock_descriptor
        self._writer = writer
        self._idle: list[sqlite3.Connection] = []
        self._closed = False

    @classmethod
    def open(cls, directory: Path, read_only: bool = False) -> "Ledger":
        """Open the ledger in `directory`, or create it; with `read_only` beside whoever writes it.

        Raises RunInUseError when another process writes there, ConfigError for a file that is no ledger, and
        StorageError where nothing can be written.
        """
        path = directory / LEDGER
        if read_only:
            with ledger_errors(path):
                open_for_reading(path).close()
            return cls(directory, lock_descriptor=None, writer=None)
        descriptor = hold(directory)
        try:
            with ledger_errors(path):
                return cls(directory, lock_descriptor=descriptor, writer=LedgerWriter(path))
        except BaseException:
            release_lock(descriptor)
            raise

    async def append(self, records: Sequence[CallRecord], *, num_bytes: int = 0, num_open: int = 0) -> None:
        """Record a call: all its choices, or none. They are on disk when this returns.

        `num_bytes`: about how large they are, where it is known; what is large is encoded in a thread.
        `num_open`: how many calls are under way: many that end at nearly the same time go to disk together.

        Raises ValueError, naming record and field, for what cannot be kept exactly; CountError for an `ok`
        record whose session, retry key and choice are those of a recorded one; StorageError when the disk
        refuses. An append that was cancelled may have been written.
        """
        writer = self._writing()
        if records:
            await writer.append(records, num_bytes, num_open)

    def traces(self, session: str) -> list[CallRecord]:
        """The calls of a session in the order in which they were recorded.

        They share messages and tools with each other: copy before you change one.
        """
        with self._reading() as connection:
            number = _session_row(connection, session)
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM calls WHERE session = ? ORDER BY call", (number,)
            )
            return list(self._decode(rows, session).values())

    def call(self, completion_id: str) -> list[CallRecord]:
        """The choices of one call; empty when it is not here."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT call, name FROM calls JOIN sessions USING (session) WHERE id = ? ORDER BY call",
                (name_bytes(completion_id),),
            ).fetchall()
            return [self._with_chain(connection, number, name_of(name)) for number, name in rows]

    def retry_of(self, session: str, retry_key: str) -> list[CallRecord]:
        """The whole choices of an earlier request with that key; empty when there was none."""
        if not retry_key:
            return []
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT call FROM calls WHERE session = ? AND retry_key = ? AND status = 'ok' "
                "ORDER BY choice",
                (_session_row(connection, session), name_bytes(retry_key)),
            ).fetchall()
            return [self._with_chain(connection, number, session) for (number,) in rows]

    def create_session(self, session: str, data: dict[str, Any]) -> bool:
        """Whether it was created: a session keeps the data that it was created with.

        One that is only there because calls of it were recorded is created by this. Waits for the disk.
        """
        require_json(data, f"Session {session[:80]!r}", "data")
        text = json.dumps(data)

        def create(connection: sqlite3.Connection) -> bool:
            row = connection.execute(
                "SELECT data FROM sessions WHERE name = ?", (name_bytes(session),)
            ).fetchone()
            if row is None:
                connection.execute(
                    "INSERT INTO sessions (name, created_at, data) VALUES (?, ?, ?)",
                    (name_bytes(session), time.time(), text),
                )
                add_to_totals(connection, Counter(sessions=1))
            elif row[0] is None:
                connection.execute("UPDATE sessions SET data = ? WHERE name = ?", (text, name_bytes(session)))
            return row is None or row[0] is None

        return self._writing().change(create)

    def try_to_write(self) -> None:
        """Raises StorageError where a call could not be recorded now. Waits for the disk, twice."""
        writer = self._writing()
        # Two transactions: pages that are freed in the one that takes them are never written.
        writer.change(
            lambda to: to.execute("INSERT OR REPLACE INTO totals VALUES ('trial', zeroblob(65536))")
        )
        writer.change(lambda to: to.execute("DELETE FROM totals WHERE name = 'trial'"))

    def session_data(self, session: str) -> dict[str, Any] | None:
        """None when there is no such session; empty when calls were recorded and it was never created."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT data FROM sessions WHERE name = ?", (name_bytes(session),)
            ).fetchone()
            return None if row is None else json.loads(row[0] or "{}")

    def delete_session(self, session: str) -> int:
        """Forget a session; returns how many records of it were deleted. Waits for the disk."""

        def delete(connection: sqlite3.Connection) -> int:
            number = _session_row(connection, session)
            firsts = connection.execute(
                "SELECT status, count(*) FROM calls WHERE session = ? AND is_first GROUP BY status", (number,)
            )
            totals = Counter({status: -count for status, count in firsts})
            num_deleted = connection.execute("DELETE FROM calls WHERE session = ?", (number,)).rowcount
            totals["choices"] = -num_deleted
            totals["sessions"] = -connection.execute(
                "DELETE FROM sessions WHERE session = ?", (number,)
            ).rowcount
            add_to_totals(connection, totals)
            return num_deleted

        return self._writing().change(delete, deletes=session)

    def sessions(self, limit: int = 100, after: str = "") -> list[dict[str, Any]]:
        """A page of sessions by name: `id`, `created_at` (unix time, s), `data`, `choices`.

        `after` is the last `id` of the page before.
        """
        if limit < 1:
            raise ValueError(f"`limit` is {limit}; ask for at least 1 session.")
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT name, created_at, data, "
                "(SELECT count(*) FROM calls WHERE calls.session = sessions.session) "
                "FROM sessions WHERE name > ? ORDER BY name LIMIT ?",
                (name_bytes(after), limit),
            )
            return [
                {
                    "id": name_of(name),
                    "created_at": created_at,
                    "data": json.loads(data or "{}"),
                    "choices": choices,
                }
                for name, created_at, data, choices in rows
            ]

    def counts(self) -> dict[str, int]:
        """Calls by status and `recorded`, their sum; `choices`, `sessions`; `bytes` on disk.

        A call has the status of its first choice. Deleted sessions are not counted.
        """
        with self._reading() as connection:
            totals = dict(connection.execute("SELECT name, value FROM totals"))
        counts = {status.value: totals.get(status.value, 0) for status in CallStatus}
        files = [self.path, self.path.with_name(LEDGER + "-wal")]
        return counts | {
            "recorded": sum(counts.values()),
            "choices": totals.get("choices", 0),
            "sessions": totals.get("sessions", 0),
            "bytes": sum(file.stat().st_size for file in files if file.exists()),
        }

    def close(self) -> None:
        """Returns when everything is written that was appended. Harmless when called twice."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        if self._writer is not None:
            self._writer.close()
        if self._lock_descriptor is not None:
            release_lock(self._lock_descriptor)
            self._lock_descriptor = None

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _writing(self) -> LedgerWriter:
        if self._writer is None:
            raise ConfigError(
                f"{self.path} was opened for reading; open it without `read_only` to change it."
            )
        return self._writer

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One state of the ledger, on a connection of its own: readers wait for nobody."""
        if self._closed:
            raise RuntimeError(f"{self.path} is closed; read before `close`, or open it again.")
        with ledger_errors(self.path):
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = open_for_reading(self.path)
            try:
                # One transaction, so that all statements of a reader see the same calls while others are
                # written.
                connection.execute("BEGIN")
                yield connection
                connection.execute("ROLLBACK")
            except BaseException:
                # With a transaction that may still be open it is of no use to the next reader.
                connection.close()
                raise
        if len(self._idle) < _IDLE_READERS and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()

    def _with_chain(self, connection: sqlite3.Connection, number: int, session: str) -> CallRecord:
        """One call, by way of those that it goes on from: together about as large as the call itself."""
        return self._decode(connection.execute(_CHAIN, (number,)), session)[number]

    def _decode(self, rows: Iterable[tuple[Any, ...]], session: str) -> dict[int, CallRecord]:
        records: dict[int, CallRecord] = {}
        for number, *columns in rows:
            row = CallRow(*columns)
            try:
                parent = None if row.parent is None else records[row.parent]
                records[number] = decode_call(row, session, parent)
            except (struct.error, ValueError, LookupError, TypeError) as error:
                raise damage(self.path, error) from error
        return records


def _session_row(connection: sqlite3.Connection, session: str) -> int | None:
    """Its number; None, which SQL finds equal to nothing, where there is none of that name."""
    row = connection.execute("SELECT session FROM sessions WHERE name = ?", (name_bytes(session),)).fetchone()
    return row[0] if row else None
