"""An upstream that speaks the Responses protocol, for clients that do.

    request.body ──body──► upstream ──► Response ──read──► Answer, with the reply as it came
                                   └──► events ──ResponsesReader──► the same events, and the Answer in them

Nothing is translated, so hosted tools and whatever else a client uses go through. The protocol has no token
ids.
"""

from typing import Any

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.dialects.openai_upstream import bad_reply, error_in_reply, error_of, request_fields, text_of
from rllm.gateway.dialects.responses_input import flat_name
from rllm.gateway.dialects.server_events import as_it_came
from rllm.types.messages import FinishReason
from rllm.types.wire import (
    Answer,
    CallRequest,
    Choice,
    Dialect,
    Piece,
    WireToolCall,
    completion_id,
    unix_time,
)

NO_IDS = (
    "The upstream was asked through /v1/responses, a protocol without token ids. To train on its answers, "
    "serve the model with vLLM 0.10.2 or newer and let the gateway ask its /v1/chat/completions, which "
    "returns ids when it is asked for `return_token_ids: true`."
)


class ResponsesUpstream:
    """Implements `rllm.gateway.dialects.base.UpstreamDialect`."""

    name = Dialect.RESPONSES
    path = "/responses"

    def body(self, request: CallRequest, *, capture: frozenset[str]) -> dict[str, Any]:
        if request.dialect is not Dialect.RESPONSES:
            raise RequestRefused(
                "This upstream speaks /v1/responses only, and the request came in the "
                f"{request.dialect} protocol; send it to /v1/responses.",
                code="unsupported_protocol",
            )
        return request_fields(request, size_names=("max_output_tokens",))

    def read(self, request: CallRequest, reply: dict[str, Any]) -> Answer:
        if reply.get("status") in ("failed", "cancelled"):
            raise error_in_reply(reply.get("error") or f"The upstream's response is {reply['status']}")
        items = reply.get("output")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise bad_reply("it has no `output`")
        answer = _answer(request, reply, items)
        answer.raw = reply
        return answer

    def reader(self, request: CallRequest) -> "ResponsesReader":
        return ResponsesReader(request)

    def error_of(self, status: int, body: bytes, headers: dict[str, str]) -> RequestRefused:
        return error_of(status, body, headers)


class ResponsesReader:
    """Implements `rllm.gateway.dialects.base.StreamReader`."""

    def __init__(self, request: CallRequest) -> None:
        self.error: RequestRefused | None = None
        """The error in the middle of the stream."""
        self._request = request
        self._response: dict[str, Any] = {"id": completion_id(Dialect.RESPONSES), "model": request.model}
        self._items: dict[int, dict[str, Any]] = {}
        """By output index, whole ones."""
        self._texts: dict[int, list[str]] = {}
        """By output index, of items that are on their way."""
        self._complete = False

    def feed(self, event: str, data: bytes) -> list[Piece]:
        if not data or self.error is not None or self._complete or data.strip() == b"[DONE]":
            return []
        try:
            payload = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            self.error = bad_reply(f"an event of its stream is no JSON ({error})")
            return []
        if not isinstance(payload, dict):
            self.error = bad_reply("an event of its stream is no JSON object")
            return []
        self._hear(text_of(payload.get("type")) or event, payload)
        return [] if self.error is not None else [as_it_came(event, data)]

    @property
    def complete(self) -> bool:
        return self._complete

    def answer(self) -> Answer:
        items = self._response.get("output")
        # Until its last event a response has no `output`, or an empty one.
        if not self._complete or not isinstance(items, list):
            items = self._items_so_far()
        return _answer(self._request, self._response, [item for item in items if isinstance(item, dict)])

    def _hear(self, kind: str, event: dict[str, Any]) -> None:
        place = event.get("output_index")
        if kind.endswith(".delta") and isinstance(place, int):
            self._texts.setdefault(place, []).append(text_of(event.get("delta")))
        elif kind in ("response.output_item.added", "response.output_item.done"):
            if isinstance(place, int) and isinstance(item := event.get("item"), dict):
                self._items[place] = item
        elif kind == "error":
            self.error = error_in_reply(event.get("error") or event)
        elif isinstance(response := event.get("response"), dict):
            self._response = response
            if kind == "response.failed":
                self.error = error_in_reply(response.get("error") or "The upstream's response failed")
            self._complete = kind in ("response.completed", "response.incomplete")

    def _items_so_far(self) -> list[dict[str, Any]]:
        """Whole items, and the text that came of the others."""
        items: list[dict[str, Any]] = []
        for place in sorted(self._items):
            item = self._items[place]
            text = "".join(self._texts.get(place, ()))
            if item.get("status") == "completed" or not text:
                items.append(item)
            elif item.get("type") == "function_call":
                items.append({**item, "arguments": text})
            else:
                items.append({**item, "content": [{"type": "output_text", "text": text}]})
        return items


def _answer(request: CallRequest, response: dict[str, Any], items: list[dict[str, Any]]) -> Answer:
    created_at = response.get("created_at")
    return Answer(
        id=text_of(response.get("id")) or completion_id(Dialect.RESPONSES),
        model=text_of(response.get("model")) or request.model,
        created=int(created_at) if isinstance(created_at, int | float) else unix_time(),
        choices=[_choice(request, response, items)],
        usage=_usage(response.get("usage")),
        no_ids_because=NO_IDS,
    )


def _choice(request: CallRequest, response: dict[str, Any], items: list[dict[str, Any]]) -> Choice:
    choice = Choice(temperature=1.0 if request.temperature is None else request.temperature)
    for item in items:
        match item.get("type"):
            case "message":
                choice.text += _texts(item.get("content"))
            case "reasoning":
                choice.reasoning += _texts(item.get("content")) or _texts(item.get("summary"))
            case "function_call":
                choice.tool_calls.append(
                    WireToolCall(
                        id=text_of(item.get("call_id")),
                        name=flat_name(text_of(item.get("namespace")), text_of(item.get("name"))),
                        arguments=text_of(item.get("arguments")),
                    )
                )
            case _:  # hosted tools: they stand in the raw reply
                pass
    if response.get("status") == "incomplete":
        choice.finish_reason = FinishReason.LENGTH
    elif choice.tool_calls:
        choice.finish_reason = FinishReason.TOOL_CALLS
    return choice


def _texts(parts: object) -> str:
    if not isinstance(parts, list):
        return ""
    dicts = [part for part in parts if isinstance(part, dict)]
    return "".join(text_of(part.get("text")) or text_of(part.get("refusal")) for part in dicts)


def _usage(usage: object) -> dict[str, int]:
    if not isinstance(usage, dict):
        return {}
    details = usage.get("input_tokens_details")
    counts = {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "cached_tokens": details.get("cached_tokens") if isinstance(details, dict) else None,
    }
    return {name: value if type(value) is int else 0 for name, value in counts.items()}
