"""Which part of the gateway a path means: the request line in, a Route out.

    [/k/TOKEN] [/sessions/SID] /v1/ENDPOINT        model calls
    [/k/TOKEN] /sessions, /sessions/SID[/traces]   sessions and what was captured
    /, /health, /metrics, /openapi.json
    /traces/…, /admin/…, /health/workers           what programs for the published gateway ask for

A session id may hold slashes and percent-escapes, so it ends at the last `/v1/` that an endpoint follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from rllm.errors import RequestRefused
from rllm.types.wire import Dialect

DEFAULT_SESSION = "default"


class Endpoint(StrEnum):
    CALL = "call"
    COUNT_TOKENS = "count_tokens"
    MODELS = "models"
    MODEL = "model"
    RESPONSE = "response"
    """One that was answered before."""
    ROOT = "root"
    """The routes that clients probe to see whether somebody is there."""
    SESSIONS = "sessions"
    SESSION = "session"
    TRACES = "traces"
    HEALTH = "health"
    METRICS = "metrics"
    OPENAPI = "openapi"
    TRACE = "trace"
    """One call, by the id of its completion. This and what follows are routes of the published gateway."""
    TRACE_QUERY = "trace_query"
    SESSION_DELETION = "session_deletion"
    """The deletion of several sessions at once."""
    WEIGHT_VERSION = "weight_version"
    WORKERS = "workers"
    WORKER = "worker"
    WORKER_HEALTH = "worker_health"
    FLUSH = "flush"
    RELOAD = "reload"


@dataclass(slots=True, frozen=True)
class Route:
    endpoint: Endpoint
    dialect: Dialect = Dialect.CHAT
    """Whose errors the client understands."""
    session: str = ""
    """Empty where the path names none."""
    token: str = ""
    model: str = ""
    response: str = ""
    item: str = ""
    """The trace or the worker that a published path names."""


PUBLISHED = frozenset(
    (
        *(Endpoint.TRACE, Endpoint.TRACE_QUERY, Endpoint.SESSION_DELETION, Endpoint.WEIGHT_VERSION),
        *(Endpoint.WORKERS, Endpoint.WORKER, Endpoint.FLUSH, Endpoint.RELOAD),
    )
)
"""The routes that `rllm.gateway.server.published` answers, with a token."""

_METHODS = {
    Endpoint.CALL: ("POST",),
    Endpoint.COUNT_TOKENS: ("POST",),
    Endpoint.SESSIONS: ("GET", "HEAD", "POST"),
    Endpoint.SESSION: ("GET", "HEAD", "DELETE"),
    Endpoint.RESPONSE: ("GET", "HEAD", "DELETE"),
    Endpoint.TRACE_QUERY: ("POST",),
    Endpoint.SESSION_DELETION: ("POST",),
    Endpoint.WEIGHT_VERSION: ("GET", "HEAD", "POST"),
    Endpoint.WORKERS: ("GET", "HEAD", "POST"),
    Endpoint.WORKER: ("DELETE",),
    Endpoint.FLUSH: ("POST",),
    Endpoint.RELOAD: ("POST",),
}
_READ_ONLY = ("GET", "HEAD")

_ENDPOINTS = {
    "chat/completions": (Endpoint.CALL, Dialect.CHAT),
    "completions": (Endpoint.CALL, Dialect.COMPLETIONS),
    "responses": (Endpoint.CALL, Dialect.RESPONSES),
    "messages": (Endpoint.CALL, Dialect.MESSAGES),
    "messages/count_tokens": (Endpoint.COUNT_TOKENS, Dialect.MESSAGES),
    "models": (Endpoint.MODELS, Dialect.CHAT),
}
_FIXED = {
    "": Endpoint.ROOT,
    "/v1": Endpoint.ROOT,
    "/health": Endpoint.HEALTH,
    "/metrics": Endpoint.METRICS,
    "/openapi.json": Endpoint.OPENAPI,
    "/sessions": Endpoint.SESSIONS,
    "/traces/query": Endpoint.TRACE_QUERY,
    "/health/workers": Endpoint.WORKER_HEALTH,
    "/admin/weight_version": Endpoint.WEIGHT_VERSION,
    "/admin/workers": Endpoint.WORKERS,
    "/admin/flush": Endpoint.FLUSH,
    "/admin/reload": Endpoint.RELOAD,
}
_NAMED = {"/traces/": Endpoint.TRACE, "/admin/workers/": Endpoint.WORKER}
"""Beginnings of published paths that end with a name."""
_DELETION = "/sessions/batch_delete"
_SESSIONS, _TRACES, _V1 = "/sessions/", "/traces", "/v1/"
_MODELS, _RESPONSES, _EMBEDDINGS = "models/", "responses/", "/v1/embeddings"
_MAX_SESSION_CHARS = 512
_SESSION_HEADERS = ("x-rllm-session", "x-session-id", "session-id")


class MethodNotAllowed(RequestRefused):
    """405, with what the path does allow."""

    def __init__(self, method: str, path: str, methods: tuple[str, ...]) -> None:
        super().__init__(
            f"{method} is not allowed on {path}; use {' or '.join(methods)}.",
            status=405,
            code="method_not_allowed",
        )
        self.allow_header = ", ".join(methods)


def route_of(method: str, target: str) -> Route:
    """Raises RequestRefused: 404 for an unknown path, 405 for a wrong method, 400 for a bad session."""
    path, token = _without_token(_path_of(target))
    if path == _DELETION and method == "POST":  # a session may have that name: it is never posted to
        return Route(Endpoint.SESSION_DELETION, token=token)
    route = _route(path, token)
    if route is None and path.endswith(_EMBEDDINGS):
        raise RequestRefused(
            "This gateway answers with text and makes no embeddings; ask a server of an embedding model.",
            status=404,
            code="embeddings_not_served",
        )
    if route is None:
        raise RequestRefused(
            f"There is nothing at {path or '/'}; this gateway answers "
            f"{', '.join(f'/v1/{tail}' for tail in _ENDPOINTS)}, also behind /sessions/SESSION.",
            status=404,
            code="not_found",
        )
    methods = _METHODS.get(route.endpoint, _READ_ONLY)
    if method not in methods:
        raise MethodNotAllowed(method, path or "/", methods)
    return route


def dialect_of(target: str) -> Dialect:
    """Whose errors a client understands that asked for something that is not there."""
    path = _path_of(target)
    for tail, (_, dialect) in _ENDPOINTS.items():
        if path.endswith(f"/{tail}"):
            return dialect
    return Dialect.CHAT


def session_id(text: str, where: str) -> str:
    """A session id as it may be. Raises RequestRefused (400) that says where it stood."""
    try:
        text = text.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        text = ""
    if not text or len(text) > _MAX_SESSION_CHARS or text in (".", "..") or not _is_printable(text):
        raise RequestRefused(
            f"The session id in {where} has {len(text)} characters; use 1 to {_MAX_SESSION_CHARS} "
            "printable ones in UTF-8, and not `.` or `..`.",
            code="invalid_session",
            param="session_id",
        )
    return text


def session_of(route: Route, headers: Mapping[str, str], fields: Mapping[str, Any]) -> str:
    """The session that the path names, else a header, else the body, else the default one."""
    if route.session:
        return route.session
    for name in _SESSION_HEADERS:
        if session_name := headers.get(name):
            return session_id(session_name, f"the header `{name}`")
    session_name = fields.get("session_id")
    if session_name is None:
        return DEFAULT_SESSION
    if not isinstance(session_name, str):
        raise RequestRefused(
            f"`session_id` is {str(session_name)[:80]!r}; it must be text.", param="session_id"
        )
    return session_id(session_name, "`session_id`")


def _is_printable(text: str) -> bool:
    return text.isprintable() or not any(ord(char) < 32 or ord(char) == 127 for char in text)


def _path_of(target: str) -> str:
    path = target.partition("?")[0].partition("#")[0]
    if not path.startswith("/"):  # the absolute form, as sent to proxies
        path = "/" + path.partition("://")[2].partition("/")[2]
    return path.rstrip("/")


def _without_token(path: str) -> tuple[str, str]:
    if not path.startswith("/k/"):
        return path, ""
    token, slash, rest = path[3:].partition("/")
    return f"{slash}{rest}", unquote(token, errors="replace")


def _route(path: str, token: str) -> Route | None:
    if path in _FIXED:
        return Route(_FIXED[path], token=token)
    for beginning, endpoint in _NAMED.items():
        item = path.removeprefix(beginning)
        if item != path and "/" not in item:
            return Route(endpoint, token=token, item=unquote(item, errors="replace"))
    # From the last one on: a session id may hold `/v1/` itself, and what no endpoint follows is part of it.
    place = path.rfind(_V1)
    while place >= 0:
        route = _under_v1(path[:place], path[place + len(_V1) :].strip("/"), token)
        if route is not None:
            return route
        place = path.rfind(_V1, 0, place)
    if not path.startswith(_SESSIONS) or _V1 in path:
        return None
    session = path[len(_SESSIONS) :]
    if session.endswith(_TRACES):
        return Route(Endpoint.TRACES, session=_from_path(session.removesuffix(_TRACES)), token=token)
    return Route(Endpoint.SESSION, session=_from_path(session.removesuffix("/v1")), token=token)


def _under_v1(before: str, tail: str, token: str) -> Route | None:
    session = ""
    if before:
        if not before.startswith(_SESSIONS):
            return None
        session = before[len(_SESSIONS) :]
    if tail in _ENDPOINTS:
        endpoint, dialect = _ENDPOINTS[tail]
        return Route(endpoint, dialect, _from_path(session) if before else "", token)
    if tail.startswith(_MODELS):
        model = unquote(tail[len(_MODELS) :], errors="replace")
        return Route(Endpoint.MODEL, session=_from_path(session) if before else "", token=token, model=model)
    response = tail.removeprefix(_RESPONSES)
    if response != tail and response and "/" not in response:
        owner = _from_path(session) if before else ""
        return Route(Endpoint.RESPONSE, Dialect.RESPONSES, owner, token, response=unquote(response))
    return None


def _from_path(part: str) -> str:
    try:
        return session_id(unquote(part, errors="strict"), "the path")
    except UnicodeDecodeError:
        return session_id("", "the path")
