"""An upstream that speaks the Messages protocol, such as Anthropic's.

    request ──body──► upstream ──► Message ──read──► Answer
                              └──► events ──MessagesReader──► pieces, Answer

A client of the same protocol gets the upstream's reply and events as they came. For others the request is
translated (messages_request.py), and so is the answer. The protocol has no token ids.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.dialects.messages_request import translate
from rllm.gateway.dialects.openai_upstream import bad_reply, error_of, request_fields, text_of
from rllm.gateway.dialects.server_events import as_it_came
from rllm.gateway.dialects.tool_input import arguments_of
from rllm.types.messages import FinishReason
from rllm.types.wire import (
    Answer,
    CallRequest,
    Choice,
    Dialect,
    Piece,
    ToolCallPiece,
    WireToolCall,
    completion_id,
    unix_time,
)

NO_IDS = (
    "The upstream was asked through /v1/messages, a protocol without token ids. To train on its answers, "
    "serve the model with vLLM 0.10.2 or newer and let the gateway ask its /v1/chat/completions, which "
    "returns ids when it is asked for `return_token_ids: true`."
)
_FINISH_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "pause_turn": FinishReason.STOP,
    "tool_use": FinishReason.TOOL_CALLS,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "refusal": FinishReason.LENGTH,  # cut off by someone else than the model
}
_STATUS_OF_ERROR = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}


class MessagesUpstream:
    """Implements `rllm.gateway.dialects.base.UpstreamDialect`."""

    name = Dialect.MESSAGES
    path = "/messages"

    def body(self, request: CallRequest, *, capture: frozenset[str]) -> dict[str, Any]:
        if request.dialect is Dialect.MESSAGES:
            return request_fields(request, size_names=("max_tokens",))
        return translate(request)

    def read(self, request: CallRequest, reply: dict[str, Any]) -> Answer:
        if reply.get("type") == "error":
            raise _error(reply)
        blocks = reply.get("content")
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise bad_reply("it has no `content`")
        choice_read = _Heard.of(request)
        choice_read.hear_message(reply)
        for place, block in enumerate(blocks):
            choice_read.begin_block(place, block)
        answer = choice_read.answer(request)
        if request.dialect is Dialect.MESSAGES:
            answer.raw = reply
        return answer

    def reader(self, request: CallRequest) -> "MessagesReader":
        return MessagesReader(request)

    def error_of(self, status: int, body: bytes, headers: dict[str, str]) -> RequestRefused:
        return error_of(status, body, headers)


class MessagesReader:
    """Implements `rllm.gateway.dialects.base.StreamReader`."""

    def __init__(self, request: CallRequest) -> None:
        self.error: RequestRefused | None = None
        """The error in the middle of the stream."""
        self._request = request
        self._same_dialect = request.dialect is Dialect.MESSAGES
        self._parts = _Heard.of(request)
        self._complete = False

    def feed(self, event: str, data: bytes) -> list[Piece]:
        if not data or self.error is not None or self._complete:
            return []
        try:
            payload = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            self.error = bad_reply(f"an event of its stream is no JSON ({error})")
            return []
        if not isinstance(payload, dict):
            self.error = bad_reply("an event of its stream is no JSON object")
            return []
        pieces: list[Piece] = []
        try:
            pieces = self._hear(text_of(payload.get("type")) or event, payload)
        except RequestRefused as error:
            self.error = error
        if self.error is not None:
            return []
        return [as_it_came(event, data)] if self._same_dialect else pieces

    @property
    def complete(self) -> bool:
        return self._complete

    def answer(self) -> Answer:
        return self._parts.answer(self._request)

    def _hear(self, kind: str, event: dict[str, Any]) -> list[Piece]:
        place = event.get("index")
        place = place if isinstance(place, int) else 0
        match kind:
            case "message_start":
                self._parts.hear_message(_object(event.get("message")))
            case "content_block_start":
                return self._parts.begin_block(place, _object(event.get("content_block")))
            case "content_block_delta":
                return self._parts.hear_delta(place, _object(event.get("delta")))
            case "message_delta":
                self._parts.hear_message(_object(event.get("delta")) | {"usage": event.get("usage")})
            case "message_stop":
                self._complete = True
            case "error":
                self.error = _error(event)
            case _:  # pings, ends of blocks, and what later versions add
                pass
        return []


@dataclass(slots=True)
class _Heard:
    """Everything that the upstream said so far."""

    id: str
    model: str
    keeps_id: bool
    """A client of another protocol gets an id in its own protocol's form."""
    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: dict[int, WireToolCall] = field(default_factory=dict[int, WireToolCall])
    """By the place of their block."""
    inputs: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    stop_reason: str = ""
    stop_sequence: str | None = None
    usage: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, request: CallRequest) -> "_Heard":
        keeps_id = request.dialect is not Dialect.MESSAGES
        return cls(id=completion_id(request.dialect), model=request.model, keeps_id=keeps_id)

    def hear_message(self, message: dict[str, Any]) -> None:
        """Read a whole message, its beginning or its end."""
        if not self.keeps_id:
            self.id = text_of(message.get("id")) or self.id
        self.model = text_of(message.get("model")) or self.model
        self.stop_reason = text_of(message.get("stop_reason")) or self.stop_reason
        self.stop_sequence = text_of(message.get("stop_sequence")) or self.stop_sequence
        usage = _object(message.get("usage"))
        self.usage |= {name: value for name, value in usage.items() if type(value) is int}

    def begin_block(self, place: int, block: dict[str, Any]) -> list[Piece]:
        match block.get("type"):
            case "text":
                return self._say(text_of(block.get("text")))
            case "thinking":
                return self._think(text_of(block.get("thinking")))
            case "tool_use":
                value = _object(block.get("input"))
                # A streamed call begins with an empty `input`, whose text comes in deltas; a whole reply has
                # all of it here.
                call = WireToolCall(
                    id=text_of(block.get("id")),
                    name=text_of(block.get("name")),
                    arguments=_arguments(value) if value else "",
                )
                index = len(self.calls)
                self.calls[place] = call
                self.inputs[place] = []
                return [
                    Piece(
                        tool_call=ToolCallPiece(
                            index=index, id=call.id, name=call.name, arguments=call.arguments
                        )
                    )
                ]
            case _:  # hosted tools: they stand in the raw reply
                return []

    def hear_delta(self, place: int, delta: dict[str, Any]) -> list[Piece]:
        match delta.get("type"):
            case "text_delta":
                return self._say(text_of(delta.get("text")))
            case "thinking_delta":
                return self._think(text_of(delta.get("thinking")))
            case "input_json_delta" if place in self.inputs:
                text = text_of(delta.get("partial_json"))
                self.inputs[place].append(text)
                index = list(self.calls).index(place)
                return [Piece(tool_call=ToolCallPiece(index=index, arguments=text))] if text else []
            case _:
                return []

    def answer(self, request: CallRequest) -> Answer:
        calls = [
            WireToolCall(
                id=call.id, name=call.name, arguments="".join(self.inputs[place]) or call.arguments or "{}"
            )
            for place, call in self.calls.items()
        ]
        reason = _FINISH_REASONS.get(self.stop_reason, FinishReason.STOP)
        choice = Choice(
            text="".join(self.texts),
            reasoning="".join(self.thoughts),
            tool_calls=calls,
            finish_reason=reason,
            stop_sequence=self.stop_sequence,
        )
        return Answer(
            id=self.id,
            model=self.model,
            created=unix_time(),
            choices=[choice],
            usage=_usage(self.usage),
            no_ids_because=NO_IDS,
        )

    def _say(self, text: str) -> list[Piece]:
        self.texts.append(text)
        return [Piece(text=text)] if text else []

    def _think(self, text: str) -> list[Piece]:
        self.thoughts.append(text)
        return [Piece(reasoning=text)] if text else []


def _arguments(value: dict[str, Any]) -> str:
    try:
        return arguments_of(value)
    except orjson.JSONEncodeError as error:
        raise bad_reply(f"the `input` of a tool call cannot be written as JSON ({error})") from error


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _usage(usage: dict[str, int]) -> dict[str, int]:
    if not usage:
        return {}
    # In this protocol `input_tokens` are those that were neither read from the cache nor written into it.
    num_cached = usage.get("cache_read_input_tokens", 0)
    read = usage.get("input_tokens", 0) + usage.get("cache_creation_input_tokens", 0) + num_cached
    return {
        "prompt_tokens": read,
        "completion_tokens": usage.get("output_tokens", 0),
        "cached_tokens": num_cached,
    }


def _error(event: dict[str, Any]) -> RequestRefused:
    """An error that came with status 200, or in the middle of a stream."""
    error = _object(event.get("error"))
    kind = text_of(error.get("type")) or "api_error"
    message = text_of(error.get("message")) or "The upstream gave an error and did not say which"
    return RequestRefused(message, status=_STATUS_OF_ERROR.get(kind, 502), kind=kind)
