"""Seeds for calls that name none, so that draws follow from the session and from what is asked.

    session's seed, messages or prompt, tools ──Draws.draw_of──► seed

The order in which parallel calls arrive does not matter. Asked again in one session, the same prompt is given
other draws, or a program that samples twice would get one answer twice; after a call that failed, the same.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.draw_numbers import DrawNumbers
from rllm.types.draws import draw_seed
from rllm.types.messages import Message
from rllm.types.wire import CallRecord, CallRequest, CallStatus


class SeedDraw(NamedTuple):
    """The draw of one call."""

    digest: bytes
    number: int
    seed: int
    """From 0 to 2^63 - 1."""


class Draws:
    """The requests of one session."""

    def __init__(self) -> None:
        self._numbers = DrawNumbers()

    @classmethod
    def from_history(cls, records: Iterable[CallRecord]) -> "Draws":
        """The state after the calls that are in the ledger."""
        draws = cls()
        for record in records:
            # One of them a call: `draw_of` counts calls and not choices.
            if record.status is CallStatus.OK and record.choice == 0:
                draws._numbers.take(_digest(record.messages, record.prompt, record.tools))
        return draws

    def draw_of(self, request: CallRequest, session_seed: int) -> SeedDraw:
        """For the next call that asks this."""
        digest = _digest(request.messages, request.prompt, request.tools)
        number = self._numbers.take(digest)
        return SeedDraw(digest, number, draw_seed(session_seed, digest.hex(), number, "upstream"))

    def give_back(self, draw: SeedDraw) -> None:
        """The draw of a call that failed."""
        self._numbers.give_back(draw.digest, draw.number)


def _digest(
    messages: Sequence[Message], prompt: str | list[int] | None, tools: Sequence[dict[str, Any]]
) -> bytes:
    """Ids of tool calls do not count: servers make them up anew in every run."""
    content = [
        {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        if "tool_calls" in message or "tool_call_id" in message
        else message
        for message in messages
    ]
    functions = [call.get("function") for message in messages for call in message.get("tool_calls") or ()]
    try:
        text = orjson.dumps([content, functions, prompt, tools], option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise RequestRefused(f"The request cannot be written as JSON ({error}).") from error
    return hashlib.blake2b(text, digest_size=16).digest()
