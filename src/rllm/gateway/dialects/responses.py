"""POST /v1/responses: OpenAI's Responses protocol, which openai-agents and codex speak by default.

    body ──parse──► CallRequest … Answer ──reply──► Response
                                  Piece, … ──stream──► events (responses_stream.py)

Clients send the whole conversation as `input`, or `previous_response_id` and what is new: the server puts
the rest before it, out of its ledger.
"""

from collections.abc import Mapping
from typing import Any

from rllm.errors import RequestRefused
from rllm.gateway.dialects.openai_fields import (
    MAX_INTEGER,
    MAX_TEMPERATURE,
    TEMPLATE_FIELDS,
    Fields,
    penalties,
    refusal,
)
from rllm.gateway.dialects.openai_reply import error_object
from rllm.gateway.dialects.responses_input import chat_tools, chosen_tools, input_messages, require_stateless
from rllm.gateway.dialects.responses_output import finished_response, output_items, response_head
from rllm.gateway.dialects.responses_stream import ResponsesWriter
from rllm.gateway.dialects.responses_upstream import ResponsesUpstream
from rllm.types.wire import Answer, CallRequest, Choice, Dialect

__all__ = ["ResponsesDialect", "ResponsesUpstream"]

_LOGPROBS = "message.output_text.logprobs"
_IDLE: Mapping[str, tuple[Any, ...]] = {
    **TEMPLATE_FIELDS,
    "truncation": ("disabled",),
    "context_management": ([],),
}
"""The protocol's own fields that change the answer, with their idle values. `reasoning` and `text.verbosity`
are hints, and `max_tool_calls` speaks of hosted tools, of which none are offered: they do not count."""


class ResponsesDialect:
    """Implements `rllm.gateway.dialects.base.ClientDialect`."""

    name = Dialect.RESPONSES

    def parse(self, body: dict[str, Any]) -> CallRequest:
        fields = Fields(body)
        require_stateless(fields)
        tool_choice, tools = chosen_tools(fields, chat_tools(fields))
        top_logprobs = fields.integer("top_logprobs", low=0, high=20) or 0
        include = fields.sequence("include") or []
        top_p = fields.number("top_p", low=0.0, high=1.0)
        if top_p == 0:
            raise fields.refusal("top_p", "it must be above 0; for greedy answers set `temperature` to 0")
        return CallRequest(
            dialect=Dialect.RESPONSES,
            body=body,
            model=fields.text("model") or "",
            messages=input_messages(fields),
            previous_response_id=fields.text("previous_response_id") or "",
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=fields.flag("parallel_tool_calls", True),
            response_schema=_response_schema(fields),
            temperature=fields.number("temperature", low=0.0, high=MAX_TEMPERATURE),
            top_p=top_p,
            top_k=fields.integer("top_k", low=0),
            max_tokens=fields.integer("max_output_tokens", low=1),
            stop=_stop(fields),
            seed=fields.integer("seed", low=-MAX_INTEGER - 1),
            penalties=penalties(fields, _IDLE),
            logprobs=_LOGPROBS in include or top_logprobs > 0,
            top_logprobs=top_logprobs,
            stream=fields.flag("stream", False),
        )

    def reply(self, request: CallRequest, answer: Answer) -> dict[str, Any]:
        if answer.raw is not None:
            return answer.raw
        choice = answer.choices[0] if answer.choices else Choice()
        head = response_head(request, answer.id, answer.model, answer.created)
        return finished_response(head, choice, output_items(request, answer.id, choice), answer.usage)

    def stream(self, request: CallRequest, answer_id: str, model: str, created_at: int) -> ResponsesWriter:
        return ResponsesWriter(request, answer_id, model, created_at)

    def error(self, error: RequestRefused) -> dict[str, Any]:
        return error_object(error)


def _response_schema(fields: Fields) -> dict[str, Any] | None:
    text = fields.mapping("text")
    if text is None or text.get("format") is None:
        return None
    text_format = Fields(text, "text").inside("format")
    match text_format.raw("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            schema = text_format.mapping("schema")
            if schema is None:
                raise text_format.refusal(
                    "schema", "it must be a JSON schema; for any JSON object use json_object"
                )
            return schema
        case _:
            raise text_format.refusal("type", "choose text, json_object or json_schema")


def _stop(fields: Fields) -> list[str]:
    """Not of the protocol, but engines take it and programs send it through `extra_body`."""
    value = fields.raw("stop")
    texts: list[Any] = [value] if isinstance(value, str) else (fields.sequence("stop") or [])
    for place, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise refusal(f"stop[{place}]", text, "it must be text that is not empty")
    return list(texts)
