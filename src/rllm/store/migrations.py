"""The shape of the store, as numbered steps: a file at version n has seen the first n of them.

A migration that has been released is never edited; a change of shape is a new entry at the end.
"""

import sqlite3
from pathlib import Path

from rllm.errors import ConfigError

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE run_values (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        # The order in which phases first appeared is the order they are read in.
        "CREATE TABLE phases (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
        """CREATE TABLE episodes (
            id INTEGER PRIMARY KEY,
            phase_id INTEGER NOT NULL REFERENCES phases (id),
            step INTEGER NOT NULL,
            task_id TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            outcome TEXT,
            termination_reason TEXT NOT NULL,
            reward REAL,
            is_correct INTEGER NOT NULL,
            num_steps INTEGER NOT NULL,
            num_sampled_tokens INTEGER NOT NULL,
            started_at REAL,
            duration_s REAL,
            payload BLOB NOT NULL
        )""",
        "CREATE INDEX episodes_in_reading_order ON episodes (phase_id, step, task_id, attempt, id)",
        """CREATE TABLE steps (
            episode INTEGER NOT NULL REFERENCES episodes (id) ON DELETE CASCADE,
            trajectory INTEGER NOT NULL,
            position INTEGER NOT NULL,
            reward REAL NOT NULL,
            num_prompt_ids_kept INTEGER NOT NULL,
            prompt_ids BLOB NOT NULL,
            response_ids BLOB NOT NULL,
            logprobs BLOB NOT NULL,
            policy_versions BLOB NOT NULL,
            PRIMARY KEY (episode, trajectory, position)
        ) WITHOUT ROWID""",
    ),
    (
        "CREATE TABLE images (sha256 TEXT PRIMARY KEY, data BLOB NOT NULL)",
        """CREATE TABLE episode_images (
            episode INTEGER NOT NULL REFERENCES episodes (id) ON DELETE CASCADE,
            sha256 TEXT NOT NULL REFERENCES images (sha256),
            PRIMARY KEY (episode, sha256)
        ) WITHOUT ROWID""",
        "CREATE INDEX episodes_of_images ON episode_images (sha256)",
    ),
    (
        """CREATE TABLE token_numbers (
            episode INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
            numbers BLOB NOT NULL
        )""",
    ),
)

LATEST = len(MIGRATIONS)
OLDEST_READABLE = 1
"""Read as it is; what it has no table for, it has none of."""
FIRST_WITH_IMAGES = 2
FIRST_WITH_TOKEN_NUMBERS = 3


def version_of(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def require_readable(connection: sqlite3.Connection, path: Path) -> None:
    """Raise ConfigError unless this rLLM can read the store as it is, without writing to it."""
    _refuse_programs(connection, path)
    version = version_of(connection)
    _refuse_newer(version, path)
    if version == 0:
        raise ConfigError(
            f"{path} holds no episodes yet: nothing was ever saved to it. Wait for the run's first save."
        )
    if version < OLDEST_READABLE:
        raise ConfigError(
            f"{path} has format {version}; this rLLM reads {OLDEST_READABLE} to {LATEST}. Resume the run "
            "once to convert it."
        )


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the store to the latest version, all steps or none. The connection must be in autocommit mode."""
    _refuse_programs(connection, path)
    _refuse_newer(version_of(connection), path)
    if version_of(connection) == LATEST:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read again: another writer may have migrated between the look and the lock.
        for statements in MIGRATIONS[version_of(connection) :]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {LATEST}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _refuse_newer(version: int, path: Path) -> None:
    if version > LATEST:
        raise ConfigError(
            f"{path} has format {version}; this rLLM knows formats up to {LATEST}. Upgrade rllm to read it."
        )


def _refuse_programs(connection: sqlite3.Connection, path: Path) -> None:
    """Raise ConfigError for a store with views or triggers, which answer in the place of tables."""
    query = "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')"
    for kind, name in connection.execute(query):
        raise ConfigError(
            f"{path} has a {kind} `{name}`, and no run writes one; restore it, or name another run."
        )
