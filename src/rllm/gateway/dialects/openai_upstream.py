"""The common upstream side of chat and completions: building bodies, reading choices and errors.

request.body ──request_fields()──► body with what the gateway captures
choice or delta, one after the other ──HeardChoice──► Choice    (merged text, calls, ids, log-probabilities)
chunk, reply ──hide_injected()──► what the client asked for
status, body, headers ──error_of()──► RequestRefused
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from rllm.errors import RequestRefused
from rllm.types.messages import FinishReason
from rllm.types.wire import Answer, CallRequest, Choice, TokenLogprob, WireToolCall

NO_IDS = (
    "The upstream gave no {what}. vLLM from 0.10.2 on gives them when asked for `return_token_ids: true` and "
    "`logprobs: true`, which the gateway does when it captures `token_ids` and `logprobs`; other servers "
    "and hosted models do not."
)
_MAX_ERROR_TEXT = 2_000

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.LENGTH,  # cut off by someone else than the model
    "abort": FinishReason.CANCELLED,
    "cancelled": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
}
_TOKEN_ID_NAME = re.compile(r"token_id:(\d+)")
"""vLLM's names of tokens under `return_tokens_as_token_ids`."""

_CONTEXT_OVERFLOW = re.compile(
    r"maximum context length|context_length_exceeded|longer than the maximum model length"
    r"|longer than the model'?s context length|exceed\w* .{0,40}context (window|length|size)"
    r"|context length is only|maximum prompt length is",
    re.IGNORECASE,
)
"""vLLM, SGLang, llama.cpp and hosted models, each in its own words."""
_MAY_BE_OVERFLOW = frozenset({400, 413, 422, 500})
_KIND_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def request_fields(request: CallRequest, *, size_names: tuple[str, ...]) -> dict[str, Any]:
    """The client's own body. Where the request was changed since it was parsed, the request counts."""
    body = dict(request.body)
    for name in ("model", "temperature", "top_p", "seed"):
        value = getattr(request, name)
        if value not in (None, "") and body.get(name) != value:
            body[name] = value
    if request.top_k is not None and body.get("top_k") != request.top_k:
        body["top_k"] = request.top_k or -1  # the one number that all servers take for "off"
    if request.n != (body.get("n") or 1):
        body["n"] = request.n
    # The session's limit takes the place of all names that the client used, so that no server reads another.
    sizes = [body[name] for name in size_names if body.get(name) is not None]
    if request.max_tokens is not None and request.max_tokens not in sizes:
        for name in size_names:
            body.pop(name, None)
        body[size_names[0]] = request.max_tokens
    return body


def capture_more(body: dict[str, Any], request: CallRequest, capture: frozenset[str], logprobs: Any) -> None:
    """Adds what the gateway wants for itself; `logprobs` is the protocol's way to ask for them."""
    if "logprobs" in capture and not request.logprobs:
        body["logprobs"] = logprobs
    if "token_ids" in capture:
        body["return_token_ids"] = True
    if "usage" in capture and request.stream:
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}


def hide_injected(reply: dict[str, Any], request: CallRequest) -> bool:
    """Take ids and log-probabilities out of a reply or chunk that the client did not ask for.

    To be called when they were heard. False when there was nothing to take out.
    """
    is_changed = False
    if not request.return_token_ids and reply.get("prompt_token_ids") is not None:
        del reply["prompt_token_ids"]
        is_changed = True
    hides_logprobs, hides_ids = not request.logprobs, not request.return_token_ids
    for choice in reply["choices"]:
        if hides_logprobs and choice.get("logprobs") is not None:
            choice["logprobs"] = None
            is_changed = True
        if hides_ids and choice.get("token_ids") is not None:
            del choice["token_ids"]
            is_changed = True
        if hides_ids and choice.get("prompt_token_ids") is not None:
            del choice["prompt_token_ids"]
            is_changed = True
    return is_changed


@dataclass(slots=True)
class HeardChoice:
    """Everything that one choice said so far."""

    index: int
    keep_tokens: bool = False
    """The client wants log-probabilities, so texts and alternatives are kept, not the numbers alone."""
    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[WireToolCall] = field(default_factory=list[WireToolCall])
    arguments: list[list[str]] = field(default_factory=list[list[str]])
    """The arguments of each call, in parts."""
    place_of_call: dict[int, int] = field(default_factory=dict[int, int])
    """The upstream's index of a call to its place in `calls`."""
    finish_reason: str | None = None
    stop_sequence: str | None = None
    prompt_ids: list[int] = field(default_factory=list[int])
    completion_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float | None] = field(default_factory=list[float | None])
    """None for the first token of an echoed prompt."""
    named_ids: list[int] = field(default_factory=list[int])
    """Ids read from token names."""
    token_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])

    def hear_common(self, choice: dict[str, Any]) -> None:
        """Finish reason and ids, which all protocols have in the same place."""
        if isinstance(reason := choice.get("finish_reason"), str) and reason:
            self.finish_reason = reason
            # vLLM and SGLang; where a token and no text ended the answer, it is the token's id, which is no
            # text.
            stop_reason = choice.get("stop_reason", choice.get("matched_stop"))
            if isinstance(stop_reason, str):
                self.stop_sequence = stop_reason
        if ids := choice.get("token_ids"):
            self.completion_ids += _ids(ids)
        if ids := choice.get("prompt_token_ids"):
            self.prompt_ids = _ids(ids)

    def hear_call(self, index: int | None, call_id: str, name: str, arguments: str) -> tuple[int, bool]:
        """A part of a call. Its place among the calls, and whether it is the call's first part."""
        place = self._place(index, call_id, name)
        first = place is None
        if place is None:
            place = len(self.calls)
            self.calls.append(WireToolCall(id=call_id, name=name, arguments=""))
            self.arguments.append([])
            self.place_of_call[place if index is None else index] = place
        call = self.calls[place]
        # Id and name come in the first part, or in a later one: the first of each counts.
        call.id = call.id or call_id
        call.name = call.name or name
        if arguments:
            self.arguments[place].append(arguments)
        return place, first

    def _place(self, index: int | None, call_id: str, name: str) -> int | None:
        """The position of a call that began before. Some servers leave the index out, or give 0 to all
        parallel calls."""
        place = (
            (len(self.calls) - 1 if self.calls else None) if index is None else self.place_of_call.get(index)
        )
        if place is None:
            return None
        call = self.calls[place]
        if call_id and call.id and call_id != call.id:
            return None
        if index is None and not call_id and name and call.name:
            return None
        return place

    def hear_names(self, names: Iterable[object]) -> None:
        """Names of tokens, which may be their ids."""
        self.named_ids += [
            token_id_of(name) for name in names if isinstance(name, str) and name.startswith("token_id:")
        ]

    def choice(self, request: CallRequest, answer_id: str, *, has_echo: bool = False) -> tuple[Choice, str]:
        """The answer, and the reason that it has no usable ids and log-probabilities, if there is one."""
        ids, logprobs, problem = self._tokens(has_echo)
        for place, call in enumerate(self.calls):
            call.arguments = "".join(self.arguments[place])
            call.id = call.id or call_id(answer_id, self.index, place)
        reason = _FINISH_REASONS.get(self.finish_reason or "stop", FinishReason.STOP)
        if self.calls and reason is FinishReason.STOP:  # vLLM says `stop` when the call was a named one
            reason = FinishReason.TOOL_CALLS
        return Choice(
            index=self.index,
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=self.calls,
            finish_reason=reason,
            stop_sequence=self.stop_sequence,
            prompt_ids=self.prompt_ids,
            completion_ids=ids,
            logprobs=logprobs,
            token_logprobs=self._aligned_tokens(ids),
        ), problem

    def _tokens(self, has_echo: bool) -> tuple[list[int], list[float], str]:
        ids = self.completion_ids
        # Names count only where each token has one that is an id: else ids and log-probabilities would shift.
        if not ids and not has_echo and len(self.named_ids) == len(self.logprobs):
            ids = self.named_ids
        values = self.logprobs
        if has_echo:  # the prompt's tokens come first
            values = values[-len(ids) :] if ids else []
        logprobs = [value for value in values if value is not None]
        if not ids:
            return [], logprobs, NO_IDS.format(what="token ids")
        if not logprobs:
            return ids, [], NO_IDS.format(what="log-probabilities")
        if len(ids) != len(logprobs):
            return (
                [],
                [],
                (
                    f"The upstream gave {len(ids)} token ids and {len(logprobs)} log-probabilities for one "
                    "answer, so neither can be trusted."
                ),
            )
        return ids, logprobs, "" if self.prompt_ids else NO_IDS.format(what="prompt ids")

    def _aligned_tokens(self, ids: list[int]) -> list[TokenLogprob]:
        tokens = self.token_logprobs
        if len(tokens) == len(ids):
            for token, token_id in zip(tokens, ids, strict=True):
                token.token_id = token_id
        return tokens


def call_id(answer_id: str, choice: int, place: int) -> str:
    """For a call that the upstream gave no id: derived, so that stream and capture agree."""
    digest = hashlib.blake2b(f"{answer_id}/{choice}/{place}".encode(), digest_size=12).hexdigest()
    return f"call_{digest}"


def finish_answer(
    answer: Answer,
    choices_read: Iterable[HeardChoice],
    request: CallRequest,
    usage: object,
    prompt_ids: object,
) -> Answer:
    """Fills `answer` with choices and usage. `prompt_ids`: given once for all choices."""
    shared_ids = _ids(prompt_ids)
    for each in choices_read:
        each.prompt_ids = each.prompt_ids or shared_ids
        choice, problem = each.choice(request, answer.id, has_echo=request.echo)
        answer.choices.append(choice)
        answer.no_ids_because = answer.no_ids_because or problem
    answer.choices.sort(key=lambda choice: choice.index)
    answer.usage = _usage(usage) or _count(answer)
    return answer


def token_id_of(name: str) -> int:
    """-1 when the name does not tell."""
    match = _TOKEN_ID_NAME.fullmatch(name)
    return int(match[1]) if match else -1


def text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def logprob_of(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def choices_of(reply: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The choices of a reply or chunk; None when they are not what the protocol says."""
    choices = reply.get("choices")
    if not isinstance(choices, list):
        return None
    for choice in choices:
        if not isinstance(choice, dict):
            return None
    return choices


def index_of(choice: dict[str, Any], place: int = 0) -> int:
    """`place` where the upstream does not number its choices."""
    index = choice.get("index")
    return index if isinstance(index, int) and index >= 0 else place


def bad_reply(why: str) -> RequestRefused:
    return RequestRefused(
        f"The upstream's reply cannot be read: {why}.",
        status=502,
        kind="server_error",
        code="bad_upstream_reply",
    )


def error_in_reply(error: object) -> RequestRefused:
    """An error that came with status 200, or in the middle of a stream."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 502
    return _refusal(status, error, "server_error" if status >= 500 else "invalid_request_error")


def error_of(status: int, body: bytes, headers: dict[str, str]) -> RequestRefused:
    """The upstream's error as its client should see it."""
    prefix = f"The upstream answered {status}"
    if not 400 <= status <= 599:  # a redirect, or an answer that is none
        status = 502
    kind = _KIND_OF_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    detail = data.get("error", data) if isinstance(data, dict) else None
    if detail is None:
        text = body[:_MAX_ERROR_TEXT].decode(errors="replace").strip()
        detail = f"{prefix}: {text}" if text else f"{prefix} and said nothing"
    error = _refusal(status, detail, kind)
    error.retry_after = next(
        (value for name, value in headers.items() if name.lower() == "retry-after"), None
    )
    return error


def _refusal(status: int, detail: object, kind: str) -> RequestRefused:
    """`detail` is OpenAI's error object, FastAPI's `detail`, or text."""
    fields: dict[str, Any] = detail if isinstance(detail, dict) else {"message": detail}
    message = fields.get("message") or fields.get("detail") or f"The upstream answered {status}"
    if not isinstance(message, str):
        try:
            message = orjson.dumps(message).decode()
        except orjson.JSONEncodeError:  # nested too deeply to say it again
            message = f"The upstream answered {status}"
    code = fields.get("code")
    error = RequestRefused(
        message[:_MAX_ERROR_TEXT],
        status=status,
        kind=text_of(fields.get("type")) or kind,
        code=str(code) if isinstance(code, str | int) and code != status else None,
        param=text_of(fields.get("param")) or None,
    )
    if error.code == "context_length_exceeded" or (
        status in _MAY_BE_OVERFLOW and _CONTEXT_OVERFLOW.search(message)
    ):
        error.status = 400
        error.code = "context_length_exceeded"
    return error


def _ids(value: object) -> list[int]:
    if not isinstance(value, list):
        return []
    for each in value:
        if type(each) is not int:
            return []
    return value


def _usage(usage: object) -> dict[str, int]:
    if not isinstance(usage, dict):
        return {}
    details = usage.get("prompt_tokens_details")
    counts = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": details.get("cached_tokens") if isinstance(details, dict) else None,
    }
    return {name: value if type(value) is int else 0 for name, value in counts.items()}


def _count(answer: Answer) -> dict[str, int]:
    """From the ids, for upstreams that report no usage."""
    if not answer.choices or not answer.choices[0].completion_ids:
        return {}
    return {
        "prompt_tokens": len(answer.choices[0].prompt_ids),
        "completion_tokens": sum(len(choice.completion_ids) for choice in answer.choices),
        "cached_tokens": 0,
    }
