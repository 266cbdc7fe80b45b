"""The page on this machine: loopback, a token, runs read-only, and nothing loaded from elsewhere.

    http://127.0.0.1:PORT/?token=T ──► a cookie, and the page without the token in its address
    /static/NAME                   ──► files of the wheel
    /api/NAME?…                    ──► JSON of rllm.view.pages
    POST /api/notes                ──► tags and a note of the reader, kept in RLLM_HOME
    /export?address=…&request=…    ──► a page as one file

Foreign text is on every page, so the browser is told to run nothing but our own files, and to refuse markup
that a script would make of text.
"""

import asyncio
import hmac
import json
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    from rllm.errors import MissingExtraError

    raise MissingExtraError(error.name or "starlette", "view") from error

from rllm.errors import RllmError
from rllm.files.atomic import StorageErrors, write_atomic
from rllm.files.descriptors import quiet_refused_connections, raised_file_limit
from rllm.files.home import rllm_home
from rllm.gateway.server.auth import Tokens, is_loopback, require_guarded
from rllm.gateway.server.listening import listening_socket
from rllm.view.export import exported_page
from rllm.view.notes import keep_note
from rllm.view.pages import answer
from rllm.view.sources import Sources
from rllm.view.static_files import static_names

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".LICENSE": "text/plain; charset=utf-8",
}
HEAD_TIMEOUT_S = 30.0
"""For the head of a request, from the moment that the connection is made."""
_SHUTDOWN_S = 3
_TOKEN_FILE = "token"
_Handler = Callable[[Request], Awaitable[Response]]


def kept_token() -> str:
    """The token of this person's pages: one for all of them, so that a link opens again tomorrow."""
    path = rllm_home() / "view" / _TOKEN_FILE
    # A crash may have left the file empty, and every request without a token would hold an empty one.
    if path.is_file() and (token := path.read_text().strip()):
        return token
    token = secrets.token_urlsafe(24)
    with StorageErrors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    write_atomic(path, f"{token}\n")
    return token


class _BoundedProtocol(H11Protocol):
    """uvicorn's connection, closed where the head of its next request takes too long."""

    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_the_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_the_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _time_the_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None:  # else each byte of a head would give it more time
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class ViewServer:
    """The page over `sources` on one address. `token` is None where everybody who can connect may look."""

    def __init__(
        self, sources: Sources, *, host: str = "127.0.0.1", port: int = 0, token: str | None
    ) -> None:
        require_guarded(host, token)
        Tokens(token)  # refuses an empty one, which `require_guarded` takes as "make one"
        self.sources, self.token = sources, token
        self._host = host
        self._socket: socket.socket = listening_socket(host, port)
        self.port: int = self._socket.getsockname()[1]
        settings = uvicorn.Config(
            self.app(),
            log_level="warning",
            lifespan="off",
            server_header=False,
            http=_BoundedProtocol,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        self._server = uvicorn.Server(settings)

    @property
    def origin(self) -> str:
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}"

    @property
    def url(self) -> str:
        """The address that a person opens."""
        return f"{self.origin}/" + (f"?{urlencode({'token': self.token})}" if self.token else "")

    def serve(self) -> None:
        """Answer until the process is told to end."""
        asyncio.run(self.serve_until_stopped())

    async def serve_until_stopped(self) -> None:
        raised_file_limit()
        quiet_refused_connections()
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """From any thread: no further requests are taken."""
        self._server.should_exit = True

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._guarded(self._page)),
                Route("/static/{name:path}", self._guarded(_static)),
                Route("/api/notes", self._guarded(self._notes), methods=["POST"]),
                Route("/api/{name}", self._guarded(self._api)),
                Route("/export", self._guarded(self._export)),
            ],
        )

    def _guarded(self, handler: _Handler) -> _Handler:
        """Refuses those without the token, and pages of others that make this browser ask for them."""

        async def handle(request: Request) -> Response:
            response = self._refusal(request) or await handler(request)
            response.headers.update(HEADERS)
            return response

        return handle

    def _refusal(self, request: Request) -> Response | None:
        name = request.url.hostname or ""
        # The name is that of the Host header. A page from elsewhere whose domain was
        # made to point at this address (DNS rebinding) still sends its own name.
        if is_loopback(self._host) and not is_loopback(name):
            return PlainTextResponse("This page is for this machine alone.", status_code=403)
        if self.token is None or self._holds_token(request):
            return None
        return PlainTextResponse(
            "There is no token, or it is wrong. Open the address that `rllm view` printed.", status_code=401
        )

    def _holds_token(self, request: Request) -> bool:
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        candidates = (
            request.query_params.get("token", ""),
            request.cookies.get(self._cookie, ""),
            credentials if scheme.lower() == "bearer" else "",
        )
        assert self.token is not None, "without a token there is nothing to check"
        expected = self.token.encode()
        return any(hmac.compare_digest(each.encode("utf-8", "replace"), expected) for each in candidates)

    @property
    def _cookie(self) -> str:
        """Cookies do not tell ports apart, so the name does."""
        return f"rllm_view_{self.port}"

    async def _page(self, request: Request) -> Response:
        if "token" not in request.query_params:
            return _file_response("index.html")
        response = RedirectResponse("/", status_code=303)
        if self.token:
            response.set_cookie(
                self._cookie, self.token, httponly=True, samesite="strict", max_age=365 * 24 * 3600
            )
        return response

    async def _api(self, request: Request) -> Response:
        target = f"{request.path_params['name']}?{request.url.query}"
        try:
            value = await run_in_threadpool(answer, self.sources, target)
        except RllmError as error:
            return _json({"error": str(error)}, status=404)
        return _json(value)

    async def _notes(self, request: Request) -> Response:
        """The one thing that is written: tags and notes of the reader, outside of every run."""
        if (
            request.headers.get("content-type") != "application/json"
        ):  # what a form of another site cannot send
            return _json({"error": "Send JSON, with its content type."}, status=415)
        try:
            value = await request.json()
            return _json(await run_in_threadpool(keep_note, self.sources, value))
        except (RllmError, ValueError) as error:
            return _json({"error": str(error)}, status=400)

    async def _export(self, request: Request) -> Response:
        """The page at `address` as a file, with the answers to every `request` that it made."""
        address = request.query_params.get("address", "")
        requests = request.query_params.getlist("request")
        try:
            text = await run_in_threadpool(exported_page, self.sources, address, requests)
        except RllmError as error:
            return _json({"error": str(error)}, status=404)
        name = re.sub(r"[^\w.-]+", "-", address.replace("run=", ""))[:80].strip("-") or "page"
        headers = {"Content-Disposition": f'attachment; filename="rllm-{name}.html"'}
        return Response(text, media_type=MEDIA_TYPES[".html"], headers=headers)


async def _static(request: Request) -> Response:
    return _file_response(request.path_params["name"])


def _json(value: object, status: int = 200) -> Response:
    text = json.dumps(value, default=str, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Response(text, status_code=status, media_type="application/json")


def _file_response(name: str) -> Response:
    path = static_names().get(name)
    if path is None or path.suffix not in MEDIA_TYPES:
        return PlainTextResponse("There is no such file.", status_code=404)
    return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix])
