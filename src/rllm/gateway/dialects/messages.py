"""POST /v1/messages: Anthropic's protocol, which its SDK and claude-code speak.

    body ──parse──► CallRequest … Answer ──reply──► Message
                                  Piece, … ──stream──► events (messages_stream.py)

Their base URL is the server's root, without `/v1`. What they send beside the conversation (betas, metadata,
cache marks) changes nothing for other models and is left alone.
"""

from typing import Any

from rllm.errors import RequestRefused
from rllm.gateway.dialects.messages_input import chat_messages, chat_tools, chosen_tool
from rllm.gateway.dialects.messages_output import (
    content_blocks,
    error_object,
    message_head,
    stop_fields,
    usage_object,
)
from rllm.gateway.dialects.messages_stream import MessagesWriter
from rllm.gateway.dialects.messages_upstream import MessagesUpstream
from rllm.gateway.dialects.openai_fields import (
    MAX_INTEGER,
    MAX_TEMPERATURE,
    TEMPLATE_FIELDS,
    Fields,
    penalties,
    refusal,
)
from rllm.types.wire import Answer, CallRequest, Choice, Dialect

__all__ = ["MessagesDialect", "MessagesUpstream"]


class MessagesDialect:
    """Implements `rllm.gateway.dialects.base.ClientDialect`."""

    name = Dialect.MESSAGES

    def parse(self, body: dict[str, Any]) -> CallRequest:
        request = _request(Fields(body), to_answer=True)
        if request.max_tokens is None:
            raise RequestRefused(
                "`max_tokens` is missing; say how many tokens the answer may have.", param="max_tokens"
            )
        return request

    def parse_count(self, body: dict[str, Any]) -> CallRequest:
        """The body of /v1/messages/count_tokens: a conversation that nobody needs to answer."""
        return _request(Fields(body), to_answer=False)

    def reply(self, request: CallRequest, answer: Answer) -> dict[str, Any]:
        if answer.raw is not None:
            return answer.raw
        choice = answer.choices[0] if answer.choices else Choice()
        return (
            message_head(answer.id, answer.model)
            | {"content": content_blocks(request, choice), "usage": usage_object(answer.usage)}
            | stop_fields(choice)
        )

    def stream(self, request: CallRequest, answer_id: str, model: str, created_at: int) -> MessagesWriter:
        return MessagesWriter(request, answer_id, model)

    def error(self, error: RequestRefused) -> dict[str, Any]:
        return error_object(error)


def _request(fields: Fields, *, to_answer: bool) -> CallRequest:
    tools = chat_tools(fields)
    tool_choice, parallel = chosen_tool(fields, tools)
    top_p = fields.number("top_p", low=0.0, high=1.0)
    if top_p == 0:
        raise fields.refusal("top_p", "it must be above 0; for greedy answers set `temperature` to 0")
    return CallRequest(
        dialect=Dialect.MESSAGES,
        body=fields.body,
        model=fields.text("model") or "",
        messages=chat_messages(fields, to_answer=to_answer),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        response_schema=_response_schema(fields),
        temperature=fields.number("temperature", low=0.0, high=MAX_TEMPERATURE),
        top_p=top_p,
        top_k=fields.integer("top_k", low=0),
        max_tokens=fields.integer("max_tokens", low=1),
        stop=_stop(fields),
        seed=fields.integer("seed", low=-MAX_INTEGER - 1),
        penalties=penalties(fields, TEMPLATE_FIELDS) | _context_edits(fields),
        stream=fields.flag("stream", False),
    )


def _context_edits(fields: Fields) -> dict[str, Any]:
    """Edits that take what was said out of the prompt. Which thoughts stay in it is up to the model's own
    chat template, so the edits for those, which Claude Code always sends, ask for nothing."""
    management = fields.mapping("context_management")
    if management is None:
        return {}
    edits = Fields(management, "context_management").each("edits")
    foreign_edits = [edit for edit in edits if not (edit.text("type") or "").startswith("clear_thinking")]
    return {"context_management": management} if foreign_edits else {}


def _response_schema(fields: Fields) -> dict[str, Any] | None:
    """Under `output_config` now, under `output_format` while it was a beta."""
    config = fields.mapping("output_config")
    if config is not None and config.get("format") is not None:
        output_format = Fields(config, "output_config").inside("format")
    elif fields.raw("output_format") is not None:
        output_format = fields.inside("output_format")
    else:
        return None
    if output_format.raw("type") != "json_schema":
        raise output_format.refusal("type", "choose json_schema")
    schema = output_format.mapping("schema")
    if schema is None:
        raise output_format.refusal("schema", "it must be a JSON schema")
    return schema


def _stop(fields: Fields) -> list[str]:
    texts = fields.sequence("stop_sequences") or []
    for place, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise refusal(f"stop_sequences[{place}]", text, "it must be text that is not empty")
    return list(texts)
