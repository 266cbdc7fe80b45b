"""The ledger's SQLite file: its tables, who may open it, and its errors in our own words.

    directory ──lock──► open_for_writing ──► the one connection that writes
              └────────► open_for_reading ──► any number that read, in any process, also meanwhile

A call is a row that begins as an earlier row of its session (`parent`) does: only what differs is stored.
Names are stored as bytes, because a session may be called anything, halves of surrogate pairs included.
"""

import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rllm.errors import ConfigError, RunInUseError, StorageError
from rllm.files.atomic import sync_directory
from rllm.files.locks import pid_in, take_lock

LEDGER, LOCK = "ledger.sqlite", "ledger.lock"

_APPLICATION_ID = 0x724C4C47
"""Tells a ledger from other SQLite files."""
_FORMAT = 1
_BUSY_TIMEOUT_S = 30.0
_LONGEST_WAL_BYTES = 64 << 20

_TABLES = (
    """CREATE TABLE sessions (
        session INTEGER PRIMARY KEY,
        name BLOB NOT NULL UNIQUE,
        created_at REAL NOT NULL,
        data TEXT
    )""",
    # Counted as they come: counting 100,000 rows of 10 kB means reading 1 GB.
    "CREATE TABLE totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE calls (
        call INTEGER PRIMARY KEY,
        session INTEGER NOT NULL,
        id BLOB NOT NULL,
        choice INTEGER NOT NULL,
        status TEXT NOT NULL,
        is_first INTEGER NOT NULL,
        retry_key BLOB,
        parent INTEGER,
        num_ids_kept INTEGER NOT NULL,
        num_messages_kept INTEGER NOT NULL,
        num_prompt_bytes_kept INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        payload BLOB NOT NULL
    )""",
    "CREATE INDEX calls_of_session ON calls (session)",
    "CREATE INDEX calls_of_id ON calls (id)",
    """CREATE UNIQUE INDEX one_sample_of_a_request ON calls (session, retry_key, choice)
        WHERE status = 'ok' AND retry_key IS NOT NULL""",
)

_FULL_OR_BROKEN = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_NOT_WRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN)


def name_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def name_of(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def hold(directory: Path) -> int:
    """The descriptor of the ledger's lock, for `release_lock`. The kernel lets go of a killed process's."""
    try:
        if not directory.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
        return take_lock(directory / LOCK)
    except RunInUseError:
        pid = pid_in(directory / LOCK) or "(unknown)"
        raise RunInUseError(
            f"{directory / LEDGER} is being written by process {pid}; "
            "wait for it, stop it, or choose another --ledger directory."
        ) from None
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{directory} is a file; choose a directory with --ledger.") from error
    except OSError as error:
        raise StorageError(
            f"{directory} could not be written ({error.strerror}): "
            "make it writable, free space, or choose another --ledger directory."
        ) from error


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Opens, or creates. Only while holding the ledger."""
    _keep_private(path)
    connection = _connect(f"{path.absolute().as_uri()}?mode=rwc")
    try:
        _require_ledger(connection, path, may_be_empty=True)
        # Deleted space is reused; to hand it back to the disk would cost every append.
        connection.execute("PRAGMA auto_vacuum = NONE")
        connection.execute("PRAGMA journal_mode = WAL")
        # A commit returns when it is on the disk itself, not in the system's memory.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute(f"PRAGMA journal_size_limit = {_LONGEST_WAL_BYTES}")
        # Some builds overwrite what is deleted with zeros, which is twice the writing.
        connection.execute("PRAGMA secure_delete = OFF")
        if _format_of(connection) == 0:
            _create_tables(connection)
            sync_directory(path.parent)
    except BaseException:
        connection.close()
        raise
    return connection


def _keep_private(path: Path) -> None:
    """Give the file to its owner alone, since it holds what programs and models wrote; SQLite's other files
    get the rights of this one.

    One that an earlier version left open to others is closed to them.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    for each in (path, *(path.with_name(name) for name in (f"{path.name}-wal", f"{path.name}-shm", LOCK))):
        if each.exists() and each.stat().st_uid == os.geteuid() and each.stat().st_mode & 0o077:
            each.chmod(0o600)


def open_for_reading(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: no gateway has written there; choose another --ledger.")
    # Reading beside a writer needs a -shm file; a read-only medium has neither it nor a writer.
    has_writer = os.access(path.parent, os.W_OK) or path.with_name(path.name + "-wal").exists()
    connection = _connect(path.absolute().as_uri() + ("?mode=ro" if has_writer else "?immutable=1"))
    try:
        _require_ledger(connection, path, may_be_empty=False)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def ledger_errors(path: Path) -> Iterator[None]:
    """A refused write is a StorageError; a damaged file, or one that cannot be opened, a ConfigError."""
    try:
        yield
    except zlib.error as error:
        raise damage(path, error) from error
    except sqlite3.Error as error:
        raise as_our_own(path, error) from error


def as_our_own(path: Path, error: sqlite3.Error) -> Exception:
    # The low byte of SQLite's extended code is the primary one.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in _FULL_OR_BROKEN:
        return StorageError(
            f"{path} could not be written ({error}): free space, or raise the quota or file size limit. "
            "Calls are refused until then and recorded again after."
        )
    if code in _NOT_WRITABLE:
        return StorageError(
            f"{path} could not be opened for writing ({error}): is its directory there, "
            "and may you write to it? Make it writable, or choose another --ledger directory."
        )
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return damage(path, error)
    return error


def damage(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is damaged or not an rLLM ledger ({error}); "
        "restore it from a copy, or choose another --ledger directory."
    )


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(
        uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )


def _format_of(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _require_ledger(connection: sqlite3.Connection, path: Path, *, may_be_empty: bool) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    ledger_format = _format_of(connection)
    if application == 0 and ledger_format == 0 and not _has_tables(connection):
        if may_be_empty:
            return
        raise ConfigError(f"{path} is empty: its gateway has not started yet. Wait until it listens.")
    if application != _APPLICATION_ID:
        raise ConfigError(f"{path} is an SQLite file of something else; choose another --ledger directory.")
    if ledger_format != _FORMAT:
        raise ConfigError(
            f"{path} has format {ledger_format}; this rLLM knows format {_FORMAT}. "
            "Read it with the rLLM that wrote it, or choose another --ledger directory."
        )


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def _create_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {_FORMAT}")
    connection.execute("COMMIT")
