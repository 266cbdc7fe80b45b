"""The Message object and its blocks, as the Anthropic SDK parses them.

    CallRequest, Choice ──► [thinking, text, tool_use, …] ──► Message

Thoughts are shown when the client turned thinking on: others take `content[0].text` for the answer. An
answer without tool calls always has a text block, empty if need be, for the same reason.
"""

from typing import Any

from rllm.errors import RequestRefused
from rllm.gateway.dialects.tool_input import tool_input
from rllm.types.messages import FinishReason
from rllm.types.wire import CallRequest, Choice, WireToolCall

SIGNATURE = "rllm"
"""Stands where Anthropic signs a thought: clients do not send back a thought without a signature."""

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    # Never sent as a whole answer. If one gets here all the same, it must not look like a natural end.
    FinishReason.CANCELLED: "max_tokens",
    FinishReason.ERROR: "max_tokens",
}
_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def shows_thinking(request: CallRequest) -> bool:
    thinking = request.body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") not in (None, "disabled")


def message_head(answer_id: str, model: str) -> dict[str, Any]:
    """A Message that holds nothing yet."""
    return {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": usage_object({}),
    }


def content_blocks(request: CallRequest, choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning and shows_thinking(request):
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": SIGNATURE})
    if choice.text or not choice.tool_calls:
        blocks.append({"type": "text", "text": choice.text})
    return blocks + [tool_use(call, tool_input(call.arguments)) for call in choice.tool_calls]


def tool_use(call: WireToolCall, value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": value}


def stop_fields(choice: Choice) -> dict[str, Any]:
    """The fields that give the reason for the answer's end."""
    reason = _STOP_REASONS[choice.finish_reason]
    sequence = choice.stop_sequence if reason == "end_turn" else None
    if sequence is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def usage_object(usage: dict[str, int]) -> dict[str, int]:
    """Tokens read are counted once: those from a cache are not among `input_tokens`."""
    # The last token is always read anew, because the answer begins with what follows from it.
    num_cached = max(0, min(usage.get("cached_tokens", 0), usage.get("prompt_tokens", 0) - 1))
    return {
        "input_tokens": usage.get("prompt_tokens", 0) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }


def error_object(error: RequestRefused) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":  # the words by which clients know that they should compact
        message = f"prompt is too long: {message}"
    error_fields = {"type": kind, "message": message} | ({"code": error.code} if error.code else {})
    return {"type": "error", "error": error_fields}
