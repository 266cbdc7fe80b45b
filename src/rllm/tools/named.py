"""The tools that come with rLLM, by name. Each is imported when it is asked for.

"calculator" ──► rllm.tools.calculator:Calculator ──(**options)──► Tool
"""

import importlib
import inspect
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from rllm.errors import ConfigError
from rllm.tools.base import ENTRY_POINTS, Tool
from rllm.types.names import object_named

TOOLS: dict[str, str] = {
    "calculator": "rllm.tools.calculator:Calculator",
    "python": "rllm.tools.python:PythonInterpreter",
    "shell": "rllm.tools.shell:Shell",
    "view_file": "rllm.tools.files:FileViewer",
    "edit_file": "rllm.tools.files:FileEditor",
    "local_search": "rllm.tools.local_search:LocalSearch",
    "tavily_search": "rllm.tools.web:TavilySearch",
    "tavily_extract": "rllm.tools.web:TavilyExtract",
    "serper_search": "rllm.tools.web:SerperSearch",
    "firecrawl": "rllm.tools.web:Firecrawl",
}
"""name -> module:class."""
_PUBLISHED = {"google_search": "serper_search"}
"""Published name -> ours, which asks for the same results."""


def tool_named(name: str, **options: Any) -> Tool:
    """A new tool: a built-in one, an entry point of the group `rllm.tools`, or `package.module:NAME`.

    What is named may be a Tool, a class of tools or a typed function. Raises ConfigError for a name or an
    option that there is not.
    """
    tool = _tool_class(_own_name(name))
    if isinstance(tool, Tool):
        if options:
            raise ConfigError(
                f"`{name}` is a tool already, so it takes no options such as `{next(iter(options))}`."
            )
        return tool
    if inspect.isclass(tool) and issubclass(tool, Tool):
        _check_options(name, tool, options)
        return tool(**options)
    if callable(tool) and not options:
        return Tool(function=tool)
    raise ConfigError(f"`{name}` is {tool!r:.80}; a tool is a Tool, a class of tools or a typed function.")


def _own_name(name: str) -> str:
    """The built-in tool of a name with `-`, or of a published one; any other name as it is."""
    own = name.replace("-", "_")
    own = _PUBLISHED.get(own, own)
    return own if own in TOOLS else name


def _tool_class(name: str) -> Any:
    if name in TOOLS:
        module, _, attribute = TOOLS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if ":" not in name and name not in (
        names := [*TOOLS, *(each.name for each in entry_points(group=ENTRY_POINTS))]
    ):
        nearest = get_close_matches(name, names, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there is {', '.join(names)}."
        raise ConfigError(f"There is no tool `{name}`; {hint}")
    return object_named(name, group=ENTRY_POINTS, what="tool")


def _check_options(name: str, kind: type[Tool], options: dict[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters
    unknown = [option for option in options if option not in parameters]
    if unknown:
        nearest = get_close_matches(unknown[0], parameters, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"it has {', '.join(parameters) or 'none'}."
        raise ConfigError(f"The tool `{name}` has no option `{unknown[0]}`; {hint}")
