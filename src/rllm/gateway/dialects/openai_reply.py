"""Parts of replies that chat and completions share: usage, log-probabilities, finish reasons, errors, events.

Choice, TokenLogprob, RequestRefused ──► the JSON objects of the OpenAI API
"""

import math
from collections.abc import Sequence
from typing import Any

import orjson

from rllm.errors import RequestRefused
from rllm.types.messages import FinishReason
from rllm.types.wire import TokenLogprob

DONE = b"data: [DONE]\n\n"
UNLIKELY = -9999.0
"""OpenAI's number for a log-probability that JSON has no number for."""

_FINISH_NAMES = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    # Never sent as a whole answer. If one gets here all the same, it must not look like a natural end.
    FinishReason.CANCELLED: "length",
    FinishReason.ERROR: "length",
}


def finish_name(reason: FinishReason) -> str:
    return _FINISH_NAMES[reason]


def usage_object(usage: dict[str, int]) -> dict[str, Any]:
    prompt = usage.get("prompt_tokens", 0)
    completion = usage.get("completion_tokens", 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0), "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.get("reasoning_tokens", 0),
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            _token(token.text, token.logprob)
            | {"top_logprobs": [_token(text, value) for _, text, value in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[TokenLogprob], *, offset: int, with_top: bool) -> dict[str, Any]:
    """The older, columnwise form. `offset` is where the first token starts in the choice's text."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token) for token in tokens] if with_top else None,
        "text_offset": offsets,
    }


def error_object(error: RequestRefused) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def event(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A token that is a part of a character decodes to a replacement mark: its bytes are not known here.
    is_whole = "\ufffd" not in text
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if is_whole else None}


def _top(token: TokenLogprob) -> dict[str, float]:
    """By text; of two tokens with one text the likelier stays. The sampled token is always among them."""
    best: dict[str, float] = {}
    for _, text, value in token.top:
        best.setdefault(text, _finite(value))
    best.setdefault(token.text, _finite(token.logprob))
    return best


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else UNLIKELY
