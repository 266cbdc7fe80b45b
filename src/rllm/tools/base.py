"""A tool: what a model is told about it, and what happens when it calls it.

    typed function ──@tool──► Tool ──.json──► the prompt
                               ▲
    arguments of a call ───────┴──► forward(**arguments) ──► ToolOutput ──.text──► the tool's message

Three kinds of failure are kept apart. What the model did wrong is a ToolError and goes back to it as text. A
bug in a tool is an exception, which MultiTool tells the model too, and logs. What failed around the tool is
an RllmError, such as a sandbox that does not start: it is nobody's answer, so it flies and fails the episode.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from rllm.errors import ConfigError
from rllm.tools.schemas import FunctionSchema, function_schema
from rllm.tools.threads import in_thread
from rllm.types.messages import Message

ENTRY_POINTS = "rllm.tools"
"""Group in which installed packages name their tools."""
MAX_NAME_CHARS = 64
"""The length of a tool's name that providers take."""


class ToolError(Exception):
    """Raised by a tool for what the model did wrong; the message is what the model reads.

    `metadata` goes into the ToolOutput, for metrics and for people.
    """

    def __init__(self, message: str, **metadata: Any) -> None:
        super().__init__(message)
        self.metadata = metadata


@dataclass(kw_only=True, slots=True)
class ToolOutput:
    """The result of one call."""

    name: str
    output: Any = None
    """The tool's return value; after an error, its output until then."""
    error: str | None = None
    """The error, in words for the model."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """For people and metrics; the model does not see it."""
    id: str = ""
    """The id of the call."""

    @property
    def text(self) -> str:
        """The text that the model reads: always text that can be encoded and stored."""
        if self.error is None:
            return self.said
        return "\n".join(part for part in (self.said, _encodable(f"Error: {self.error}")) if part)

    @property
    def said(self) -> str:
        """`output` as text."""
        return _encodable(self.output if isinstance(self.output, str) else _json_text(self.output))

    def message(self) -> Message:
        """The message of role `tool` that answers the call."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": self.text}


def _json_text(value: Any) -> str:
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return str(value)


def _encodable(text: str) -> str:
    """Half a character (a lone surrogate) becomes a question mark: no encoder downstream takes one."""
    return text.encode("utf-8", "replace").decode("utf-8")


class Tool:
    """Something that a model may call.

    Make one with `@tool`, with `Tool(function=…)`, or derive a class and write `forward` (or `async_forward`)
    with typed parameters: name, description and schema come from it and its docstring, where the class does
    not set `name`, `description` and `parameters` itself.
    """

    name: str = ""
    description: str = ""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    timeout_s: float | None = None
    """A call's time limit; None takes MultiTool's."""

    def __init__(
        self,
        name: str = "",
        description: str = "",
        *,
        function: Callable[..., Any] | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Raises ConfigError for a name that no provider takes and for annotations without a JSON schema."""
        self._function = function
        schema: FunctionSchema | None = None
        if parameters is None and not hasattr(type(self), "parameters"):
            schema = function_schema(function or self._own_function())
        self.name = (
            name or self.name or (_callable_name(function) if function else _snake(type(self).__name__))
        )
        self.description = (
            description
            or self.description
            or (schema.description if schema else inspect.getdoc(function) or "")
        )
        if parameters is not None or schema is not None:
            self.parameters = parameters if parameters is not None else schema.parameters  # pyright: ignore[reportOptionalMemberAccess]
        if timeout_s is not None:
            self.timeout_s = timeout_s
        self._written = schema
        _check(self)

    @property
    def json(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as chat templates and servers take it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    def forward(self, *args: Any, **arguments: Any) -> Any:
        """One call: returns a value or a ToolOutput, raises ToolError for what the model did wrong.

        Runs in a thread, several at once.
        """
        if self._function is not None:
            # This thread has no event loop, so what is to be awaited gets one of its own.
            value = self._function(*args, **arguments)
            return asyncio.run(_await_value(value)) if inspect.isawaitable(value) else value
        if type(self).async_forward is not Tool.async_forward:
            return asyncio.run(self.async_forward(*args, **arguments))
        raise NotImplementedError(f"{type(self).__name__} needs `forward` or `async_forward`.")

    async def async_forward(self, *args: Any, **arguments: Any) -> Any:
        """The same without blocking: in a thread, unless a tool knows better."""
        if self._function is not None and inspect.iscoroutinefunction(self._function):
            return await self._function(*args, **arguments)
        return await in_thread(lambda: self.forward(*args, **arguments))

    def __call__(self, *args: Any, **arguments: Any) -> ToolOutput:
        """One call as a ToolOutput. What the model did wrong is its `error`; a bug in the tool flies."""
        try:
            return self.output_of(self.forward(*args, **arguments))
        except ToolError as error:
            return self.failed(error)

    def read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """JSON arguments as `forward` takes them: dataclasses, enums and tuples where it is so annotated."""
        return dict(arguments) if self._written is None else self._written.python_values(arguments)

    def output_of(self, value: Any) -> ToolOutput:
        return value if isinstance(value, ToolOutput) else ToolOutput(name=self.name, output=value)

    def failed(self, error: ToolError) -> ToolOutput:
        return ToolOutput(name=self.name, error=str(error), metadata=dict(error.metadata))

    def close(self) -> None:
        """Give back what the tool holds, such as a sandbox. May be called twice."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def _own_function(self) -> Callable[..., Any]:
        own = type(self)
        if own.forward is Tool.forward and own.async_forward is Tool.async_forward:
            raise ConfigError(
                f"{own.__name__} says nothing about its parameters; write `forward` with typed parameters, "
                "or give `function` or `parameters`."
            )
        return self.async_forward if own.forward is Tool.forward else self.forward


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str = "", description: str = "", timeout_s: float | None = None
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    description: str = "",
    timeout_s: float | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """A tool from a typed function, whose docstring is what the model is told.

    `@tool` or `@tool(name=…)`. The function may be a coroutine.
    """

    def make(of: Callable[..., Any]) -> Tool:
        return Tool(name, description, function=of, timeout_s=timeout_s)

    return make if function is None else make(function)


async def _await_value(value: Any) -> Any:
    return await value


def _callable_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _snake(name: str) -> str:
    parts = [
        "_" + sign.lower() if sign.isupper() and place else sign.lower() for place, sign in enumerate(name)
    ]
    return "".join(parts)


def _check(of: Tool) -> None:
    signs = of.name.replace("_", "").replace("-", "")
    if not (signs.isascii() and signs.isalnum() and len(of.name) <= MAX_NAME_CHARS):
        raise ConfigError(
            f"A tool is called {of.name!r}; use at most {MAX_NAME_CHARS} letters, digits, `_` and `-`."
        )
    if of.timeout_s is not None and not 0 < of.timeout_s < float("inf"):
        raise ConfigError(
            f"`timeout_s` of the tool `{of.name}` is {of.timeout_s}; it must be above 0 seconds."
        )
