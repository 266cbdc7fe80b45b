"""What servers answer becomes text for the model, and nothing of it vanishes in silence."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the `mcp` extra is not installed")

from mcp.server.lowlevel import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from rllm.errors import ConfigError
from rllm.tools import MultiTool
from rllm.tools.mcp import MCPPool, MCPServer, MCPServerError, mcp_tools
from rllm.types.messages import ToolCall

ODD = MCPServer(command=[sys.executable, str(Path(__file__).with_name("mcp_odd_server.py"))], shared=True)


@pytest.fixture(scope="module")
def odd() -> Any:
    with MCPPool(ODD) as pool, pool.lease() as lease:
        yield MultiTool(mcp_tools(lease))


def test_all_pages_of_the_list_are_read_and_the_schema_is_the_servers(odd: MultiTool) -> None:
    assert odd.names == ["remember", "variable", "sleep", "die", "refuse", "spawn", "picture", "structured"]
    assert odd.json[0]["function"] == {
        "name": "remember",
        "description": "The tool remember.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    }


def test_images_files_and_links_are_named_with_type_and_size(odd: MultiTool) -> None:
    output = odd.call(ToolCall(name="picture"))
    assert output.text.splitlines() == [
        "here:",
        "[image: image/png, 8 bytes, not shown]",
        "[resource note://1]",
        "a note",
        "[resource file://2: a/b, 3 bytes, not shown]",
        "[link to file://3: third]",
    ]
    assert output.metadata["media"] == [
        {"mime_type": "image/png", "base64": "iVBORw0KGgo="},
        {"mime_type": "a/b", "base64": "AAEC"},
    ]


def test_structured_content_is_text_where_there_is_no_other(odd: MultiTool) -> None:
    output = odd.call(ToolCall(name="structured"))
    assert output.text == '{"answer": 42}'
    assert output.metadata["structured"] == {"answer": 42}


def test_what_the_server_calls_an_error_goes_back_to_the_model(odd: MultiTool) -> None:
    assert odd.call(ToolCall(name="refuse")).error == "not today"
    assert "word" in (odd.call(ToolCall(name="remember")).error or "")


def server_of(tools: list[Tool], answer: str = "fine") -> Server[Any]:
    async def listed(_context: Any, _params: Any) -> ListToolsResult:
        return ListToolsResult(tools=tools)

    async def called(_context: Any, _params: Any) -> CallToolResult:
        return CallToolResult(content=[TextContent(text=answer)])

    return Server("own", on_list_tools=listed, on_call_tool=called)


def test_names_that_providers_refuse_are_shown_with_underscores_and_called_by_their_own() -> None:
    server = server_of([Tool(name="files.read/all", input_schema={"type": "object"})])
    with MCPPool(MCPServer(target=server, prefix="fs-")) as pool, pool.lease() as lease:
        (tool,) = mcp_tools(lease)
        assert (tool.name, tool.server_name) == ("fs-files_read_all", "files.read/all")
        assert tool().output == "fine"


def test_only_the_tools_that_were_asked_for_are_offered() -> None:
    tools = [Tool(name=name, input_schema={"type": "object"}) for name in ("a", "b")]
    with MCPPool(MCPServer(target=server_of(tools), only=("b",))) as pool, pool.lease() as lease:
        assert [each.name for each in mcp_tools(lease)] == ["b"]
    says = pytest.raises(MCPServerError, match=r"`only` names 'c'.* it has a, b")
    with MCPPool(MCPServer(target=server_of(tools), only=("c",))) as pool, pool.lease() as lease, says:
        mcp_tools(lease)


def test_a_list_without_end_is_cut_off() -> None:
    endless = MCPServer(command=[*ODD.words, "endless"], list_timeout_s=0.5)
    says = pytest.raises(MCPServerError, match=r"within 0\.5 s|1000 pages")
    with MCPPool(endless) as pool, pool.lease() as lease, says:
        mcp_tools(lease)


def test_a_server_that_cannot_be_meant_is_refused(subtests: pytest.Subtests) -> None:
    for given, says in [
        ({}, "neither command, url nor target; give one"),
        ({"command": "a", "url": "http://b"}, "command and url"),
        ({"url": "localhost:80"}, "begins with http"),
        ({"comand": "a"}, "did you mean `command`"),
        ({"command": "a", "call_timeout_s": 0}, "`call_timeout_s` is 0"),
        ({"command": "a", "max_sessions": 2, "warm": 3}, "`warm` not above 2"),
        ({"url": "http://b", "env": {"A": "b"}}, "`env` does nothing"),
    ]:
        with subtests.test(given=given, says=says), pytest.raises(ConfigError, match=says):
            MCPServer.from_dict(given, "mine")


def test_a_target_that_leads_nowhere_is_refused() -> None:
    nowhere = MCPServer(target="rllm.tools.nowhere:x")
    with MCPPool(nowhere) as pool, pytest.raises(ConfigError, match="leads nowhere"):
        pool.lease()
