"""Routes of the published gateway that ours has in another form: looked up by trace, and what `/admin` says.

    GET  /traces/ID                       POST /traces/query {session_ids, since, limit}
    POST /sessions/batch_delete           GET  /health/workers
    GET, POST /admin/weight_version       GET, POST /admin/workers, DELETE /admin/workers/ID
    POST /admin/flush, /admin/reload

Records leave in the published form (`TraceRecord`): one answered choice each.
"""

import asyncio
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from aiohttp import web

from rllm.errors import ConfigError, RequestRefused
from rllm.gateway.ledger import Ledger
from rllm.gateway.server.auth import TokenScope
from rllm.gateway.server.bodies import json_object, read_body
from rllm.gateway.server.delivery import json_response
from rllm.gateway.server.management import Management
from rllm.gateway.server.paths import Endpoint, Route, session_id
from rllm.gateway.server.sessions import SessionRegistry
from rllm.types.messages import oldest_version
from rllm.types.wire import CallRecord, CallStatus, Policy

_MAX_SESSIONS = 1000
_MAX_TRACES = 10_000
_NO_WORKERS = (
    "the built-in engine answers here, and there are no servers behind it: `rllm serve gateway` and `rllm "
    "serve fleet` have them"
)


@runtime_checkable
class ServerPolicy(Protocol):
    """A policy with servers behind it, such as `UpstreamPolicy` and `FleetPolicy`."""

    async def add_server(self, url: str, weight: float) -> dict[str, Any]: ...

    async def remove_server(self, url: str) -> None: ...

    async def look_again(self) -> None: ...

    def set_policy_version(self, policy_version: int) -> None: ...


class PublishedRoutes:
    """The handlers of `Endpoint`s that only published programs ask for."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        sessions: SessionRegistry,
        management: Management,
        *,
        has_token: bool,
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._sessions = sessions
        self._management = management
        self._has_token = has_token

    async def respond(self, http: web.BaseRequest, route: Route, scope: TokenScope) -> web.StreamResponse:
        if route.endpoint is Endpoint.TRACE:
            return json_response(await self._trace(route.item, scope))
        fields = await _body_of(http) if http.method == "POST" else {}
        if route.endpoint is Endpoint.TRACE_QUERY:
            return json_response(await self._traces(fields, scope))
        scope.require_run("what only the one who runs the gateway may do")
        match route.endpoint:
            case Endpoint.SESSION_DELETION:
                return json_response(await self._delete_sessions(fields))
            case Endpoint.WEIGHT_VERSION:
                return json_response(self._weight_version(fields))
            case Endpoint.WORKERS if http.method == "POST":
                return json_response(await self._add_worker(fields))
            case Endpoint.WORKERS:
                return json_response({"workers": worker_rows(self._policy)})
            case Endpoint.WORKER:
                return json_response(await self._remove_worker(route.item))
            case Endpoint.FLUSH:
                await self._sessions.wait_until_stored()
                return json_response({"status": "flushed"})
            case _:
                if isinstance(self._policy, ServerPolicy):
                    await self._policy.look_again()
                return json_response({"status": "reloaded"})

    async def _trace(self, trace_id: str, scope: TokenScope) -> dict[str, Any]:
        records = await asyncio.to_thread(self._ledger.call, trace_id)
        for record in records[:1]:
            scope.require_session(record.session)
            return trace_data(record)
        raise RequestRefused(
            f"There is no trace {trace_id[:80]!r}; traces are named by the id of their completion.",
            status=404,
            code="trace_not_found",
        )

    async def _traces(self, fields: Mapping[str, Any], scope: TokenScope) -> list[dict[str, Any]]:
        names = _session_ids(fields)
        for name in names:
            scope.require_session(name)
        since = _number(fields, "since", 0.0)
        limit = _number(fields, "limit", float(_MAX_TRACES))
        if not 1 <= limit <= _MAX_TRACES or limit != int(limit):
            raise RequestRefused(
                f"`limit` is {limit:g}; ask for 1 to {_MAX_TRACES} traces, in several queries by `since`.",
                param="limit",
            )

        def read() -> list[CallRecord]:
            records = [record for name in names for record in self._ledger.traces(name)]
            answers = [each for each in records if each.status is CallStatus.OK and each.started_at >= since]
            return sorted(answers, key=lambda each: each.started_at)[: int(limit)]

        return [trace_data(each) for each in await asyncio.to_thread(read)]

    async def _delete_sessions(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for name in _session_ids(fields):
            try:
                counts[name] = await self._management.delete_records(name)
            except RequestRefused as error:
                if error.status != 404:
                    raise
        return {"deleted": sum(counts.values()), "sessions": counts}

    def _weight_version(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if fields:
            version = fields.get("weight_version")
            if not isinstance(version, int) or isinstance(version, bool) or version < 0:
                raise RequestRefused(
                    f"`weight_version` is {str(version)[:40]!r}; it must be a whole number from 0 on.",
                    param="weight_version",
                )
            self._servers("its versions count the updates of its own weights").set_policy_version(version)
        return {"weight_version": max(self._policy.health().get("policy_versions", ()), default=0)}

    async def _add_worker(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if not self._has_token:  # whoever names a server gets the key of the servers sent
            raise RequestRefused(
                "This gateway has no token, so anybody could name a server and be sent its key; start it "
                "with one, or name the servers there.",
                status=403,
                kind="permission_error",
                code="token_required",
            )
        unknown = next((each for each in fields if each not in _WORKER_FIELDS), None)
        if unknown is not None:
            raise RequestRefused(
                f"There is no field {unknown[:80]!r}; a worker has {', '.join(_WORKER_FIELDS)}.",
                param=unknown[:80],
            )
        url, path = str(fields.get("url") or ""), str(fields.get("api_path") or "")
        if path.strip("/") and not url.rstrip("/").endswith(f"/{path.strip('/')}"):
            url = f"{url.rstrip('/')}/{path.strip('/')}"
        try:
            server = await self._servers(_NO_WORKERS).add_server(url, _number(fields, "weight", 1.0))
        except ConfigError as error:
            raise RequestRefused(str(error), param="url") from error
        # Known only once the server was asked, so one with another model is removed again.
        model, models = fields.get("model_name"), server.get("models") or []
        if model and models and model not in models:
            await self._servers(_NO_WORKERS).remove_server(server["url"])
            raise RequestRefused(
                f"{server['url']} serves {', '.join(models)}, and `model_name` is {str(model)[:80]!r}; it "
                "was not added.",
                param="model_name",
            )
        return _worker_row(server)

    async def _remove_worker(self, worker: str) -> dict[str, Any]:
        servers = self._servers(_NO_WORKERS)
        for row in worker_rows(self._policy):
            if row["worker_id"] == worker:
                try:
                    await servers.remove_server(row["url"])
                except ConfigError as error:
                    raise RequestRefused(str(error), status=409, code="last_worker") from error
                return {"worker_id": worker, "removed": True}
        raise RequestRefused(
            f"There is no worker {worker[:80]!r}; GET /admin/workers lists them.",
            status=404,
            code="worker_not_found",
        )

    def _servers(self, why_not: str) -> ServerPolicy:
        if not isinstance(self._policy, ServerPolicy):
            raise RequestRefused(f"This cannot be changed: {why_not}.", status=409, code="not_changeable")
        return self._policy


_WORKER_FIELDS = ("url", "model_name", "weight", "api_path")


def worker_rows(policy: Policy) -> list[dict[str, Any]]:
    """The servers that answer, or the built-in engine as the one that does."""
    health = policy.health()
    rows = health.get("upstreams")
    if rows is None:
        return [
            {"worker_id": "engine", "url": "", "healthy": bool(health.get("healthy", True)), "weight": 1.0}
        ]
    return [_worker_row(each) for each in rows]


def _worker_row(server: Mapping[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(server["url"].encode()).hexdigest()
    return {"worker_id": f"w-{digest[:12]}", **server}


def trace_data(record: CallRecord) -> dict[str, Any]:
    """The published `TraceRecord` of an answered choice."""
    return {
        "trace_id": record.id,
        "session_id": record.session,
        "model": record.model,
        "messages": record.messages,
        "prompt_token_ids": record.prompt_ids,
        "response_message": record.response,
        "completion_token_ids": record.completion_ids,
        "logprobs": record.logprobs,
        "routing_matrices": None,
        "finish_reason": record.finish_reason,
        "weight_version": oldest_version(record.policy_versions),
        "latency_ms": 1000.0 * record.latency_s,
        "token_counts": {"prompt": len(record.prompt_ids), "completion": len(record.completion_ids)},
        "timestamp": record.started_at,
        "metadata": {
            "choice": record.choice,
            "status": str(record.status),
            "conversation": record.conversation,
            "segment": record.segment,
        },
        "raw_request": None,
        "raw_response": None,
    }


async def _body_of(http: web.BaseRequest) -> dict[str, Any]:
    body = await read_body(http)
    return json_object(body) if body else {}


def _session_ids(fields: Mapping[str, Any]) -> list[str]:
    names: Any = fields.get("session_ids")
    if not isinstance(names, list) or not names or len(names) > _MAX_SESSIONS:
        raise RequestRefused(
            f"`session_ids` is {str(names)[:80]!r}; give a list of 1 to {_MAX_SESSIONS} names.",
            param="session_ids",
        )
    if not all(isinstance(each, str) for each in names):
        raise RequestRefused("`session_ids` holds something that is no text.", param="session_ids")
    return [session_id(each, "`session_ids`") for each in names]


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestRefused(f"`{name}` is {str(value)[:80]!r}; it must be a number.", param=name)
    return float(value)
