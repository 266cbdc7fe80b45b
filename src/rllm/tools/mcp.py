"""Tools that live on MCP servers.

    MCPPool ──lease()──► mcp_tools(lease) ──► [MCPTool, MCPTool, …] ──► MultiTool, ToolEnvironment, your code

The schema is the server's. What the server says is wrong with a call goes back to the model, and so does a
call that took too long; a server that is gone is an MCPServerError, which fails the episode.
"""

import re
from typing import Any

from rllm.errors.redaction import without_keys
from rllm.tools.base import Tool, ToolOutput
from rllm.tools.mcp_content import read_result
from rllm.tools.mcp_sessions import CallRefused, CallTimeout, MCPLease, MCPPool, MCPServer, MCPServerError

__all__ = ["MCPLease", "MCPPool", "MCPServer", "MCPServerError", "MCPTool", "mcp_tools"]

_MAX_NAME_CHARS = 64


class MCPTool(Tool):
    """One tool of an MCP server, called through a lease. `forward` serves threads, `async_forward` loops."""

    def __init__(self, lease: MCPLease, entry: Any) -> None:
        """`entry` is the SDK's description of the tool, as `lease.listed()` has it."""
        self.lease = lease
        self.server_name: str = entry.name
        """The server's own name of it."""
        super().__init__(
            allowed_name(lease.server.prefix + entry.name),
            entry.description or entry.title or "",
            parameters=entry.input_schema,
            timeout_s=lease.server.call_timeout_s + lease.server.connect_timeout_s,
        )

    def forward(self, /, **arguments: Any) -> ToolOutput:
        """One call. Raises MCPServerError when the server is gone."""
        try:
            return self._read(self.lease.call(self.server_name, arguments))
        except (CallTimeout, CallRefused) as error:
            return ToolOutput(name=self.name, error=without_keys(str(error)))

    async def async_forward(self, /, **arguments: Any) -> ToolOutput:
        try:
            return self._read(await self.lease.async_call(self.server_name, arguments))
        except (CallTimeout, CallRefused) as error:
            return ToolOutput(name=self.name, error=without_keys(str(error)))

    def _read(self, result: Any) -> ToolOutput:
        text, metadata = read_result(result)
        text = without_keys(text)
        if result.is_error:
            return ToolOutput(
                name=self.name, error=text or "The tool failed and did not say why.", metadata=metadata
            )
        return ToolOutput(name=self.name, output=text, metadata=metadata)


def mcp_tools(lease: MCPLease) -> list[MCPTool]:
    """The tools of a lease's server, in its order. Raises MCPServerError when it does not list them."""
    return [MCPTool(lease, each) for each in lease.listed()]


async def async_mcp_tools(lease: MCPLease) -> list[MCPTool]:
    return [MCPTool(lease, each) for each in await lease.async_listed()]


def allowed_name(name: str) -> str:
    """MCP allows signs in names that model providers refuse, such as dots: they become underscores."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_MAX_NAME_CHARS]
