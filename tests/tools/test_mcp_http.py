"""MCP over streamable HTTP: sessions of their own, headers, and a server that goes away and comes back."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the `mcp` extra is not installed")

import uvicorn
from mcp.server.mcpserver import Context
from mcp.server.mcpserver import MCPServer as SDKServer

from rllm.tools.mcp import MCPPool, MCPServer, MCPServerError, mcp_tools


def served() -> SDKServer:
    server = SDKServer("over http", log_level="CRITICAL")

    @server.tool(structured_output=False)
    def double(number: int) -> str:
        """Twice a number."""
        return str(2 * number)

    @server.tool(structured_output=False)
    async def header(name: str, context: Context) -> str:
        """A header of the request."""
        return context.request_context.request.headers.get(name, "(none)")  # pyright: ignore[reportOptionalMemberAccess]

    return server


@contextlib.contextmanager
def running(port: int = 0) -> Iterator[int]:
    """Serve in a thread on a port of 127.0.0.1."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    config = uvicorn.Config(served().streamable_http_app(), log_level="critical", timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()


def tools_of(pool: MCPPool) -> Any:
    lease = pool.lease()
    return lease, {each.name: each for each in mcp_tools(lease)}


def test_tools_are_called_over_http_with_the_headers_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "Bearer t")
    with running() as port:
        server = MCPServer(
            url=f"http://127.0.0.1:{port}/mcp",
            headers={"x-given": "explicit"},
            headers_from={"authorization": "OWN_TOKEN"},
        )
        with MCPPool(server) as pool:
            _, tools = tools_of(pool)
            assert tools["double"](number=21).output == "42"
            assert tools["header"](name="x-given").output == "explicit"
            assert tools["header"](name="authorization").output == "[key]", (
                "sent, and hidden in what comes back"
            )


def test_a_server_that_goes_away_fails_the_call_and_is_found_again_when_it_is_back() -> None:
    going = running()
    port = going.__enter__()
    with MCPPool(MCPServer(url=f"http://127.0.0.1:{port}/mcp", connect_timeout_s=5)) as pool:
        _, tools = tools_of(pool)
        assert tools["double"](number=1).output == "2"
        going.__exit__(None, None, None)
        with pytest.raises(MCPServerError, match=r"died .*`double`"):
            tools["double"](number=2)
        with pytest.raises(MCPServerError, match="connection attempts failed"):
            tools["double"](number=3)
        with running(port):
            assert tools["double"](number=4).output == "8"


def test_an_address_where_nobody_listens_is_an_error_at_once() -> None:
    nobody = MCPServer(url="http://127.0.0.1:9/mcp")
    with MCPPool(nobody) as pool, pytest.raises(MCPServerError, match="ConnectError"):
        pool.lease()
