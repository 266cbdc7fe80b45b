"""A model behind Anthropic's own API.

    messages in OpenAI's form ──► system + turns of content blocks ──POST /v1/messages──► text, thought, calls

No token ids and no log-probabilities come back, so what it says is measured and judged, and not trained on.
The API has no seed. Nothing is tried again here: a failed call is an InferenceError, and whoever plays asks
again.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import ConfigError, InferenceError
from rllm.errors.redaction import hide_key
from rllm.inference.client import StatelessSession, Tools
from rllm.inference.openai_http import HttpRefusal, ServerHttp
from rllm.types.addresses import require_base_url
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams, ToolCall

VERSION = "2023-06-01"
_FINISH_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "refusal": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "tool_use": FinishReason.TOOL_CALLS,
}
_PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
"""Each of them leaves the others out."""


class AnthropicClient:
    """A `ModelClient`. `base_url` has no `/v1` at its end."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 30.0,
        max_connections: int = 0,
    ) -> None:
        if not model:
            raise ConfigError("`model` is empty; name one of Anthropic's models.")
        self.base_url = require_base_url("`base_url`", base_url).removesuffix("/v1")
        self.model = model
        hide_key(api_key)
        self._headers = {"anthropic-version": VERSION, **({"x-api-key": api_key} if api_key else {})}
        self._http = ServerHttp(
            self.base_url,
            api_key=None,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections,
        )

    def session(self, order: tuple[str, int]) -> StatelessSession:
        return StatelessSession(self.get_model_response)

    async def get_model_response(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams = SamplingParams(),
        *,
        tools: Tools = (),
    ) -> ModelOutput:
        """One answer.

        Raises ConfigError for what the API cannot do and for a key or model that it refuses, InferenceError
        when it failed, ContextLengthError for too long a prompt.
        """
        body = _body(self.model, messages, sampling, tools)
        start_s = time.perf_counter()
        try:
            reply = await self._http.post("/v1/messages", body, self._headers)
        except HttpRefusal as error:
            raise self._error_of(error) from error
        try:
            output = _read(reply)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InferenceError(
                f"The server at {self.base_url} answered in a form that cannot be read: {error!r}"
            ) from error
        output.latency_s = time.perf_counter() - start_s
        output.temperature = sampling.temperature
        return output

    async def close(self) -> None:
        await self._http.close()

    def _error_of(self, error: HttpRefusal) -> Exception:
        if error.status in (401, 403):
            return ConfigError(f"The server at {self.base_url} refuses the key ({error}); give a valid one.")
        if error.status == 404:
            return ConfigError(f"The server at {self.base_url} has no model `{self.model}` ({error}).")
        is_final = error.is_json and error.status in (400, 413, 422)
        return InferenceError(
            f"The server at {self.base_url} refused the request: {error}", is_final=is_final
        )


def _body(model: str, messages: Sequence[Message], sampling: SamplingParams, tools: Tools) -> dict[str, Any]:
    for name in ("grammar", "top_logprobs", "stop_token_ids"):
        if getattr(sampling, name):
            raise ConfigError(
                f"`{name}` is {getattr(sampling, name)!r}, which Anthropic's API does not have; leave it out."
            )
    if sampling.temperature > 1.0:
        raise ConfigError(f"`temperature` is {sampling.temperature}; Anthropic's API takes 0 to 1.")
    system = "\n\n".join(_text(each) for each in messages if each["role"] in ("system", "developer"))
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": sampling.max_tokens,
        "messages": _turns(messages),
    }
    # Some of its models refuse fields that others take, so what is at the API's own default is not sent.
    if sampling.temperature != 1.0:
        body["temperature"] = sampling.temperature
    if sampling.top_p != 1.0:
        body["top_p"] = sampling.top_p
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.stop:
        body["stop_sequences"] = list(sampling.stop)
    if system:
        body["system"] = system
    if tools:
        body["tools"] = [_tool(each) for each in tools]
    return body


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "input_schema": function.get("parameters") or {"type": "object"},
    }


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns of content blocks, user and assistant in turn: results of tools are the user's to report."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] in ("system", "developer"):
            continue
        role = "assistant" if message["role"] == "assistant" else "user"
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"] += _blocks(message)
    return [turn for turn in turns if turn["content"]]


def _blocks(message: Message) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [
            {
                "type": "tool_result",
                "tool_use_id": message.get("tool_call_id", ""),
                "content": _text(message),
            }
        ]
    text = _text(message)
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for call in message.get("tool_calls") or ():
        call_arguments = call["function"].get("arguments") or {}
        arguments = json.loads(call_arguments) if isinstance(call_arguments, str) else call_arguments
        name = call["function"]["name"]
        blocks.append({"type": "tool_use", "id": call.get("id", ""), "name": name, "input": arguments})
    return blocks


def _text(message: Message) -> str:
    """The text of a message. Raises ConfigError for parts that are no text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    kinds = {part.get("type") for part in content}
    if kinds - {"text"}:
        raise ConfigError(f"A message holds {', '.join(map(str, kinds))}; this client sends text alone.")
    return "".join(part["text"] for part in content)


def _read(reply: Any) -> ModelOutput:
    reason = reply["stop_reason"]
    if reason not in _FINISH_REASONS:
        raise InferenceError(f"The server ended the answer with `{reason}`: it is not whole.")
    blocks = reply["content"]
    text = "".join(each["text"] for each in blocks if each["type"] == "text")
    usage = reply.get("usage") or {}
    return ModelOutput(
        text=text,
        content=text,
        reasoning="".join(each["thinking"] for each in blocks if each["type"] == "thinking"),
        tool_calls=[
            ToolCall(name=each["name"], arguments=each["input"], id=each["id"])
            for each in blocks
            if each["type"] == "tool_use"
        ],
        stop_sequence=reply.get("stop_sequence"),
        completion_id=str(reply.get("id") or ""),
        finish_reason=_FINISH_REASONS[reason],
        usage={
            "prompt_tokens": sum(usage.get(name) or 0 for name in _PROMPT_COUNTS),
            "completion_tokens": usage.get("output_tokens") or 0,
            "cached_tokens": usage.get("cache_read_input_tokens") or 0,
        },
    )
