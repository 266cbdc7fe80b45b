"""The replies of servers in OpenAI's chat protocol: a reply ──► ModelOutput; a refusal ──► its subject."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import InferenceError
from rllm.inference.openai_http import HttpRefusal
from rllm.types.messages import FinishReason, ModelOutput, ToolCall

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
}
_NOT_FIELDS = {"model", "messages"}
_PROMPT_TOKENS_TOLD = re.compile(r"(\d+) in the messages|(?:has|passed|least) (\d+) input tokens")
_CONTEXT_TOLD = re.compile(r"context length is (?:only )?(\d+)")


def read_answer(reply: dict[str, Any], policy_version: int) -> ModelOutput:
    """The first choice. Raises InferenceError for an answer that is not whole."""
    choice = reply["choices"][0]
    reason = choice.get("finish_reason")
    if reason not in _FINISH_REASONS:
        raise InferenceError(f"The server ended the answer with `{reason}`: it is not whole.")
    message = choice["message"]
    content = message.get("content") or ""
    ids = choice.get("token_ids") or []
    logprob_entries = (choice.get("logprobs") or {}).get("content") if ids else None
    logprobs = [float(each["logprob"]) for each in logprob_entries or ()]
    if not set(map(type, ids)) <= {int} or len(logprobs) not in (0, len(ids)):
        raise ValueError(f"{len(ids)} token ids and {len(logprobs)} log-probabilities")
    calls, unread = _calls(message.get("tool_calls") or ())
    usage = reply.get("usage") or {}
    version = _version(reply)
    return ModelOutput(
        text="\n".join(filter(None, [content, *unread])),
        content=content,
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        tool_calls=calls,
        prompt_ids=(reply.get("prompt_token_ids") or choice.get("prompt_token_ids") or []) if ids else [],
        completion_ids=ids,
        logprobs=logprobs,
        policy_versions=[policy_version if version is None else version] * len(ids),
        completion_id=str(reply.get("id") or ""),
        finish_reason=_FINISH_REASONS[reason],
        usage={
            "prompt_tokens": usage.get("prompt_tokens") or 0,
            "completion_tokens": usage.get("completion_tokens") or 0,
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        },
    )


def _calls(entries: Sequence[Mapping[str, Any]]) -> tuple[list[ToolCall], list[str]]:
    """The calls, and as text those whose arguments are no JSON object."""
    calls: list[ToolCall] = []
    unread: list[str] = []
    for each in entries:
        function = each["function"]
        arguments_text = function.get("arguments") or "{}"
        try:
            arguments = json.loads(arguments_text) if isinstance(arguments_text, str) else arguments_text
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            calls.append(ToolCall(name=function["name"], arguments=arguments, id=each.get("id") or ""))
        else:
            unread.append(json.dumps({"name": function["name"], "arguments": arguments_text}))
    return calls, unread


def _version(reply: Mapping[str, Any]) -> int | None:
    weight_version = reply.get("weight_version", (reply.get("metadata") or {}).get("weight_version"))
    return int(weight_version) if str(weight_version).isdecimal() else None


def fields_refused(error: HttpRefusal, body: Mapping[str, Any]) -> set[str]:
    """The fields of the body that a refusal is about."""
    if error.status not in (400, 422):
        return set()
    names = {name for name in body if re.search(rf"\b{name}\b", error.param)}
    if names:
        return names - _NOT_FIELDS
    text = error.message.split("'input'")[0].split('"input"')[0]  # some repeat the whole request behind it
    return {
        name
        for name in body
        if name not in _NOT_FIELDS
        and re.search(rf"['\"`]{name}['\"`]|(?:supplied|field|parameter):? {name}\b", text)
    }


def room_told(text: str) -> int:
    """The number of tokens that fit behind the prompt, read from an error about the context; 0 where it is
    silent.
    """
    prompt, context = _PROMPT_TOKENS_TOLD.search(text), _CONTEXT_TOLD.search(text)
    if prompt is None or context is None:
        return 0
    return int(context[1]) - int(prompt[1] or prompt[2])
