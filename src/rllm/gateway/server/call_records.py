"""Answers as they are recorded, and records as they are answered with again.

CallRequest + Answer ──records_of──► CallRecord, one per choice
CallRequest + pieces that came ──answer_so_far──► Answer ──► partial records
CallRecord, … of a call ──answer_of──► Answer
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rllm.errors import RequestRefused
from rllm.gateway.dialects.openai_reply import UNLIKELY
from rllm.gateway.dialects.registry import UPSTREAMS
from rllm.gateway.server.sessions import Session
from rllm.inference.sse import EventSplitter
from rllm.types.messages import FinishReason, Message
from rllm.types.wire import (
    Answer,
    CallRecord,
    CallRequest,
    CallStatus,
    Choice,
    Dialect,
    Piece,
    TokenLogprob,
    ToolMode,
    WireToolCall,
    completion_id,
    unix_time,
)


@dataclass(kw_only=True, slots=True)
class Circumstances:
    """The fields of records beside the request and its answer."""

    session: Session
    retry_key: str
    started_at: float
    """Unix time, s."""
    latency_s: float = 0.0
    first_token_s: float | None = None


def records_of(
    request: CallRequest,
    answer: Answer,
    around: Circumstances,
    status: CallStatus = CallStatus.OK,
    error: RequestRefused | None = None,
) -> list[CallRecord]:
    """At least one, so that a call that broke off before its first token is seen too."""
    sampling = sampling_of(request, around.session)
    error_fields = None if error is None else error_data(error)
    return [
        CallRecord(
            id=answer.id,
            session=around.session.id,
            choice=choice.index,
            dialect=request.dialect,
            model=answer.model or request.model,
            stream=request.stream,
            status=status,
            error=error_fields,
            messages=request.messages,
            prompt=request.prompt,
            tools=request.tools,
            sampling=sampling if choice.seed is None else {**sampling, "seed": choice.seed},
            response=_response(choice),
            response_fields=_response_fields(request),
            finish_reason=str(choice.finish_reason) if status is CallStatus.OK else "",
            stop_sequence=choice.stop_sequence,
            has_cut_thought=choice.has_cut_thought,
            unparsed_markup=choice.unparsed_markup,
            prompt_ids=choice.prompt_ids,
            completion_ids=choice.completion_ids,
            logprobs=choice.logprobs,
            logprob_meaning=choice.logprob_meaning,
            temperature=choice.temperature,
            policy_versions=choice.policy_versions,
            mixed_versions=choice.mixed_versions,
            no_ids_because=answer.no_ids_because,
            token_logprobs=[_as_json(token) for token in choice.token_logprobs],
            usage=answer.usage,
            conversation=choice.conversation,
            segment=choice.segment,
            segment_reason=choice.segment_reason,
            upstream=answer.upstream,
            retry_key=around.retry_key,
            started_at=around.started_at,
            latency_s=around.latency_s,
            first_token_s=around.first_token_s if answer.first_token_s is None else answer.first_token_s,
        )
        for choice in answer.choices or [Choice()]
    ]


_RESPONSE_FIELDS = (
    *("metadata", "previous_response_id", "reasoning", "store", "text", "tool_choice"),
    *("max_tool_calls", "user", "prompt_cache_key", "safety_identifier"),
)


def _response_fields(request: CallRequest) -> dict[str, Any]:
    if request.dialect is not Dialect.RESPONSES:
        return {}
    body = request.body
    fields = {name: body[name] for name in _RESPONSE_FIELDS if body.get(name) is not None}
    # Their text is the first message of the record.
    return fields | {"instructions": True} if body.get("instructions") else fields


def error_record(request: CallRequest, error: RequestRefused, around: Circumstances) -> CallRecord:
    """A call that was refused or failed. It has no answer, so nobody can take it for a sample."""
    return CallRecord(
        id=completion_id(request.dialect),
        session=around.session.id,
        dialect=request.dialect,
        model=request.model,
        stream=request.stream,
        status=CallStatus.ERROR,
        error=error_data(error),
        messages=request.messages,
        prompt=request.prompt,
        tools=request.tools,
        sampling=sampling_of(request, around.session),
        retry_key=around.retry_key,
        started_at=around.started_at,
        latency_s=around.latency_s,
    )


def error_data(error: RequestRefused) -> dict[str, Any]:
    return {"status": error.status, "type": error.kind, "code": error.code, "message": error.message}


def sampling_of(request: CallRequest, session: Session) -> dict[str, Any]:
    """The sampling parameters of the answer: the client's, with those set for the session in their place."""
    sampling: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "response_schema")
        if (value := getattr(request, name)) is not None
    }
    if request.stop:
        sampling["stop"] = request.stop
    if request.n != 1:
        sampling["n"] = request.n
    if request.tool_choice.mode is not ToolMode.AUTO:
        sampling["tool_choice"] = request.tool_choice.name or str(request.tool_choice.mode)
    if not request.parallel_tool_calls:
        sampling["parallel_tool_calls"] = False
    return sampling | request.penalties | session.sampling


def answer_so_far(request: CallRequest, pieces: Sequence[Piece], model: str) -> Answer:
    """The part of a streamed answer that had arrived when it broke off."""
    # Raw events hold more than their text, such as ids, which the reader of the protocol takes out of them.
    if any(piece.raw is not None for piece in pieces):
        reader = UPSTREAMS[request.dialect].reader(request)
        splitter = EventSplitter()
        for event, data in splitter.feed(b"".join(piece.raw or b"" for piece in pieces)):
            reader.feed(event, data)
        return reader.answer()
    choices: dict[int, Choice] = {}
    calls: dict[tuple[int, int], WireToolCall] = {}
    for piece in pieces:
        choice = choices.setdefault(piece.choice, Choice(index=piece.choice))
        choice.text += piece.text
        choice.reasoning += piece.reasoning
        choice.completion_ids += [token.token_id for token in piece.logprobs]
        choice.logprobs += [token.logprob for token in piece.logprobs]
        if (part := piece.tool_call) is not None:
            call = calls.get((piece.choice, part.index))
            if call is None:
                call = calls[piece.choice, part.index] = WireToolCall(
                    id=part.id, name=part.name, arguments=""
                )
                choice.tool_calls.append(call)
            call.arguments += part.arguments
    return Answer(
        id=completion_id(request.dialect),
        model=request.model or model,
        created=unix_time(),
        choices=[choices[index] for index in sorted(choices)],
        no_ids_because="the answer broke off",
    )


def answer_of(records: Sequence[CallRecord]) -> Answer:
    """The answer that was recorded, for a client that asks again."""
    first = records[0]
    return Answer(
        id=first.id,
        model=first.model,
        created=int(first.started_at),
        choices=[_choice_of(record) for record in records],
        usage=first.usage,
        no_ids_because=first.no_ids_because,
        upstream=first.upstream,
    )


def _response(choice: Choice) -> Message:
    message = choice.message()
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    return message


def _as_json(token: TokenLogprob) -> dict[str, Any]:
    """One token's log-probability as JSON: where a grammar forbids the token it is not finite, and JSON has
    no number for it."""
    return {
        "token_id": token.token_id,
        "text": token.text,
        "logprob": max(token.logprob, UNLIKELY),
        "top": [[each, text, max(logprob, UNLIKELY)] for each, text, logprob in token.top],
    }


def _from_json(token: dict[str, Any]) -> TokenLogprob:
    top = [(each, text, logprob) for each, text, logprob in token["top"]]
    return TokenLogprob(token_id=token["token_id"], text=token["text"], logprob=token["logprob"], top=top)


def _choice_of(record: CallRecord) -> Choice:
    response = record.response
    return Choice(
        index=record.choice,
        text=response.get("content") or "",
        reasoning=response.get("reasoning_content") or "",
        tool_calls=[
            WireToolCall(
                id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"]
            )
            for call in response.get("tool_calls", ())
        ],
        finish_reason=FinishReason(record.finish_reason),
        stop_sequence=record.stop_sequence,
        has_cut_thought=record.has_cut_thought,
        unparsed_markup=record.unparsed_markup,
        prompt_ids=record.prompt_ids,
        completion_ids=record.completion_ids,
        logprobs=record.logprobs,
        logprob_meaning=record.logprob_meaning,
        temperature=record.temperature,
        policy_versions=record.policy_versions,
        mixed_versions=record.mixed_versions,
        conversation=record.conversation,
        segment=record.segment,
        segment_reason=record.segment_reason,
        token_logprobs=[_from_json(token) for token in record.token_logprobs],
    )
