"""The gateway's HTTP server: any program that speaks to a model speaks to it, and every call is captured.

    client ──► route ──► token ──► body ──► session ──► dialect.parse ──► Calls ──► Policy
       ◄── dialect.reply / server-sent events ◄── Ledger has it ◄──────────────────── Answer

    async with Gateway(policy, Ledger.open(directory)) as gateway:
        session = gateway.open_session("lake-3/0", seed=7)
        ...                                       # a program with session.base_url as its base URL
        records = session.traces()

aiohttp's low-level server: one handler, no routing table, no middlewares, no access log.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohttp import web
from multidict import CIMultiDict

from rllm.errors import RequestRefused
from rllm.files.descriptors import quiet_refused_connections, raised_file_limit
from rllm.gateway.dialects.base import ClientDialect
from rllm.gateway.dialects.messages import MessagesDialect
from rllm.gateway.dialects.registry import DIALECTS
from rllm.gateway.ledger import Ledger
from rllm.gateway.offload import OffLoop
from rllm.gateway.server.auth import Tokens, TokenScope, require_guarded
from rllm.gateway.server.bodies import (
    ARRIVAL_TIMEOUT_S,
    MAX_BODY_BYTES,
    SMALL_BODY_BYTES,
    json_object,
    read_body,
)
from rllm.gateway.server.call_records import answer_of
from rllm.gateway.server.calls import Calls, gateway_closed, refusal_of, session_closed
from rllm.gateway.server.counts import Counts
from rllm.gateway.server.delivery import EventSink, error_response, json_response, send
from rllm.gateway.server.disk import DiskCheck
from rllm.gateway.server.http import HttpServer
from rllm.gateway.server.listening import BACKLOG, listening_socket
from rllm.gateway.server.management import Management, session_url
from rllm.gateway.server.metrics import health, prometheus_text
from rllm.gateway.server.openapi import openapi_document
from rllm.gateway.server.pace import Pace
from rllm.gateway.server.paths import PUBLISHED, Endpoint, Route, dialect_of, route_of, session_id, session_of
from rllm.gateway.server.prometheus import CONTENT_TYPE
from rllm.gateway.server.published import PublishedRoutes, worker_rows
from rllm.gateway.server.responses import KeptResponses, delete_refused
from rllm.gateway.server.sessions import MAX_IDLE_SESSIONS, Session, SessionRegistry
from rllm.types.call_budget import CallBudget
from rllm.types.episode_clock import EpisodeClock
from rllm.types.wire import Answer, CallRecord, CallRequest, Policy

_Body = TypeVar("_Body")
_Content = TypeVar("_Content")
_MESSAGES = MessagesDialect()
_LONGEST_LINE = 32 << 10
_HANDLERS_GRACE_S = 2.0


class Gateway:
    """A policy behind every protocol that clients speak, on one address.

    `ledger` is one that is open, or the directory of one that is opened at `start` and closed at `close`.
    `token` is made anew when it is empty; None lets everybody in who can connect, and is refused unless
    `host` is this machine alone. With `require_session`, calls of sessions that nobody created get a 404.
    `arrival_timeout_s` is the longest time that the head of a request may take, and its body before it comes
    at a steady pace. `listening` is a socket that holds the address already, in place of `port`.
    """

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger | Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = "",
        require_session: bool = False,
        grace_s: float = 10.0,
        max_body_bytes: int = MAX_BODY_BYTES,
        arrival_timeout_s: float = ARRIVAL_TIMEOUT_S,
        max_idle_sessions: int = MAX_IDLE_SESSIONS,
        listening: socket.socket | None = None,
    ) -> None:
        require_guarded(host, token)
        self.policy = policy
        self.host = host
        self.port = port
        self.counts = Counts()
        self._tokens = Tokens(Tokens.new() if token == "" else token)
        self._ledger_given = ledger
        self._require_session = require_session
        self._grace_s = grace_s
        self._max_body_bytes = max_body_bytes
        self._arrival_timeout_s = arrival_timeout_s
        self._max_idle_sessions = max_idle_sessions
        self._socket: socket.socket | None = None
        if listening is not None:
            self._adopt(listening)
        self._runner: web.ServerRunner | None = None
        self._is_closing = False
        self._pace = Pace()
        self._large = OffLoop("bodies")
        self._started_at = 0.0

    @property
    def token(self) -> str | None:
        """Opens everything. None where none is needed."""
        return self._tokens.run

    @property
    def url(self) -> str:
        """Where this machine reaches the gateway; the port is known after `bind`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def base_url(self) -> str:
        """For clients of the default session, with the token in the path: any API key does."""
        return f"{self.url}{f'/k/{self.token}' if self.token else ''}/v1"

    @property
    def num_in_flight(self) -> int:
        return self.calls.num_in_flight

    def bind(self) -> None:
        """Take the address; connections wait until `start`. Raises ConfigError when it cannot be had."""
        if self._socket is None:
            self._adopt(listening_socket(self.host, self.port))

    def _adopt(self, listening: socket.socket) -> None:
        self._socket = listening
        self.port = listening.getsockname()[1]

    async def start(self) -> None:
        self.bind()
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        raised_file_limit()
        quiet_refused_connections()
        ledger_path = self._ledger_given
        self.ledger = (
            ledger_path
            if isinstance(ledger_path, Ledger)
            else await asyncio.to_thread(Ledger.open, ledger_path)
        )
        self.sessions = SessionRegistry(
            self.ledger, require_created=self._require_session, max_idle=self._max_idle_sessions
        )
        self.calls = Calls(self.policy, self.ledger, self.counts)
        ledger = self.ledger
        self._disk = DiskCheck(lambda: asyncio.to_thread(ledger.try_to_write))
        self._responses = KeptResponses(self.ledger)
        self._management = Management(self.ledger, self.sessions, self.calls, self._tokens)
        self._published_routes = PublishedRoutes(
            self.policy,
            self.ledger,
            self.sessions,
            self._management,
            has_token=self._tokens.run is not None,
        )
        await self.policy.start()
        server = HttpServer(
            self._handle,
            head_timeout_s=self._arrival_timeout_s,
            access_log=None,
            # `read_body` unpacks, within its limits.
            auto_decompress=False,
            max_line_size=_LONGEST_LINE,
            max_field_size=_LONGEST_LINE,
            lingering_time=2.0,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=_HANDLERS_GRACE_S)
        await self._runner.setup()
        assert self._socket is not None, "bind made it"
        await web.SockSite(self._runner, self._socket, backlog=BACKLOG).start()
        self._started_at = time.monotonic()

    async def close(self) -> None:
        """Stop accepting, let what is in flight end for `grace_s`, stop the rest, close what is ours."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._runner is not None:
            # First no new connections, then the calls, then the handlers: a call that may still end within
            # its grace has somebody to hand its answer to.
            for site in list(self._runner.sites):
                await site.stop()
            await self.calls.finish(self._grace_s)
            await self.sessions.wait_until_stored()
            await self._runner.cleanup()
            await self.calls.finish(0.0)
            await self._disk.close()
            await self.policy.close()
            self._large.close()
        if self._socket is not None:
            self._socket.close()
        if not isinstance(self._ledger_given, Ledger) and hasattr(self, "ledger"):
            await asyncio.to_thread(self.ledger.close)
        if self._runner is not None:
            self.counts.require_conserved(self.calls.num_in_flight)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def open_session(
        self,
        session: str,
        *,
        seed: int | None = None,
        sampling: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        budget: CallBudget | None = None,
    ) -> "GatewaySession":
        """A session for one program. Without `seed` it has one that follows from its id. Calls beyond its
        `budget` are refused (403, `budget_exhausted`).

        To be called in the gateway's event loop. Raises RequestRefused when it exists with other settings.
        """
        created_session = self.sessions.create(
            session_id(session, "`session`"), seed, sampling or {}, metadata or {}, budget
        )
        return GatewaySession(self, created_session)

    # ---- requests ------------------------------------------------------------------------------------------

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Every request comes here; what goes wrong leaves in the client's own protocol."""
        try:
            route = route_of(http.method, http.raw_path)
        except RequestRefused as error:
            response = error_response(DIALECTS[dialect_of(http.raw_path)], error)
        else:
            try:
                response = await self._respond(http, route)
            except RequestRefused as error:
                response = error_response(DIALECTS[route.dialect], error)
            except ConnectionError:  # nobody is there to read it, and the connection is closed without a word
                response = web.Response(status=499)
            except Exception as error:  # noqa: BLE001  a bug of ours is answered too, in the client's shape
                response = error_response(DIALECTS[route.dialect], refusal_of(error))
        if self._is_closing:
            response.force_close()
        self.counts.responses[response.status] += 1
        return response

    async def _respond(self, http: web.BaseRequest, route: Route) -> web.StreamResponse:
        # These need no token: probes of health checkers have none, and what they are told holds no secret.
        match route.endpoint:
            case Endpoint.ROOT:
                return json_response({"object": "gateway", "name": "rllm"})
            case Endpoint.HEALTH:
                writable = await self._disk.is_writable()
                gauges = {"writable": writable, "now": time.monotonic(), **self._gauges()}
                report = health(self.counts, self.policy.health(), **gauges)
                return json_response(report, 200 if report["status"] == "ok" else 503)
            case Endpoint.OPENAPI:
                return json_response(openapi_document())
            case Endpoint.WORKER_HEALTH:
                return json_response({"workers": worker_rows(self.policy)})
            case Endpoint.SESSION if self._is_probe(http, route):
                return json_response({"object": "gateway", "name": "rllm"})
            case _:
                scope = self._tokens.scope(route.token, http.headers)
        if self._is_closing:
            raise gateway_closed()
        match route.endpoint:
            case Endpoint.CALL:
                return await self._call(http, route, scope)
            case Endpoint.COUNT_TOKENS:
                return await self._count_tokens(http, route, scope)
            case Endpoint.MODELS | Endpoint.MODEL:
                if route.session:
                    scope.require_session(route.session)
                return self._models(route)
            case endpoint if endpoint in PUBLISHED:
                return await self._published_routes.respond(http, route, scope)
            case Endpoint.RESPONSE:
                session = session_of(route, http.headers, {})
                scope.require_session(session)
                if http.method == "DELETE":
                    raise delete_refused()
                return json_response(await self._responses.retrieve(route.response, session))
            case Endpoint.TRACES:
                scope.require_session(route.session)
                return await self._management.traces(http, route.session)
            case Endpoint.SESSION if http.method != "DELETE":
                scope.require_session(route.session)
                return await self._management.show(route.session)
            case Endpoint.SESSION:
                scope.require_run("the deletion of sessions")
                return await self._management.delete(route.session)
            case Endpoint.SESSIONS:
                scope.require_run("the list of sessions")
                if http.method == "POST":
                    return await self._management.create(http)
                return await self._management.page(http.raw_path)
            case _:
                scope.require_run("the metrics")
                text = prometheus_text(self.counts, self.policy.health(), **self._gauges())
                return web.Response(body=text.encode(), headers=CIMultiDict({"Content-Type": CONTENT_TYPE}))

    def _is_probe(self, http: web.BaseRequest, route: Route) -> bool:
        """Whether a client looks if somebody is at its base URL, before its first call made the session."""
        if http.method != "GET":
            return http.method == "HEAD"
        try:
            self._tokens.scope(route.token, http.headers)
        except RequestRefused:
            return True
        return False

    def _gauges(self) -> dict[str, Any]:
        return {
            "in_flight": self.calls.num_in_flight,
            "sessions": len(self.sessions),
            "uptime_s": time.monotonic() - self._started_at,
        }

    async def _call(self, http: web.BaseRequest, route: Route, scope: TokenScope) -> web.StreamResponse:
        dialect = DIALECTS[route.dialect]
        try:
            body = await read_body(http, self._max_body_bytes, self._arrival_timeout_s)
            # Behind the reading, which waits for the client, and before all that takes the loop's time.
            await self._pace.take()
            fields = await self._read(len(body), json_object, body)
            session = self.sessions.get(_session_id(http, route, scope, fields))
            fields.pop(
                "session_id", None
            )  # it is for this gateway: strict servers refuse what they do not know
        except RequestRefused as error:
            self.calls.count_refused(error)
            raise
        try:
            request = await self._read(len(body), dialect.parse, fields)
            request.num_bytes = len(body)
            if request.previous_response_id:
                await self._responses.go_on(request, session.id)
        except RequestRefused as error:
            raw_request = CallRequest(dialect=route.dialect, body=fields, model=_text(fields.get("model")))
            await self.calls.refuse(raw_request, session, error)
            raise
        if self._is_closing:  # since the body was begun to be read
            raise gateway_closed()
        placement = self.calls.retries.place(session.id, route.dialect, http.headers, body)
        sink = None
        if request.stream:
            sink = EventSink(http, dialect, request, request.model or self._first_model())
        # A call sends its pieces to the sink of the client that began it. Whoever joins it gets the whole
        # answer at its end.
        is_retry = bool(placement.call or placement.records)
        if is_retry:
            self.counts.num_retries += 1
        if placement.records:
            answer = answer_of(placement.records)
        else:
            call = placement.call or self.calls.start(request, session, placement, sink)
            try:
                answer = await self.calls.answer(call, sink)
            except RequestRefused as error:
                if sink is None or not sink.has_started:
                    raise
                return await sink.failed(error)
            # Another one, where the key turned out to be taken when the call was recorded.
            placement.key = call.key
        try:
            return await self._deliver(http, dialect, request, answer, sink, is_retry)
        except (ConnectionError, asyncio.CancelledError):
            # The answer is recorded and was not read: the client's retry gets this one and no second sample.
            self.calls.note_undelivered(placement.digest, placement.key)
            raise

    async def _deliver(
        self,
        http: web.BaseRequest,
        dialect: ClientDialect,
        request: CallRequest,
        answer: Answer,
        sink: EventSink | None,
        is_retry: bool,
    ) -> web.StreamResponse:
        if sink is not None:
            return await (sink.replay(answer) if is_retry else sink.finish(answer))
        reply = dialect.reply(request, answer)
        return await send(http, json_response(reply, headers={"x-request-id": answer.id}))

    async def _count_tokens(
        self, http: web.BaseRequest, route: Route, scope: TokenScope
    ) -> web.StreamResponse:
        body = await read_body(http, self._max_body_bytes, self._arrival_timeout_s)
        fields = await self._read(len(body), json_object, body)
        _session_id(http, route, scope, fields)
        request = await self._read(len(body), _MESSAGES.parse_count, fields)
        return json_response({"input_tokens": await self.policy.count_tokens(request)})

    async def _read(self, num_bytes: int, work: Callable[[_Body], _Content], body: _Body) -> _Content:
        """Parse the body, in another thread where it is large: a small one costs less than the change of
        threads."""
        return work(body) if num_bytes <= SMALL_BODY_BYTES else await self._large.run(work, body)

    def _models(self, route: Route) -> web.StreamResponse:
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "rllm"} for name in self.policy.models()
        ]
        if route.endpoint is Endpoint.MODELS:
            return json_response({"object": "list", "data": models})
        for model in models:
            if model["id"] == route.model:
                return json_response(model)
        raise RequestRefused(
            f"There is no model {route.model[:80]!r}; there is {', '.join(self.policy.models())}.",
            status=404,
            code="model_not_found",
            param="model",
        )

    def _first_model(self) -> str:
        return next(iter(self.policy.models()), "")


class GatewaySession:
    """One program's session, as the one who runs the program sees it."""

    def __init__(self, gateway: Gateway, session: Session) -> None:
        self.id = session.id
        self._gateway = gateway
        self._session = session

    @property
    def base_url(self) -> str:
        """For OpenAI clients. It opens this session alone, whatever API key is sent."""
        return session_url(self._gateway.url, self.id, self._gateway._tokens)

    @property
    def root_url(self) -> str:
        """For Anthropic clients, which add /v1 themselves."""
        return self.base_url.removesuffix("/v1")

    def tell(self, clock: EpisodeClock) -> None:
        """Tell `clock` when calls of the session begin and end, from now on."""
        self._session.clock = clock

    def traces(self) -> list[CallRecord]:
        """The captured calls, in the order in which they were recorded."""
        return self._gateway.ledger.traces(self.id)

    async def close(self) -> None:
        """Cancel what is in flight and refuse later requests. What was captured stays."""
        self._gateway.sessions.close(self.id)
        await self._gateway.calls.cancel_session(self._session, session_closed())


def _session_id(http: web.BaseRequest, route: Route, scope: TokenScope, fields: Mapping[str, Any]) -> str:
    name = session_of(route, http.headers, fields)
    scope.require_session(name)
    return name


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
