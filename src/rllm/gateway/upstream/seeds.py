"""Seeds for calls that name none, so that draws follow from the session and from what is asked.

    session's seed, messages or prompt, tools ──Draws.seed_of──► seed

The order in which parallel calls arrive does not matter. Asked again in one session, the same prompt is given
other draws, or a program that samples twice would get one answer twice.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rllm.errors import RequestRefused
from rllm.types.draws import draw_seed
from rllm.types.messages import Message
from rllm.types.wire import CallRecord, CallRequest, CallStatus

MAX_PROMPTS = 8192
"""That are remembered, of one session."""


@dataclass(slots=True)
class Draws:
    """The requests of one session."""

    _times_asked: dict[bytes, int] = field(default_factory=dict[bytes, int])

    @classmethod
    def from_history(cls, records: Iterable[CallRecord]) -> "Draws":
        """The state after the calls that are in the ledger."""
        draws = cls()
        for record in records:
            # One of them a call: `seed_of` counts calls and not choices.
            if record.status is CallStatus.OK and record.choice == 0:
                draws._num_asked(_digest(record.messages, record.prompt, record.tools))
        return draws

    def seed_of(self, request: CallRequest, session_seed: int) -> int:
        """For the next call that asks this, from 0 to 2^63 - 1."""
        digest = _digest(request.messages, request.prompt, request.tools)
        return draw_seed(session_seed, digest.hex(), self._num_asked(digest), "upstream")

    def _num_asked(self, digest: bytes) -> int:
        """The number of earlier requests with this digest."""
        times = self._times_asked.pop(digest, 0)
        self._times_asked[digest] = times + 1
        if len(self._times_asked) > MAX_PROMPTS:
            del self._times_asked[next(iter(self._times_asked))]
        return times


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
