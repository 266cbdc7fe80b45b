"""Checked reading of the fields that OpenAI's request bodies share: any JSON in, values or a 400 out.

    body ──Fields──► text, flags, numbers, lists ──► keyword arguments of CallRequest
             └──► RequestRefused that names the parameter, its value and what it may be

A field that is null counts as absent, as at OpenAI. A field that is not known is left alone.
"""

import math
from collections.abc import Mapping
from typing import Any

from rllm.errors import RequestRefused
from rllm.types.wire import CallRequest

MAX_CHOICES = 128
"""Upper limit of `n`, as in the OpenAI API."""
MAX_INTEGER = 2**63 - 1
MAX_TEMPERATURE = 2.0
"""As in the OpenAI API, and of what servers behind it take."""
MAX_STOP_TEXTS = 64
"""OpenAI takes 4. Engines take more, and agents that were written for engines send more."""

CHANGES_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "return_tokens_as_token_ids": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "custom_logit_processor": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "json_schema": ("",),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "lora_path": ("",),
}
"""Fields of OpenAI and of engines that change what is sampled or answered, each with its idle values."""

TEMPLATE_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "thinking_token_budget": (),
}
"""Fields of engines that change the prompt which is made of a conversation, in whatever protocol it came."""

CONTINUOUS_USAGE = "stream_options.continuous_usage_stats"

_PENALTY_LIMIT = 2.0
_BIAS_LIMIT = 100.0


def short_repr(value: object) -> str:
    """A value as an error message shows it: short, whatever came."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) <= 2 * MAX_INTEGER else "an integer beyond 64 bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "…")
    if isinstance(value, list):
        return f"a list of {len(value)}"  # pyright: ignore[reportUnknownArgumentType]
    return "an object"


def refusal(param: str, value: object, mend: str, code: str | None = None) -> RequestRefused:
    return RequestRefused(f"`{param}` is {short_repr(value)}; {mend}.", param=param, code=code)


class Fields:
    """One JSON object of a request. `where` is its place in the body, such as `messages[2]`."""

    def __init__(self, body: object, where: str = "") -> None:
        if not isinstance(body, dict):
            raise refusal(where or "body", body, "it must be an object")
        self.body: dict[str, Any] = body
        self.where = where

    def param(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def raw(self, name: str) -> Any:
        """The value as it came; None when it is null or absent."""
        return self.body.get(name)

    def refusal(self, name: str, mend: str, code: str | None = None) -> RequestRefused:
        return refusal(self.param(name), self.body.get(name), mend, code)

    def text(self, name: str) -> str | None:
        value = self.body.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self.refusal(name, "it must be text")

    def name(self, name: str) -> str:
        """Text that may not be missing or empty."""
        value = self.text(name)
        if not value:
            raise self.refusal(name, "it must be text that is not empty")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.refusal(name, "it must be true or false")

    def integer(self, name: str, *, low: int, high: int = MAX_INTEGER) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # JSON knows one kind of number: 256.0 is 256
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            limit = f"of at least {low}" if high == MAX_INTEGER else f"from {low} to {high}"
            raise self.refusal(name, f"it must be an integer {limit}")
        return value

    def number(self, name: str, *, low: float, high: float = math.inf) -> float | None:
        value = self.body.get(name)
        if value is None:
            return None
        limit = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, f"it must be a number {limit}")
        if not low <= value <= high or value == math.inf or abs(value) > MAX_INTEGER:  # NaN compares false
            raise self.refusal(name, f"it must be a finite number {limit}")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.body.get(name)
        if value is None or isinstance(value, dict):
            return value
        raise self.refusal(name, "it must be an object")

    def sequence(self, name: str) -> list[Any] | None:
        value = self.body.get(name)
        if value is None or isinstance(value, list):
            return value
        raise self.refusal(name, "it must be a list")

    def inside(self, name: str) -> "Fields":
        """The object under `name`, which may not be missing."""
        return Fields(self.body.get(name), self.param(name))

    def each(self, name: str) -> list["Fields"]:
        """The objects of a list."""
        return [
            Fields(entry, f"{self.param(name)}[{place}]")
            for place, entry in enumerate(self.sequence(name) or ())
        ]


def require_no_seed(request: CallRequest) -> None:
    """Raises RequestRefused (400) where draws are the server's own and a request names them."""
    if request.seed is not None:
        raise RequestRefused(
            f"`seed` is {request.seed}, but this gateway sends its server no seeds, so the draws cannot be "
            "repeated. Leave it out, or start the gateway without --no-seeds.",
            param="seed",
            code="unsupported_parameter",
        )


def mend_of(name: str) -> str:
    """The advice about a field that this engine or upstream cannot honour."""
    match name:
        case "truncation":
            return 'Send "disabled", and a conversation that fits'
        case "context_management":
            return "Leave it out, and send the conversation as the model shall read it"
        case _:
            return "Leave it out"


def shared_fields(fields: Fields) -> dict[str, Any]:
    """The fields that chat and completions have in common, as keyword arguments of CallRequest."""
    options = Fields(fields.mapping("stream_options") or {}, "stream_options")
    top_p = fields.number("top_p", low=0.0, high=1.0)
    if top_p == 0:
        raise fields.refusal(
            "top_p", "it must be above 0 and at most 1; for greedy answers set `temperature` to 0"
        )
    top_k = fields.integer("top_k", low=-1)
    return {
        "model": fields.text("model") or "",
        "temperature": fields.number("temperature", low=0.0, high=MAX_TEMPERATURE),
        "top_p": top_p,
        "top_k": None if top_k is None else max(top_k, 0),  # engines write "off" as -1 or as 0
        "max_tokens": _max_tokens(fields),
        "stop": _stop(fields),
        "seed": fields.integer("seed", low=-MAX_INTEGER - 1),
        "n": fields.integer("n", low=1, high=MAX_CHOICES) or 1,
        "stream": fields.flag("stream", False),
        "include_usage": options.flag("include_usage", False),
        "return_token_ids": fields.flag("return_token_ids", False),
        "response_schema": _response_schema(fields),
    }


def penalties(fields: Fields, idle: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Fields that change the answer and are set to something that does; `idle` adds a protocol's own."""
    for name in ("presence_penalty", "frequency_penalty"):
        fields.number(name, low=-_PENALTY_LIMIT, high=_PENALTY_LIMIT)
    biases = Fields(fields.mapping("logit_bias") or {}, "logit_bias")
    for token in biases.body:
        biases.number(token, low=-_BIAS_LIMIT, high=_BIAS_LIMIT)
    # A field that stands in neither table is its own idle value: what nobody knows is let through.
    changes = {
        name: value
        for name, value in fields.body.items()
        if value is not None and value not in idle.get(name, CHANGES_NOTHING.get(name, (value,)))
    }
    options = Fields(fields.mapping("stream_options") or {}, "stream_options")
    if options.flag("continuous_usage_stats", False) and fields.flag("stream", False):
        changes[CONTINUOUS_USAGE] = True
    return changes


def _max_tokens(fields: Fields) -> int | None:
    """`max_tokens` is the old name, `max_completion_tokens` the new one; frameworks send either."""
    old = fields.integer("max_tokens", low=1)
    new = fields.integer("max_completion_tokens", low=1)
    if old is not None and new is not None and old != new:
        raise fields.refusal(
            "max_completion_tokens", f"`max_tokens` says {old} at the same time. Send one of the two"
        )
    return old if new is None else new


def _stop(fields: Fields) -> list[str]:
    value = fields.raw("stop")
    texts: list[Any] = [value] if isinstance(value, str) else (fields.sequence("stop") or [])
    if len(texts) > MAX_STOP_TEXTS:
        raise fields.refusal("stop", f"at most {MAX_STOP_TEXTS} texts can end an answer")
    for place, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            where = "stop" if isinstance(value, str) else f"stop[{place}]"
            raise refusal(where, text, "it must be text that is not empty")
    return list(texts)


def _response_schema(fields: Fields) -> dict[str, Any] | None:
    if fields.raw("response_format") is None:
        return None
    response_format = fields.inside("response_format")
    match response_format.raw("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            json_schema = response_format.inside("json_schema")
            if not isinstance(schema := json_schema.raw("schema"), dict):
                raise json_schema.refusal(
                    "schema", "it must be a JSON schema; for any JSON object send json_object"
                )
            return schema
        case _:
            raise response_format.refusal("type", "choose text, json_object or json_schema")
