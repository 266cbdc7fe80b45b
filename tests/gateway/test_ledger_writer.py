"""The thread that writes the ledger: what it puts together, and what a refusal leaves behind."""

import asyncio
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rllm.errors import CountError, StorageError
from rllm.gateway.ledger import Ledger, writer
from rllm.gateway.ledger.writer import LedgerWriter
from rllm.types.wire import CallRecord

sys.path.insert(0, str(Path(__file__).parent))
from polling import eventually


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    with Ledger.open(tmp_path / "ledger") as ledger:
        yield ledger


def writer_of(ledger: Ledger) -> LedgerWriter:
    assert ledger._writer is not None
    return ledger._writer


def connection_of(ledger: Ledger) -> sqlite3.Connection:
    connection = writer_of(ledger)._connection
    assert connection is not None
    return connection


def call(name: str, session: str = "lake", **fields: Any) -> CallRecord:
    return CallRecord(id=name, session=session, **fields)


def a_turn(session: str, number: int) -> CallRecord:
    """Of a conversation whose ids begin with those of the turn before."""
    return call(f"{session}-{number}", session, prompt_ids=[1] * (100 + number), completion_ids=[1])


class Held:
    """The writer is busy until the end of the context: what is put meanwhile waits, and is one batch."""

    def __init__(self, ledger: Ledger) -> None:
        self._writer = writer_of(ledger)
        self._begun, self._go_on = threading.Event(), threading.Event()

    def __enter__(self) -> "Held":
        hold = lambda _: (self._begun.set(), self._go_on.wait(30))  # noqa: E731
        self._thread = threading.Thread(target=self._writer.change, args=(hold,))
        self._thread.start()
        assert self._begun.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._thread.join()


def put_change(ledger: Ledger, change: Callable[[sqlite3.Connection], Any], **options: Any) -> Any:
    item = writer._Change(change=change, **{"deletes": None} | options)
    writer_of(ledger)._put(item)
    return item.done


async def appends_in_one_batch(ledger: Ledger, *appends: list[CallRecord]) -> list[Any]:
    with Held(ledger):
        tasks = [asyncio.ensure_future(ledger.append(records)) for records in appends]
        await eventually(lambda: writer_of(ledger)._queue.qsize() == len(tasks))
    return await asyncio.gather(*tasks, return_exceptions=True)


def rows(ledger: Ledger, columns: str) -> list[Any]:
    with ledger._reading() as connection:
        return connection.execute(f"SELECT {columns} FROM calls ORDER BY call").fetchall()


async def test_what_waits_is_written_together_at_most_1024_at_a_time(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    commit = writer_of(ledger)._commit
    monkeypatch.setattr(writer_of(ledger), "_commit", lambda batch: sizes.append(len(batch)) or commit(batch))
    with Held(ledger):
        waiting = [put_change(ledger, lambda _: None) for _ in range(1030)]
    for each in waiting:
        each.result(30)
    assert sizes == [1, 1024, 6]


async def test_a_commit_is_put_off_where_many_calls_are_under_way_and_end_often(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(duration_s: float) -> None:
        if threading.current_thread() is threading.main_thread():  # not the writer's own
            slept.append(duration_s)

    monkeypatch.setattr(
        writer, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic, time=time.time)
    )
    loop = asyncio.get_running_loop()

    def put_off(num_open: int, num_came: int, within_s: float) -> float:
        came: list[Any] = [
            writer._Append(
                calls=[],
                num_deletions=0,
                num_keys=0,
                num_open=num_open,
                loop=loop,
                on_disk=loop.create_future(),
            )
            for _ in range(num_came)
        ]
        slept.clear()
        writer_of(ledger)._gather(came, within_s)
        return sum(slept)

    assert put_off(64, 10, 0.010) == 0.020, "half of 64 would take 32 ms, which is too long"
    assert put_off(16, 10, 0.010) == pytest.approx(0.008), "half of 16 come in 8 ms"
    assert put_off(1, 1, 0.001) == 0, "one caller, one call after the other"
    assert put_off(7, 3, 0.001) == 0, "too few"
    assert put_off(64, 1, 0.500) == 0, "64 that take long: nobody comes soon"
    assert put_off(0, 5, 0.001) == 0, "nothing is known of those under way"
    with Held(ledger):
        waiting = [put_change(ledger, lambda _: None) for _ in range(8)]
        assert put_off(64, 1, 0.500) == put_off(0, 5, 0.001) == 0.004, "some came during a commit"
        assert put_off(16, 10, 0.010) == 0, "half of 16 are here"
    for each in waiting:
        each.result(30)


async def test_many_calls_that_end_at_nearly_the_same_time_share_commits(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    commit = writer_of(ledger)._commit
    monkeypatch.setattr(writer_of(ledger), "_commit", lambda batch: sizes.append(len(batch)) or commit(batch))

    async def caller(number: int) -> None:
        for turn in range(4):
            await ledger.append([call(f"c{number}-{turn}", f"s{number}")], num_open=64)

    await asyncio.gather(*(caller(number) for number in range(64)))
    assert sum(sizes) == 256
    assert len(sizes) < 64, f"commits of {sizes}"
    assert ledger.counts()["ok"] == 256


async def test_rows_of_one_batch_share_statements_of_about_64(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    insert = writer._insert_calls
    monkeypatch.setattr(
        writer,
        "_insert_calls",
        lambda connection, numbered: sizes.append(len(numbered)) or insert(connection, numbered),
    )
    await appends_in_one_batch(ledger, *([call(f"c{number}", f"s{number}")] for number in range(140)))
    assert sizes == [64, 64, 12]
    assert rows(ledger, "call, session") == [
        (number, rows(ledger, "session")[number - 1][0]) for number in range(1, 141)
    ]
    assert ledger.counts()["sessions"] == ledger.counts()["ok"] == 140
    assert [record.id for record in ledger.traces("s139")] == ["c139"]


async def test_a_call_of_unknown_or_small_size_is_encoded_at_once_and_a_large_one_in_a_thread(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    encode = writer_of(ledger)._encode

    def recorded(records: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return encode(records)

    monkeypatch.setattr(writer_of(ledger), "_encode", recorded)
    await ledger.append([call("small")], num_bytes=256 * 1024)
    await ledger.append([call("large")], num_bytes=256 * 1024 + 1)
    monkeypatch.setattr(writer, "_ENCODED_HERE_BYTES", 0)
    await ledger.append([call("unknown")])
    assert threads == [False, True, False]


async def test_calls_of_one_append_go_on_from_each_other_within_their_session(ledger: Ledger) -> None:
    records = [a_turn("a", 0), a_turn("b", 0), a_turn("a", 1), a_turn("b", 1)]
    await ledger.append(records)
    assert rows(ledger, "call, parent") == [(1, None), (2, None), (3, 1), (4, 2)]
    assert [ledger.traces("a"), ledger.traces("b")] == [records[::2], records[1::2]]


async def test_after_a_deletion_only_what_went_on_from_the_deleted_is_stored_anew(ledger: Ledger) -> None:
    await ledger.append([a_turn("a", 0), a_turn("b", 0), a_turn("other", 0)])
    encode = writer_of(ledger)._encode
    unrelated = encode([a_turn("a", 1), a_turn("a", 2), a_turn("new", 0), a_turn("new", 1)])
    ledger.delete_session("other")
    writer_of(ledger)._encode = lambda _: unrelated  # type: ignore[method-assign]
    await ledger.append([a_turn("a", 1)])
    assert rows(ledger, "call, parent") == [(1, None), (2, None), (4, 1), (5, 4), (6, None), (7, 6)]
    both = encode([a_turn("a", 3), a_turn("b", 1)])
    ledger.delete_session("b")
    writer_of(ledger)._encode = lambda _: both  # type: ignore[method-assign]
    await ledger.append([a_turn("a", 3)])
    assert ledger.traces("b") == [a_turn("b", 1)]
    assert ledger.traces("a") == [a_turn("a", number) for number in range(4)]


async def test_nothing_goes_on_from_a_session_between_its_deletion_and_the_commit(ledger: Ledger) -> None:
    await ledger.append([a_turn("a", 0)])
    with Held(ledger):
        put_change(ledger, lambda to: to.execute("DELETE FROM calls"), deletes="a")
        parent = put_change(
            ledger, lambda _: writer_of(ledger)._encode([a_turn("a", 1)])[0][0].kept_prefix.parent
        )
    assert parent.result(30) is None


async def test_a_refused_append_beside_a_good_one_of_several_choices(ledger: Ledger) -> None:
    await ledger.append([call("first", retry_key="key")])
    choices = [call("good", choice=number, retry_key="other") for number in range(3)]
    outcomes = await appends_in_one_batch(
        ledger, [call("bad", retry_key="key", choice=1), call("bad", retry_key="key")], choices
    )
    assert [type(outcome) for outcome in outcomes] == [CountError, type(None)]
    assert ledger.traces("lake")[1:] == choices
    assert rows(ledger, "is_first") == [(1,), (1,), (0,), (0,)]
    assert (ledger.counts()["ok"], ledger.counts()["choices"]) == (2, 4)


async def test_a_session_that_a_full_disk_refused_begins_with_the_next_call(ledger: Ledger) -> None:
    refused = connection_of(ledger)
    refused.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StorageError, match="full"):
        await ledger.append([call("large", "pond", prompt_ids=list(range(100_000)))])
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        refused.execute("SELECT 1")
    await ledger.append([call("small", "pond")])
    assert [record.id for record in ledger.traces("pond")] == ["small"]
    assert ledger.counts()["sessions"] == 1


async def test_a_trial_of_the_disk_is_refused_by_a_full_one_and_leaves_nothing(ledger: Ledger) -> None:
    connection_of(ledger).execute("PRAGMA max_page_count = 1")
    with pytest.raises(StorageError, match="full"):
        ledger.try_to_write()
    ledger.try_to_write()
    with ledger._reading() as connection:
        assert connection.execute("SELECT name FROM totals").fetchall() == []


async def test_20000_sessions_are_remembered_the_last_ones(ledger: Ledger) -> None:
    remembered = writer_of(ledger)._session_rows
    await ledger.append([call("a", "first")])
    remembered |= {f"s{number}": -number for number in range(19_999)}
    await ledger.append([call("b", "first"), call("c", "second")])
    assert len(remembered) == 20_000
    assert "first" not in remembered
    assert "second" in remembered
    await ledger.append([call("d", "first")])
    assert [record.id for record in ledger.traces("first")] == ["a", "b", "d"]
    assert ledger.counts()["sessions"] == 2


async def test_readers_are_used_again_four_of_them_and_none_after_close(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    with ExitStack() as together:
        readers = [together.enter_context(ledger._reading()) for _ in range(6)]
    assert len(ledger._idle) == 4
    with ledger._reading() as again:
        assert again in readers
    with pytest.raises(ZeroDivisionError), ledger._reading() as broken:
        raise ZeroDivisionError
    with ledger._reading():
        ledger.close()
    assert ledger._idle == []
    for connection in [*readers, broken]:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


async def test_close_leaves_neither_the_thread_nor_the_connection(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path)
    connection, thread = connection_of(ledger), writer_of(ledger)._thread
    assert thread.daemon, "a program that forgets to close ends all the same"
    ledger.close()
    assert not thread.is_alive()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


async def test_a_new_ledger_counts_nothing_and_a_page_has_a_hundred_sessions(ledger: Ledger) -> None:
    counts = ledger.counts()
    files = [ledger.path, ledger.path.with_name("ledger.sqlite-wal")]
    assert counts.pop("bytes") == sum(file.stat().st_size for file in files)
    assert set(counts.values()) == {0}
    await ledger.append([call(f"c{number}", f"s{number:03}") for number in range(101)])
    assert len(ledger.sessions()) == 100
    assert [session["id"] for session in ledger.sessions(limit=1, after="s099")] == ["s100"]
