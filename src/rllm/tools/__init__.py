"""The tools that agents may call: `@tool`, those that ship, and MultiTool that runs them.

Names are looked up in their files when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm.tools.base import Tool as Tool
    from rllm.tools.base import ToolError as ToolError
    from rllm.tools.base import ToolOutput as ToolOutput
    from rllm.tools.base import tool as tool
    from rllm.tools.calculator import Calculator as Calculator
    from rllm.tools.files import FileEditor as FileEditor
    from rllm.tools.files import FileViewer as FileViewer
    from rllm.tools.local_search import LocalSearch as LocalSearch
    from rllm.tools.mcp import MCPTool as MCPTool
    from rllm.tools.multi import MultiTool as MultiTool
    from rllm.tools.named import tool_named as tool_named
    from rllm.tools.python import PythonInterpreter as PythonInterpreter
    from rllm.tools.shell import Shell as Shell
    from rllm.tools.web import Firecrawl as Firecrawl
    from rllm.tools.web import SerperSearch as SerperSearch
    from rllm.tools.web import TavilyExtract as TavilyExtract
    from rllm.tools.web import TavilySearch as TavilySearch
    from rllm.types.messages import ToolCall as ToolCall

_HOME_OF = {
    "Calculator": "rllm.tools.calculator",
    "FileEditor": "rllm.tools.files",
    "FileViewer": "rllm.tools.files",
    "Firecrawl": "rllm.tools.web",
    "LocalSearch": "rllm.tools.local_search",
    "MCPTool": "rllm.tools.mcp",
    "MultiTool": "rllm.tools.multi",
    "PythonInterpreter": "rllm.tools.python",
    "SerperSearch": "rllm.tools.web",
    "Shell": "rllm.tools.shell",
    "TavilyExtract": "rllm.tools.web",
    "TavilySearch": "rllm.tools.web",
    "Tool": "rllm.tools.base",
    "ToolCall": "rllm.types.messages",
    "ToolError": "rllm.tools.base",
    "ToolOutput": "rllm.tools.base",
    "tool": "rllm.tools.base",
    "tool_named": "rllm.tools.named",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `rllm.tools` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
