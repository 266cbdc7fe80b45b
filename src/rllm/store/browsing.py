"""Rows of a store as tables of episodes show them: columns alone, so that a page of thousands is quick.

    store.sqlite ──► phases(), page(filter), step_summaries() ──► EpisodeSummary without messages and tokens

Each object is a connection of its own that reads beside a writer; whole episodes are `EpisodeStore`'s.
"""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rllm.store.episodes import connect_store, store_errors
from rllm.store.migrations import require_readable
from rllm.store.payload import unpack_payload

_COLUMNS = (
    "episodes.id, phases.name, step, task_id, attempt, outcome, termination_reason, reward, is_correct, "
    "num_steps, num_sampled_tokens, started_at, duration_s"
)
_FROM = "FROM episodes JOIN phases ON phases.id = episodes.phase_id"
ORDERS = {
    "": "episodes.id",
    "reward": "reward",
    "turns": "num_steps",
    "tokens": "num_sampled_tokens",
    "duration": "duration_s",
}
"""The orders of a page -> the column."""
_FAILED = "coalesce(outcome, '') NOT IN ('scored', 'truncated')"
VERDICTS = {
    "right": "is_correct = 1",
    "wrong": f"is_correct = 0 AND NOT ({_FAILED})",
    "failed": f"is_correct = 0 AND {_FAILED}",
}
"""The verdicts on an attempt -> the condition; every attempt fulfils one."""
TASK_ORDERS = {
    "": "min(episodes.id)",
    "success": "1.0 * sum(is_correct) / count(*)",
    "reward": "avg(reward)",
    "failed": f"sum({_FAILED})",
    "attempts": "count(*)",
}
"""The orders of tasks -> the expression."""
ALL_ROWS = -1
"""A limit that is none."""
UNJUDGED = "unjudged"
"""The name of an episode without an outcome in filters and counts."""


class EpisodeSummary(NamedTuple):
    """The columns of one episode."""

    id: int
    phase: str
    step: int
    task_id: str
    attempt: int
    outcome: str | None
    termination_reason: str
    reward: float | None
    is_correct: bool
    num_steps: int
    num_sampled_tokens: int
    started_at: float | None
    duration_s: float | None


class TaskSummary(NamedTuple):
    """The attempts at one task, counted."""

    task_id: str
    attempts: int
    successes: int
    failed: int
    """Those whose outcome is neither `scored` nor `truncated`."""
    mean_reward: float | None
    """Over the attempts that were paid."""
    num_paid: int
    """The number of those."""
    mean_squared_reward: float | None
    """Over the same, as are the next two."""
    least_reward: float | None
    greatest_reward: float | None
    first_id: int


class PhaseSummary(NamedTuple):
    """A phase, and which steps of it there are."""

    name: str
    episodes: int
    first_step: int
    last_step: int


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeFilter:
    """Which episodes a page shows; what is None or empty is not asked for."""

    phase: str | None = None
    step: int | None = None
    task_id: str | None = None
    outcome: str | None = None
    is_correct: bool | None = None
    ids: Sequence[int] | None = None
    verdict: str | None = None
    """One of VERDICTS."""
    without: Sequence[int] = ()
    """Ids that are left out."""

    def condition(self) -> tuple[str, list[str | int]]:
        """A WHERE clause and its values."""
        equal: dict[str, str | int | None] = {
            "phases.name = ?": self.phase,
            "step = ?": self.step,
            "task_id = ?": self.task_id,
            "coalesce(outcome, 'unjudged') = ?": self.outcome,
            "is_correct = ?": None if self.is_correct is None else int(self.is_correct),
        }
        clauses = [clause for clause, value in equal.items() if value is not None]
        values = [value for value in equal.values() if value is not None]
        if self.verdict is not None:
            clauses.append(VERDICTS[self.verdict])
        for operator, ids in (("IN", self.ids), ("NOT IN", self.without or None)):
            if ids is not None:
                clauses.append(f"episodes.id {operator} (SELECT value FROM json_each(?))")
                # As one value: SQLite has a limit of values in a statement, and a page may name any number of
                # ids.
                values.append(json.dumps(list(ids)))
        return f"WHERE {' AND '.join(clauses)}" if clauses else "", values


class EpisodeBrowser:
    """Read-only tables of one store; closed by the `with` statement."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> "EpisodeBrowser":
        """Raises ConfigError where there is no store that can be read."""
        with store_errors(path), ExitStack() as closed_unless_readable:
            connection = closed_unless_readable.enter_context(closing(connect_store(path, read_only=True)))
            require_readable(connection, path)
            closed_unless_readable.pop_all()
        return cls(path, connection)

    def phases(self) -> list[PhaseSummary]:
        """Phases that have episodes, in the order in which they first appeared."""
        with store_errors(self.path):
            rows = self._connection.execute(
                "SELECT phases.name, episodes, first_step, last_step FROM phases JOIN "
                "(SELECT phase_id, count(*) AS episodes, min(step) AS first_step, max(step) AS last_step "
                "FROM episodes INDEXED BY episodes_in_reading_order GROUP BY phase_id) AS counted "
                "ON counted.phase_id = phases.id ORDER BY phases.id"
            )
            return [PhaseSummary(*row) for row in rows]

    def page(
        self,
        which: EpisodeFilter,
        *,
        order: str = "",
        descending: bool = False,
        limit: int = ALL_ROWS,
        offset: int = 0,
    ) -> list[EpisodeSummary]:
        """Episodes in the order they were saved in, or by one of ORDERS, those without a value last."""
        where, values = which.condition()
        column, direction = ORDERS[order], "DESC" if descending else "ASC"
        with store_errors(self.path):
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} {_FROM} {where} "
                f"ORDER BY {column} IS NULL, {column} {direction}, episodes.id LIMIT ? OFFSET ?"
                if order
                else f"SELECT {_COLUMNS} {_FROM} {where} ORDER BY episodes.id {direction} LIMIT ? OFFSET ?",
                (*values, limit, offset),
            )
            return [_summary(row) for row in rows]

    def count(self, which: EpisodeFilter) -> int:
        where, values = which.condition()
        with store_errors(self.path):
            (number,) = self._connection.execute(f"SELECT count(*) {_FROM} {where}", values).fetchone()
            return number

    def step_summaries(self, phase: str, step: int) -> list[EpisodeSummary]:
        """All episodes of a step, by task and attempt."""
        with store_errors(self.path):
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} {_FROM} WHERE phases.name = ? AND step = ? ORDER BY episodes.id",
                (phase, step),
            )
            return [_summary(row) for row in rows]

    def tasks(
        self,
        which: EpisodeFilter,
        *,
        order: str = "",
        descending: bool = False,
        limit: int = ALL_ROWS,
        offset: int = 0,
    ) -> list[TaskSummary]:
        """The tasks of the episodes that fit, in the order they were first saved in or by one of
        TASK_ORDERS."""
        where, values = which.condition()
        with store_errors(self.path):
            rows = self._connection.execute(
                f"SELECT task_id, count(*), sum(is_correct), sum({_FAILED}), avg(reward), "
                "count(reward), avg(reward * reward), min(reward), max(reward), min(episodes.id) "
                f"{_FROM} {where} GROUP BY task_id ORDER BY {TASK_ORDERS[order]} "
                f"{'DESC' if descending else 'ASC'}, min(episodes.id) LIMIT ? OFFSET ?",
                (*values, limit, offset),
            )
            return [TaskSummary(*row) for row in rows]

    def superseded(self, phase: str) -> list[int]:
        """Failures of attempts that were made again: all but the newest episode of each, a success of the
        machinery before a failure of it."""
        again = "coalesce(outcome, 'cancelled') IN ('infrastructure_failure', 'cancelled')"
        with store_errors(self.path):
            rows = self._connection.execute(
                f"WITH mine AS (SELECT episodes.id AS id, task_id, attempt, {again} AS again {_FROM} "
                "WHERE phases.name = ?), "
                "failures AS (SELECT DISTINCT task_id, attempt FROM mine WHERE again) "
                "SELECT id FROM (SELECT id, row_number() OVER (PARTITION BY task_id, attempt "
                "ORDER BY again, id DESC) AS place FROM mine JOIN failures USING (task_id, attempt)) "
                "WHERE place > 1",
                (phase,),
            )
            return [row_id for (row_id,) in rows]

    def payloads(self, phase: str, step: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Id and content of every episode of a step: all but its tokens."""
        with store_errors(self.path):
            rows = self._connection.execute(
                f"SELECT episodes.id, payload {_FROM} WHERE phases.name = ? AND step = ?", (phase, step)
            )
            for row_id, payload in rows:
                yield row_id, unpack_payload(payload)

    def steps(self, phase: str) -> list[int]:
        """The steps of a phase that have episodes, in order; a walk along the index, one probe a step."""
        with store_errors(self.path):
            rows = self._connection.execute(
                "WITH RECURSIVE walk (phase, step) AS ("
                "SELECT id, (SELECT min(step) FROM episodes WHERE phase_id = phases.id) "
                "FROM phases WHERE name = ? UNION ALL "
                "SELECT phase, (SELECT min(step) FROM episodes WHERE phase_id = phase AND step > walk.step) "
                "FROM walk WHERE walk.step IS NOT NULL) SELECT step FROM walk WHERE step IS NOT NULL",
                (phase,),
            )
            return [step for (step,) in rows]

    def __enter__(self) -> "EpisodeBrowser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()


def _summary(row: tuple[object, ...]) -> EpisodeSummary:
    summary = EpisodeSummary(*row)  # pyright: ignore[reportArgumentType]
    return summary._replace(is_correct=bool(summary.is_correct))
