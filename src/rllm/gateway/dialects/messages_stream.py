"""A streamed answer in the Messages protocol.

    message_start, ping ─► for each block: start, deltas, stop ─► message_delta, message_stop
                                                              └► error

Text and thoughts go out as they come. A tool call goes out when the answer is whole: its input must be an
object, and whether its text is one shows at the end (tool_input.py). While the model writes what is not
sent, pings keep the connection awake. What a recorded answer holds beyond the pieces that came is sent at
its end.
"""

from typing import Any, Literal

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.dialects.messages_output import (
    SIGNATURE,
    error_object,
    message_head,
    shows_thinking,
    stop_fields,
    tool_use,
    usage_object,
)
from rllm.gateway.dialects.server_events import event_up_to, server_event
from rllm.gateway.dialects.tool_input import tool_input
from rllm.types.wire import Answer, CallRequest, Choice, Piece, WireToolCall

_PING = server_event({"type": "ping"})
_PIECES_PER_PING = 16
_EMPTY = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessagesWriter:
    """Implements `rllm.gateway.dialects.base.StreamWriter`."""

    def __init__(self, request: CallRequest, answer_id: str, model: str) -> None:
        self._head = message_head(answer_id, model)
        self._shows_thinking = shows_thinking(request)
        self._open: Literal["text", "thinking", ""] = ""
        self._num_blocks = 0
        self._delta_heads: dict[str, bytes] = {}
        """A delta event of the open block up to its text."""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._num_unsent = 0

    def begin(self) -> bytes:
        return server_event({"type": "message_start", "message": self._head}) + _PING

    def piece(self, piece: Piece) -> bytes:
        if piece.choice:  # this protocol has one choice
            return b""
        events = b""
        if piece.reasoning and self._shows_thinking:
            events += self._say("thinking", piece.reasoning)
        if piece.text:
            events += self._say("text", piece.text)
        return events or self._unsent()

    def end(self, answer: Answer) -> bytes:
        choice = answer.choices[0] if answer.choices else Choice()
        events = self._catch_up(choice) + self._close()
        for call in choice.tool_calls:
            events += self._whole_call(call)
        delta = {"type": "message_delta", "delta": stop_fields(choice), "usage": usage_object(answer.usage)}
        return events + server_event(delta) + server_event({"type": "message_stop"})

    def failed(self, error: RequestRefused) -> bytes:
        return server_event(error_object(error))

    def _say(self, kind: Literal["text", "thinking"], text: str) -> bytes:
        events = b"" if self._open == kind else self._next(kind)
        (self._texts if kind == "text" else self._thoughts).append(text)
        return b"%b%b%b}}\n\n" % (events, self._delta_heads[kind], orjson.dumps(text))

    def _unsent(self) -> bytes:
        self._num_unsent += 1
        return b"" if self._num_unsent % _PIECES_PER_PING else _PING

    def _catch_up(self, choice: Choice) -> bytes:
        events = b""
        if choice.reasoning and self._shows_thinking and not self._num_blocks:
            events += self._say("thinking", choice.reasoning)
        text_so_far = "".join(self._texts)
        if len(choice.text) > len(text_so_far) and choice.text.startswith(text_so_far):
            events += self._say("text", choice.text[len(text_so_far) :])
        if not self._texts and not choice.text and not choice.tool_calls:
            events += self._next("text")
        return events

    def _next(self, kind: Literal["text", "thinking"]) -> bytes:
        """Closes the block that is open and opens another."""
        events = self._close()
        index = self._num_blocks
        self._num_blocks += 1
        self._open = kind
        # The delta's own JSON within that of the event, both up to the text; `_say` adds the text and closes
        # both.
        head = event_up_to(kind, {"type": f"{kind}_delta"})
        event = event_up_to("delta", {"type": "content_block_delta", "index": index})
        self._delta_heads[kind] = event + head[head.index(b"{") :]
        return events + _start(index, _EMPTY[kind])

    def _close(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        index = self._num_blocks - 1
        signature = b""
        if kind == "thinking":
            signature = _delta(index, {"type": "signature_delta", "signature": SIGNATURE})
        return signature + _stop(index)

    def _whole_call(self, call: WireToolCall) -> bytes:
        index = self._num_blocks
        self._num_blocks += 1
        value = tool_input(call.arguments)
        return (
            _start(index, tool_use(call, {}))
            + _delta(index, {"type": "input_json_delta", "partial_json": orjson.dumps(value).decode()})
            + _stop(index)
        )


def _start(index: int, block: dict[str, Any]) -> bytes:
    return server_event({"type": "content_block_start", "index": index, "content_block": block})


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return server_event({"type": "content_block_delta", "index": index, "delta": delta})


def _stop(index: int) -> bytes:
    return server_event({"type": "content_block_stop", "index": index})
