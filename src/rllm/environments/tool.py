"""A task that is worked on with tools: the agent calls them here, until it answers.

    calls   ──► MultiTool, side by side ──► {"tool_outputs": {id: text}}, reward 0
    answer (a text, or a call of `finish`) ──► judge ──► reward, done
    neither within `max_steps` ──► truncated, reward 0

A call that is wrong in any way is answered with an error that the model can read. That the tools themselves
are broken is a failure of the episode and no answer.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rllm.environments.base import BaseEnv, Moved, moved
from rllm.environments.judging import Judge, RewardFn, judge_of
from rllm.environments.multi_turn import shown_question, split_task
from rllm.errors import AgentError, ConfigError
from rllm.tools.base import Tool, ToolOutput
from rllm.tools.multi import MultiTool
from rllm.tools.named import tool_named
from rllm.types.episode import Action
from rllm.types.messages import ToolCall

FINISH = "finish"
"""The call that ends an episode: `{"response": the answer}`."""

UNREADABLE = ""
"""Name of a call that an agent could not read; its arguments are the text."""

AnyTool = Tool | str | Callable[..., Any]
_OWN_KEYS = ("tools", "tool_map", "reward_fn", "max_steps")


class ToolEnvironment(BaseEnv):
    """One task and the tools for it.

    `tools` are names, tools or typed functions; `tool_map` is name -> tool or class of tools, as published
    programs give it. Without a judge (a `reward_fn`, or the task's `grader`) every answer earns 0.
    """

    def __init__(
        self,
        task: dict[str, Any] | None = None,
        tools: Sequence[AnyTool] | None = None,
        tool_map: Mapping[str, Any] | None = None,
        reward_fn: RewardFn | None = None,
        max_steps: int = 10,
    ) -> None:
        if max_steps < 1:
            raise ConfigError(f"`max_steps` is {max_steps}; it must be at least 1.")
        self.task: dict[str, Any] = dict(task or {})
        self.reward_fn = reward_fn
        self.max_steps = max_steps
        self.num_steps = 0
        self._own: list[Tool] = []
        """Made here, so closed here."""
        self.tools = MultiTool(self._make_tools(tools, tool_map))
        self._judge: Judge | None = judge_of(self.task, reward_fn)
        self._over = True

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The question; `info["tools"]` are the schemas of the tools. Nothing is drawn."""
        self.num_steps, self._over = 0, False
        return shown_question(self.task), {"tools": self.tools.json}

    def step(self, action: Any) -> Moved:
        """An answer (text, or a call of `finish`), one call, or a list of calls."""
        if self._over:
            raise AgentError(f"{type(self).__name__}.step: the episode is over; call reset first.")
        action = action.action if isinstance(action, Action) else action
        self.num_steps += 1
        answer = action if isinstance(action, str) else None
        calls = [] if answer is not None else [_in_openai_form(each) for each in _as_list(action)]
        for call in calls:
            if call["function"]["name"] == FINISH:
                answer = _response(call["function"]["arguments"])
        # An answer ends the episode: calls beside it are not made.
        if answer is not None:
            return self._judge_answer(answer)
        if self.num_steps >= self.max_steps:
            self._over = True
            info = {"response": calls, "metadata": {}, "is_correct": False}
            return moved({}, 0.0, info, truncated=True)
        return self._call(calls)

    def close(self) -> None:
        for each in self._own:
            each.close()

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "ToolEnvironment":
        """A task with `tools` or `tool_map`, `max_steps` and `reward_fn` beside it; the task itself is under
        `task`, or all the rest."""
        task, own = split_task(info, _OWN_KEYS)
        return ToolEnvironment(task, **own)

    # ---- one step --------------------------------------------------------------------------------------

    def _judge_answer(self, answer: str) -> Moved:
        self._over = True
        if self._judge is None:
            return {}, 0.0, True, {"response": answer, "metadata": {}}
        verdict = self._judge(answer)
        info = {"response": answer, "metadata": verdict.info, "is_correct": verdict.is_correct}
        return {}, verdict.reward, True, info

    def _call(self, calls: list[dict[str, Any]]) -> Moved:
        _number(calls)
        readable = [call for call in calls if call["function"]["name"] != UNREADABLE]
        outputs = {output.id: output for output in self.tools.call_many(readable)}
        for call in calls:
            if call["id"] not in outputs:
                outputs[call["id"]] = _unread(call)
        texts = {call["id"]: outputs[call["id"]].text for call in calls}
        num_failed = sum(outputs[call["id"]].error is not None for call in calls)
        info = {"response": calls, "metadata": {"num_calls": len(calls), "num_failed_calls": num_failed}}
        return {"tool_outputs": texts}, 0.0, False, info

    def _make_tools(
        self, tools: Sequence[AnyTool] | None, tool_map: Mapping[str, Any] | None
    ) -> list[Tool | Callable[..., Any]]:
        if tools and tool_map:
            raise ConfigError("Both `tools` and `tool_map` are given; give one of them.")
        instances: list[Tool | Callable[..., Any]] = []
        for each in tools or ():
            if isinstance(each, str):
                each = tool_named(each)
                self._own.append(each)
            instances.append(each)
        for name, each in (tool_map or {}).items():
            if isinstance(each, type):
                each = each()
                self._own.append(each)
            if each.name != name:
                raise ConfigError(
                    f"`tool_map` calls a tool `{name}` that calls itself `{each.name}`; use its own name."
                )
            instances.append(each)
        return instances


def _as_list(action: Any) -> list[Any]:
    if isinstance(action, Mapping | ToolCall):
        return [action]
    if isinstance(action, list) and action:
        return action
    raise AgentError(
        f"A tool environment was given {action!r:.200} (a {type(action).__name__}) as an action; give a text "
        'as the answer, or calls such as {"id": "call_0", "function": {"name": "…", "arguments": {}}}.'
    )


def _in_openai_form(call: Any) -> dict[str, Any]:
    """`{"id", "function": {"name", "arguments"}}`, whichever way it was written."""
    if isinstance(call, ToolCall):
        return {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
    if not isinstance(call, Mapping):
        raise AgentError(
            f"A call is {call!r:.200} (a {type(call).__name__}); it must be a ToolCall or a dict."
        )
    inner: Any = call.get("function", call)
    function: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    name = str(function.get("name") or UNREADABLE)
    return {
        "id": str(call.get("id") or ""),
        "function": {"name": name, "arguments": function.get("arguments")},
    }


def _number(calls: list[dict[str, Any]]) -> None:
    """Ids where there are none, or two alike: each output needs one of its own."""
    seen_ids: set[str] = set()
    for number, call in enumerate(calls):
        if not call["id"] or call["id"] in seen_ids:
            call["id"] = next(name for name in _names(f"call_{number}") if name not in seen_ids)
        seen_ids.add(call["id"])


def _names(first: str) -> Iterator[str]:
    yield first
    yield from (f"{first}_{again}" for again in itertools.count(2))


def _response(arguments: Any) -> str:
    """The answer in a call of `finish`, however it was written."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    if isinstance(arguments, Mapping) and "response" in arguments:
        return str(arguments["response"])
    return "" if arguments is None else str(arguments)


def _unread(call: Mapping[str, Any]) -> ToolOutput:
    return ToolOutput(
        name="",
        id=call["id"],
        error="This call could not be read. Write the tool's name and a JSON object with its arguments, in "
        "the form that you were shown.",
    )
