"""POST /v1/completions, the protocol of bare prompts: the client's side, and upstreams that speak it.

    body ──CompletionsDialect.parse──► CallRequest ──CompletionsUpstream.body──► body for an upstream
    Answer ──CompletionsDialect.reply──► JSON             reply ──CompletionsUpstream.read──► Answer
    Piece, Piece, … ──CompletionsStream──► events         events ──CompletionsReader──► Piece, …, Answer

A call has one prompt, as text or as ids: a list of several would be several calls with one id.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.dialects.base import StreamReader, StreamWriter
from rllm.gateway.dialects.openai_fields import Fields, penalties, refusal, shared_fields
from rllm.gateway.dialects.openai_reply import (
    DONE,
    completion_logprobs,
    error_object,
    event,
    finish_name,
    usage_object,
)
from rllm.gateway.dialects.openai_stream import EventReader
from rllm.gateway.dialects.openai_upstream import (
    HeardChoice,
    bad_reply,
    capture_more,
    choices_of,
    error_in_reply,
    error_of,
    finish_answer,
    hide_injected,
    index_of,
    logprob_of,
    request_fields,
    text_of,
    token_id_of,
)
from rllm.types.messages import FinishReason
from rllm.types.wire import (
    Answer,
    CallRequest,
    Choice,
    Dialect,
    Piece,
    TokenLogprob,
    completion_id,
    unix_time,
)

_IDLE: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}
_MAX_LOGPROBS = 20
"""OpenAI gives up to 5 alternatives, engines more."""
_MAX_TOKEN_ID = 2**31 - 1
_SIZE_NAMES = ("max_tokens", "max_completion_tokens")


class CompletionsDialect:
    """Implements `ClientDialect`."""

    name = Dialect.COMPLETIONS

    def parse(self, body: dict[str, Any]) -> CallRequest:
        fields = Fields(body)
        common_fields = shared_fields(fields)
        num_alternatives = fields.integer("logprobs", low=0, high=_MAX_LOGPROBS)
        echo = fields.flag("echo", False)
        changes = penalties(fields, _IDLE)
        best_of = fields.integer("best_of", low=1)
        if best_of is not None and best_of < common_fields["n"]:
            raise fields.refusal("best_of", f"it must be at least `n`, which is {common_fields['n']}")
        # Equal to `n` it changes nothing, so it is no reason to refuse the call.
        if best_of is not None and best_of > common_fields["n"]:
            changes["best_of"] = best_of
        if echo and num_alternatives is not None:  # then the prompt's log-probabilities are asked for too
            changes["echo"] = True
        return CallRequest(
            dialect=self.name,
            body=body,
            prompt=_prompt(fields),
            echo=echo,
            penalties=changes,
            logprobs=num_alternatives is not None,
            top_logprobs=num_alternatives or 0,
            **common_fields,
        )

    def reply(self, request: CallRequest, answer: Answer) -> dict[str, Any]:
        if answer.raw is not None:
            return answer.raw
        return {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [_choice_object(request, choice) for choice in answer.choices],
            "usage": usage_object(answer.usage),
            "system_fingerprint": None,
        }

    def stream(self, request: CallRequest, answer_id: str, model: str, created_at: int) -> StreamWriter:
        return CompletionsStream(request, answer_id, model, created_at)

    def error(self, error: RequestRefused) -> dict[str, Any]:
        return error_object(error)


class CompletionsStream:
    """Implements `StreamWriter`. What all chunks of one answer share is encoded once."""

    def __init__(self, request: CallRequest, answer_id: str, model: str, created_at: int) -> None:
        self._request = request
        chunk_fields = {
            "id": answer_id,
            "object": "text_completion",
            "created": created_at,
            "model": model,
            "system_fingerprint": None,
        }
        self._head = b"data: " + orjson.dumps(chunk_fields)[:-1] + b',"choices":['
        self._tail = (b'],"usage":null' if request.include_usage else b"]") + b"}\n\n"
        self._num_chars: dict[int, int] = {}
        """The length of each choice's text so far: where its next token starts."""

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        if not piece.text and not piece.logprobs:
            return b""
        logprobs: dict[str, Any] | None = None
        if self._request.logprobs:
            offset = self._num_chars.get(piece.choice, 0)
            logprobs = _logprobs_object(self._request, piece.logprobs, offset) if piece.logprobs else None
            self._num_chars[piece.choice] = offset + len(piece.text)
        elif not piece.text:
            return b""
        return self._chunk(_part(piece.choice, piece.text, logprobs, None))

    def end(self, answer: Answer) -> bytes:
        chunks: list[bytes] = []
        for choice in answer.choices:
            last = _part(choice.index, "", None, _finish_name(choice))
            if self._request.return_token_ids:
                last |= _ids_of(choice)
            chunks.append(self._chunk(last))
        if self._request.include_usage:
            chunks.append(self._head + b'],"usage":' + orjson.dumps(usage_object(answer.usage)) + b"}\n\n")
        chunks.append(DONE)
        return b"".join(chunks)

    def failed(self, error: RequestRefused) -> bytes:
        return event(error_object(error))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + orjson.dumps(choice) + self._tail


class CompletionsUpstream:
    """Implements `UpstreamDialect`."""

    name = Dialect.COMPLETIONS
    path = "/completions"

    def body(self, request: CallRequest, *, capture: frozenset[str]) -> dict[str, Any]:
        if request.dialect is not self.name:
            raise RequestRefused(
                "The upstream answers bare prompts alone and cannot be given `messages`; send a `prompt` to "
                "/v1/completions, or configure an upstream that serves /v1/chat/completions.",
                param="messages",
                code="unsupported_by_upstream",
            )
        body = request_fields(request, size_names=_SIZE_NAMES)
        body["prompt"] = request.prompt
        capture_more(body, request, capture, logprobs=1)  # there are servers that take 0 for "none"
        return body

    def read(self, request: CallRequest, reply: dict[str, Any]) -> Answer:
        if not isinstance(reply, dict):
            raise bad_reply("it is no JSON object")
        choices = choices_of(reply)
        if not choices:
            raise error_in_reply(reply["error"]) if reply.get("error") else bad_reply("it has no `choices`")
        choices_read: list[HeardChoice] = []
        for place, choice in enumerate(choices):
            if not isinstance(choice.get("text"), str):
                raise bad_reply(f"`choices[{place}]` has no `text`")
            one = HeardChoice(index_of(choice, place), keep_tokens=request.logprobs)
            _hear(one, choice)
            choices_read.append(one)
        answer = Answer(
            id=text_of(reply.get("id")) or completion_id(request.dialect),
            model=text_of(reply.get("model")) or request.model,
            created=created_at if isinstance(created_at := reply.get("created"), int) else unix_time(),
        )
        # Only clients of this protocol get here, so it goes to them as it is.
        answer.raw = reply
        reply["id"] = answer.id
        finish_answer(answer, choices_read, request, reply.get("usage"), reply.get("prompt_token_ids"))
        hide_injected(reply, request)
        return answer

    def reader(self, request: CallRequest) -> StreamReader:
        return CompletionsReader(request)

    def error_of(self, status: int, body: bytes, headers: dict[str, str]) -> RequestRefused:
        return error_of(status, body, headers)


class CompletionsReader(EventReader):
    """Implements `StreamReader`. Only clients of the same protocol get here, so all pieces are raw."""

    dialect = Dialect.COMPLETIONS

    def hear(self, choice_read: HeardChoice, choice: dict[str, Any]) -> list[Piece]:
        _hear(choice_read, choice)
        return []


def _prompt(fields: Fields) -> str | list[int]:
    value = fields.raw("prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise fields.refusal("prompt", "one call answers one prompt. Send each in a request of its own")
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise fields.refusal("prompt", "it must be text or a list of token ids, and not empty")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID:
            raise refusal(f"prompt[{place}]", token, f"a token id is an integer from 0 to {_MAX_TOKEN_ID}")
    return value


def _hear(choice_read: HeardChoice, choice: dict[str, Any]) -> None:
    choice_read.hear_common(choice)
    if text := text_of(choice.get("text")):
        choice_read.text.append(text)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return
    names = _list(logprobs.get("tokens"))
    values = [logprob_of(value) for value in _list(logprobs.get("token_logprobs"))]
    choice_read.logprobs += values
    choice_read.hear_names(names)
    if not choice_read.keep_tokens:
        return
    top = _list(logprobs.get("top_logprobs"))
    for place, (name, value) in enumerate(zip(names, values, strict=False)):
        if value is not None and isinstance(name, str):
            others = _alternatives(top[place]) if place < len(top) else []
            choice_read.token_logprobs.append(
                TokenLogprob(token_id=token_id_of(name), text=name, logprob=value, top=others)
            )


def _alternatives(top: object) -> list[tuple[int, str, float]]:
    if not isinstance(top, dict):
        return []
    alternatives = [
        (token_id_of(name), name, value) for name, value in top.items() if logprob_of(value) is not None
    ]
    return sorted(alternatives, key=lambda each: -each[2])


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _finish_name(choice: Choice) -> str:
    """There are no tool calls in this protocol."""
    if choice.finish_reason is FinishReason.TOOL_CALLS:
        return "stop"
    return finish_name(choice.finish_reason)


def _part(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}


def _choice_object(request: CallRequest, choice: Choice) -> dict[str, Any]:
    logprobs = _logprobs_object(request, choice.token_logprobs, 0) if request.logprobs else None
    part = _part(choice.index, choice.text, logprobs, _finish_name(choice))
    return part | _ids_of(choice) if request.return_token_ids else part


def _logprobs_object(request: CallRequest, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    return completion_logprobs(tokens, offset=offset, with_top=request.top_logprobs > 0)


def _ids_of(choice: Choice) -> dict[str, list[int]]:
    return {"prompt_token_ids": choice.prompt_ids, "token_ids": choice.completion_ids}
