"""A policy that answers what it is told to, for tests of the server in front of it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.types.messages import FinishReason
from rllm.types.wire import (
    Answer,
    CallRecord,
    CallRequest,
    Choice,
    Emit,
    Piece,
    PolicySession,
    TokenLogprob,
    ToolCallPiece,
    WireToolCall,
    completion_id,
    unix_time,
)


@dataclass(kw_only=True, slots=True)
class Say:
    """One scripted answer."""

    text: str = "hello world"
    reasoning: str = ""
    tool_calls: Sequence[WireToolCall] = ()
    ids: Sequence[int] = (11, 12, 13)
    shown: Sequence[str] = ()
    """Texts of the tokens for clients that want log-probabilities, each with itself in capitals beside it."""
    stop_sequence: str | None = None
    error: Exception | None = None
    """Raised after the first `error_after` pieces."""
    error_after: int = 0
    hold: asyncio.Event | None = None
    """Waited for before the answer, or after its first piece when it is streamed."""
    raw: Sequence[bytes] = ()
    """Events of an upstream that are passed on as they are."""


@dataclass(slots=True)
class ScriptedPolicy:
    """Implements `Policy`: `script` says what to answer to a request."""

    script: Callable[[CallRequest], Say] = lambda request: Say()
    requests: list[CallRequest] = field(default_factory=list[CallRequest])
    sessions: list[str] = field(default_factory=list[str])
    seeds: list[int] = field(default_factory=list[int])
    histories: list[list[CallRecord]] = field(default_factory=list[list[CallRecord]])
    in_flight: int = 0
    cancelled: int = 0
    is_started: bool = False
    is_closed: bool = False
    is_healthy: bool = True

    async def answer(self, request: CallRequest, session: PolicySession, emit: Emit | None = None) -> Answer:
        self.requests.append(request)
        self.sessions.append(session.id)
        self.seeds.append(session.seed)
        if "seen" not in session.state:
            session.state["seen"] = True
            self.histories.append(session.history())
        say = self.script(request)
        self.in_flight += 1
        try:
            if emit is not None:
                await self._stream(say, request, emit)
            elif say.hold is not None:
                await say.hold.wait()
            if say.error is not None:
                raise say.error
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        return self.whole(say, request)

    async def _stream(self, say: Say, request: CallRequest, emit: Emit) -> None:
        pieces = [Piece(raw=raw) for raw in say.raw] or list(self.pieces(say, request))
        if say.error is not None:
            pieces = pieces[: say.error_after]
        for number, piece in enumerate(pieces):
            await emit(piece)
            if number == 0 and say.hold is not None:
                await say.hold.wait()

    def pieces(self, say: Say, request: CallRequest) -> list[Piece]:
        found: list[Piece] = []
        for choice in range(request.n):
            words = say.text.split(" ") if say.text else []
            parts = [word + (" " if number < len(words) - 1 else "") for number, word in enumerate(words)]
            for number, part in enumerate(parts):
                logprobs = [self._shown(say)[number]] if request.logprobs else []
                found.append(Piece(choice=choice, text=part, logprobs=logprobs))
            for index, call in enumerate(say.tool_calls):
                half = len(call.arguments) // 2
                head, tail = call.arguments[:half], call.arguments[half:]
                found.append(
                    Piece(tool_call=ToolCallPiece(index=index, id=call.id, name=call.name, arguments=head))
                )
                found.append(Piece(tool_call=ToolCallPiece(index=index, arguments=tail)))
        return found

    def whole(self, say: Say, request: CallRequest) -> Answer:
        ids = list(say.ids)
        return Answer(
            id=completion_id(request.dialect),
            model=request.model or "scripted",
            created=unix_time(),
            choices=[
                Choice(
                    index=index,
                    text=say.text,
                    reasoning=say.reasoning,
                    tool_calls=list(say.tool_calls),
                    finish_reason=FinishReason.TOOL_CALLS if say.tool_calls else FinishReason.STOP,
                    stop_sequence=say.stop_sequence,
                    prompt_ids=[1, 2, 3],
                    completion_ids=[each + 100 * index for each in ids],
                    logprobs=[-0.5] * len(ids),
                    policy_versions=[4] * len(ids),
                    token_logprobs=self._shown(say) if request.logprobs else [],
                )
                for index in range(request.n)
            ],
            usage={"prompt_tokens": 3, "completion_tokens": len(ids) * request.n, "cached_tokens": 0},
        )

    def _shown(self, say: Say) -> list[TokenLogprob]:
        if not say.shown:
            return [TokenLogprob(token_id=each, text=f"<{each}>", logprob=-0.5) for each in say.ids]
        return [
            TokenLogprob(
                token_id=-1,
                text=text,
                logprob=-0.5,
                top=[(-1, text, -0.5), (-1, text.upper(), float("-inf"))],
            )
            for text in say.shown
        ]

    async def count_tokens(self, request: CallRequest) -> int:
        return 7 * len(request.messages)

    def models(self) -> list[str]:
        return ["scripted"]

    def health(self) -> dict[str, Any]:
        return {
            "healthy": self.is_healthy,
            "queued": 2,
            "in_flight": self.in_flight,
            "policy_versions": [4],
        }

    async def start(self) -> None:
        self.is_started = True

    async def close(self) -> None:
        self.is_closed = True
