"""Responses that are kept: `previous_response_id` and GET /v1/responses/ID, out of the ledger.

    request with previous_response_id ──go_on──► request with the whole conversation
    id ──retrieved──► the Response as it was answered

They are there as long as their session is, also after a restart, but for those sent with `store: false`.
`instructions` are those of each request alone, as at OpenAI.
"""

import asyncio
from typing import Any

from rllm.errors import RequestRefused
from rllm.gateway.dialects.responses import ResponsesDialect
from rllm.gateway.ledger import Ledger
from rllm.gateway.server.call_records import answer_of
from rllm.types.wire import CallRecord, CallRequest, CallStatus, Dialect

_DIALECT = ResponsesDialect()


class KeptResponses:
    """The stored responses of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def go_on(self, request: CallRequest, session: str) -> None:
        """Puts the conversation that a request goes on with before its own messages.

        Raises RequestRefused (400) where the session has no such response.
        """
        record = await self._record(request.previous_response_id, session)
        if record is None:
            raise RequestRefused(
                f"`previous_response_id` is {request.previous_response_id[:80]!r}, and this session has no "
                "such response; send the whole conversation as `input`.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        # `instructions` count for one request alone, so the earlier ones are cut off and the new ones stay in
        # front.
        rules = request.messages[: _num_instructions(request.body)]
        messages = record.messages[_num_instructions(record.response_fields) :]
        answer = {name: value for name, value in record.response.items() if name != "reasoning_content"}
        request.messages = [*rules, *messages, answer, *request.messages[len(rules) :]]

    async def retrieve(self, response_id: str, session: str) -> dict[str, Any]:
        """Raises RequestRefused (404) where the session has no such response."""
        record = await self._record(response_id, session)
        if record is None:
            raise RequestRefused(
                f"This session has no response {response_id[:80]!r}, or it was sent with `store: false`.",
                status=404,
                code="response_not_found",
            )
        return _DIALECT.reply(_request_of(record), answer_of([record]))

    async def _record(self, response_id: str, session: str) -> CallRecord | None:
        for record in await asyncio.to_thread(self._ledger.call, response_id):
            is_kept = record.response_fields.get("store") is not False and record.status is CallStatus.OK
            if record.session == session and record.dialect is Dialect.RESPONSES and is_kept:
                return record
        return None


def delete_refused() -> RequestRefused:
    return RequestRefused(
        "A response is deleted with its session alone: DELETE /sessions/SESSION.",
        status=405,
        code="method_not_allowed",
    )


def _num_instructions(fields: dict[str, Any]) -> int:
    """The number of a call's messages that are its `instructions`."""
    return 1 if fields.get("instructions") else 0


def _request_of(record: CallRecord) -> CallRequest:
    fields = dict(record.response_fields)
    if _num_instructions(fields):
        fields["instructions"] = record.messages[0]["content"]
    # A description that was left out is empty in the record.
    functions = [
        {name: value for name, value in tool["function"].items() if value != ""} for tool in record.tools
    ]
    tools = [{"type": "function", **function} for function in functions]
    return CallRequest(
        dialect=Dialect.RESPONSES,
        body={**fields, "tools": tools, "max_output_tokens": record.sampling.get("max_tokens")},
        messages=record.messages,
        tools=record.tools,
        temperature=record.sampling.get("temperature"),
        top_p=record.sampling.get("top_p"),
        parallel_tool_calls=record.sampling.get("parallel_tool_calls", True),
        logprobs=bool(record.token_logprobs),
    )
