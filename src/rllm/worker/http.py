"""Workers over HTTP: one request a run, the same answer for the same key.

POST   /workers/ID/runs       {"inputs": {…}, "version"?, "trace"?, "constraints"?: {"timeout_seconds"}}
GET    /workers/ID/runs/KEY   its answer; 202 while under way; events with Accept: text/event-stream
DELETE /workers/ID/runs/KEY   cancel it; the attempt counts
POST   /workers/ID/model      have the model that the worker's file names now; no run is dropped
GET    /workers, /workers/ID  the contracts        GET /openapi.json  the same for tools that read it
POST   /workers/ID/runs/KEY/feedback, /runs/ID/feedback   what somebody thinks of it
GET    /health, /ready, /metrics      whether it lives, whether runs can be done now; these two need no token
"""

import hmac
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

try:
    from aiohttp import web
except ModuleNotFoundError as error:
    from rllm.errors import MissingExtraError

    raise MissingExtraError(error.name or "aiohttp", "worker") from error

from rllm.contracts.contract import Contract
from rllm.errors import ConfigError, InferenceError, StorageError
from rllm.files.descriptors import quiet_refused_connections, raised_file_limit
from rllm.gateway.server.auth import Tokens, require_guarded
from rllm.gateway.server.disk import DiskCheck
from rllm.gateway.server.http import HttpServer
from rllm.gateway.server.listening import listening_socket
from rllm.gateway.server.prometheus import CONTENT_TYPE
from rllm.worker.envelope import envelope_problem
from rllm.worker.host import WorkerHost
from rllm.worker.metrics import prometheus_text
from rllm.worker.openapi import openapi
from rllm.worker.replies import is_text
from rllm.worker.response import WorkerResponse
from rllm.worker.runtime import WorkerRuntime

MAX_BODY_BYTES, MAX_FEEDBACK_BYTES = 32 << 20, 1 << 20
_MAX_SCORE = 1e300
HEAD_TIMEOUT_S = 30.0
"""For the head of a request; a new connection may stay silent four times as long."""
_SHUTDOWN_S = 10.0
"""For answers on their way when the server is stopped."""
_OPEN = ("/health", "/ready")
"""For whoever watches: without a token."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _BoundedRunner(web.AppRunner):
    """aiohttp's runner, whose connections have so many seconds for the head of a request."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return HttpServer(
            server.request_handler,
            request_factory=server.request_factory,
            head_timeout_s=HEAD_TIMEOUT_S,
            # A run goes on when its client leaves: the next one asks for the answer.
            handler_cancellation=False,
            access_log=None,
        )


class WorkerServer:
    """The workers of a host on one address. `token` is made anew when it is empty; None asks for none."""

    def __init__(
        self, host: WorkerHost, *, address: str = "127.0.0.1", port: int = 0, token: str | None = ""
    ) -> None:
        require_guarded(address, token)
        self.host = host
        self.token = Tokens.new() if token == "" else token
        self._address = address
        # Bound here already, so a taken port fails before anything is started, and `url` is known at once.
        self._socket: socket.socket = listening_socket(address, port)
        self.port: int = self._socket.getsockname()[1]
        self._runner: web.AppRunner | None = None
        self._disk = DiskCheck(host.try_to_write)

    @property
    def url(self) -> str:
        # An address that means every interface is one to listen on; a client needs one of the interfaces.
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._address, self._address)
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/workers", self._list)
        app.router.add_get("/workers/{id}", self._show)
        app.router.add_post("/workers/{id}/runs", self._run)
        app.router.add_post("/workers/{id}/model", self._reload_model)
        app.router.add_get("/workers/{id}/runs/{key}", self._find)
        app.router.add_delete("/workers/{id}/runs/{key}", self._cancel)
        app.router.add_post("/workers/{id}/runs/{key}/feedback", self._feedback)
        app.router.add_post("/runs/{id}/feedback", self._feedback_by_run)
        raised_file_limit()
        quiet_refused_connections()
        self._runner = _BoundedRunner(app, handle_signals=False, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket, backlog=4096).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._disk.close()
        self._socket.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path not in _OPEN and not self._is_allowed(request):
            return _refusal(401, "unauthorized", "Send the server's token as `Authorization: Bearer TOKEN`.")
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, "too_large", f"The body is larger than {MAX_BODY_BYTES:,} bytes.")
        except web.HTTPException as error:
            return _refusal(error.status, "not_found" if error.status == 404 else "http", error.reason)
        except StorageError as error:
            return _refusal(503, "storage", str(error))

    def _is_allowed(self, request: web.Request) -> bool:
        if self.token is None:
            return True
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        # Compared as bytes: of texts compare_digest takes ASCII alone, and a header may hold anything.
        return scheme.lower() == "bearer" and hmac.compare_digest(
            credentials.strip().encode("utf-8", "surrogatepass"), self.token.encode()
        )

    # ---- runs ----------------------------------------------------------------------------------------------

    async def _run(self, request: web.Request) -> web.StreamResponse:
        worker = self._worker(request)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            return _refusal(400, "bad_json", f"The body is no JSON: {error}.")
        problem = envelope_problem(worker.contract, body)
        if problem:
            return _refusal(400, "bad_request", problem)
        response = await worker.run(
            body.get("inputs"),
            trace=body.get("trace") or request.headers.get("traceparent", ""),
            timeout_s=(body.get("constraints") or {}).get("timeout_seconds"),
        )
        return _answer(response)

    async def _find(self, request: web.Request) -> web.StreamResponse:
        worker, key = self._worker(request), request.match_info["key"]
        if "text/event-stream" in request.headers.get("Accept", ""):
            return await self._stream(request, worker, key)
        # Asked before the store is read as well: a run that ends meanwhile was not interrupted.
        was_under_way = worker.is_under_way(key)
        run = await worker.find(key)
        if run is not None and run.response is not None:
            return _answer(WorkerResponse.from_body(run.response))
        is_under_way = was_under_way or worker.is_under_way(key)
        if run is None and not is_under_way:
            return _refusal(404, "not_found", f"{worker.contract.id} has no run with the key {key!r:.100}.")
        state = "running" if is_under_way else "interrupted"
        return web.json_response({"state": state, "attempts": run.attempts if run else 0}, status=202)

    async def _stream(self, request: web.Request, worker: WorkerRuntime, key: str) -> web.StreamResponse:
        """Events until the run ends, then how it ended: `answer` with the response, or `interrupted`."""
        if not worker.is_under_way(key) and await worker.find(key) is None:
            return _refusal(404, "not_found", f"{worker.contract.id} has no run with the key {key!r:.100}.")
        stream = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await stream.prepare(request)
        try:
            # A run that ended before this line has no events; its answer is read from the store below.
            async with aclosing(worker.watch(key)) as events:
                async for event in events:
                    await stream.write(_event(event["event"], json.dumps(event).encode()))
            run = await worker.find(key)
            if run is not None and run.response is not None:
                await stream.write(_event("answer", run.response))
            else:
                state = {"attempts": run.attempts if run else 0}
                await stream.write(_event("interrupted", json.dumps(state).encode()))
            await stream.write_eof()
        except ConnectionError:
            pass  # the client has gone; the run goes on
        return stream

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        worker, key = self._worker(request), request.match_info["key"]
        if not await worker.cancel(key):
            return _refusal(404, "not_found", f"No run with the key {key!r:.100} is under way.")
        return web.json_response({"state": "cancelled"})

    async def _feedback(self, request: web.Request) -> web.StreamResponse:
        return await self._keep_feedback(request, self._worker(request), request.match_info["key"])

    async def _feedback_by_run(self, request: web.Request) -> web.StreamResponse:
        """The run that somebody calls so: `run_id` in its answer."""
        name = request.match_info["id"]
        runs = await self.host.runs_named(name)
        if len(runs) > 1:
            paths = ", ".join(f"/workers/{run.worker}/runs/{run.key}/feedback" for run in runs)
            return _refusal(
                409, "several_runs", f"{len(runs)} runs are called {name!r:.100}; post to {paths:.500}."
            )
        if not runs:
            return _refusal(404, "not_found", f"There is no run {name!r:.100}.")
        return await self._keep_feedback(request, self.host.workers[runs[0].worker], runs[0].key)

    async def _keep_feedback(
        self, request: web.Request, worker: WorkerRuntime, key: str
    ) -> web.StreamResponse:
        body = await request.read()
        if len(body) > MAX_FEEDBACK_BYTES:
            why = f"The feedback has {len(body):,} bytes; at most {MAX_FEEDBACK_BYTES:,} are kept."
            return _refusal(413, "too_large", why)
        try:
            feedback = json.loads(body)
        except (ValueError, RecursionError) as error:
            return _refusal(400, "bad_json", f"The body is no JSON: {error}.")
        problem = _feedback_problem(feedback) or await worker.add_feedback(key, feedback)
        if problem:
            return _refusal(404 if problem.startswith("There is no") else 400, "bad_feedback", problem)
        return web.json_response({"state": "kept"}, status=201)

    async def _reload_model(self, request: web.Request) -> web.StreamResponse:
        worker = self._worker(request)
        try:
            model = await self.host.reload_model(worker.contract.id)
        except (ConfigError, InferenceError) as error:
            return _refusal(409, "not_reloaded", str(error))
        return web.json_response({"model": model})

    # ---- what there is -------------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"workers": [contract_facts(each.contract) for each in self.host.workers.values()]}
        )

    async def _show(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(contract_facts(self._worker(request).contract))

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(openapi([each.contract for each in self.host.workers.values()]))

    async def _health(self, request: web.Request) -> web.StreamResponse:
        running = {name: each.admission.num_running for name, each in self.host.workers.items()}
        return web.json_response({"status": "ok", "running": running})

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        """Whether runs can be done now: they can be kept, and every model can be reached."""
        is_writable = await self._disk.is_writable()
        workers = {name: each.has_model_in_service() for name, each in self.host.workers.items()}
        is_ready = is_writable and all(workers.values())
        report = {
            "status": "ready" if is_ready else "not_ready",
            "store": "writable" if is_writable else "refuses writes",
            "models": {name: "reachable" if each else "unreachable" for name, each in workers.items()},
        }
        return web.json_response(report, status=200 if is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        text = prometheus_text(self.host.workers.values())
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    def _worker(self, request: web.Request) -> WorkerRuntime:
        name = request.match_info["id"]
        worker = self.host.workers.get(name)
        if worker is None:
            raise web.HTTPNotFound(
                reason=f"There is no such worker; there are {', '.join(self.host.workers)}."
            )
        return worker


def _feedback_problem(feedback: Any) -> str:
    kinds: dict[str, tuple[type, ...]] = {"score": (int, float), "label": (str,), "outputs": (dict,)}
    if not isinstance(feedback, dict) or not feedback:
        return "The body is no object with `score`, `label` or `outputs`."
    for name, value in feedback.items():
        if name not in kinds:
            return f"Feedback has no {name!r:.100}; it may have {', '.join(kinds)}."
        if isinstance(value, bool) or not isinstance(value, kinds[name]):
            return f"`{name}` is {value!r:.100}; it is {' or '.join(each.__name__ for each in kinds[name])}."
    score = feedback.get("score", 0)
    if not -_MAX_SCORE <= score <= _MAX_SCORE:  # nor is NaN
        return f"`score` is {score!r:.100}; it is a number of at most {_MAX_SCORE:g} either way."
    if not is_text(feedback.get("label", "")):
        return "`label` holds half a surrogate pair, which is no text."
    return ""


def _answer(response: WorkerResponse) -> web.Response:
    headers = {}
    if response.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(response.retry_after_s)))
    return web.Response(
        body=response.body, status=response.http_status, content_type="application/json", headers=headers
    )


def _event(name: str, data: bytes) -> bytes:
    """One server-sent event; `data` is JSON in one line."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _refusal(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message}}, status=status)


def contract_facts(contract: Contract) -> dict[str, Any]:
    """A contract as JSON, for listings."""
    limits = contract.constraints
    return {
        "id": contract.id,
        "version": contract.version,
        "name": contract.name,
        "purpose": contract.purpose,
        "tags": list(contract.tags),
        "input_schema": dict(contract.input_schema.document),
        "output_schema": dict(contract.output_schema.document),
        "constraints": {
            "timeout_seconds": limits.timeout_seconds,
            "max_attempts": limits.max_attempts,
            "idempotency_key": limits.idempotency_key or None,
            "status_enum": list(limits.status_enum),
        },
    }
