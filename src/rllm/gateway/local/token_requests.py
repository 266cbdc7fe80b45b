"""The request of an engine that takes ids: what is refused, and how the answer is written and read.

CallRequest ──require_answerable──► 400, or ──► grammar of the answer, Reader of its text
"""

from dataclasses import dataclass
from typing import Any

from rllm.errors import RequestRefused
from rllm.gateway.dialects.openai_fields import MAX_CHOICES, mend_of, short_repr
from rllm.rendering.tools import AnswerStream, ParsedAnswer, PlainFormat, ToolFormat
from rllm.types.content import IMAGE_TYPES, is_image_part
from rllm.types.wire import CallRequest, ToolMode

MAX_TOP_LOGPROBS = 20
TEMPLATE_VARIABLES = "chat_template_kwargs"
"""As vLLM and SGLang call it."""
_MAX_VARIABLES_CHARS = 2_000


def require_answerable(request: CallRequest, *, reads_images: bool = False) -> None:
    """Raises RequestRefused (400) for what the built-in engine cannot honour."""
    for name, value in request.penalties.items():
        if name == TEMPLATE_VARIABLES:
            _require_variables(value)
            continue
        raise RequestRefused(
            f"`{name}` is {short_repr(value)}; this engine samples from the model itself and does not "
            f"know it. {mend_of(name)}.",
            param=name,
            code="unsupported_parameter",
        )
    if not 1 <= request.n <= MAX_CHOICES:
        raise RequestRefused(f"`n` is {request.n}; choose from 1 to {MAX_CHOICES}.", param="n")
    if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise RequestRefused(
            f"`top_logprobs` is {request.top_logprobs}; choose from 0 to {MAX_TOP_LOGPROBS}.",
            param="top_logprobs",
        )
    for place, message in enumerate(request.messages):
        if isinstance(message.get("content"), list):
            kinds = {str(part.get("type")) for part in message["content"]} - {"text"}
            if not (unreadable := sorted(kinds - (IMAGE_TYPES if reads_images else set()))):
                continue
            raise RequestRefused(
                f"`messages[{place}].content` has parts of type {', '.join(unreadable)}; this model reads "
                f"text {'and images' if reads_images else 'alone'}.",
                param=f"messages[{place}].content",
                code="unsupported_content",
            )


def template_variables(request: CallRequest) -> dict[str, Any]:
    return request.penalties.get(TEMPLATE_VARIABLES, {})


def _require_variables(value: object) -> None:
    if not isinstance(value, dict) or _chars_of(value) > _MAX_VARIABLES_CHARS:
        raise RequestRefused(
            f"`{TEMPLATE_VARIABLES}` is {short_repr(value)}; it must be an object of variables for the chat "
            f"template, with at most {_MAX_VARIABLES_CHARS} characters.",
            param=TEMPLATE_VARIABLES,
        )


def num_chars(request: CallRequest) -> int:
    """The length of all text that a prompt may be made of, in characters; an id counts as one, an image as
    none."""
    chars = 0 if request.prompt is None else len(request.prompt)
    for message in request.messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [part for part in content if not is_image_part(part)]
        chars += _chars_of(content)
        for call in message.get("tool_calls") or ():
            chars += _chars_of((call.get("function") or {}).get("arguments"))
    return chars + sum(map(_chars_of, request.tools))


def _chars_of(value: object) -> int:
    """The length of all texts and keys in it; level by level, as bodies may be nested deeply."""
    if isinstance(value, str):
        return len(value)
    chars = 0
    left: list[object] = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            chars += len(each)
        elif isinstance(each, dict):
            left += each.keys()
            left += each.values()
        elif isinstance(each, list):
            left += each
    return chars


def require_may_fit(chars: int, max_chars: int, max_context: int) -> None:
    """Raises RequestRefused (400) for text that is too long, before a token of it is made.

    Encoding takes seconds for a few million characters, and 200 bytes of memory for each.
    """
    if chars > max_chars:
        raise RequestRefused(
            f"The conversation has {chars} characters, and {max_chars} are the most that a context of "
            f"{max_context} tokens is given; send a shorter one.",
            code="context_length_exceeded",
        )


@dataclass(slots=True, frozen=True)
class Reader:
    """Reasoning, text and calls out of what the model wrote."""

    format: ToolFormat | PlainFormat
    tools: list[dict[str, Any]]

    def parse(self, text: str) -> ParsedAnswer:
        if isinstance(self.format, PlainFormat):
            return self.format.parse(text)
        return self.format.parse(text, self.tools)

    def stream(self) -> AnswerStream:
        if isinstance(self.format, PlainFormat):
            return self.format.stream()
        return self.format.stream(self.tools)


def reader_of(
    request: CallRequest, tool_format: ToolFormat | None, plain_format: PlainFormat
) -> Reader | None:
    if request.prompt is not None:
        return None
    if tool_format is None or request.tool_choice.mode is ToolMode.NONE:
        return Reader(plain_format, [])  # nothing that may be called, so nothing is a call
    return Reader(tool_format, request.tools)


def grammar_of(request: CallRequest, tool_format: ToolFormat | None, plain_format: PlainFormat) -> str:
    """The grammar of an answer for which `tool_choice`, `strict` and `response_format` hold; may be ""."""
    choice, schema = request.tool_choice, request.response_schema
    if choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
        names = [tool["function"]["name"] for tool in request.tools]
        if tool_format is None or (choice.mode is ToolMode.NAMED and choice.name not in names):
            raise RequestRefused(
                f"`tool_choice` asks for {choice.name or 'a tool'}, but `tools` offers "
                f"{', '.join(names) or 'none'}.",
                param="tool_choice",
            )
        return tool_format.grammar(
            request.tools, required=True, name=choice.name, parallel=request.parallel_tool_calls
        )
    if tool_format is None or choice.mode is ToolMode.NONE:
        return "" if schema is None else plain_format.schema_grammar(schema)
    strict = any(tool["function"].get("strict") for tool in request.tools)
    # Nothing is asked for that a model could not write by itself, so it samples without a grammar.
    if not strict and request.parallel_tool_calls and schema is None:
        return ""
    return tool_format.grammar(
        request.tools, required=False, parallel=request.parallel_tool_calls, schema=schema
    )
