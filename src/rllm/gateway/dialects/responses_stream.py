"""A streamed answer in the Responses protocol.

    created, in_progress ─► for each item: added, deltas, done ─► completed | incomplete
                                                               └► error, failed

Items stand in the order in which the model wrote them, one open at a time. What an answer holds beyond the
pieces that came, because it is a recorded one, is sent at its end. There is no [DONE] in this protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.dialects.responses_input import namespaces
from rllm.gateway.dialects.responses_output import (
    call_item,
    finished_response,
    item_id,
    item_status,
    logprob_entry,
    message_item,
    reasoning_item,
    response_head,
    status_of,
    text_part,
)
from rllm.gateway.dialects.server_events import event_up_to, server_event
from rllm.types.wire import Answer, CallRequest, Choice, Piece, TokenLogprob, ToolCallPiece, WireToolCall

_DELTA = {
    "reasoning": "response.reasoning_text.delta",
    "message": "response.output_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(slots=True)
class _Item:
    """An output item on its way."""

    kind: Literal["reasoning", "message", "function_call"]
    id: str
    place: int
    delta_head: bytes
    """A delta event up to its text."""
    call: WireToolCall
    """Id and name of a function call; empty otherwise."""
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    status: str = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ResponsesWriter:
    """Implements `rllm.gateway.dialects.base.StreamWriter`."""

    def __init__(self, request: CallRequest, answer_id: str, model: str, created_at: int) -> None:
        self._request = request
        self._head = response_head(request, answer_id, model, created_at)
        self._spaces = namespaces(request.body) if request.tools else {}
        self._sequence = 0
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._calls: dict[int, _Item] = {}
        self._began = False

    def begin(self) -> bytes:
        self._began = True
        return self._event("response.created", response=self._head) + self._event(
            "response.in_progress", response=self._head
        )

    def piece(self, piece: Piece) -> bytes:
        if piece.choice:  # this protocol has one choice
            return b""
        events = b""
        if piece.reasoning:
            events += self._say("reasoning", piece.reasoning)
        if piece.text or piece.logprobs:
            events += self._say_text(piece.text, piece.logprobs)
        if piece.tool_call is not None:
            events += self._say_call(piece.tool_call)
        return events

    def end(self, answer: Answer) -> bytes:
        choice = answer.choices[0] if answer.choices else Choice()
        events = self._catch_up(choice)
        status = status_of(choice)
        events += self._close(item_status(status))
        output = [self._wire(item) for item in self._items]
        return events + self._event(
            f"response.{'failed' if status == 'cancelled' else status}",
            response=finished_response(self._head, choice, output, answer.usage),
        )

    def failed(self, error: RequestRefused) -> bytes:
        events = self._event("error", code=error.code or error.kind, message=error.message, param=error.param)
        if not self._began:  # what was sent so far is an upstream's own response, with its own id
            return events
        for item in self._items:
            item.status = item.status.replace("in_progress", "incomplete")
        response = self._head | {
            "status": "failed",
            "error": {"code": _failure(error), "message": error.message},
            "output": [self._wire(item) for item in self._items],
        }
        return events + self._event("response.failed", response=response)

    # ---- what the model says -------------------------------------------------------------------------------

    def _say(self, kind: Literal["reasoning", "message"], text: str) -> bytes:
        events = b""
        item = self._open
        if item is None or item.kind != kind:
            events, item = self._next(kind)
        item.texts.append(text)
        return events + self._delta(item, text)

    def _say_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Log-probabilities of tokens that are no text, such as markup, go with the text that is next."""
        if not self._request.logprobs or not logprobs:
            return self._say("message", text) if text else b""
        events = b""
        item = self._open
        if item is None or item.kind != "message":
            if not text:
                return b""
            events, item = self._next("message")
        item.texts.append(text)
        item.logprobs.extend(logprobs)
        return events + self._event(
            _DELTA["message"],
            item_id=item.id,
            output_index=item.place,
            content_index=0,
            delta=text,
            logprobs=[logprob_entry(each) for each in logprobs],
        )

    def _say_call(self, piece: ToolCallPiece) -> bytes:
        events = b""
        item = self._calls.get(piece.index)
        if item is None:
            events, item = self._next(
                "function_call", WireToolCall(id=piece.id, name=piece.name, arguments="")
            )
            self._calls[piece.index] = item
        if piece.arguments:
            item.texts.append(piece.arguments)
            events += self._delta(item, piece.arguments)
        return events

    def _catch_up(self, choice: Choice) -> bytes:
        events = b""
        if choice.reasoning and not self._items:
            events += self._say("reasoning", choice.reasoning)
        text_so_far = "".join(item.text for item in self._items if item.kind == "message")
        # Only what continues the pieces: what was sent cannot be taken back, so a text that differs is left
        # as it went out.
        if len(choice.text) > len(text_so_far) and choice.text.startswith(text_so_far):
            rest = choice.token_logprobs if not text_so_far else ()
            events += self._say_text(choice.text[len(text_so_far) :], rest)
        for index, call in enumerate(choice.tool_calls):
            item = self._calls.get(index)
            item_text = "" if item is None else item.text
            if item is None or (call.arguments != item_text and call.arguments.startswith(item_text)):
                rest = call.arguments[len(item_text) :]
                events += self._say_call(
                    ToolCallPiece(index=index, id=call.id, name=call.name, arguments=rest)
                )
        if not self._calls and not any(item.kind == "message" for item in self._items):
            opening, _ = self._next("message")
            events += opening
        return events

    # ---- items ---------------------------------------------------------------------------------------------

    def _next(
        self, kind: Literal["reasoning", "message", "function_call"], call: WireToolCall | None = None
    ) -> tuple[bytes, _Item]:
        """Closes the item that is open and opens another."""
        events = self._close("completed")
        place = len(self._items)
        name = item_id(_PREFIX[kind], self._head["id"], place)
        event_fields: dict[str, Any] = {"type": _DELTA[kind], "item_id": name, "output_index": place}
        if kind != "function_call":
            event_fields["content_index"] = 0
        if kind == "message":
            event_fields["logprobs"] = []
        item = _Item(
            kind,
            name,
            place,
            event_up_to("delta", event_fields),
            call or WireToolCall(id="", name="", arguments=""),
        )
        self._items.append(item)
        self._open = item
        events += self._event("response.output_item.added", output_index=place, item=self._wire(item))
        if kind != "function_call":
            events += self._part_event("added", item)
        return events, item

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        item.status = status
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.place}
        if item.kind == "function_call":
            events = self._event(
                "response.function_call_arguments.done",
                **place,
                name=self._wire(item)["name"],
                arguments=item.text,
            )
        elif item.kind == "message":
            logprobs = [logprob_entry(each) for each in item.logprobs]
            events = self._event(
                "response.output_text.done", **place, content_index=0, text=item.text, logprobs=logprobs
            ) + self._part_event("done", item)
        else:
            events = self._event(
                "response.reasoning_text.done", **place, content_index=0, text=item.text
            ) + self._part_event("done", item)
        return events + self._event(
            "response.output_item.done", output_index=item.place, item=self._wire(item)
        )

    def _wire(self, item: _Item) -> dict[str, Any]:
        if item.kind == "message":
            return message_item(item.id, item.text, item.status, item.logprobs)
        if item.kind == "reasoning":
            return reasoning_item(item.id, item.text, item.status)
        call = WireToolCall(id=item.call.id, name=item.call.name, arguments=item.text)
        return call_item(item.id, call, item.status, self._spaces)

    # ---- events --------------------------------------------------------------------------------------------

    def _delta(self, item: _Item, text: str) -> bytes:
        sequence = self._sequence
        self._sequence = sequence + 1
        return b'%b%b,"sequence_number":%d}\n\n' % (item.delta_head, orjson.dumps(text), sequence)

    def _part_event(self, what: str, item: _Item) -> bytes:
        part = (
            text_part(item.text, item.logprobs)
            if item.kind == "message"
            else {"type": "reasoning_text", "text": item.text}
        )
        return self._event(
            f"response.content_part.{what}",
            item_id=item.id,
            output_index=item.place,
            content_index=0,
            part=part,
        )

    def _event(self, event: str, /, **data: Any) -> bytes:
        sequence = self._sequence
        self._sequence = sequence + 1
        return server_event({"type": event, "sequence_number": sequence} | data)


def _failure(error: RequestRefused) -> str:
    """One of the codes that the protocol knows for a failed response."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"
