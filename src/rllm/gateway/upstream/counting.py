"""The number of tokens in a request, as the server that would answer it counts.

CallRequest ──► /tokenize (vLLM), /v1/messages/count_tokens (Anthropic) ──► tokens, or a 400 that says why
"""

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.dialects.base import UpstreamDialect
from rllm.gateway.upstream.http import Dropped, HttpClient, Unreachable
from rllm.gateway.upstream.pool import Upstream
from rllm.gateway.upstream.server_facts import Known
from rllm.types.wire import CallRequest, Dialect

_COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking")
_TOKENIZED = ("model", "messages", "prompt", "tools")
_NOT_THERE = (404, 405, 501)


async def counted_tokens(
    request: CallRequest, dialect: UpstreamDialect, upstream: Upstream, facts: Known, http: HttpClient
) -> int:
    """Raises RequestRefused: 400 where the server does not count, 503 when it cannot be reached."""
    count = await _count(request, dialect, upstream, facts, http) if facts.counts_tokens else None
    if count is None:
        raise RequestRefused(
            f"The upstream {upstream.url} cannot count tokens: it has no /tokenize, as vLLM has, and no "
            "/v1/messages/count_tokens. Send the request itself, and read `usage` in the answer.",
            code="count_tokens_unsupported",
        )
    return count


async def _count(
    request: CallRequest, dialect: UpstreamDialect, upstream: Upstream, facts: Known, http: HttpClient
) -> int | None:
    body = dialect.body(request, capture=frozenset())
    if dialect.name is Dialect.MESSAGES:
        url, names = f"{upstream.url}/messages/count_tokens", _COUNTED
    else:
        url, names = f"{upstream.root}/tokenize", _TOKENIZED
    try:
        status, reply = await http.ask(url, {name: body[name] for name in names if name in body})
    except (Unreachable, Dropped, TimeoutError) as error:
        raise unreachable(upstream.url, error) from error
    if status in _NOT_THERE:
        facts.counts_tokens = False
        return None
    if not isinstance(reply, dict) or status != 200:
        raise dialect.error_of(status, b"" if reply is None else orjson.dumps(reply), {})
    count = reply.get("count", reply.get("input_tokens"))
    return count if type(count) is int else None


def unreachable(url: str, why: Exception) -> RequestRefused:
    return RequestRefused(
        f"The upstream {url} failed: {why}.", status=503, kind="server_error", code="upstream_unreachable"
    )
