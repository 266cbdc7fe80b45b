"""Tool formats: how one family of models is read, streamed and held to its tools.

    tokenizer ──tool_format_of──► ToolFormat ── parse(text), stream() ──► reasoning, text, calls
       a probe, rendered and            └─ grammar(tools), schema_grammar(schema) ──► Lark text for llguidance
       parsed again

A format is never configured. It is the one that gives a call back which the model's own chat template
rendered, after a way through the tokenizer: so a template and a parser that do not fit cannot meet.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from rllm.errors import ConfigError
from rllm.rendering.answers import (
    CLOSE_THINK,
    OPEN_THINK,
    AnswerReader,
    AnswerStream,
    CallReader,
    ParsedAnswer,
    ParsedCall,
    StreamEvent,
    gathered,
)
from rllm.rendering.calls import JsonCallReader, JsonListReader, TaggedJsonReader
from rllm.rendering.grammars import (
    NO_THINKING,
    Grammar,
    Thinking,
    alternatives,
    call_schema,
    chosen_tools,
    parameter_rules,
    parameters_schema,
    quoted,
    thinking_of,
)
from rllm.rendering.tag_calls import TagCallReader
from rllm.rendering.tokens import TextTokenizer
from rllm.types.messages import Message

__all__ = [
    "AnswerStream",
    "ParsedAnswer",
    "ParsedCall",
    "PlainFormat",
    "StreamEvent",
    "ToolFormat",
    "plain_format_of",
    "schema_grammar",
    "tool_format_of",
]

Tools = Sequence[Mapping[str, Any]]
"""{"type": "function", "function": {"name", "description", "parameters"}} each."""


class ToolFormat(Protocol):
    """One way to write tool calls."""

    name: ClassVar[str]

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
        """What an answer must follow to call these tools as their schemas say: Lark text for llguidance.

        `required`: at least one call and no text; `name`: of that tool alone; not `parallel`: one call at
        most. `schema`: an answer without a call is JSON by this schema. Raises ConfigError for what this
        format cannot enforce.
        """
        ...

    def schema_grammar(self, schema: Mapping[str, Any]) -> str:
        """What an answer must follow to be JSON by this schema, behind what reasoning there may be."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class PlainFormat:
    """Answers without tools: reasoning and text. Nothing in them is taken for a call."""

    thinking: Thinking = NO_THINKING

    def parse(self, text: str) -> ParsedAnswer:
        return _parsed(self.stream(), text)

    def stream(self) -> AnswerStream:
        return AnswerReader(None, "", in_reasoning=self.thinking.opened)

    def schema_grammar(self, schema: Mapping[str, Any]) -> str:
        return schema_grammar(schema, self.thinking)


@dataclass(kw_only=True, slots=True, frozen=True)
class _TagFormat:
    """Calls between two tags. The other forms differ in what is between them, or in having none."""

    thinking: Thinking = NO_THINKING
    token_ids: Mapping[str, int] = field(default_factory=dict[str, int])
    """Ids of the markup that is one token in the model's vocabulary, such as `<tool_call>` in Qwen's: a
    grammar names it by id, because llguidance does not match such a token with its text."""
    one_call: bool = False
    """The chat template takes no more than one call per answer."""

    name: ClassVar[str]
    opener: ClassVar[str] = "<tool_call>"
    closer: ClassVar[str] = "</tool_call>"
    arguments_key: ClassVar[str] = "arguments"

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        return lambda: TaggedJsonReader(self.closer)

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        return _parsed(self.stream(tools), text)

    def stream(self, tools: Tools = ()) -> AnswerStream:
        return AnswerReader(self.new_reader(tools), self.opener, in_reasoning=self.thinking.opened)

    def schema_grammar(self, schema: Mapping[str, Any]) -> str:
        return schema_grammar(schema, self.thinking)

    def grammar(
        self,
        tools: Tools,
        *,
        required: bool,
        name: str = "",
        parallel: bool = True,
        schema: Mapping[str, Any] | None = None,
    ) -> str:
        grammar = Grammar(self.token_ids)
        functions = chosen_tools(tools, name)
        grammar.rule(
            "body",
            alternatives([self._body(grammar, place, each) for place, each in enumerate(functions)]),
        )
        calls = self._calls(grammar, several=parallel and not self.one_call)
        if required:
            answer = calls
        elif schema is not None:
            answer = f"{grammar.json('json_answer', schema)} | {calls}"
        else:
            answer = self._text_or(grammar, calls)
        grammar.begin(self.thinking, answer)
        return grammar.text

    def _body(self, grammar: Grammar, place: int, function: Mapping[str, Any]) -> str:
        """The rule for a call of one tool, without the tags around it."""
        before = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{self.arguments_key}": '
        arguments = grammar.json(f"arguments_{place}", parameters_schema(function))
        return grammar.rule(f"call_{place}", f'{quoted(before)} {arguments} "}}"')

    def _calls(self, grammar: Grammar, *, several: bool) -> str:
        """The rule for all calls of an answer."""
        opener, closer = grammar.markup(self.opener), grammar.markup(self.closer)
        grammar.rule("behind_opener", f'"\\n" body "\\n" {closer}')
        more = f'( "\\n" {opener} behind_opener )*' if several else ""
        grammar.rule("calls_behind_opener", f"behind_opener {more}")
        return grammar.rule("calls", f"{opener} calls_behind_opener")

    def _text_or(self, grammar: Grammar, calls: str) -> str:
        """Text, then calls or none."""
        if self.opener in self.token_ids:
            return f"ANY {calls}?"
        without = grammar.text_without("NO_CALL", self.opener)
        return f"{without} | {grammar.text_up_to('text_and_opener', self.opener)} calls_behind_opener"


class HermesFormat(_TagFormat):
    """`<tool_call>` and one JSON object, as in Hermes, Qwen2.5, Qwen3 and the built-in model."""

    __slots__ = ()
    name = "hermes"


class QwenCoderFormat(_TagFormat):
    """`<tool_call>` and tags for the function and each parameter, whose values are bare text."""

    __slots__ = ()
    name = "qwen-coder"

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        properties: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            schema = tool["function"].get("parameters") or {}
            properties[tool["function"]["name"]] = schema.get("properties") or {}
        return lambda: TagCallReader(self.closer, properties)

    def _body(self, grammar: Grammar, place: int, function: Mapping[str, Any]) -> str:
        parameters = parameter_rules(grammar, place, function)
        begin, end = quoted(f"<function={function['name']}>\n"), quoted("</function>")
        return grammar.rule(f"call_{place}", f"{begin} {parameters} {end}")


class MistralFormat(_TagFormat):
    """`[TOOL_CALLS]` and a JSON list of calls, to the end of the answer."""

    __slots__ = ()
    name = "mistral"
    opener = "[TOOL_CALLS]"
    closer = ""

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        return JsonListReader

    def _calls(self, grammar: Grammar, *, several: bool) -> str:
        more = '( ", " body )*' if several else ""
        grammar.rule("calls_behind_opener", f'" "? "[" body {more} "]"')
        return grammar.rule("calls", f"{grammar.markup(self.opener)} calls_behind_opener")


class LlamaFormat(_TagFormat):
    """The whole answer is `{"name": …, "parameters": {…}}`; several of them have `; ` in between."""

    __slots__ = ()
    name = "llama"
    opener = ""
    closer = ""
    arguments_key = "parameters"

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        return lambda: JsonCallReader(strict=True)

    def _body(self, grammar: Grammar, place: int, function: Mapping[str, Any]) -> str:
        """JSON as a whole: beside an answer in JSON, nothing else would tell the two apart."""
        return grammar.json(f"call_{place}", call_schema(function, self.arguments_key))

    def _calls(self, grammar: Grammar, *, several: bool) -> str:
        return grammar.rule("calls", 'body ( "; " body )*' if several else "body")

    def _text_or(self, grammar: Grammar, calls: str) -> str:
        grammar.rule("NO_CALL", r"/\s*[^{\s](?s:.*)/")
        return f"NO_CALL? | {calls}"


_FORMATS: tuple[type[_TagFormat], ...] = (HermesFormat, QwenCoderFormat, MistralFormat, LlamaFormat)


def schema_grammar(schema: Mapping[str, Any], thinking: Thinking = NO_THINKING) -> str:
    """What an answer must follow to be JSON by this schema: Lark text for llguidance."""
    grammar = Grammar({})
    grammar.begin(thinking, grammar.json("json_answer", schema))
    return grammar.text


def _parsed(stream: AnswerStream, text: str) -> ParsedAnswer:
    events = stream.feed(text) + stream.finish()
    return gathered(events, unparsed_markup=stream.unparsed_markup)


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
    try:
        prompt = tokenizer.apply_template([_ASK], add_generation_prompt=True, tools=PROBE_TOOLS)
        if PROBE_NAME not in prompt:
            return None
        answer = _answer_text(tokenizer, prompt, num_calls=1)
    except ConfigError:
        return None
    token_ids = _markup_tokens(tokenizer)
    thinking = thinking_of(prompt, token_ids)
    for kind in _FORMATS:
        tool_format = kind(thinking=thinking, token_ids=token_ids)
        if _gives_back(tool_format, answer, num_calls=1):
            one_call = not _takes_two(tokenizer, prompt, tool_format)
            return kind(thinking=thinking, token_ids=token_ids, one_call=one_call)
    return None


def plain_format_of(tokenizer: TextTokenizer) -> PlainFormat:
    """How answers are read when no tools are offered."""
    prompt = tokenizer.apply_template([_ASK], add_generation_prompt=True)
    return PlainFormat(thinking=thinking_of(prompt, _markup_tokens(tokenizer)))


def _answer_text(tokenizer: TextTokenizer, prompt: str, *, num_calls: int) -> str:
    """What a model would have written to make the probe calls, as it comes out of the tokenizer.

    It begins with reasoning where the prompt opens it, as answers do.
    """
    calls = [probe_call(number) for number in range(num_calls)]
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
    parsed = tool_format.parse(text)
    if len(parsed.calls) != num_calls or parsed.content.strip() or parsed.unparsed_markup:
        return False
    return all(
        call.name == PROBE_NAME and json.loads(call.arguments) == _PROBE_ARGUMENTS for call in parsed.calls
    )


def _takes_two(tokenizer: TextTokenizer, prompt: str, tool_format: ToolFormat) -> bool:
    try:
        return _gives_back(tool_format, _answer_text(tokenizer, prompt, num_calls=2), num_calls=2)
    except ConfigError:
        return False


def _markup_tokens(tokenizer: TextTokenizer) -> dict[str, int]:
    tags = {OPEN_THINK, CLOSE_THINK} | {tag for kind in _FORMATS for tag in (kind.opener, kind.closer) if tag}
    ids = {tag: tokenizer.encode(tag) for tag in sorted(tags)}
    return {tag: each[0] for tag, each in ids.items() if len(each) == 1}
