"""A model's answer in the form that an agent acts on: text, reasoning and tool calls.

    text ──tool format of the model──► ModelOutput.content, .reasoning, .tool_calls
                                           └──► the assistant messages in which it may be said again

Nothing here changes an id. A conversation goes on from the ids that were sampled, whichever of those messages
the agent keeps.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import ConfigError
from rllm.rendering.chat import ChatRenderer
from rllm.rendering.tools import ParsedAnswer, required_tool_format
from rllm.types.messages import FinishReason, Message, ModelOutput, ToolCall

Tools = Sequence[Mapping[str, Any]]


def parsed_text(text: str, renderer: ChatRenderer, tools: Tools) -> ParsedAnswer:
    """An answer taken apart in the model's own format. Raises ConfigError where the model has none."""
    tool_format = renderer.tool_format or required_tool_format(renderer.tokenizer)
    return tool_format.parse(text, tools)


def no_tools(tools: Tools, because: str) -> ConfigError:
    """That tools were offered where nobody can take them."""
    return ConfigError(
        f"`tools` has {len(tools)} tools, but {because}; offer none, or use a model that takes them."
    )


def read_into(output: ModelOutput, answer: ParsedAnswer) -> None:
    """Fill in what the text of `output` says.

    A call whose arguments are no JSON object is none: it stays in the text, and `unparsed_markup` says so.
    """
    output.content, output.reasoning = answer.content, answer.reasoning
    read = [(call.name, _arguments(call.arguments)) for call in answer.calls]
    output.tool_calls = [
        ToolCall(name=name, arguments=arguments, id=f"call_{number}")
        for number, (name, arguments) in enumerate(read)
        if arguments is not None
    ]
    output.unparsed_markup = answer.unparsed_markup or len(output.tool_calls) < len(read)
    if output.tool_calls and output.finish_reason is FinishReason.STOP:
        output.finish_reason = FinishReason.TOOL_CALLS


def answer_message(output: ModelOutput) -> Message:
    """The assistant message of an answer, its calls taken apart; as the model wrote it where it made none, or
    one that could not be read."""
    if not output.tool_calls or output.unparsed_markup:
        return {"role": "assistant", "content": output.text}
    return {"role": "assistant", "content": output.content, "tool_calls": call_messages(output.tool_calls)}


def call_messages(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls as they stand in messages: `{"id", "type": "function", "function": {"name", "arguments"}}`."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]


def as_it_may_come_back(output: ModelOutput) -> list[Message]:
    """The assistant messages in which an agent may say what was answered: as written, or taken apart."""
    message: Message = {"role": "assistant", "content": output.text}
    if output.tool_calls:
        calls = call_messages(output.tool_calls)
        return [message, {"role": "assistant", "content": output.content, "tool_calls": calls}]
    if output.content != output.text:
        return [message, {"role": "assistant", "content": output.content}]
    return [message]


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
