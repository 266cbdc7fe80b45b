"""The one thread that writes the ledger: whatever waits goes to disk together, in one transaction.

    append ─┐                    ┌─ one transaction, one fsync ─► every append of it returns
    append ─┼─► queue ─► thread ─┤
    change ─┘                    └─ the disk refuses ─► every one of it gets a StorageError; the next is tried

Calls are encoded where they are appended: one that cannot be kept fails alone and at once, and this thread
holds the interpreter only for moments.
"""

import asyncio
import json
import os
import queue
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm.errors import CountError
from rllm.errors.redaction import num_known_keys
from rllm.gateway.ledger.file import as_our_own, name_bytes, name_of, open_for_writing
from rllm.gateway.ledger.prefixes import Tips
from rllm.gateway.ledger.rows import CallRow, EncodedCall, encode_call
from rllm.types.wire import CallRecord, CallStatus

_MOST_PER_COMMIT = 1024
_MOST_GATHERED = 64
_FEWEST_GATHERED = 4
_LONGEST_GATHER_S = 0.020
"""A commit costs about as much as ten rows: where many calls are under way, and end often enough, one is put
off until half of them have come, but not for long. A call that ends alone does not wait."""
_GATHER_S = 0.004
"""For more of those that came during a commit, where nobody knows how many are under way or they end seldom:
to wait halves what each of them costs."""
_ENCODED_HERE_BYTES = 256 << 10
"""The size beyond which a call is encoded in a thread."""
_SESSIONS_REMEMBERED = 20_000
_ROWS_PER_STATEMENT = 64
"""About so many. SQLite prepares a statement of each number of rows once, and keeps those used last."""
_INSERT = f"INSERT INTO calls (call, {', '.join(CallRow._fields)}) VALUES "
TOTALS = (*CallStatus, "choices", "sessions")

_NumberedRow = tuple[int, CallRow]
Change = Callable[[sqlite3.Connection], Any]
"""Something to do within a transaction."""


@dataclass(kw_only=True, slots=True)
class _Append:
    """The choices of one append: all are written, or none."""

    calls: list[EncodedCall]
    num_deletions: int
    """Sessions that had been deleted when the calls were encoded."""
    num_keys: int
    """The keys that the calls were searched for."""
    num_open: int
    """Calls under way when it came, each of which will come with an append of its own."""
    loop: asyncio.AbstractEventLoop
    on_disk: asyncio.Future[None]
    error: Exception | None = None


@dataclass(kw_only=True, slots=True)
class _Change:
    change: Change
    deletes: str | None
    """The session that is gone after it."""
    done: Future[Any] = field(default_factory=Future[Any])
    result: Any = None


class LedgerWriter:
    """Owns the connection that writes. Its methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tips = Tips()
        self._connection: sqlite3.Connection | None = open_for_writing(path)
        (last,) = self._connection.execute("SELECT coalesce(max(call), 0) FROM calls").fetchone()
        self._last_call: int = last
        self._session_rows: OrderedDict[str, int] = OrderedDict()
        self._queue: queue.SimpleQueue[_Append | _Change | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Guards `tips`, `_num_deletions`, `_num_keys` and `_closed`."""
        self._num_deletions = 0
        self._num_keys = num_known_keys()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rllm-ledger", daemon=True)
        self._thread.start()

    async def append(self, records: Sequence[CallRecord], num_bytes: int, num_open: int) -> None:
        """Returns when all of `records` are on disk."""
        # Before the encoding: where a key becomes known meanwhile, `_commit` sees that the call was not
        # searched for it, and lets nothing go on from the call.
        num_keys = num_known_keys()
        if num_bytes > _ENCODED_HERE_BYTES:
            calls, num_deletions = await asyncio.to_thread(self._encode, records)
        else:
            calls, num_deletions = self._encode(records)
        loop = asyncio.get_running_loop()
        item = _Append(
            calls=calls,
            num_deletions=num_deletions,
            num_keys=num_keys,
            num_open=num_open,
            loop=loop,
            on_disk=loop.create_future(),
        )
        self._put(item)
        await item.on_disk

    def change(self, change: Change, *, deletes: str | None = None) -> Any:
        """Do something between the appends, `deletes` that session perhaps, and wait until it is on disk."""
        item = _Change(change=change, deletes=deletes)
        self._put(item)
        return item.done.result()

    def close(self) -> None:
        """Wait until everything is written that was appended before."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _put(self, item: _Append | _Change) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self.path} was opened by process {self._pid}; a fork of it cannot write there."
            )
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self.path} is closed; append before `close`, or open it again.")
            self._queue.put(item)

    def _encode(self, records: Sequence[CallRecord]) -> tuple[list[EncodedCall], int]:
        """Each call as what differs from what is on disk, or from an earlier one of `records`."""
        calls: list[EncodedCall] = []
        with self._lock:
            num_deletions = self._num_deletions
            if self._num_keys != num_known_keys():
                # What is on disk was not searched for the newest key: nothing goes on from it.
                self._num_keys = num_known_keys()
                self.tips.forget_all()
        for record in records:
            with self._lock:
                tips = self.tips.of(record.session)
            # Choices of one call share its whole prompt, and none of them is on disk yet.
            siblings = [call.tip for call in calls[::-1] if call.record.session == record.session]
            calls.append(encode_call(record, siblings + tips))
        return calls, num_deletions

    # Everything below runs in the thread.

    def _run(self) -> None:
        open_for_more = True
        since = time.monotonic()
        while open_for_more:
            batch: list[_Append | _Change] = []
            item = self._queue.get()
            while item is not None:
                batch.append(item)
                if len(batch) == _MOST_PER_COMMIT:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            else:
                open_for_more = False
            if batch:
                self._settle(batch, self._commit(batch))
            before, since = since, time.monotonic()
            if open_for_more:
                self._gather(batch, since - before)
        if self._connection is not None:
            self._connection.close()

    def _gather(self, batch: list[_Append | _Change], took_s: float) -> None:
        """Put the next commit off, where more appends will come soon; `batch` came within `took_s`."""
        # `per_s` is measured over the last commit and wait: what came in that time foretells what will come
        # in the next.
        num_waiting = self._queue.qsize()
        num_open = max((item.num_open for item in batch if isinstance(item, _Append)), default=0)
        goal = min(num_open // 2, _MOST_GATHERED)
        per_s = len(batch) / max(took_s, 1e-6)
        if goal < _FEWEST_GATHERED or per_s * _LONGEST_GATHER_S < _FEWEST_GATHERED:
            if num_waiting:
                time.sleep(_GATHER_S)
        elif num_waiting < goal:
            time.sleep(min((goal - num_waiting) / per_s, _LONGEST_GATHER_S))

    def _commit(self, batch: list[_Append | _Change]) -> Exception | None:
        """The reason that nothing of `batch` was written; None when it was, but for appends that have an
        error."""
        try:
            if self._connection is None:
                self._connection = open_for_writing(self.path)
            self._connection.execute("BEGIN IMMEDIATE")
            self._write(self._connection, batch)
            self._connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001  whoever waits for this batch must hear of it, whatever it is
            self._start_afresh()
            return error
        # All at once: nobody may see a tip of a session that was deleted later in the same batch.
        with self._lock:
            for item in batch:
                if isinstance(item, _Change):
                    if item.deletes is not None:
                        self.tips.forget(item.deletes)
                elif item.error is None and item.num_keys == self._num_keys:
                    for call in item.calls:
                        self.tips.add(call.record.session, call.tip, call.kept_prefix)
        return None

    def _write(self, connection: sqlite3.Connection, batch: list[_Append | _Change]) -> None:
        appends: list[_Append] = []
        for item in batch:
            if isinstance(item, _Append):
                appends.append(item)
                continue
            # Appends are written together, but never past a change: what was appended before a deletion is
            # deleted by it.
            self._write_calls(connection, appends)
            appends = []
            item.result = item.change(connection)
            if item.deletes is not None:
                self._session_rows.pop(item.deletes, None)
                with self._lock:
                    self.tips.forget(item.deletes)
                    self._num_deletions += 1
        self._write_calls(connection, appends)

    def _write_calls(self, connection: sqlite3.Connection, appends: list[_Append]) -> None:
        if not appends:
            return
        totals: Counter[str] = Counter()
        sessions = self._find_sessions(connection, appends, totals)
        together: list[tuple[_Append, list[_NumberedRow]]] = []
        num_rows = 0
        for item in appends:
            together.append((item, self._number(connection, item, sessions)))
            num_rows += len(item.calls)
            if num_rows >= _ROWS_PER_STATEMENT or item is appends[-1]:
                self._insert(connection, together, totals)
                together, num_rows = [], 0
        add_to_totals(connection, totals)

    def _insert(
        self,
        connection: sqlite3.Connection,
        rows: list[tuple[_Append, list[_NumberedRow]]],
        totals: Counter[str],
    ) -> None:
        """All in one statement, which writes all of them or nothing."""
        try:
            _insert_calls(connection, [row for _, rows_of_item in rows for row in rows_of_item])
        except sqlite3.IntegrityError:
            for item, rows_of_item in rows:
                self._write_alone(connection, item, rows_of_item)
        for item, rows_of_item in rows:
            if item.error is None:
                totals["choices"] += len(rows_of_item)
                for _, row in rows_of_item:
                    totals[row.status] += row.is_first

    def _write_alone(self, connection: sqlite3.Connection, item: _Append, rows: list[_NumberedRow]) -> None:
        """A second sample for a request that has one is refused, and with it its whole append."""
        # Within the transaction, so that the other appends of the batch stay.
        connection.execute("SAVEPOINT alone")
        for call, row in zip(item.calls, rows, strict=True):
            try:
                _insert_calls(connection, [row])
            except sqlite3.IntegrityError:
                item.error = _second_sample(connection, call.record, row[1])
                connection.execute("ROLLBACK TO alone")
                break
        connection.execute("RELEASE alone")

    def _number(
        self, connection: sqlite3.Connection, item: _Append, sessions: dict[str, int]
    ) -> list[_NumberedRow]:
        if item.num_deletions != self._num_deletions:
            _without_deleted_parents(connection, item)
        rows: list[_NumberedRow] = []
        session_names: set[str] = set()
        for call in item.calls:
            self._last_call += 1
            call.tip.call = self._last_call
            row = call.row(
                session=sessions[call.record.session], is_first=call.record.id not in session_names
            )
            rows.append((self._last_call, row))
            session_names.add(call.record.id)
        return rows

    def _find_sessions(
        self, connection: sqlite3.Connection, appends: list[_Append], totals: Counter[str]
    ) -> dict[str, int]:
        """A call may come before its session was created: the session is there from then on."""
        names = {call.record.session for item in appends for call in item.calls}
        rows = {name: row for name in names if (row := self._session_rows.get(name)) is not None}
        unknown = [name for name in names if name not in rows]
        for start in range(0, len(unknown), _ROWS_PER_STATEMENT):
            keys = {name_bytes(name): name for name in unknown[start : start + _ROWS_PER_STATEMENT]}
            totals["sessions"] += connection.execute(
                f"INSERT INTO sessions (created_at, name) VALUES {_rows(2, len(keys))} "
                "ON CONFLICT DO NOTHING",
                [value for key in keys for value in (time.time(), key)],
            ).rowcount
            # One row for all of them: each row that is fetched is one more wait for the interpreter.
            (pairs,) = connection.execute(
                "SELECT json_group_array(json_array(hex(name), session)) FROM sessions "
                f"WHERE name IN {_rows(len(keys), 1)}",
                list(keys),
            ).fetchone()
            rows |= {keys[bytes.fromhex(key)]: row for key, row in json.loads(pairs)}
        self._session_rows |= {name: rows[name] for name in unknown}
        while len(self._session_rows) > _SESSIONS_REMEMBERED:
            self._session_rows.popitem(last=False)
        return rows

    def _start_afresh(self) -> None:
        """After a refused write the connection is given up: what it holds is not worth a guess."""
        # Rows of sessions that were made in the refused transaction do not exist.
        self._session_rows.clear()
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = None

    def _settle(self, batch: list[_Append | _Change], error: Exception | None) -> None:
        waiting: dict[asyncio.AbstractEventLoop, list[_Append]] = {}
        for item in batch:
            # One error each: an exception that several tasks raise collects the tracebacks of all.
            own = as_our_own(self.path, error) if isinstance(error, sqlite3.Error) else error
            if isinstance(item, _Append):
                item.error = own or item.error
                waiting.setdefault(item.loop, []).append(item)
            elif own is not None:
                item.done.set_exception(own)
            else:
                item.done.set_result(item.result)
        for loop, items in waiting.items():
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_wake, items)


def _rows(num_columns: int, num_rows: int) -> str:
    """`(?, ?), (?, ?)`"""
    return ", ".join([f"({', '.join('?' * num_columns)})"] * num_rows)


def _insert_calls(connection: sqlite3.Connection, rows: Sequence[_NumberedRow]) -> None:
    """In one statement: between two of them another thread may hold the interpreter for 5 ms."""
    values = [value for number, row in rows for value in (number, *row)]
    connection.execute(_INSERT + _rows(1 + len(CallRow._fields), len(rows)), values)


def add_to_totals(connection: sqlite3.Connection, totals: Counter[str]) -> None:
    connection.execute(
        f"INSERT INTO totals (name, value) VALUES {_rows(2, len(TOTALS))} "
        "ON CONFLICT DO UPDATE SET value = value + excluded.value",
        [value for name in TOTALS for value in (name, totals[name])],
    )


def _wake(items: list[_Append]) -> None:
    for item in items:
        if item.on_disk.done():  # cancelled meanwhile; the calls are on disk all the same
            continue
        if item.error is None:
            item.on_disk.set_result(None)
        else:
            item.on_disk.set_exception(item.error)


def _without_deleted_parents(connection: sqlite3.Connection, item: _Append) -> None:
    """A session was deleted since `item` was encoded: calls that went on from it are stored whole."""
    own = {id(call.tip) for call in item.calls}
    parents = {
        call.kept_prefix.parent.call
        for call in item.calls
        if call.kept_prefix.parent and id(call.kept_prefix.parent) not in own
    }
    if all(connection.execute("SELECT 1 FROM calls WHERE call = ?", (each,)).fetchone() for each in parents):
        return
    item.calls = [encode_call(call.record, ()) for call in item.calls]


def _second_sample(connection: sqlite3.Connection, record: CallRecord, row: CallRow) -> CountError:
    (other,) = connection.execute(
        "SELECT id FROM calls WHERE session = ? AND retry_key = ? AND choice = ? AND status = 'ok'",
        (row.session, row.retry_key, row.choice),
    ).fetchone()
    return CountError(
        f"Record {record.id!r} answers the request {record.retry_key!r} of session {record.session[:80]!r} "
        f"a second time: choice {record.choice} of {name_of(other)!r} is recorded as its sample. "
        "Answer a retry with what `retry_of` returns."
    )
