"""The reading of a chat upstream's answers, whole or in deltas. It is lenient: servers differ in the details.

choice with `message` or `delta` ──hear──► HeardChoice
"""

from typing import Any

import orjson

from rllm.gateway.dialects.openai_upstream import (
    HeardChoice,
    bad_reply,
    logprob_of,
    text_of,
    token_id_of,
)
from rllm.types.wire import TokenLogprob, ToolCallPiece


def hear(choice_read: HeardChoice, choice: dict[str, Any], delta: dict[str, Any]) -> list[ToolCallPiece]:
    """`delta` is a whole message or a delta of one. Returns the parts of calls in it."""
    choice_read.hear_common(choice)
    if choice.get("logprobs"):
        _hear_logprobs(choice_read, choice)
    content = delta.get("content")
    if len(delta) == 1 and type(content) is str:  # nearly all deltas
        if content:
            choice_read.text.append(content)
        return []
    if text := content_text(content) or text_of(delta.get("refusal")):
        choice_read.text.append(text)
    if reasoning := reasoning_text(delta):
        choice_read.reasoning.append(reasoning)
    pieces: list[ToolCallPiece] = []
    calls = delta.get("tool_calls")
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            # In a whole message the calls stand in order. In a delta the place says nothing: most hold one
            # call each.
            whole = "message" in choice
            pieces.append(_hear_call(choice_read, call, place if whole else None))
    if isinstance(legacy := delta.get("function_call"), dict):
        pieces.append(_hear_call(choice_read, {"index": 0, "function": legacy}, None))
    return pieces


def _hear_logprobs(choice_read: HeardChoice, choice: dict[str, Any]) -> None:
    entries = _logprob_entries(choice)
    try:
        values = [entry["logprob"] for entry in entries]
    except KeyError:
        values = [entry.get("logprob") for entry in entries]
    for value in values:
        if type(value) is not float:
            values = [logprob_of(value) for value in values]
            break
    choice_read.logprobs += values
    if not choice_read.completion_ids:  # they are what names of tokens would stand in for
        choice_read.hear_names(entry.get("token") for entry in entries)
    if choice_read.keep_tokens:
        choice_read.token_logprobs += logprob_tokens(choice)


def content_text(content: object) -> str:
    """Some servers answer with content parts, thoughts among them; those are not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(
        text_of(part.get("text"))
        for part in content
        if isinstance(part, dict) and part.get("type") in ("text", "output_text")
    )


def reasoning_text(delta: dict[str, Any]) -> str:
    """vLLM has called it by both names."""
    return text_of(delta.get("reasoning_content")) or text_of(delta.get("reasoning"))


def logprob_tokens(choice: dict[str, Any]) -> list[TokenLogprob]:
    tokens: list[TokenLogprob] = []
    for entry in _logprob_entries(choice):
        value = logprob_of(entry.get("logprob"))
        if value is not None:
            name = text_of(entry.get("token"))
            tokens.append(
                TokenLogprob(
                    token_id=token_id_of(name),
                    text=name,
                    logprob=value,
                    top=_alternatives(entry.get("top_logprobs")),
                )
            )
    return tokens


def _logprob_entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return []
    for entry in content:
        if type(entry) is not dict:
            return [entry for entry in content if isinstance(entry, dict)]
    return content


def _alternatives(top: object) -> list[tuple[int, str, float]]:
    alternatives: list[tuple[int, str, float]] = []
    for entry in top if isinstance(top, list) else ():
        value = logprob_of(entry.get("logprob")) if isinstance(entry, dict) else None
        if value is not None:
            name = text_of(entry.get("token"))
            alternatives.append((token_id_of(name), name, value))
    return alternatives


def _hear_call(choice_read: HeardChoice, call: dict[str, Any], place: int | None) -> ToolCallPiece:
    function = call.get("function")
    if not isinstance(function, dict):
        function = {}
    index = call.get("index", place)
    call_id = text_of(call.get("id"))
    name = text_of(function.get("name"))
    arguments = _arguments(function.get("arguments"))
    number, first = choice_read.hear_call(index if isinstance(index, int) else None, call_id, name, arguments)
    return ToolCallPiece(
        index=number, id=call_id if first else "", name=name if first else "", arguments=arguments
    )


def _arguments(value: object) -> str:
    if not isinstance(value, dict):
        return text_of(value)
    try:  # decoded, against the protocol
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise bad_reply(f"the arguments of a tool call are no JSON ({error})") from error
