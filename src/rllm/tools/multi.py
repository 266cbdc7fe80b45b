"""Several tools as one: calls in, outputs out, in order, whatever each of them does.

    calls ──► which tool? ──► arguments by its schema? ──► forward, side by side ──► clipped ──► outputs
                  └─────────────── no: an output whose error says what is wrong ──────────────────┘

An unknown tool, bad arguments, an exception and a timeout are outputs with an `error`. An RllmError flies: it
says that something around the tools failed, which is nothing that a model could mend or be paid for.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rllm.errors import ConfigError, RllmError
from rllm.tools.base import Tool, ToolError, ToolOutput
from rllm.tools.clipping import MIN_LIMIT_CHARS, clip
from rllm.tools.named import tool_named
from rllm.tools.threads import start_in_thread
from rllm.tools.values import problem_of
from rllm.types.messages import ToolCall

_log = logging.getLogger(__name__)
_NOTICE_S = 0.1
"""As long a wait may be deaf to what is raised in its thread, such as the end of a cancelled run."""

AnyCall = ToolCall | Mapping[str, Any]
"""A call that was read, or one in OpenAI's form, `{"id", "function": {"name", "arguments"}}`, whose arguments
may be the text that the model wrote."""


@dataclass(kw_only=True, slots=True)
class _Ready:
    """A call that may be made."""

    tool: Tool
    arguments: dict[str, Any]
    id: str
    timeout_s: float
    started_s: float
    ended_s: float | None = None


class MultiTool:
    """Calls of many tools. Safe from several threads as far as its tools are."""

    def __init__(
        self,
        tools: Iterable[Tool | str | Callable[..., Any]],
        *,
        timeout_s: float = 30.0,
        max_chars: int = 8192,
        max_parallel: int = 16,
    ) -> None:
        """`tools` may be tools, names of built-in ones (see `rllm.tools.named`) and typed functions.

        `timeout_s` holds for each call of a tool without its own, `max_chars` for each output's text;
        `max_parallel` calls run at once. Raises ConfigError for two tools of one name.
        """
        self.timeout_s = timeout_s
        self.max_chars = max_chars
        self.max_parallel = max_parallel
        if not 0 < timeout_s < float("inf"):
            raise ConfigError(f"`timeout_s` is {timeout_s}; it must be above 0 seconds.")
        if max_chars < 4 * MIN_LIMIT_CHARS:
            raise ConfigError(f"`max_chars` is {max_chars}; it must be at least {4 * MIN_LIMIT_CHARS}.")
        if max_parallel < 1:
            raise ConfigError(f"`max_parallel` is {max_parallel}; it must be at least 1.")
        self._tools: dict[str, Tool] = {}
        for each in map(_as_tool, tools):
            if each.name in self._tools:
                raise ConfigError(f"Two tools are called `{each.name}`; give one of them another name.")
            self._tools[each.name] = each

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    @property
    def tools(self) -> list[Tool]:
        return list(self._tools.values())

    @property
    def json(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's form."""
        return [each.json for each in self._tools.values()]

    def call(self, call: AnyCall) -> ToolOutput:
        """Make one call."""
        return self.call_many([call])[0]

    def call_many(self, calls: Sequence[AnyCall]) -> list[ToolOutput]:
        """Make calls side by side; outputs come in the order of the calls. Blocks."""
        calls_or_outputs = [self._prepare(call) for call in calls]
        outputs: list[ToolOutput] = []
        for begin in range(0, len(calls_or_outputs), self.max_parallel):
            running = [_begin(each) for each in calls_or_outputs[begin : begin + self.max_parallel]]
            outputs += [self._wait_for(each) for each in running]
        return outputs

    async def async_call(self, call: AnyCall) -> ToolOutput:
        return (await self.async_call_many([call]))[0]

    async def async_call_many(self, calls: Sequence[AnyCall]) -> list[ToolOutput]:
        """The same for coroutines."""
        turn = asyncio.Semaphore(self.max_parallel)

        async def one(call: AnyCall) -> ToolOutput:
            async with turn:
                return await self._await_output(self._prepare(call))

        outputs = await asyncio.gather(*map(one, calls), return_exceptions=True)
        for each in outputs:
            if isinstance(each, BaseException):  # no call is left running behind an error that flies
                raise each
        return [each for each in outputs if isinstance(each, ToolOutput)]

    def close(self) -> None:
        """Close every tool. May be called twice."""
        for each in self._tools.values():
            each.close()

    def __enter__(self) -> "MultiTool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def _prepare(self, call: AnyCall) -> _Ready | ToolOutput:
        """The call as it may be made, or what the model did wrong."""
        name, arguments, call_id = _parts(call)
        of = self._tools.get(name)
        if of is None:
            return _refuse(name, self._unknown(name), "unknown_tool", call_id)
        try:
            arguments = of.read_arguments(_require_arguments(of, arguments))
        except ToolError as error:
            return _refuse(name, str(error), "bad_arguments", call_id)
        limit_s = of.timeout_s or self.timeout_s
        return _Ready(tool=of, arguments=arguments, id=call_id, timeout_s=limit_s, started_s=time.monotonic())

    def _unknown(self, name: str) -> str:
        nearest = get_close_matches(name, self._tools, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"the tools are: {', '.join(self._tools)}."
        return f"There is no tool `{name[:80]}`; {hint}" if self._tools else "There are no tools."

    def _wait_for(self, started_call: "tuple[_Ready, Future[Any]] | ToolOutput") -> ToolOutput:
        if isinstance(started_call, ToolOutput):
            return started_call
        ready, future = started_call
        ends_s = ready.started_s + ready.timeout_s
        while not future.done() and (left_s := ends_s - time.monotonic()) > 0:
            wait([future], timeout=min(left_s, _NOTICE_S))
        # Asked before the result, because the call may end between the two questions.
        has_ended = future.done()
        try:
            # SystemExit as well, because one that a tool raises would end the caller.
            output = ready.tool.output_of(future.result(timeout=0))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the model, or raised again
            output = _failure(ready, error, timed_out=not has_ended and isinstance(error, TimeoutError))
        return self._finish(ready, output)

    async def _await_output(self, ready: _Ready | ToolOutput) -> ToolOutput:
        if isinstance(ready, ToolOutput):
            return ready
        limit = asyncio.timeout(ready.timeout_s)
        try:
            async with limit:
                output = ready.tool.output_of(await ready.tool.async_forward(**ready.arguments))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the model, or raised again
            output = _failure(ready, error, timed_out=limit.expired())
        return self._finish(ready, output)

    def _finish(self, ready: _Ready, output: ToolOutput) -> ToolOutput:
        """With the call's id, and short enough to show."""
        output.id = ready.id
        output.metadata["duration_s"] = (ready.ended_s or time.monotonic()) - ready.started_s
        _clip(output, self.max_chars)
        return output


def _clip(output: ToolOutput, max_chars: int) -> None:
    """Shorten what is too long to show; an error keeps at least half of the room."""
    length = len(output.text)
    if length <= max_chars:
        return
    output.metadata["num_clipped_chars"] = length - max_chars
    if output.error is None:
        output.output = clip(output.text, max_chars)
        return
    text = output.said
    output.error = clip(output.error, max_chars - len(_BEFORE_ERROR) - min(len(text), max_chars // 2))
    room = max_chars - len(f"{_BEFORE_ERROR}{output.error}")
    output.output = clip(text, room) if text else None


_BEFORE_ERROR = "\nError: "


def _refuse(name: str, error: str, reason: str, call_id: str) -> ToolOutput:
    """A call that was not made; `reason` is for metrics."""
    return ToolOutput(name=name, error=error, metadata={"refused": reason}, id=call_id)


def _failure(ready: _Ready, error: Exception | SystemExit, *, timed_out: bool) -> ToolOutput:
    """The output that tells the model of an exception. Raises it again when it is nothing to tell a model."""
    name = ready.tool.name
    if timed_out:
        message = f"`{name}` took longer than {ready.timeout_s:g} s and was given up."
        return ToolOutput(name=name, error=message, metadata={"timed_out": True})
    if isinstance(error, ToolError):
        return ready.tool.failed(error)
    if isinstance(error, RllmError):
        raise error
    _log.warning("The tool `%s` raised.", name, exc_info=error)
    return ToolOutput(
        name=name, error=f"{type(error).__name__}: {_text_of(error)}", metadata={"raised": True}
    )


def _text_of(error: BaseException) -> str:
    """The text of an exception; its class may be a tool's own, and may fail at that too."""
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001 - whatever flies, the model is told of the first
        return f"(and its text could not be had: {type(worse).__name__})"


def _begin(ready: _Ready | ToolOutput) -> "tuple[_Ready, Future[Any]] | ToolOutput":
    if isinstance(ready, ToolOutput):
        return ready

    def run() -> Any:
        try:
            return ready.tool.forward(**ready.arguments)
        finally:
            ready.ended_s = time.monotonic()

    ready.started_s = time.monotonic()
    return ready, start_in_thread(run)


def _as_tool(value: Any) -> Tool:
    if isinstance(value, Tool):
        return value
    if isinstance(value, str):
        return tool_named(value)
    if callable(value):
        return Tool(function=value)
    raise ConfigError(f"{value!r} is no tool; give a Tool, the name of one, or a typed function.")


def _parts(call: AnyCall) -> tuple[str, Any, str]:
    """Name, arguments and id of a call in any of its forms."""
    if isinstance(call, ToolCall):
        return call.name, call.arguments, call.id
    function = call.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else call
    return str(inner.get("name", "")), inner.get("arguments"), str(call.get("id") or "")


def _require_arguments(of: Tool, arguments: Any) -> dict[str, Any]:
    """Arguments that keep to the tool's schema. Raises ToolError that names what does not."""
    if isinstance(arguments, str):
        arguments = _read(of, arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ToolError(
            f"The arguments of `{of.name}` must be a JSON object such as {_example(of)}, "
            f"not {arguments!r:.80}."
        )
    # Parameters that somebody wrote may leave the type out.
    problem = problem_of(arguments, {"type": "object", **of.parameters})
    if problem is not None:
        end = "" if problem.endswith("?") else "."
        raise ToolError(f"Bad arguments for `{of.name}`: {problem}{end}")
    return dict(arguments)


def _read(of: Tool, text: str) -> Any:
    if not text.strip():
        return {}
    try:
        return json.loads(text)
    except RecursionError:
        raise ToolError(f"The arguments of `{of.name}` are nested too deeply.") from None
    except ValueError as error:
        raise ToolError(
            f"The arguments of `{of.name}` are no JSON ({error}): {text[:200]!r}. "
            f"Write an object such as {_example(of)}."
        ) from None


_EXAMPLES: dict[str, Any] = {
    "string": "…",
    "integer": 1,
    "number": 1.5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def _example(of: Tool) -> str:
    """Arguments of the right shape, to show a model what is meant."""
    properties = of.parameters.get("properties") or {}
    values: dict[str, Any] = {}
    for key in of.parameters.get("required") or properties:
        schema = properties.get(key) or {}
        kind = schema.get("type", "string")
        choices = schema.get("enum")
        values[key] = (
            choices[0] if choices else _EXAMPLES.get(kind if isinstance(kind, str) else kind[0], "…")
        )
    return json.dumps(values, ensure_ascii=False)
