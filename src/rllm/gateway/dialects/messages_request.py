"""A request of another protocol, written for an upstream that speaks Messages.

    CallRequest (chat form) ──► {"system", "messages", "tools", "max_tokens", …}

What the protocol cannot express is refused: nothing is left out that changes the answer.
"""

from typing import Any

from rllm.errors import RequestRefused
from rllm.gateway.dialects.openai_fields import mend_of
from rllm.gateway.dialects.tool_input import tool_input
from rllm.types.messages import Message
from rllm.types.wire import CallRequest, ToolMode

DEFAULT_MAX_TOKENS = 8_192
"""The protocol demands a limit; this one is within what every hosted model of it can do since 2024."""


def translate(request: CallRequest) -> dict[str, Any]:
    _require_expressible(request)
    system, rest = _split_system(request.messages)
    body: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.max_tokens or DEFAULT_MAX_TOKENS,
        "messages": _messages(rest),
    }
    optional = {
        "system": system,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_sequences": request.stop,
        "tools": [_tool(tool["function"]) for tool in request.tools],
        "stream": request.stream,
    }
    body |= {name: value for name, value in optional.items() if value not in (None, "", [], False)}
    if request.tools:
        body["tool_choice"] = _tool_choice(request)
    if request.response_schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": request.response_schema}}
    return body


def _require_expressible(request: CallRequest) -> None:
    inexpressible: dict[str, Any] = {
        "prompt": request.prompt,
        "n": request.n if request.n != 1 else None,
        "seed": request.seed,
        "logprobs": request.logprobs or None,
        "return_token_ids": request.return_token_ids or None,
    } | request.penalties
    for name, value in inexpressible.items():
        if value is not None:
            raise RequestRefused(
                f"`{name}` is set, and this upstream speaks /v1/messages, which has nothing like it. "
                f"{mend_of(name)}.",
                param=name,
                code="unsupported_parameter",
            )


def _split_system(messages: list[Message]) -> tuple[str, list[Message]]:
    """The system messages at the beginning, as the text of `system`, and what follows."""
    place = 0
    while place < len(messages) and messages[place]["role"] == "system":
        place += 1
    return "\n\n".join(_text(message) for message in messages[:place]), messages[place:]


def _messages(messages: list[Message]) -> list[dict[str, Any]]:
    """One entry a turn: results of parallel calls stand in one user message, before what the user says."""
    anthropic_messages: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        blocks = _blocks(message)
        if role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": blocks}]
            role = "user"
        elif role == "assistant":
            blocks += [_tool_use(call) for call in message.get("tool_calls", ())]
        if not blocks:  # the protocol refuses turns in which nothing was said
            continue
        # Results of parallel calls, which are several messages in chat, stand in one user message here.
        if anthropic_messages and anthropic_messages[-1]["role"] == role:
            anthropic_messages[-1]["content"] += blocks
        else:
            anthropic_messages.append({"role": role, "content": blocks})
    return anthropic_messages


def _blocks(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, list):
        return [_block(part) for part in content]
    return [{"type": "text", "text": content}] if content else []


def _block(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "text", "text": part["text"]}
    image = part.get("image_url")
    if (
        part.get("type") == "image_url"
        and isinstance(image, dict)
        and isinstance(url := image.get("url"), str)
    ):
        return {"type": "image", "source": _source(url)}
    raise RequestRefused(
        f"A message has a part of type {part.get('type')}; an upstream that speaks /v1/messages takes text "
        "and image_url from clients of other protocols.",
        param="messages",
        code="unsupported_content",
    )


def _source(url: str) -> dict[str, Any]:
    head, comma, data = url.partition(",")
    if head.startswith("data:") and comma and head.endswith(";base64"):
        return {"type": "base64", "media_type": head[len("data:") : -len(";base64")], "data": data}
    return {"type": "url", "url": url}


def _text(message: Message) -> str:
    return "\n".join(str(block.get("text", "")) for block in _blocks(message))


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": tool_input(function["arguments"]),
    }


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    tool = {
        "name": function["name"],
        "description": function.get("description") or "",
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }
    return tool | ({"strict": True} if function.get("strict") else {})


def _tool_choice(request: CallRequest) -> dict[str, Any]:
    match request.tool_choice.mode:
        case ToolMode.NONE:
            return {"type": "none"}
        case ToolMode.NAMED:
            choice: dict[str, Any] = {"type": "tool", "name": request.tool_choice.name}
        case ToolMode.REQUIRED:
            choice = {"type": "any"}
        case _:
            choice = {"type": "auto"}
    return choice if request.parallel_tool_calls else choice | {"disable_parallel_tool_use": True}
