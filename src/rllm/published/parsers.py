"""Tool calls in a model's text, read by the classes that published programs import.

QwenToolParser().parse(text) ──► HermesFormat ──► list of ToolCall
"""

import json
from abc import ABC
from typing import ClassVar

from rllm.errors import ConfigError, choices_of
from rllm.rendering.formats import DeepSeekFencedFormat, HermesFormat, TagFormat
from rllm.types.messages import ToolCall


class ToolParser(ABC):
    """Reads the calls of one model family, and tells a model how to write them."""

    format: ClassVar[TagFormat]
    example: ClassVar[str]
    """A call as the family writes it."""

    def parse(self, model_response: str) -> list[ToolCall]:
        """The calls of an answer, in order; what cannot be read is none."""
        calls: list[ToolCall] = []
        for each in self.format.parse(model_response).calls:
            try:
                arguments = json.loads(each.arguments)
            except ValueError:
                continue
            if isinstance(arguments, dict):
                calls.append(ToolCall(name=each.name, arguments=arguments))
        return calls

    def get_tool_prompt(self, tools_schema: str) -> str:
        """Words on how to call these tools, for a system prompt."""
        return (
            "You may call functions. Their signatures, as JSON:\n"
            f"{tools_schema}\n"
            "Write each call in this form, with the arguments as a JSON object:\n"
            f"{self.example}"
        )


class QwenToolParser(ToolParser):
    """`<tool_call>` and one JSON object."""

    format = HermesFormat()
    example = '<tool_call>\n{"name": "function_name", "arguments": {}}\n</tool_call>'


class R1ToolParser(ToolParser):
    """DeepSeek's marks, the name and the arguments in a fence of JSON."""

    format = DeepSeekFencedFormat()
    example = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>function_name\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


_PARSERS: dict[str, type[ToolParser]] = {"qwen": QwenToolParser, "r1": R1ToolParser}


def get_tool_parser(parser_name: str) -> type[ToolParser]:
    """The class of a parser. Raises ConfigError for a name that there is not."""
    if parser_name not in _PARSERS:
        raise ConfigError(f"There is no tool parser `{parser_name}`; {choices_of(parser_name, _PARSERS)}.")
    return _PARSERS[parser_name]
