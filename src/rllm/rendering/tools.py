"""Tool formats: how one family of models is read, streamed and held to its tools.

    tokenizer ──tool_format_of──► ToolFormat ── parse(text), stream() ──► reasoning, text, calls
       a probe, rendered and            └─ grammar(tools), schema_grammar(schema) ──► Lark text for llguidance
       parsed again

A format is never configured. It is the one that gives a call back which the model's own chat template
rendered, after a way through the tokenizer: so a template and a parser that do not fit cannot meet.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from rllm.errors import ConfigError, ModelDirectoryError
from rllm.rendering.answers import (
    CLOSE_THINK,
    OPEN_THINK,
    AnswerStream,
    ParsedAnswer,
    ParsedCall,
    StreamEvent,
)
from rllm.rendering.dsml_format import DsmlFormat
from rllm.rendering.formats import (
    DeepSeekFencedFormat,
    DeepSeekFormat,
    GlmFormat,
    HermesFormat,
    LlamaFormat,
    MistralArgsFormat,
    MistralFormat,
    PlainFormat,
    QwenCoderFormat,
    TagFormat,
    Tools,
    schema_grammar,
)
from rllm.rendering.grammars import thinking_of
from rllm.rendering.harmony import CHANNEL, HARMONY_MARKUP
from rllm.rendering.harmony_format import HarmonyFormat, HarmonyPlainFormat
from rllm.rendering.tokens import TextTokenizer
from rllm.types.messages import Message

__all__ = [
    "FORMAT_NAMES",
    "MARKUP",
    "AnswerStream",
    "DeepSeekFencedFormat",
    "DeepSeekFormat",
    "DsmlFormat",
    "GlmFormat",
    "HarmonyFormat",
    "HarmonyPlainFormat",
    "HermesFormat",
    "LlamaFormat",
    "MistralArgsFormat",
    "MistralFormat",
    "ParsedAnswer",
    "ParsedCall",
    "PlainFormat",
    "QwenCoderFormat",
    "StreamEvent",
    "ToolFormat",
    "plain_format_of",
    "required_tool_format",
    "schema_grammar",
    "shown_markup",
    "tool_format_of",
]


class ToolFormat(Protocol):
    """One way to write tool calls."""

    name: ClassVar[str]

    @property
    def one_call(self) -> bool:
        """The chat template takes no more than one call per answer."""
        ...

    @property
    def text_arguments(self) -> bool:
        """The chat template takes arguments as JSON text alone."""
        ...

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """A whole answer, decoded. `tools` helps where a format writes values without their types."""
        ...

    def stream(self, tools: Tools = ()) -> AnswerStream:
        """The same for an answer that is still being written."""
        ...

    def grammar(
        self,
        tools: Tools,
        *,
        required: bool,
        name: str = "",
        parallel: bool = True,
        schema: Mapping[str, Any] | None = None,
    ) -> str:
        """The grammar of an answer that calls these tools as their schemas demand: Lark text for llguidance.

        `required`: at least one call and no text; `name`: of that tool alone; not `parallel`: one call at
        most. `schema`: an answer without a call is JSON by this schema. Raises ConfigError for what this
        format cannot enforce.
        """
        ...

    def schema_grammar(self, schema: Mapping[str, Any]) -> str:
        """The grammar of an answer that is JSON by this schema, behind what reasoning there may be."""
        ...


_FORMATS: tuple[type[TagFormat], ...] = (
    HermesFormat,
    QwenCoderFormat,
    GlmFormat,
    MistralFormat,
    MistralArgsFormat,
    DeepSeekFormat,
    DeepSeekFencedFormat,
    DsmlFormat,
    HarmonyFormat,
    LlamaFormat,
)

FORMAT_NAMES = tuple(kind.name for kind in _FORMATS)

MARKUP = frozenset({OPEN_THINK, CLOSE_THINK}).union(
    *({kind.opener, kind.closer, *kind.inner_markup} - {""} for kind in _FORMATS)
)
"""All tags by which reasoning and calls are told from text."""


def shown_markup(special: Collection[str]) -> frozenset[str]:
    """Which of a vocabulary's special tokens stay in decoded text, because calls are found by them.

    Harmony's do where there are channels: elsewhere a token such as `<|end|>` is the end of an answer.
    """
    return (MARKUP if CHANNEL in special else MARKUP.difference(HARMONY_MARKUP)).intersection(special)


# ---- which format a model has ------------------------------------------------------------------------

PROBE_NAME = "probe_tool"
PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": PROBE_NAME,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["place", "count"],
            },
        },
    }
]
_PROBE_ARGUMENTS = {"place": "Oslo (N)", "count": 3}
_ASK: Message = {"role": "user", "content": "x"}


def probe_call(number: int = 0) -> dict[str, Any]:
    """A call as templates see it. Some templates take ids of exactly nine letters and digits."""
    function = {"name": PROBE_NAME, "arguments": dict(_PROBE_ARGUMENTS)}
    return {"id": f"probe000{number}", "type": "function", "function": function}


def tool_format_of(tokenizer: TextTokenizer) -> ToolFormat | None:
    """The format in which a model's chat template writes calls; None when it does not show tools or calls.

    Raises nothing: a template that refuses a conversation with tools does not know them.
    """
    tool_format = _format_or_reason(tokenizer)
    return None if isinstance(tool_format, str) else tool_format


def required_tool_format(tokenizer: TextTokenizer) -> ToolFormat:
    """The same for a run that is about to offer tools. Raises ConfigError that says why there is none."""
    tool_format = _format_or_reason(tokenizer)
    if isinstance(tool_format, str):
        raise ConfigError(
            f"Tools cannot be offered in this model's own form: {tool_format} Offer them as text (tool form "
            "`text`), or use a chat template that writes calls in one of the forms "
            f"{', '.join(FORMAT_NAMES)}."
        )
    return tool_format


def plain_format_of(tokenizer: TextTokenizer) -> PlainFormat:
    """The reading of answers when no tools are offered."""
    token_ids = _markup_tokens(tokenizer)
    try:
        prompt = tokenizer.apply_template([_ASK], add_generation_prompt=True)
    except ModelDirectoryError:  # no chat template: texts alone are continued
        return PlainFormat()
    probe: Message = {"role": "assistant", "content": "x"}
    try:
        text = tokenizer.apply_template([_ASK, probe], add_generation_prompt=False)
    except ConfigError:
        text = ""
    answer = tokenizer.decode(tokenizer.encode(text.removeprefix(prompt)))
    if CHANNEL in answer:
        return HarmonyPlainFormat(token_ids=token_ids)
    return PlainFormat(thinking=thinking_of(prompt, token_ids))


def _format_or_reason(tokenizer: TextTokenizer) -> TagFormat | str:
    """The format, or why there is none."""
    try:
        prompt = tokenizer.apply_template([_ASK], add_generation_prompt=True, tools=PROBE_TOOLS)
    except ConfigError as error:
        return f"{error}"
    if PROBE_NAME not in prompt:
        return "its chat template does not print the tools."
    token_ids = _markup_tokens(tokenizer)
    thinking = thinking_of(prompt, token_ids)
    why = ""
    for text_arguments in (False, True):
        try:
            answer = _answer_text(tokenizer, prompt, num_calls=1, text_arguments=text_arguments)
        except ConfigError as error:
            why = why or f"{error}"
            continue
        for kind in _FORMATS:
            tool_format = kind(thinking=thinking, token_ids=token_ids, text_arguments=text_arguments)
            if _gives_back(tool_format, answer, num_calls=1):
                return replace(tool_format, one_call=not _takes_two(tokenizer, prompt, tool_format))
        why = (
            f"its chat template writes a call as {answer[:200]!r}, which is none of the forms that are known."
        )
    return why


def _answer_text(tokenizer: TextTokenizer, prompt: str, *, num_calls: int, text_arguments: bool) -> str:
    """The text that a model would have written to make the probe calls, as it comes out of the tokenizer.

    It begins with reasoning where the prompt opens it, as answers do.
    """
    calls = [probe_call(number) for number in range(num_calls)]
    if text_arguments:
        for call in calls:
            call["function"]["arguments"] = json.dumps(_PROBE_ARGUMENTS)
    conversation = [_ASK, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = tokenizer.apply_template(conversation, add_generation_prompt=False, tools=PROBE_TOOLS)
    thought = ""
    if not text.startswith(prompt) and prompt.rstrip().endswith(OPEN_THINK):
        prompt = prompt.rstrip().removesuffix(OPEN_THINK)
        thought = CLOSE_THINK
    if not text.startswith(prompt):
        return ""
    return tokenizer.decode(tokenizer.encode(thought + text[len(prompt) :]))


def _gives_back(tool_format: ToolFormat, text: str, *, num_calls: int) -> bool:
    answer = tool_format.parse(text)
    # Text that is left over is markup of another form.
    if len(answer.calls) != num_calls or answer.content.strip() or answer.unparsed_markup:
        return False
    return all(
        call.name == PROBE_NAME and json.loads(call.arguments) == _PROBE_ARGUMENTS for call in answer.calls
    )


def _takes_two(tokenizer: TextTokenizer, prompt: str, of: TagFormat) -> bool:
    try:
        text = _answer_text(tokenizer, prompt, num_calls=2, text_arguments=of.text_arguments)
    except ConfigError:
        return False
    return _gives_back(of, text, num_calls=2)


def _markup_tokens(tokenizer: TextTokenizer) -> dict[str, int]:
    ids = {tag: tokenizer.encode(tag) for tag in sorted(MARKUP)}
    return {tag: each[0] for tag, each in ids.items() if len(each) == 1}
