"""Runs of workers on disk: what was asked, how often it was tried, what was answered.

    find(key)      ──► Run: new, to go on with, or final     one process writes (a lock), any number read
    start_attempt  ──► its number, on disk before any work
    end_attempt    ──► the response's bytes, on disk before they leave

A run that is neither final nor under way was cut off by a crash: its attempts count, and its key goes on.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rllm.errors import ConfigError, RunInUseError, StorageError
from rllm.files.locks import pid_in, release_lock, take_lock

_T = TypeVar("_T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    worker TEXT NOT NULL, key TEXT NOT NULL, id TEXT NOT NULL UNIQUE, inputs TEXT NOT NULL,
    digest BLOB NOT NULL, attempts INTEGER NOT NULL, status TEXT, response BLOB, created_at REAL NOT NULL,
    ended_at REAL,
    PRIMARY KEY (worker, key)
);
CREATE TABLE IF NOT EXISTS attempts (
    run TEXT NOT NULL, number INTEGER NOT NULL, started_at REAL NOT NULL, ended_at REAL, status TEXT,
    error TEXT, result TEXT, session TEXT NOT NULL, PRIMARY KEY (run, number)
);
CREATE TABLE IF NOT EXISTS feedback (
    run TEXT NOT NULL, at REAL NOT NULL, score REAL, label TEXT, outputs TEXT
);
CREATE INDEX IF NOT EXISTS runs_by_key ON runs (key);
CREATE INDEX IF NOT EXISTS feedback_of_run ON feedback (run);
CREATE TABLE IF NOT EXISTS trials (bytes BLOB NOT NULL);
"""
MAX_RESULT_CHARACTERS = 1 << 20
"""The length of a raw result that is kept although it breaks the schema."""


@dataclass(kw_only=True, slots=True)
class Run:
    """One run as it is on disk."""

    worker: str
    key: str
    id: str
    digest: bytes
    """A digest of the inputs."""
    attempts: int
    status: str | None = None
    response: bytes | None = None
    """The response of a run that is final."""

    @property
    def is_final(self) -> bool:
        return self.response is not None


class RunStore:
    """The runs in one directory. Its calls wait for the disk; call them from a thread of their own."""

    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        """`read_only` takes no lock and sees what was on disk when each call began; a server may go on."""
        self.directory = directory
        self._lock: int | None = None
        if read_only:
            self._open_to_read()
            return
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be made: {error.strerror}.") from error
        self._lock = _take_lock(directory)
        previous_umask = os.umask(0o077)  # inputs and outputs are their owner's alone
        try:
            self._database = sqlite3.connect(
                directory / "runs.sqlite", isolation_level=None, check_same_thread=False
            )
            # WAL lets others read while this process writes. FULL syncs at every commit; NORMAL would lose
            # the last ones with the power, although their responses have left.
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            release_lock(self._lock)
            raise StorageError(f"{directory / 'runs.sqlite'} cannot be opened: {error}.") from error
        finally:
            os.umask(previous_umask)

    def _open_to_read(self) -> None:
        path = self.directory / "runs.sqlite"
        if not path.is_file():
            raise ConfigError(f"{self.directory} holds no runs of workers.")
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA query_only=ON")
        except sqlite3.Error as error:
            raise StorageError(f"{path} cannot be read: {error}.") from error

    def close(self) -> None:
        self._database.close()
        if self._lock is not None:
            release_lock(self._lock)

    def find(self, worker: str, key: str) -> Run | None:
        row = self._execute(
            "SELECT worker, key, id, digest, attempts, status, response FROM runs WHERE worker=? AND key=?",
            (worker, key),
        ).fetchone()
        if row is None:
            return None
        names = ("worker", "key", "id", "digest", "attempts", "status", "response")
        return Run(**dict(zip(names, row, strict=True)))

    def named(self, name: str) -> list[Run]:
        """The runs of all workers that somebody may call so: by their id, or by their key."""
        rows = self._execute("SELECT worker, key FROM runs WHERE id=? OR key=?", (name, name)).fetchall()
        return [run for worker, key in rows if (run := self.find(worker, key)) is not None]

    def fill(self) -> None:
        """Write something that `empty` takes back. Raises StorageError where no run could be kept now."""
        self._execute("INSERT INTO trials VALUES (zeroblob(65536))")

    def empty(self) -> None:
        """Take back what `fill` wrote."""
        self._execute("DELETE FROM trials")

    def start_attempt(self, run: Run, inputs: str, session: str) -> int:
        """The attempt's number, from 1. `inputs` are the JSON of a run that may not be there yet."""
        with self._together():
            self._add(run, inputs)
            self._execute("UPDATE runs SET attempts=attempts+1 WHERE id=?", (run.id,))
            self._execute(
                "INSERT INTO attempts (run, number, started_at, session) VALUES (?,?,?,?)",
                (run.id, run.attempts + 1, time.time(), session),
            )
        run.attempts += 1
        return run.attempts

    def end_attempt(
        self,
        run: Run,
        *,
        status: str,
        error: dict[str, Any] | None,
        result: str,
        response: bytes | None,
    ) -> None:
        """`response` makes the run final, together with the attempt's end or not at all."""
        excerpt = result[:MAX_RESULT_CHARACTERS]
        with self._together():
            self._execute(
                "UPDATE attempts SET ended_at=?, status=?, error=?, result=? WHERE run=? AND number=?",
                (time.time(), status, json.dumps(error) if error else None, excerpt, run.id, run.attempts),
            )
            if response is not None:
                self._finish(run, status, response)

    def finish(self, run: Run, inputs: str, status: str, response: bytes) -> None:
        """End a run without another attempt."""
        with self._together():
            self._add(run, inputs)
            self._finish(run, status, response)

    def add_feedback(self, run_id: str, feedback: Mapping[str, Any]) -> None:
        """Any of `score`, `label` and corrected `outputs`; earlier ones stay where it says nothing."""
        outputs, score = feedback.get("outputs"), feedback.get("score")
        self._execute(
            "INSERT INTO feedback (run, at, score, label, outputs) VALUES (?,?,?,?,?)",
            (
                run_id,
                time.time(),
                None if score is None else float(score),
                feedback.get("label"),
                None if outputs is None else canonical_json(outputs),
            ),
        )

    def feedback(self, run_id: str) -> dict[str, Any]:
        """The last word on each of `score`, `label` and `outputs`."""
        rows = self._execute(
            "SELECT score, label, outputs FROM feedback WHERE run=? ORDER BY rowid", (run_id,)
        ).fetchall()
        latest: dict[str, Any] = {}
        for score, label, outputs in rows:
            values = {"score": score, "label": label, "outputs": outputs and json.loads(outputs)}
            latest |= {name: value for name, value in values.items() if value is not None}
        return latest

    def runs(self, worker: str = "") -> Iterator[dict[str, Any]]:
        """All runs, the newest first, for people and exports."""
        rows = self._execute(
            "SELECT worker, key, id, inputs, attempts, status, response, created_at, ended_at FROM runs "
            "WHERE worker=? OR ?='' ORDER BY created_at DESC, rowid DESC",
            (worker, worker),
        )
        for name, key, run_id, inputs, attempts, status, response, created_at, ended_at in rows.fetchall():
            yield {
                "worker_id": name,
                "key": key,
                "run_id": run_id,
                "inputs": json.loads(inputs),
                "attempts": attempts,
                "status": status,
                "response": None if response is None else json.loads(response),
                "created_at": created_at,
                "ended_at": ended_at,
            }

    def attempts(self, run_id: str) -> list[dict[str, Any]]:
        names = ("number", "started_at", "ended_at", "status", "error", "result", "session")
        rows = self._execute(
            f"SELECT {', '.join(names)} FROM attempts WHERE run=? ORDER BY number", (run_id,)
        )
        return [dict(zip(names, row, strict=True)) for row in rows.fetchall()]

    def _finish(self, run: Run, status: str, response: bytes) -> None:
        self._execute(
            # The first response stays: it has left, and the same key is to have the same bytes.
            "UPDATE runs SET status=?, response=?, ended_at=? WHERE id=? AND response IS NULL",
            (status, response, time.time(), run.id),
        )
        run.status, run.response = status, response

    def commit(self, works: Sequence[Callable[[], _T]]) -> list[_T | BaseException]:
        """Do all of them and sync the disk once: what each gave or raised. Who raises undoes itself alone.

        Raises StorageError where the disk refuses them all.
        """
        outcomes: list[_T | BaseException] = []
        self._execute("BEGIN IMMEDIATE")
        try:
            for work in works:
                try:
                    outcomes.append(work())
                except Exception as error:  # noqa: BLE001  the one who asked for this work gets it
                    outcomes.append(error)
            self._execute("COMMIT")
        except BaseException:
            # After a COMMIT that was refused as well: the transaction
            # would stay open, and every later BEGIN fail.
            self._database.rollback()
            raise
        return outcomes

    def _add(self, run: Run, inputs: str) -> None:
        self._execute(
            # An earlier attempt may have added the run.
            "INSERT OR IGNORE INTO runs (worker, key, id, inputs, digest, attempts, created_at) "
            "VALUES (?,?,?,?,?,0,?)",
            (run.worker, run.key, run.id, inputs, run.digest, time.time()),
        )

    @contextmanager
    def _together(self) -> Iterator[None]:
        """All statements or none, within a transaction or as one."""
        self._execute("SAVEPOINT together")
        try:
            yield
        except BaseException:
            self._execute("ROLLBACK TO together")
            self._execute("RELEASE together")
            raise
        self._execute("RELEASE together")

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise StorageError(
                f"The store of worker runs in {self.directory} refused a write ({error}); free space there."
            ) from error


def _take_lock(directory: Path) -> int:
    try:
        return take_lock(directory / "lock")
    except RunInUseError as error:
        raise RunInUseError(
            f"The runs in {directory} are being written by process "
            f"{pid_in(directory / 'lock') or '(unknown)'}; send requests to it (rllm worker serve), "
            "stop it, or choose another --directory."
        ) from error


def canonical_json(value: Any) -> str:
    """The same text for equal values, whatever the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(inputs: str) -> bytes:
    """[16] bytes for the canonical JSON of inputs."""
    return hashlib.blake2b(inputs.encode(), digest_size=16).digest()
