"""Search in all text of a run's episodes: SQLite's full-text index, made beside the run and not in it.

    store.sqlite ──a step at a time, in a thread──► RLLM_HOME/view/HASH.sqlite ──► search ──► {id: snippet}

It is made when somebody first searches, goes on where it stopped, and makes a step again that was replaced.
What is found while it is made is of the steps that it has; `Progress` says how many.
"""

import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.files.atomic import StorageErrors
from rllm.files.home import rllm_home
from rllm.store.browsing import EpisodeBrowser, EpisodeFilter
from rllm.store.run_directory import RunDirectory

MAX_HITS = 1_000
"""Episodes that a search gives back."""
MAX_INDEX_CHARS = 400_000
"""The length of the text of one episode."""
_WAIT_S = 0.2
"""The time that a search waits for its index: most are whole by then."""
_TABLES = """
CREATE TABLE IF NOT EXISTS steps (
    phase TEXT NOT NULL, step INTEGER NOT NULL, mark TEXT NOT NULL, first INTEGER, last INTEGER,
    PRIMARY KEY (phase, step)) WITHOUT ROWID;
CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5 (text, tokenize = "unicode61 tokenchars '_'");
"""

_threads: dict[Path, threading.Thread] = {}
_threads_lock = threading.Lock()


def search(run: RunDirectory, words: str) -> tuple[dict[int, str], dict[str, Any]]:
    """Episode -> the place where the words stand in it, best first; and how far the index is.

    Words have to be all there, the last one may be a beginning; words in quotation marks follow each other.
    """
    if not run.store_path.is_file():
        return {}, {"steps": 0, "of": 0}
    path = index_path(run.store_path)
    thread = _bring_up_to_date(run.store_path, path)
    thread.join(_WAIT_S)
    with closing(_open(path)) as connection:
        try:
            rows = connection.execute(
                "SELECT rowid, snippet(texts, 0, char(2), char(3), '…', 16) FROM texts WHERE texts MATCH ? "
                "ORDER BY rank LIMIT ?",
                (match_expression(words), MAX_HITS),
            ).fetchall()
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"{words[:80]!r} cannot be searched for ({error}); type plain words."
            ) from error
        (done,) = connection.execute("SELECT count(*) FROM steps").fetchone()
    with EpisodeBrowser.open(run.store_path) as browser:
        total = sum(len(browser.steps(phase.name)) for phase in browser.phases())
    return dict(rows), {"steps": min(done, total), "of": total}


def match_expression(words: str) -> str:
    """Words of a person as an expression of FTS5 in which no character has a meaning of its own."""
    terms: list[str] = []
    for number, part in enumerate(words.split('"')):
        terms += [part] if number % 2 else part.split()
    terms = [term for term in terms if any(character.isalnum() for character in term)]
    if not terms:
        raise ConfigError(f"{words[:80]!r} holds no word to search for; type letters or digits.")
    is_open = words.count('"') % 2 == 0 and not words.endswith('"')
    return " ".join(f'"{term}"' for term in terms) + ("*" if is_open else "")


def index_path(store: Path) -> Path:
    """Where the index of a store lies: under the home of its reader, who may only read the run."""
    name = hashlib.blake2b(os.fsencode(store.absolute()), digest_size=12).hexdigest()
    return rllm_home() / "view" / f"{name}.sqlite"


def _bring_up_to_date(store: Path, path: Path) -> threading.Thread:
    """The thread that does it: the one that is at it, or a new one."""
    with _threads_lock:
        thread = _threads.get(path)
        if thread is None or not thread.is_alive():
            with StorageErrors(path.parent):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                # SQLite would make the file with the permissions of the umask, and it holds texts of the run.
                path.touch(mode=0o600)
            thread = threading.Thread(target=update_index, args=(store, path), name="text index", daemon=True)
            _threads[path] = thread
            thread.start()
    return thread


def update_index(store: Path, path: Path) -> None:
    """Index what the store has and the index has not, a transaction for each step."""
    with closing(_open(path)) as connection, EpisodeBrowser.open(store) as browser:
        marks = {
            (phase, step): (mark, first, last)
            for phase, step, mark, first, last in connection.execute("SELECT * FROM steps")
        }
        for phase in browser.phases():
            for step in browser.steps(phase.name):
                key = (phase.name, step)
                rows = browser.page(EpisodeFilter(phase=phase.name, step=step))
                first, last = rows[0].id, rows[-1].id
                # With the times, because a step that is made again may
                # have the same number of episodes and the same ids.
                mark = f"{len(rows)}:{first}:{last}:{rows[0].started_at}:{rows[-1].started_at}"
                if marks.get(key, ("",))[0] == mark:
                    continue
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    # Ids of a step that a resumed run repeats may be those of one that it has forgotten.
                    connection.execute("DELETE FROM texts WHERE rowid BETWEEN ? AND ?", (first, last))
                    if key in marks:
                        connection.execute("DELETE FROM texts WHERE rowid BETWEEN ? AND ?", marks[key][1:])
                    connection.executemany(
                        "INSERT INTO texts (rowid, text) VALUES (?, ?)",
                        (
                            (row_id, "\n".join(texts_of(content))[:MAX_INDEX_CHARS])
                            for row_id, content in browser.payloads(phase.name, step)
                        ),
                    )
                    connection.execute(
                        "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)", (*key, mark, first, last)
                    )


def texts_of(content: dict[str, Any]) -> Iterator[str]:
    """Every text that a person may look for: of the task, messages, answers, grader, errors."""
    yield from _strings(content.get("task"))
    yield from _strings(content.get("info"))
    for trajectory in content["trajectories"]:
        for step in trajectory["steps"]:
            for message in step.get("messages", ()):
                yield from _strings(message.get("content"))
                yield from _strings(message.get("tool_calls"))
            yield from _strings(step.get("model_response"))
            yield from _strings(step.get("info"))
        yield from _strings(trajectory.get("info"))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")  # what a power cut takes is made again
    connection.executescript(_TABLES)
    return connection
