"""POST /v1/chat/completions: the client's side, and upstreams that speak it.

    body ──ChatDialect.parse──► CallRequest ──ChatUpstream.body──► body for an upstream
    Answer ──ChatDialect.reply──► JSON                reply ──ChatUpstream.read──► Answer
    Piece, Piece, … ──ChatStream──► events            events ──ChatReader──► Piece, Piece, …, Answer

A client and an upstream that both speak it are connected without loss: the body goes through as sent, the
reply comes back as given, except for what the gateway alone had asked for.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.dialects.base import StreamReader, StreamWriter
from rllm.gateway.dialects.chat_messages import chat_messages, chat_tool_choice, chat_tools
from rllm.gateway.dialects.chat_reading import content_text, hear, logprob_tokens, reasoning_text
from rllm.gateway.dialects.openai_fields import (
    CHANGES_NOTHING,
    TEMPLATE_FIELDS,
    Fields,
    mend_of,
    penalties,
    shared_fields,
    short_repr,
)
from rllm.gateway.dialects.openai_reply import (
    DONE,
    chat_logprobs,
    error_object,
    event,
    finish_name,
    usage_object,
)
from rllm.gateway.dialects.openai_stream import EventReader
from rllm.gateway.dialects.openai_upstream import (
    HeardChoice,
    bad_reply,
    call_id,
    capture_more,
    choices_of,
    error_in_reply,
    error_of,
    finish_answer,
    hide_injected,
    index_of,
    request_fields,
    text_of,
)
from rllm.types.wire import (
    Answer,
    CallRequest,
    Choice,
    Dialect,
    Piece,
    ToolCallPiece,
    ToolChoice,
    ToolMode,
    completion_id,
    unix_time,
)

_IDLE: Mapping[str, tuple[Any, ...]] = {
    **TEMPLATE_FIELDS,
    "echo": (False,),
    "best_of": (1,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}
"""Chat's own fields that change the answer, with their idle values. `reasoning_effort` and `verbosity` are
hints and do not count."""

_MAX_TOP_LOGPROBS = 20
_SIZE_NAMES = ("max_completion_tokens", "max_tokens")


class ChatDialect:
    """Implements `ClientDialect`."""

    name = Dialect.CHAT

    def parse(self, body: dict[str, Any]) -> CallRequest:
        fields = Fields(body)
        tools = chat_tools(fields)
        logprobs = fields.flag("logprobs", False)
        top_logprobs = fields.integer("top_logprobs", low=0, high=_MAX_TOP_LOGPROBS) or 0
        if top_logprobs and not logprobs:
            raise fields.refusal("top_logprobs", "it is allowed only when `logprobs` is true. Set that too")
        return CallRequest(
            dialect=self.name,
            body=body,
            messages=chat_messages(fields),
            tools=tools,
            tool_choice=chat_tool_choice(fields, tools),
            parallel_tool_calls=fields.flag("parallel_tool_calls", True),
            penalties=penalties(fields, _IDLE),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            **shared_fields(fields),
        )

    def reply(self, request: CallRequest, answer: Answer) -> dict[str, Any]:
        if answer.raw is not None:
            return answer.raw
        reply: dict[str, Any] = {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [_choice_object(request, choice) for choice in answer.choices],
            "usage": usage_object(answer.usage),
            "system_fingerprint": None,
        }
        if request.return_token_ids:
            reply["prompt_token_ids"] = _prompt_ids(answer)
        return reply

    def stream(self, request: CallRequest, answer_id: str, model: str, created_at: int) -> StreamWriter:
        return ChatStream(request, answer_id, model, created_at)

    def error(self, error: RequestRefused) -> dict[str, Any]:
        return error_object(error)


class ChatStream:
    """Implements `StreamWriter`. What all chunks of one answer share is encoded once."""

    def __init__(self, request: CallRequest, answer_id: str, model: str, created_at: int) -> None:
        self._request = request
        chunk_fields = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created_at,
            "model": model,
            "system_fingerprint": None,
        }
        # Without the closing brace: choices and the end are joined to it as bytes.
        self._head = b"data: " + orjson.dumps(chunk_fields)[:-1] + b',"choices":['
        self._tail = (b'],"usage":null' if request.include_usage else b"]") + b"}\n\n"
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._text_heads = [self._text_head(index) for index in range(request.n)]

    def begin(self) -> bytes:
        """The role of every choice. Where tools are offered, the content is null, which can become text."""
        content = None if self._request.tools else ""
        delta = {"role": "assistant", "content": content, "refusal": None}
        return b"".join(self._chunk(index, delta) for index in range(self._request.n))

    def piece(self, piece: Piece) -> bytes:
        if piece.tool_call is None and not piece.logprobs and not piece.reasoning:
            if not piece.text:
                return b""
            heads = self._text_heads
            head = heads[piece.choice] if piece.choice < len(heads) else self._text_head(piece.choice)
            return head + orjson.dumps(piece.text) + self._text_tail
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.text:
            delta["content"] = piece.text
        if piece.tool_call is not None:
            delta["tool_calls"] = [_call_delta(piece.tool_call)]
        logprobs = chat_logprobs(piece.logprobs) if piece.logprobs and self._request.logprobs else None
        return self._chunk(piece.choice, delta, logprobs) if delta or logprobs else b""

    def end(self, answer: Answer) -> bytes:
        chunks = [self._finish(choice) for choice in answer.choices]
        if self._request.include_usage:
            chunks.append(self._head + b'],"usage":' + orjson.dumps(usage_object(answer.usage)) + b"}\n\n")
        chunks.append(DONE)
        return b"".join(chunks)

    def failed(self, error: RequestRefused) -> bytes:
        return event(error_object(error))

    def _finish(self, choice: Choice) -> bytes:
        """The ids, where asked for, come as one: a client that appends those of all chunks has them."""
        last = {
            "index": choice.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": finish_name(choice.finish_reason),
        }
        tail = self._tail
        if self._request.return_token_ids:
            last["token_ids"] = choice.completion_ids
            tail = b'],"prompt_token_ids":' + orjson.dumps(choice.prompt_ids) + tail[1:]
        return self._head + orjson.dumps(last) + tail

    def _text_head(self, index: int) -> bytes:
        return self._head + b'{"index":%d,"delta":{"content":' % index

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._head + orjson.dumps(choice) + self._tail


class ChatUpstream:
    """Implements `UpstreamDialect`."""

    name = Dialect.CHAT
    path = "/chat/completions"

    def body(self, request: CallRequest, *, capture: frozenset[str]) -> dict[str, Any]:
        same = request.dialect is self.name
        body = request_fields(request, size_names=_SIZE_NAMES) if same else _body_of(request)
        capture_more(body, request, capture, logprobs=True)
        return body

    def read(self, request: CallRequest, reply: dict[str, Any]) -> Answer:
        if not isinstance(reply, dict):
            raise bad_reply("it is no JSON object")
        choices = choices_of(reply)
        if not choices:
            raise error_in_reply(reply["error"]) if reply.get("error") else bad_reply("it has no `choices`")
        choices_read: list[HeardChoice] = []
        for place, choice in enumerate(choices):
            message = choice.get("message")
            if not isinstance(message, dict):
                raise bad_reply(f"`choices[{place}]` has no `message`")
            one = HeardChoice(index_of(choice, place), keep_tokens=request.logprobs)
            hear(one, choice, message)
            choices_read.append(one)
        given_id = text_of(reply.get("id"))
        same = request.dialect is self.name
        answer = Answer(
            id=given_id if same and given_id else completion_id(request.dialect),
            model=text_of(reply.get("model")) or request.model,
            created=created_at if isinstance(created_at := reply.get("created"), int) else unix_time(),
        )
        # The reply is given to the client as it is, and changed only once everything in it was heard.
        if same:
            answer.raw = reply
            if not given_id:
                reply["id"] = answer.id
        finish_answer(answer, choices_read, request, reply.get("usage"), reply.get("prompt_token_ids"))
        if same:
            hide_injected(reply, request)
        return answer

    def reader(self, request: CallRequest) -> StreamReader:
        return ChatReader(request)

    def error_of(self, status: int, body: bytes, headers: dict[str, str]) -> RequestRefused:
        return error_of(status, body, headers)


class ChatReader(EventReader):
    """Implements `StreamReader`."""

    dialect = Dialect.CHAT

    def hear(self, choice_read: HeardChoice, choice: dict[str, Any]) -> list[Piece]:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            delta = {}
        calls = hear(choice_read, choice, delta)
        if self.same_dialect:
            return []
        pieces = [
            Piece(
                choice=choice_read.index,
                tool_call=ToolCallPiece(
                    index=call.index,
                    id=call.id or (call_id(self.id, choice_read.index, call.index) if call.name else ""),
                    name=call.name,
                    arguments=call.arguments,
                ),
            )
            for call in calls
        ]
        text = content_text(delta.get("content"))
        reasoning = reasoning_text(delta)
        tokens = logprob_tokens(choice) if self.request.logprobs else []
        if text or reasoning or (tokens and not pieces):
            pieces.insert(0, Piece(choice=choice_read.index, text=text, reasoning=reasoning))
        if pieces:
            pieces[0].logprobs = tokens
        return pieces


def _choice_object(request: CallRequest, choice: Choice) -> dict[str, Any]:
    message = choice.message() | {"refusal": None, "annotations": []}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    message_fields: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": chat_logprobs(choice.token_logprobs) if request.logprobs else None,
        "finish_reason": finish_name(choice.finish_reason),
    }
    if request.return_token_ids:
        message_fields["token_ids"] = choice.completion_ids
    return message_fields


def _call_delta(call: ToolCallPiece) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _prompt_ids(answer: Answer) -> list[int]:
    return answer.choices[0].prompt_ids if answer.choices else []


def _body_of(request: CallRequest) -> dict[str, Any]:
    """A request of another protocol, said in this one."""
    if request.prompt is not None:
        raise RequestRefused(
            "The upstream answers chat completions alone and cannot go on with a bare `prompt`; send "
            "`messages` to /v1/chat/completions, or configure an upstream that serves /v1/completions.",
            param="prompt",
            code="unsupported_by_upstream",
        )
    body: dict[str, Any] = {"model": request.model} if request.model else {}
    body["messages"] = request.messages
    body |= _tools_of(request)
    sampling = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_completion_tokens": request.max_tokens,
        "seed": request.seed,
        "stop": request.stop or None,
        "n": request.n if request.n != 1 else None,
        "top_logprobs": request.top_logprobs or None,
    }
    body |= {name: value for name, value in sampling.items() if value is not None}
    body |= {name: True for name in ("logprobs", "return_token_ids", "stream") if getattr(request, name)}
    if request.stream and request.include_usage:
        body["stream_options"] = {"include_usage": True}
    if request.response_schema is not None:
        body["response_format"] = _format_of(request.response_schema)
    for name, value in request.penalties.items():
        if name not in CHANGES_NOTHING and name not in _IDLE:
            raise RequestRefused(
                f"`{name}` is {short_repr(value)}, which cannot be said to an upstream that speaks chat "
                f"completions. {mend_of(name)}.",
                param=name,
                code="unsupported_by_upstream",
            )
        body[name] = value
    return body


def _tools_of(request: CallRequest) -> dict[str, Any]:
    if not request.tools:
        return {}
    fields: dict[str, Any] = {"tools": request.tools}
    if request.tool_choice != ToolChoice():
        choice = request.tool_choice
        named_function = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named_function if choice.mode is ToolMode.NAMED else str(choice.mode)
    if not request.parallel_tool_calls:
        fields["parallel_tool_calls"] = False
    return fields


def _format_of(schema: dict[str, Any]) -> dict[str, Any]:
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
