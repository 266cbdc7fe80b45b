"""The agent that calls tools: schemas go out with every model call, calls come back as actions.

    question            ──► user message ──► model, told of the tools ──► calls    ──► Action([call, …])
    {"tool_outputs": …} ──► tool messages ──►  the same conversation  ──► an answer ──► Action([finish])

How calls are written is the business of the model's own chat template: the inference client reads them in its
format and hands them over as `output.tool_calls`. What looked like a call and could not be read goes to the
environment as a call without a name, and comes back as an error.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllm.agents.dialogue import DialogueAgent
from rllm.agents.prompts_named import prompt_named
from rllm.environments.tool import FINISH, UNREADABLE
from rllm.errors import AgentError, ConfigError
from rllm.inference.reading import answer_message, call_messages, read_into
from rllm.rendering.tools import HermesFormat
from rllm.tools.base import Tool
from rllm.tools.multi import MultiTool
from rllm.types.episode import Action
from rllm.types.messages import Message, ModelOutput

PARSERS = ("", "qwen", "hermes")
"""Formats of answers that come without `output`, from whoever drives an agent by hand."""

AnyTool = Tool | str | Callable[..., Any]


class ToolAgent(DialogueAgent):
    """One conversation with tools.

    `tools` (names, tools, typed functions) or `tool_map` (name -> tool or class of tools) are what it offers;
    without either, what the environment says at the start: `tools` in its info or observation, schemas in
    OpenAI's form.
    `system_prompt`: None is the built-in one, "" none at all. `parser_name` is what published programs give;
    it only counts for answers that were not read by an inference client.
    """

    def __init__(
        self,
        system_prompt: str | None = None,
        parser_name: str = "",
        tools: Sequence[AnyTool] | None = None,
        tool_map: Mapping[str, Any] | None = None,
    ) -> None:
        if tools and tool_map:
            raise ConfigError("Both `tools` and `tool_map` are given; give one of them.")
        if parser_name not in PARSERS:
            raise ConfigError(
                f"`parser_name` is {parser_name!r}; calls are read in the format of the model's own chat "
                "template, so leave it out."
            )
        tools_of_map = [each() if isinstance(each, type) else each for each in (tool_map or {}).values()]
        self.tools = MultiTool([*(tools or ()), *tools_of_map])
        self._system_prompt = prompt_named("tool") if system_prompt is None else system_prompt
        self.reset()

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return self._schemas

    def reset(self) -> None:
        self.begin(self._system_prompt)
        self._schemas: list[dict[str, Any]] = self.tools.json

    # ---- from the environment ----------------------------------------------------------------------------

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self.pay(observation, reward, done, info)
        if not self._schemas and not self._trajectory.steps:
            fields = observation if isinstance(observation, Mapping) else {}
            self._schemas = list(info.get("tools") or fields.get("tools") or ())
        if not done:  # nobody answers the last observation
            self._messages += self._messages_of(observation)

    def _messages_of(self, observation: Any) -> list[Message]:
        if isinstance(observation, list):
            return observation
        if not isinstance(observation, Mapping):
            return [{"role": "user", "content": str(observation)}]
        if "tool_outputs" in observation:
            names = self._names_of_calls()
            return [
                {"role": "tool", "tool_call_id": call_id, "name": names.get(call_id, ""), "content": text}
                for call_id, text in observation["tool_outputs"].items()
            ]
        if "question" in observation:
            return [{"role": "user", "content": str(observation["question"])}]
        raise AgentError(
            f"ToolAgent was shown {observation!r:.200}; it reads text, messages, and dicts with `question` "
            "or `tool_outputs`."
        )

    def _names_of_calls(self) -> dict[str, str]:
        calls: Any = self._trajectory.steps[-1].action.action if self._trajectory.steps else []
        return {call["id"]: call["function"]["name"] for call in calls}

    # ---- from the model ----------------------------------------------------------------------------------

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        output: ModelOutput | None = kwargs.get("output")
        if output is None:
            output = ModelOutput(text=response)
            read_into(output, HermesFormat().parse(response, self._schemas))
        self._messages.append(answer_message(output))
        action = Action(_calls_of(output))
        self.record(response, action, thought=output.reasoning)
        return action


class MCPToolAgent(ToolAgent):
    """The same with tools of MCP servers, under the name that published programs know."""


def _calls_of(output: ModelOutput) -> list[dict[str, Any]]:
    """The actions of an answer in OpenAI's form: its calls, those that could not be read, or `finish`."""
    calls = call_messages(output.tool_calls)
    if output.unparsed_markup:
        calls.append(_call("call_unread", UNREADABLE, output.text))
    return calls or [_call("finish", FINISH, json.dumps({"response": output.content}, ensure_ascii=False))]


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
