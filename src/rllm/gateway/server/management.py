"""Reading and managing sessions over HTTP: JSON in, JSON out; calls as they were captured."""

import asyncio
import secrets
from typing import Any
from urllib.parse import parse_qs, quote

import orjson
from aiohttp import web
from multidict import CIMultiDict

from rllm.errors import RequestRefused
from rllm.gateway.ledger import Ledger
from rllm.gateway.server.auth import Tokens
from rllm.gateway.server.bodies import json_object, read_body
from rllm.gateway.server.calls import Calls, session_closed
from rllm.gateway.server.delivery import json_response, send
from rllm.gateway.server.paths import session_id
from rllm.gateway.server.sessions import SessionRegistry, budget_of, unknown_session
from rllm.types.wire import CallRecord

_PAGE, _MAX_PAGE = 100, 1000
_CHUNK_BYTES = 256 << 10
_MAX_SEED = 2**63 - 1


class Management:
    """The handlers behind /sessions."""

    def __init__(self, ledger: Ledger, sessions: SessionRegistry, calls: Calls, tokens: Tokens) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self._calls = calls
        self._tokens = tokens

    async def create(self, http: web.BaseRequest) -> web.StreamResponse:
        body = await read_body(http)
        fields = json_object(body) if body else {}
        names = ("session_id", "seed", "sampling", "metadata", "budget")
        if "sampling_params" in fields:  # the published name
            if "sampling" in fields:
                raise RequestRefused(
                    "`sampling` and `sampling_params` are one thing; leave one of them out.",
                    param="sampling_params",
                )
            fields["sampling"] = fields.pop("sampling_params")
        for name in fields:
            if name not in names:
                raise RequestRefused(
                    f"There is no field {name[:80]!r}; a session has {', '.join(names)}.", param=name[:80]
                )
        session_name = _field(fields, "session_id", str, "text") or f"s-{secrets.token_hex(8)}"
        seed = _field(fields, "seed", int, "a whole number")
        if seed is not None and not 0 <= seed <= _MAX_SEED:
            raise RequestRefused(f"`seed` is {seed}; choose from 0 to {_MAX_SEED}.", param="seed")
        session = self._sessions.create(
            session_id(session_name, "`session_id`"),
            seed,
            _field(fields, "sampling", dict, "an object") or {},
            _field(fields, "metadata", dict, "an object") or {},
            budget_of(_field(fields, "budget", dict, "an object") or {}),
        )
        if session.store_task is not None:
            await asyncio.shield(session.store_task)
        return json_response(
            {
                "session_id": session.id,
                "base_url": session_url(f"http://{http.host}", session.id, self._tokens),
                "token": self._tokens.of_session(session.id),
                **session.data(),
            }
        )

    async def page(self, target: str) -> web.StreamResponse:
        query = parse_qs(target.partition("?")[2])
        limit = query.get("limit", [str(_PAGE)])[-1]
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= _MAX_PAGE):
            raise RequestRefused(
                f"`limit` is {limit[:20]!r}; ask for 1 to {_MAX_PAGE} sessions.", param="limit"
            )
        sessions = await asyncio.to_thread(self._ledger.sessions, int(limit), query.get("after", [""])[-1])
        next_after = sessions[-1]["id"] if len(sessions) == int(limit) else None
        return json_response({"sessions": sessions, "next_after": next_after})

    async def show(self, session: str) -> web.StreamResponse:
        data = self._ledger.session_data(session)
        if data is None and self._sessions.in_memory(session) is None:
            raise unknown_session(session)
        return json_response({"session_id": session, **(data or {})})

    async def traces(self, http: web.BaseRequest, session: str) -> web.StreamResponse:
        """A JSON list, sent bit by bit: a long session is larger than what should be in memory twice."""
        if self._ledger.session_data(session) is None and self._sessions.in_memory(session) is None:
            raise unknown_session(session)
        records = await asyncio.to_thread(self._ledger.traces, session)
        response = web.StreamResponse(headers=CIMultiDict({"Content-Type": "application/json"}))
        await response.prepare(http)
        if http.method == "HEAD":
            return response
        # In chunks: a large session is then not in memory a second time, as one text.
        part = bytearray(b"[")
        for number, record in enumerate(records):
            part += (b",\n" if number else b"") + record_json(record)
            if len(part) > _CHUNK_BYTES:
                await response.write(bytes(part))
                part.clear()
        part += b"]"
        await response.write(bytes(part))
        return await send(http, response)

    async def delete(self, session: str) -> web.StreamResponse:
        num_deleted = await self.delete_records(session)
        return json_response({"session_id": session, "deleted": True, "records": num_deleted})

    async def delete_records(self, session: str) -> int:
        """Stop what is in flight, then forget what was captured; returns how many records that were.

        Raises RequestRefused (404) for a session that there is not.
        """
        in_memory = self._sessions.in_memory(session)
        if in_memory is not None:
            # A session that reached the disk behind its own deletion would be there again.
            if in_memory.store_task is not None:
                await asyncio.wait({in_memory.store_task})
            await self._calls.cancel_session(in_memory, session_closed())
        elif self._ledger.session_data(session) is None:
            raise unknown_session(session)
        self._sessions.forget(session)
        return await asyncio.to_thread(self._ledger.delete_session, session)


def record_json(record: CallRecord) -> bytes:
    """The JSON of `CallRecord.to_dict`."""
    return orjson.dumps(record)


def session_url(url: str, session: str, tokens: Tokens) -> str:
    """A base URL that opens one session, whatever API key the client sends."""
    token = tokens.of_session(session)
    return f"{url}{f'/k/{token}' if token else ''}/sessions/{quote(session, safe='')}/v1"


def _field(fields: dict[str, Any], name: str, kind: type, label: str) -> Any:
    value = fields.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise RequestRefused(f"`{name}` is {str(value)[:80]!r}; it must be {label}.", param=name)
    return value
