"""Every episode of a run in one SQLite file: one writer, any number of readers, also while it is written.

    save_episodes("train", 7, episodes) ──► one transaction ──► episodes("train", 7) ──► the same Episodes

A (phase, step) is saved whole, and saving it again replaces it: a step that a resumed run repeats is there
once. Reading order is fixed: phases in the order they first appeared, then step, task, attempt; task test-2
stands before test-10.
"""

import errno
import json
import os
import re
import sqlite3
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rllm.errors import ConfigError
from rllm.files.atomic import refused_write
from rllm.store.encoding import EncodedEpisode, EncodedEpisodes, EpisodeRow, StepRow, decode_episode
from rllm.store.images import forget_unused_images, load_images, save_images
from rllm.store.migrations import (
    FIRST_WITH_IMAGES,
    FIRST_WITH_TOKEN_NUMBERS,
    migrate,
    require_readable,
    version_of,
)
from rllm.types.episode import Episode, Outcome, TerminationReason, ending

TRAIN_PHASE = "train"
"""The phase whose steps are policy updates; it and the next are those that `rollback_to` shortens."""
GREEDY_PHASE = "train.greedy"
"""Attempts at the tasks of those steps by the likeliest tokens, which some estimators compare with."""

_BUSY_TIMEOUT_S = 30.0
_EPISODE_COLUMNS = ", ".join(EpisodeRow._fields)
_STEP_COLUMNS = ", ".join(StepRow._fields)
_FROM = "FROM episodes JOIN phases ON phases.id = episodes.phase_id"
_SELECT = f"SELECT episodes.id, {_EPISODE_COLUMNS} {_FROM}"
TOKEN_COLUMNS = ("advantage", "ratio", "entropy")
"""The trainer's values of a token: its advantage, its importance ratio in the update, and the entropy of the
policy where it was sampled, in nats."""
_IN_READING_ORDER = "ORDER BY phase_id, step, episodes.id"


_NUMBERS = re.compile(r"(\d+)")


def natural(name: str) -> list[Any]:
    """A sort key by which test-2 stands before test-10: texts, and between them numbers by their digits."""
    parts = ((part, part.lstrip("0")) for part in _NUMBERS.split(name))
    return [(len(digits), digits) if part.isdecimal() else part for part, digits in parts]


class EpisodeStore:
    """Episodes and a few run-level values. May be used from several threads; a save holds the others up."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._connection = connection
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: Path, read_only: bool = False) -> "EpisodeStore":
        """Open the store for reading, or create, bring up to date and open it for writing."""
        with store_errors(path), ExitStack() as closed_unless_all_is_well:
            connection = closed_unless_all_is_well.enter_context(
                closing(connect_store(path, read_only=read_only))
            )
            if read_only:
                require_readable(connection, path)
            else:
                connection.execute("PRAGMA journal_mode = WAL")
                # With a WAL this never damages the file; a power cut may take the last commits.
                connection.execute("PRAGMA synchronous = NORMAL")
                migrate(connection, path)
            closed_unless_all_is_well.pop_all()
        return cls(path, connection, read_only=read_only)

    def save_episodes(
        self, phase: str, step: int, episodes: Sequence[Episode], known_rows: EncodedEpisodes | None = None
    ) -> None:
        """Replace what was saved for (phase, step) by `episodes`, all of them or none.

        `known_rows`: those of the episodes that were encoded before.
        """
        encode = EncodedEpisode.of if known_rows is None else known_rows.of
        encodings = [encode(episode) for episode in episodes]
        # Rows are numbered by what they are, so that the order in which rollouts finished leaves no trace.
        encodings.sort(key=lambda rows: (natural(rows[0].task_id), rows[0].task_id, rows[0].attempt))
        with self._transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO phases (name) VALUES (?)", (phase,))
            (phase_id,) = connection.execute("SELECT id FROM phases WHERE name = ?", (phase,)).fetchone()
            deletion = connection.execute(
                "DELETE FROM episodes WHERE phase_id = ? AND step = ?", (phase_id, int(step))
            )
            (last_id,) = connection.execute("SELECT coalesce(max(id), 0) FROM episodes").fetchone()
            by_id = list(enumerate(encodings, start=last_id + 1))
            connection.executemany(
                f"INSERT INTO episodes (id, phase_id, step, {_EPISODE_COLUMNS}) "
                f"VALUES (?, ?, ?{', ?' * len(EpisodeRow._fields)})",
                ((row_id, phase_id, int(step), *row) for row_id, (row, _, _) in by_id),
            )
            connection.executemany(
                f"INSERT INTO steps (episode, {_STEP_COLUMNS}) VALUES (?{', ?' * len(StepRow._fields)})",
                ((row_id, *step_row) for row_id, (_, step_rows, _) in by_id for step_row in step_rows),
            )
            save_images(connection, {row_id: each for row_id, (_, _, each) in by_id if each})
            # An image that several episodes show is kept once, so no cascade knows when the last of them is
            # gone.
            if deletion.rowcount:
                forget_unused_images(connection)

    def save_token_numbers(self, phase: str, step: int, numbers: Iterable[tuple[str, int, bytes]]) -> None:
        """Keep what was computed of the sampled tokens of saved episodes: (task_id, attempt, numbers).

        `numbers`: float32, little-endian, for each of TOKEN_COLUMNS a value of each of the N tokens.
        """
        with self._transaction() as connection:
            connection.executemany(
                f"INSERT OR REPLACE INTO token_numbers SELECT episodes.id, ? {_FROM} "
                "WHERE phases.name = ? AND step = ? AND task_id = ? AND attempt = ?",
                (
                    (zlib.compress(each, 1), phase, int(step), task_id, attempt)
                    for task_id, attempt, each in numbers
                ),
            )

    def token_numbers(self, row_id: int) -> dict[str, list[float]]:
        """[N] each of TOKEN_COLUMNS for the sampled tokens of an episode, trajectory after trajectory.

        NaN where nothing was computed; empty of an episode that was not learned from.
        """
        with self._reading() as connection:
            if version_of(connection) < FIRST_WITH_TOKEN_NUMBERS:
                return {}
            row = connection.execute("SELECT numbers FROM token_numbers WHERE episode = ?", (row_id,))
            if (record := row.fetchone()) is None:
                return {}
        values = [value for (value,) in struct.iter_unpack("<f", zlib.decompress(record[0]))]
        count = len(values) // len(TOKEN_COLUMNS)
        return {name: values[index * count : (index + 1) * count] for index, name in enumerate(TOKEN_COLUMNS)}

    def episodes(
        self, phase: str | None = None, step: int | None = None, limit: int | None = None
    ) -> Iterator[Episode]:
        """Episodes in reading order, as they were when the iteration began."""
        where, values = _condition(phase, step)
        # A connection of its own: an iteration that is half-way neither sees nor disturbs later saves.
        with store_errors(self.path), closing(connect_store(self.path, read_only=True)) as connection:
            connection.execute("BEGIN")
            # Only ids are sorted: whole rows would be in memory.
            ids = connection.execute(
                f"SELECT episodes.id {_FROM} {where} {_IN_READING_ORDER} LIMIT coalesce(?, -1)",
                (*values, limit),
            ).fetchall()
            for each in ids:
                row_id, *columns = connection.execute(f"{_SELECT} WHERE episodes.id = ?", each).fetchone()
                yield _episode(connection, row_id, columns)

    def episode(self, row_id: int) -> Episode:
        """One episode by its row id, as `row_ids` lists them."""
        with self._reading() as connection:
            row = connection.execute(f"{_SELECT} WHERE episodes.id = ?", (_sqlite_int(row_id),)).fetchone()
            if row is not None:
                return _episode(connection, row_id, list(row[1:]))
        raise ConfigError(f"{self.path} holds no episode {row_id}; it holds {self.count()} episodes.")

    def row_ids(self, phase: str | None = None, step: int | None = None) -> list[int]:
        """Row ids in reading order."""
        where, values = _condition(phase, step)
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT episodes.id {_FROM} {where} {_IN_READING_ORDER}",
                values,
            )
            return [row_id for (row_id,) in rows]

    def count(self, phase: str | None = None, step: int | None = None) -> int:
        return sum(self.counts_by_outcome(phase, step).values())

    def counts_by_outcome(self, phase: str | None = None, step: int | None = None) -> dict[str, int]:
        """The number of episodes with each outcome; `unjudged` are those without one."""
        where, values = _condition(phase, step)
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT coalesce(outcome, 'unjudged'), count(*) {_FROM} {where} GROUP BY 1 ORDER BY 1",
                values,
            )
            return dict(rows.fetchall())

    def counts_by_ending(self, phase: str | None = None, step: int | None = None) -> dict[str, int]:
        """The number of episodes with each end, the most frequent first; see `rllm.types.episode.ending`."""
        where, values = _condition(phase, step)
        counts: Counter[str] = Counter()
        with self._reading() as connection:
            for outcome, reason, count in connection.execute(
                f"SELECT outcome, termination_reason, count(*) {_FROM} {where} GROUP BY 1, 2", values
            ):
                counts[ending(Outcome(outcome) if outcome else None, TerminationReason(reason))] += count
        return dict(counts.most_common())

    def phases(self) -> list[str]:
        """Phases in the order they first appeared."""
        with self._reading() as connection:
            return [name for (name,) in connection.execute("SELECT name FROM phases ORDER BY id")]

    def rollback_to(self, step: int) -> None:
        """Forget the training steps after `step`: a run that resumes there will sample them again."""
        with self._transaction() as connection:
            connection.execute(
                "DELETE FROM episodes WHERE step > ? AND phase_id IN "
                "(SELECT id FROM phases WHERE name IN (?, ?))",
                (int(step), TRAIN_PHASE, GREEDY_PHASE),
            )
            forget_unused_images(connection)

    def forget(self, phase: str) -> None:
        """Delete a whole phase."""
        with self._transaction() as connection:
            connection.execute(
                "DELETE FROM episodes WHERE phase_id = (SELECT id FROM phases WHERE name = ?)", (phase,)
            )
            connection.execute("DELETE FROM phases WHERE name = ?", (phase,))
            forget_unused_images(connection)

    def set_value(self, key: str, value: Any) -> None:
        """Keep a JSON value under a name, for what belongs to the run and to no episode."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO run_values (key, value) VALUES (?, ?)",
                (key, json.dumps(value, allow_nan=False)),
            )

    def value(self, key: str, default: Any = None) -> Any:
        with self._reading() as connection:
            row = connection.execute("SELECT value FROM run_values WHERE key = ?", (key,)).fetchone()
            return default if row is None else json.loads(row[0])

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> "EpisodeStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A state of the store that no other process changes half-way."""
        with self._lock, store_errors(self.path):
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                self._connection.execute("ROLLBACK")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self.read_only:
            raise ConfigError(
                f"{self.path} was opened for reading; open it without `read_only` to change it."
            )
        with self._lock, store_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                # A COMMIT that the disk refuses may have ended the transaction, or not.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")


def connect_store(path: Path, *, read_only: bool) -> sqlite3.Connection:
    if read_only and not path.is_file():
        raise ConfigError(
            f"{path} does not exist: the run has saved no episodes yet, or this is another run."
        )
    uri = path.absolute().as_uri()
    if read_only:
        uri += "?mode=ro" if _may_have_a_writer(path) else "?immutable=1"
    connection = sqlite3.connect(
        uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    # Off unless a connection asks: with it the steps and images of an episode are deleted with the episode.
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _may_have_a_writer(path: Path) -> bool:
    """Reading beside a writer needs a `-shm` file; on a read-only medium there is neither it nor a writer."""
    return os.access(path.parent, os.W_OK) or path.with_name(path.name + "-wal").exists()


def _episode(connection: sqlite3.Connection, row_id: int, columns: list[Any]) -> Episode:
    step_rows = connection.execute(f"SELECT {_STEP_COLUMNS} FROM steps WHERE episode = ?", (row_id,))
    has_images = version_of(connection) >= FIRST_WITH_IMAGES
    return decode_episode(
        EpisodeRow(*columns),
        (StepRow(*row) for row in step_rows),
        load_images(connection, row_id) if has_images else {},
    )


def _sqlite_int(number: int) -> int:
    """`number`, or -1, which no row has, where it has more than the 64 bits of an INTEGER."""
    return number if number.bit_length() < 64 else -1


def _condition(phase: str | None, step: int | None) -> tuple[str, tuple[Any, ...]]:
    by_clause = {"phases.name = ?": phase, "step = ?": step if step is None else _sqlite_int(step)}
    present = {clause: value for clause, value in by_clause.items() if value is not None}
    return f"WHERE {' AND '.join(present)}" if present else "", tuple(present.values())


_ERRNO_OF_SQLITE = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EACCES,
}


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """SQLite's errors in our own tree: a refused write, a damaged file, a place that cannot be opened."""
    try:
        yield
    except zlib.error as error:
        raise _damage(path, error) from error
    except sqlite3.Error as error:
        # The low byte of SQLite's extended code is the primary one.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _ERRNO_OF_SQLITE:
            raise refused_write(path, str(error), _ERRNO_OF_SQLITE[code]) from error
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise _damage(path, error) from error
        if code == sqlite3.SQLITE_CANTOPEN:
            raise ConfigError(
                f"{path} cannot be opened; is its directory there, and may you write to it?"
            ) from error
        raise


def _damage(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is damaged or not an rLLM store ({error}); "
        "restore it from a copy, or start the run in a new directory."
    )
