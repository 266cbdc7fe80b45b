"""A gateway without a server for the tests of traced programs, and engines that play programs with it."""

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rllm.engine.traced import TracedEngine
from rllm.types.call_budget import CallBudget
from rllm.types.episode import Episode
from rllm.types.task import AgentConfig
from rllm.types.wire import CallRecord, CallStatus

Messages = Sequence[dict[str, Any]]


class CallFailed(Exception):
    """What an SDK would raise."""


@dataclass
class Reply:
    id: str
    text: str


@dataclass
class FakeSession:
    id: str
    seed: int | None
    sampling: dict[str, Any]
    records: list[CallRecord] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)

    @property
    def base_url(self) -> str:
        return f"http://fake/sessions/{self.id}/v1"

    def traces(self) -> list[CallRecord]:
        return list(self.records)

    async def close(self) -> None:
        self.closed.set()


class FakeGateway:
    """A gateway without a server: programs call `ask`, from any thread, and it captures what it answered.

    `answer` says what the model writes; an int is the HTTP status of a failure.
    """

    def __init__(self, answer: Callable[[Messages], str | int] = lambda messages: "yes") -> None:
        self.answer = answer
        self.sessions: dict[str, FakeSession] = {}
        self.no_ids_because = ""
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def open_session(
        self,
        session: str,
        *,
        seed: int | None = None,
        sampling: dict[str, Any] | None = None,
        budget: CallBudget | None = None,
    ) -> FakeSession:
        assert session not in self.sessions, "a session is never used twice"
        made = self.sessions[session] = FakeSession(session, seed, sampling or {})
        return made

    def ask(self, config: AgentConfig, text: str, *, breaks_off: bool = False) -> Reply:
        session = self.sessions[config.session_uid]
        if session.closed.is_set():
            raise CallFailed("410: the session is closed")
        messages = [{"role": "user", "content": text}]
        said = self.answer(messages)
        with self._lock:
            name = f"chatcmpl-{next(self._numbers)}"
            session.records.append(self._record(session.id, name, messages, said, breaks_off))
        if isinstance(said, int):
            raise CallFailed(f"status {said}")
        if breaks_off:
            raise CallFailed("the stream broke off")
        return Reply(name, said)

    def _record(
        self, session: str, name: str, messages: Messages, said: str | int, breaks_off: bool
    ) -> CallRecord:
        record = CallRecord(id=name, session=session, messages=list(messages))
        if isinstance(said, int):
            code = "context_length_exceeded" if said == 400 else None
            record.status = CallStatus.ERROR
            record.error = {"status": said, "type": "", "code": code, "message": f"status {said}"}
            return record
        record.status = CallStatus.PARTIAL if breaks_off else CallStatus.OK
        record.response = {"role": "assistant", "content": said}
        record.finish_reason = "" if breaks_off else "stop"
        record.no_ids_because = self.no_ids_because
        if not self.no_ids_because:
            record.prompt_ids = [ord(letter) for letter in messages[0]["content"]]
            record.completion_ids = [ord(letter) for letter in said]
            record.logprobs = [-0.5] * len(said)
            record.policy_versions = [3] * len(said)
        return record


def half(task: dict[str, Any], episode: Episode) -> float:
    return 0.5


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"task_id": f"t{number}", "question": f"What is {number}?"} for number in range(count)]


async def play(engine: TracedEngine, rows: Sequence[Any], **options: Any) -> list[Episode]:
    async with engine, aclosing(engine.run(rows, **options)) as running:
        episodes = [episode async for episode in running]
    return sorted(episodes, key=lambda episode: (episode.task_id, episode.rollout_idx))


def engine_for(program: Any, gateway: FakeGateway, evaluator: Any = half, **options: Any) -> TracedEngine:
    return TracedEngine(program, evaluator, gateway, model="m", **options)
