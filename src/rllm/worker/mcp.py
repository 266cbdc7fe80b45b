"""Workers as the tools of an MCP server: any MCP client calls them by their contract.

tools/list  ──► one tool a worker: its purpose, its input and output schema
tools/call  ──► one run ──► the outputs as structured content; what is not `ok` is an error with the response
a cancelled call ends its run, unless another call waits for it
"""

from typing import Any

from rllm.errors import MissingExtraError
from rllm.worker.host import WorkerHost


def worker_tools_server(host: WorkerHost) -> Any:
    """A server object of the SDK over the workers of an open host. It keeps nothing between calls."""
    try:
        from mcp import types
        from mcp.server.lowlevel import Server
    except ModuleNotFoundError as error:
        raise MissingExtraError("mcp", "mcp") from error

    async def list_tools(context: Any, params: Any) -> Any:
        tools = [
            types.Tool(
                name=name,
                title=worker.contract.name or None,
                description=worker.contract.purpose,
                input_schema=dict(worker.contract.input_schema.document),
                output_schema=dict(worker.contract.output_schema.document),
            )
            for name, worker in host.workers.items()
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(context: Any, params: Any) -> Any:
        worker = host.workers.get(params.name)
        if worker is None:
            text = f"There is no worker {params.name!r}; there are {', '.join(host.workers)}."
            return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)
        response = await worker.run(params.arguments or {}, ends_with_caller=True)
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=response.body.decode())],
            structured_content=response.outputs,
            is_error=not response.is_ok,
        )

    return Server("rllm-workers", on_list_tools=list_tools, on_call_tool=call_tool)


async def serve_stdio(host: WorkerHost) -> None:
    """Answer the client at stdin and stdout until it closes them."""
    server = worker_tools_server(host)
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())
