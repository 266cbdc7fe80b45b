"""The ledger's file: who may read it, how durable it is, and which file is refused."""

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from rllm.errors import ConfigError, StorageError
from rllm.gateway.ledger import Ledger
from rllm.gateway.ledger import file as ledger_file
from rllm.gateway.ledger.file import LEDGER, as_our_own, open_for_reading, open_for_writing
from rllm.types.wire import CallRecord


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_ledger_is_durable_bounded_and_waits_for_others(tmp_path: Path) -> None:
    with closing(open_for_writing(tmp_path / LEDGER)) as connection:
        settings = {
            name: connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("synchronous", "journal_mode", "wal_autocheckpoint", "journal_size_limit")
        }
        (waits_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
        (overwrites,) = connection.execute("PRAGMA secure_delete").fetchone()
    # FULL: a crash of the machine loses no answered call, not only one of the process.
    assert settings == {
        "synchronous": 2,
        "journal_mode": "wal",
        "wal_autocheckpoint": 4000,
        "journal_size_limit": 64 * 2**20,
    }
    assert waits_ms == 30_000
    assert not overwrites


def test_ledgers_of_this_format_have_its_mark_and_number(tmp_path: Path) -> None:
    """A reader of another version tells by these bytes what the file is."""
    Ledger.open(tmp_path).close()
    header = (tmp_path / LEDGER).read_bytes()[:100]
    assert header[68:72] == b"rLLG"
    assert int.from_bytes(header[60:64], "big") == 1


def test_the_name_of_a_new_ledger_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    open_for_writing(tmp_path / LEDGER).close()
    assert synced == [tmp_path.resolve()]
    open_for_writing(tmp_path / LEDGER).close()
    assert len(synced) == 1, "it was there before"


def test_a_new_ledger_is_its_owners_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with Ledger.open(tmp_path / "some" / "runs" / "ledger"):
            assert rights(tmp_path / "some" / "runs" / "ledger") == 0o700
            for name in (LEDGER, "ledger.lock", f"{LEDGER}-wal", f"{LEDGER}-shm"):
                assert rights(tmp_path / "some" / "runs" / "ledger" / name) == 0o600
    finally:
        os.umask(umask)


@pytest.mark.parametrize("is_mine", [True, False])
def test_one_that_was_left_open_to_others_is_closed_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mine: bool
) -> None:
    Ledger.open(tmp_path).close()
    files = [tmp_path / LEDGER, tmp_path / "ledger.lock"]
    for file in files:
        file.chmod(0o604)
    tmp_path.chmod(0o755)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid if is_mine else uid + 1)
    open_for_writing(tmp_path / LEDGER).close()
    assert [rights(file) for file in files] == [0o600 if is_mine else 0o604] * 2
    assert rights(tmp_path) == 0o755, "a directory that was there keeps its rights"


def test_rights_that_let_nobody_else_in_are_left_alone(tmp_path: Path) -> None:
    Ledger.open(tmp_path).close()
    (tmp_path / "ledger.lock").chmod(0o400)
    open_for_writing(tmp_path / LEDGER).close()
    assert rights(tmp_path / "ledger.lock") == 0o400


def test_a_file_that_is_no_ledger_of_ours_is_refused_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []
    connect = ledger_file._connect

    def recorded(uri: str) -> sqlite3.Connection:
        opened.append(connect(uri))
        return opened[-1]

    monkeypatch.setattr(ledger_file, "_connect", recorded)
    for number, (statements, message) in enumerate(
        (
            (["CREATE TABLE theirs (x)"], "something else"),
            (["PRAGMA user_version = 1"], "something else"),
            (["PRAGMA application_id = 7"], "something else"),
            (["PRAGMA application_id = 1917602887", "PRAGMA user_version = 2"], "format 2"),
            (["PRAGMA application_id = 1917602887"], "format 0"),
        )
    ):
        path = tmp_path / str(number) / LEDGER
        path.parent.mkdir()
        with closing(sqlite3.connect(path)) as theirs:
            for statement in statements:
                theirs.execute(statement)
        before = path.read_bytes()
        for door in (open_for_writing, open_for_reading):
            with pytest.raises(ConfigError, match=message):
                door(path)
        assert path.read_bytes() == before
        for connection in opened:
            with pytest.raises(sqlite3.ProgrammingError, match="closed"):
                connection.execute("SELECT 1")
    assert len(opened) == 2 * 5


def test_an_empty_file_is_a_ledger_to_be_and_nothing_to_read(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    path.touch()
    with pytest.raises(ConfigError, match="not started yet"):
        open_for_reading(path)
    open_for_writing(path).close()
    open_for_reading(path).close()


async def append(ledger: Ledger, name: str) -> None:
    await ledger.append([CallRecord(id=name, session="lake")])


def number_of_calls(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT count(*) FROM calls").fetchone()[0]


async def test_who_reads_a_closed_ledger_sees_what_a_later_writer_adds(tmp_path: Path) -> None:
    Ledger.open(tmp_path).close()
    with closing(open_for_reading(tmp_path / LEDGER)) as connection:
        assert number_of_calls(connection) == 0
        with Ledger.open(tmp_path) as ledger:
            await append(ledger, "c")
            assert number_of_calls(connection) == 1


async def test_a_ledger_in_a_place_where_nothing_can_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with Ledger.open(tmp_path) as ledger:
        await append(ledger, "c")
        with closing(open_for_reading(tmp_path / LEDGER)) as connection:
            assert number_of_calls(connection) == 1, "a writer's newest calls are in its second file"
    with closing(open_for_reading(tmp_path / LEDGER)) as connection:
        assert number_of_calls(connection) == 1
        assert sorted(each.name for each in tmp_path.iterdir()) == ["ledger.lock", LEDGER]


def test_what_sqlite_refuses_is_an_error_of_ours_where_the_user_can_mend_it() -> None:
    for code, kind, mend in (
        (sqlite3.SQLITE_FULL, StorageError, "free space"),
        (sqlite3.SQLITE_IOERR, StorageError, "free space"),
        (sqlite3.SQLITE_IOERR_WRITE, StorageError, "free space"),
        (sqlite3.SQLITE_READONLY_DIRECTORY, StorageError, "Make it writable"),
        (sqlite3.SQLITE_PERM, StorageError, "Make it writable"),
        (sqlite3.SQLITE_CANTOPEN_ISDIR, StorageError, "Make it writable"),
        (sqlite3.SQLITE_NOTADB, ConfigError, "damaged"),
        (sqlite3.SQLITE_CORRUPT_INDEX, ConfigError, "damaged"),
        (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.OperationalError, ""),
        (None, sqlite3.OperationalError, ""),
    ):
        error = sqlite3.OperationalError("refused")
        if code is not None:
            error.sqlite_errorcode = code
        own = as_our_own(Path("ledger.sqlite"), error)
        assert type(own) is kind
        assert mend in str(own)
        assert "refused" in str(own)
