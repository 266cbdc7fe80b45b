"""The sessions that are in use: bounded in number, each rebuilt from the ledger when it is needed again.

    id ──► SessionRegistry ──known?──► Session
               └── not in memory ──► Ledger.session_data ──► Session, its policy state empty until asked for

What a session was created with (seed, sampling, metadata) is in the ledger; what a policy remembers of it,
such as its conversations, is not: `Session.history` is what that is built from.
"""

import asyncio
import hashlib
import json
import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any

from rllm.errors import RequestRefused, choices_of
from rllm.gateway.ledger import Ledger
from rllm.gateway.server.budgets import SessionBudget
from rllm.types.call_budget import CallBudget, budget_problem
from rllm.types.episode_clock import EpisodeClock
from rllm.types.wire import CallRecord

MAX_IDLE_SESSIONS = 4096
_MAX_CLOSED_IDS = 100_000
_EVICTIONS_AT_ONCE = 8


@dataclass(slots=True, eq=False)
class Session:
    """Implements `rllm.types.wire.PolicySession`."""

    id: str
    ledger: Ledger
    seed: int
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    has_history: bool = False
    """Calls of it may be in the ledger; asking there costs time that a new session need not spend."""
    in_flight: set[Any] = field(default_factory=set[Any])
    """Its calls that are on their way."""
    clock: EpisodeClock | None = None
    """The clock of the episode that makes the calls."""
    limits: CallBudget = field(default_factory=CallBudget)
    budget: SessionBudget | None = None
    """None where it has no limits."""
    store_task: asyncio.Future[Any] | None = None
    """Pending while what it was created with goes to disk; its answers wait for that."""

    def history(self) -> list[CallRecord]:
        return self.ledger.traces(self.id) if self.has_history else []

    def data(self) -> dict[str, Any]:
        data = {"seed": self.seed, "sampling": self.sampling, "metadata": self.metadata}
        return data if self.limits.is_unlimited else data | {"budget": asdict(self.limits)}

    def hold_to(self, limits: CallBudget) -> None:
        """Have its calls counted against the limits, from the first one in the ledger on."""
        self.limits = limits
        self.budget = None if limits.is_unlimited else SessionBudget(limits, self.history())


class SessionRegistry:
    """Finds sessions, and lets go of those that were idle longest."""

    def __init__(
        self, ledger: Ledger, *, require_created: bool = False, max_idle: int = MAX_IDLE_SESSIONS
    ) -> None:
        self._ledger = ledger
        self._require_created = require_created
        self._max_idle = max_idle
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> Session:
        """The session of a call. Raises RequestRefused: 404 for an unknown one where sessions must be
        created, 410 for a closed one."""
        session = self._sessions.get(session_id)
        if session is not None:
            self._sessions.move_to_end(session_id)
            return session
        if session_id in self._closed:
            raise RequestRefused(
                f"The session {session_id[:80]!r} is closed; start a new one.",
                status=410,
                code="session_closed",
            )
        data = self._ledger.session_data(session_id)
        if data is None and self._require_created:
            raise unknown_session(session_id)
        if self._require_created and not data:  # calls of it are there, but nobody created it
            raise unknown_session(session_id)
        return self._add(_session_of(session_id, self._ledger, data))

    def create(
        self,
        session_id: str,
        seed: int | None,
        sampling: dict[str, Any],
        metadata: dict[str, Any],
        limits: CallBudget | None = None,
    ) -> Session:
        """A session with settings of its own, in memory at once and on its way to disk.

        To create it again with the same settings changes nothing; with others it is refused (409).
        """
        require_sampling(sampling)
        _require_json(metadata)
        if seed is None:
            seed = derived_seed(session_id)
        settings: dict[str, Any] = {"seed": seed, "sampling": sampling, "metadata": metadata}
        limits = limits or CallBudget()
        require_budget(limits)
        if not limits.is_unlimited:
            settings["budget"] = asdict(limits)
        session = self._sessions.get(session_id)
        data = (
            self._ledger.session_data(session_id)
            # What is on its way to disk is not in the ledger yet; the session in memory has it already.
            if session is None or session.store_task is None
            else session.data()
        )
        self._closed.pop(session_id, None)
        if data:
            session = session or self._add(_session_of(session_id, self._ledger, data))
            if session.data() != settings:
                raise RequestRefused(
                    f"The session {session_id[:80]!r} exists with other settings; delete it first, "
                    "or choose another id.",
                    status=409,
                    code="session_exists",
                    param="session_id",
                )
            return session
        if session is None:
            session = self._add(Session(session_id, self._ledger, seed, has_history=data is not None))
        session.seed, session.sampling, session.metadata = seed, sampling, metadata
        session.hold_to(limits)
        self._store(session, settings)
        return session

    def in_memory(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def close(self, session_id: str) -> None:
        """Later calls of it are refused."""
        self._sessions.pop(session_id, None)
        self._closed[session_id] = None
        if len(self._closed) > _MAX_CLOSED_IDS:
            self._closed.popitem(last=False)

    def forget(self, session_id: str) -> None:
        """As if it had never been there."""
        self._sessions.pop(session_id, None)
        self._closed.pop(session_id, None)

    async def wait_until_stored(self) -> None:
        """Returns when every session that was created is on disk."""
        pending = [each.store_task for each in self._sessions.values() if each.store_task is not None]
        await asyncio.gather(*pending, return_exceptions=True)

    def _add(self, session: Session) -> Session:
        self._sessions[session.id] = session
        for _ in range(_EVICTIONS_AT_ONCE):
            if len(self._sessions) <= self._max_idle:
                break
            oldest_id, oldest = next(iter(self._sessions.items()))
            # A call, or what the session was created with, would otherwise end in an object that nobody finds
            # any more. Busy ones go to the end, where they are looked at last.
            is_busy = oldest.in_flight or oldest.store_task is not None or oldest.clock is not None
            if is_busy or oldest is session:
                self._sessions.move_to_end(oldest_id)
            else:
                del self._sessions[oldest_id]
        return session

    def _store(self, session: Session, data: dict[str, Any]) -> None:
        task = asyncio.ensure_future(asyncio.to_thread(self._ledger.create_session, session.id, data))
        session.store_task = task

        def on_done(future: asyncio.Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                session.store_task = None
            elif (
                self._sessions.get(session.id) is session
            ):  # its calls hear of it; the next attempt starts anew
                del self._sessions[session.id]

        task.add_done_callback(on_done)


def unknown_session(session_id: str) -> RequestRefused:
    return RequestRefused(
        f"There is no session {session_id[:80]!r}; create it with POST /sessions.",
        status=404,
        code="session_not_found",
        param="session_id",
    )


def derived_seed(session_id: str) -> int:
    """The seed of a session for which nobody chose one: its own, and always the same."""
    # 63 bits, like every seed that a session or a request may be given.
    return int.from_bytes(hashlib.blake2b(session_id.encode(), digest_size=8).digest()) >> 1


def require_sampling(sampling: dict[str, Any]) -> None:
    """Raises RequestRefused (400) for a sampling parameter that a session cannot set."""
    for name, value in sampling.items():
        is_valid = _SAMPLING.get(name)
        if is_valid is None:
            raise RequestRefused(
                f"`sampling.{name}` cannot be set for a session; {choices_of(name, _SAMPLING)}.",
                param=f"sampling.{name}",
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_valid(value):
            raise RequestRefused(
                f"`sampling.{name}` is {str(value)[:80]!r}; it must be {_MEANING[name]}.",
                param=f"sampling.{name}",
            )


def budget_of(fields: dict[str, Any]) -> CallBudget:
    """The limits of a session as JSON has them. Raises RequestRefused (400) for what is none."""
    names = [each.name for each in dataclass_fields(CallBudget)]
    for name in fields:
        if name not in names:
            raise RequestRefused(
                f"`budget.{name[:80]}` limits nothing; {choices_of(name[:80], names)}.", param="budget"
            )
    return CallBudget(**fields)


def require_budget(limits: CallBudget) -> None:
    """Raises RequestRefused (400) for limits that make no sense."""
    if (problem := budget_problem(limits))[0]:
        raise RequestRefused(f"`budget.{problem[0]}` {problem[1]}.", param=f"budget.{problem[0]}")


_SAMPLING = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: isinstance(value, int) and value >= 0,
    "max_tokens": lambda value: isinstance(value, int) and value >= 1,
}
_MEANING = {
    "temperature": "a finite number from 0 on",
    "top_p": "a number above 0 and at most 1",
    "top_k": "a whole number from 0 on, where 0 is off",
    "max_tokens": "a whole number from 1 on",
}


def _require_json(metadata: dict[str, Any]) -> None:
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestRefused(
            f"`metadata` is no JSON ({error}); use text, numbers, lists and dicts.", param="metadata"
        ) from error


def _session_of(session_id: str, ledger: Ledger, data: dict[str, Any] | None) -> Session:
    fields = data or {}
    session = Session(
        session_id,
        ledger,
        fields.get("seed", derived_seed(session_id)),
        fields.get("sampling", {}),
        fields.get("metadata", {}),
        has_history=data is not None,
    )
    session.hold_to(budget_of(fields.get("budget", {})))
    return session
