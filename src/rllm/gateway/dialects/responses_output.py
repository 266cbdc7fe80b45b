"""The Response object and its items, as the OpenAI SDK parses them.

    CallRequest, Choice ──► [reasoning, message, function_call, …] ──► Response

An answer without tool calls always has a message item, empty if need be: a client that sends its history
back then says that the model had its turn.
"""

import math
from collections.abc import Sequence
from typing import Any

from rllm.gateway.dialects.openai_reply import UNLIKELY
from rllm.gateway.dialects.responses_input import namespaces
from rllm.types.messages import FinishReason
from rllm.types.wire import CallRequest, Choice, TokenLogprob, ToolMode, WireToolCall

_STATUS = {
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "failed",
}
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "user",
    "prompt_cache_key",
    "safety_identifier",
)
"""Fields of the request that stand unchanged in the response."""


def status_of(choice: Choice) -> str:
    return _STATUS.get(choice.finish_reason, "completed")


def item_status(status: str) -> str:
    """The status of an item in a response of that status."""
    return status if status in ("completed", "in_progress") else "incomplete"


def item_id(prefix: str, answer_id: str, place: int) -> str:
    return f"{prefix}_{answer_id.removeprefix('resp_')}_{place}"


def response_head(request: CallRequest, answer_id: str, model: str, created_at: int) -> dict[str, Any]:
    """A Response that holds nothing yet: what was asked for, as the client sent it."""
    body = request.body
    metadata = body.get("metadata")
    reasoning = body.get("reasoning")
    text = body.get("text")
    return {
        "id": answer_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id or body.get("previous_response_id"),
        "reasoning": reasoning if isinstance(reasoning, dict) else {"effort": None, "summary": None},
        "store": body.get("store") is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": text if isinstance(text, dict) else {"format": {"type": "text"}},
        "tool_choice": _tool_choice(request),
        "tools": _tools(body),
        "top_logprobs": request.top_logprobs,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": metadata if isinstance(metadata, dict) else {},
    } | {name: body.get(name) for name in _ECHOED}


def finished_response(
    head: dict[str, Any], choice: Choice, output: list[dict[str, Any]], usage: dict[str, int]
) -> dict[str, Any]:
    status = status_of(choice)
    return head | {
        "status": status,
        "completed_at": head["created_at"] if status == "completed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": _usage(usage),
    }


def output_items(request: CallRequest, answer_id: str, choice: Choice) -> list[dict[str, Any]]:
    status = item_status(status_of(choice))
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        items.append(reasoning_item(item_id("rs", answer_id, 0), choice.reasoning, status))
    if choice.text or not choice.tool_calls:
        logprobs = choice.token_logprobs if request.logprobs else ()
        items.append(message_item(item_id("msg", answer_id, len(items)), choice.text, status, logprobs))
    spaces = namespaces(request.body) if choice.tool_calls else {}
    for call in choice.tool_calls:
        items.append(call_item(item_id("fc", answer_id, len(items)), call, status, spaces))
    return items


def reasoning_item(name: str, text: str, status: str) -> dict[str, Any]:
    return {
        "id": name,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}] if text else [],
        "encrypted_content": None,
        "status": status,
    }


def message_item(name: str, text: str, status: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
    content = [] if status == "in_progress" else [text_part(text, logprobs)]
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": [logprob_entry(each) for each in logprobs],
    }


def call_item(
    name: str, call: WireToolCall, status: str, spaces: dict[str, tuple[str, str]]
) -> dict[str, Any]:
    item = {
        "id": name,
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }
    if call.name in spaces:
        item["namespace"], item["name"] = spaces[call.name]
    return item


def logprob_entry(token: TokenLogprob) -> dict[str, Any]:
    return _token_logprob(token.text, token.logprob) | {
        "top_logprobs": [_token_logprob(text, logprob) for _, text, logprob in token.top]
    }


def _token_logprob(text: str, logprob: float) -> dict[str, Any]:
    # A token that is a part of a character decodes to a replacement mark: its bytes are not known here.
    is_whole = "\ufffd" not in text
    return {
        "token": text,
        "bytes": list(text.encode()) if is_whole else [],
        "logprob": logprob if math.isfinite(logprob) else UNLIKELY,
    }


def _usage(usage: dict[str, int]) -> dict[str, Any]:
    prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning_tokens", 0)},
        "total_tokens": prompt + completion,
    }


def _tool_choice(request: CallRequest) -> Any:
    choice = request.body.get("tool_choice")
    if isinstance(choice, dict) and "function" in choice and request.tool_choice.mode is ToolMode.NAMED:
        return {"type": "function", "name": request.tool_choice.name}  # the nested form belongs to chat
    return choice or "auto"


def _tools(body: dict[str, Any]) -> list[Any]:
    tools = body.get("tools") or []
    return [
        {"parameters": None, "strict": None} | tool if tool.get("type") == "function" else tool
        for tool in tools
    ]
