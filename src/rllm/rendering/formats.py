"""The calls of each family of models: the tags, who reads what is between them, and the grammar.

    hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>
    qwen-coder    <tool_call><function=…><parameter=…>…</parameter></function></tool_call>
    glm           <tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>
    mistral       [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
    mistral-args  [TOOL_CALLS]name[ARGS]{…}
    deepseek      <｜tool▁calls▁begin｜>… in two forms: V3 and R1, and from V3.1 on
    llama         {"name": …, "parameters": {…}}

DeepSeek V3.2's, whose tags are text around a token, is in `dsml_format`; Harmony, in which the whole answer
has another shape, in `harmony_format`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rllm.rendering.answers import AnswerReader, AnswerStream, CallReader, ParsedAnswer, gather
from rllm.rendering.calls import JsonCallReader, JsonListReader, TaggedJsonReader
from rllm.rendering.grammars import (
    NO_THINKING,
    PARAMETER_TAGS,
    Grammar,
    ParameterTags,
    Thinking,
    alternatives,
    call_schema,
    chosen_tools,
    parameter_rules,
    parameters_schema,
    quote,
)
from rllm.rendering.named_calls import (
    ARGUMENTS_TAG,
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    NamedCallReader,
    SeparatedCallReader,
)
from rllm.rendering.tag_calls import ArgumentCallReader, TagCallReader

_LINE = quote("\n") + "?"
"""A line end or none: GLM's versions differ in that."""

Tools = Sequence[Mapping[str, Any]]
"""{"type": "function", "function": {"name", "description", "parameters"}} each."""


def parse_all(stream: AnswerStream, text: str) -> ParsedAnswer:
    """A whole answer through its stream."""
    events = stream.feed(text) + stream.finish()
    return gather(events, unparsed_markup=stream.unparsed_markup)


def schema_grammar(schema: Mapping[str, Any], thinking: Thinking = NO_THINKING) -> str:
    """The grammar of an answer that is JSON by this schema: Lark text for llguidance."""
    grammar = Grammar({})
    grammar.begin(thinking, grammar.json("json_answer", schema))
    return grammar.text


@dataclass(kw_only=True, slots=True, frozen=True)
class PlainFormat:
    """Answers without tools: reasoning and text. Nothing in them is taken for a call."""

    thinking: Thinking = NO_THINKING

    def parse(self, text: str) -> ParsedAnswer:
        return parse_all(self.stream(), text)

    def stream(self) -> AnswerStream:
        return AnswerReader(None, "", in_reasoning=self.thinking.is_open)

    def schema_grammar(self, schema: Mapping[str, Any]) -> str:
        return schema_grammar(schema, self.thinking)


@dataclass(kw_only=True, slots=True, frozen=True)
class TagFormat:
    """Calls between two tags. The other forms differ in what is between them, or in having none."""

    thinking: Thinking = NO_THINKING
    token_ids: Mapping[str, int] = field(default_factory=dict[str, int])
    """Ids of the markup that is one token in the model's vocabulary, such as `<tool_call>` in Qwen's: a
    grammar names it by id, because llguidance does not match such a token with its text."""
    one_call: bool = False
    """The chat template takes no more than one call per answer."""
    text_arguments: bool = False
    """The chat template prints arguments as the text that they are given as, and cannot print an object."""

    name: ClassVar[str]
    opener: ClassVar[str] = "<tool_call>"
    closer: ClassVar[str] = "</tool_call>"
    inner_markup: ClassVar[tuple[str, ...]] = ()
    """Tags between the two."""
    arguments_key: ClassVar[str] = "arguments"

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        return lambda: TaggedJsonReader(self.closer)

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        return parse_all(self.stream(tools), text)

    def stream(self, tools: Tools = ()) -> AnswerStream:
        return AnswerReader(self.new_reader(tools), self.opener, in_reasoning=self.thinking.is_open)

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
            answer = self._schema_or(grammar, schema, calls)
        else:
            answer = self._text_or(grammar, calls)
        self._begin(grammar, answer)
        return grammar.text

    def _begin(self, grammar: Grammar, answer: str) -> None:
        grammar.begin(self.thinking, answer)

    def _body(self, grammar: Grammar, place: int, function: Mapping[str, Any]) -> str:
        """The rule for a call of one tool, without the tags around it."""
        before = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{self.arguments_key}": '
        arguments = grammar.json(f"arguments_{place}", parameters_schema(function))
        return grammar.rule(f"call_{place}", f'{quote(before)} {arguments} "}}"')

    def _calls(self, grammar: Grammar, *, several: bool) -> str:
        """The rule for all calls of an answer."""
        opener, closer = grammar.markup(self.opener), grammar.markup(self.closer)
        grammar.rule("behind_opener", f'"\\n" body "\\n" {closer}')
        more = f'( "\\n" {opener} behind_opener )*' if several else ""
        grammar.rule("calls_behind_opener", f"behind_opener {more}")
        return grammar.rule("calls", f"{opener} calls_behind_opener")

    def _schema_or(self, grammar: Grammar, schema: Mapping[str, Any], calls: str) -> str:
        """JSON by a schema, or calls."""
        return f"{grammar.json('json_answer', schema)} | {calls}"

    def _text_or(self, grammar: Grammar, calls: str) -> str:
        """Text, then calls or none."""
        # ANY matches no special token, so text cannot run over the opener.
        if self.opener in self.token_ids:
            return f"ANY {calls}?"
        without = grammar.text_without("NO_CALL", self.opener)
        return f"{without} | {grammar.text_up_to('text_and_opener', self.opener)} calls_behind_opener"


class HermesFormat(TagFormat):
    """`<tool_call>` and one JSON object, as in Hermes, Qwen2.5, Qwen3 and the built-in model."""

    __slots__ = ()
    name = "hermes"


class QwenCoderFormat(TagFormat):
    """`<tool_call>` and tags for the function and each parameter, whose values are bare text."""

    __slots__ = ()
    name = "qwen-coder"

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        properties = _properties(tools)
        return lambda: TagCallReader(self.closer, properties)

    def _body(self, grammar: Grammar, place: int, function: Mapping[str, Any]) -> str:
        parameters = parameter_rules(grammar, place, function, PARAMETER_TAGS)
        begin, end = quote(f"<function={function['name']}>\n"), quote("</function>")
        return grammar.rule(f"call_{place}", f"{begin} {parameters} {end}")


class GlmFormat(TagFormat):
    """`<tool_call>`, the name, and tags for each key and value, as in GLM-4.5 and later."""

    __slots__ = ()
    name = "glm"
    inner_markup = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        properties = _properties(tools)
        return lambda: ArgumentCallReader(properties)

    def _body(self, grammar: Grammar, place: int, function: Mapping[str, Any]) -> str:
        key, close_key, value, close_value = (grammar.markup(tag) for tag in self.inner_markup)
        tags = ParameterTags(
            begin=lambda name, is_text: f"{key} {name} {close_key} {_LINE} {value}",
            end=f"{close_value} {_LINE}",
            up_to_end=lambda grammar, rule: f"{grammar.up_to(rule, self.inner_markup[3])} {_LINE}",
            say_what_is_text=False,
        )
        parameters = parameter_rules(grammar, place, function, tags)
        return grammar.rule(f"call_{place}", f"{quote(function['name'])} {_LINE} {parameters}")

    def _calls(self, grammar: Grammar, *, several: bool) -> str:
        opener, closer = grammar.markup(self.opener), grammar.markup(self.closer)
        grammar.rule("behind_opener", f"body {closer}")
        more = f"( {_LINE} {opener} behind_opener )*" if several else ""
        grammar.rule("calls_behind_opener", f"behind_opener {more}")
        return grammar.rule("calls", f"{opener} calls_behind_opener")


class MistralFormat(TagFormat):
    """`[TOOL_CALLS]` and a JSON list of calls, to the end of the answer: Mistral's models up to 2024."""

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


class MistralArgsFormat(TagFormat):
    """`[TOOL_CALLS]`, the name, `[ARGS]` and the arguments: Mistral's models from 2025 on."""

    __slots__ = ()
    name = "mistral-args"
    opener = "[TOOL_CALLS]"
    closer = ""
    inner_markup = (ARGUMENTS_TAG,)

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        return NamedCallReader

    def _body(self, grammar: Grammar, place: int, function: Mapping[str, Any]) -> str:
        arguments = grammar.json(f"arguments_{place}", parameters_schema(function))
        name, mark = quote(function["name"]), grammar.markup(ARGUMENTS_TAG)
        return grammar.rule(f"call_{place}", f"{name} {mark} {arguments}")

    def _calls(self, grammar: Grammar, *, several: bool) -> str:
        opener = grammar.markup(self.opener)
        more = f"( {opener} body )*" if several else ""
        grammar.rule("calls_behind_opener", f"body {more}")
        return grammar.rule("calls", f"{opener} calls_behind_opener")


class DeepSeekFormat(TagFormat):
    """Calls in begin and end marks, the name and the JSON with a separator in between: V3.1 and later."""

    __slots__ = ()
    name = "deepseek-v3.1"
    opener = CALLS_BEGIN
    closer = CALLS_END
    inner_markup = (CALL_BEGIN, SEPARATOR, CALL_END)
    between_calls: ClassVar[str] = ""

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        return lambda: SeparatedCallReader(has_fence=False)

    def _body(self, grammar: Grammar, place: int, function: Mapping[str, Any]) -> str:
        begin, separator, end = (grammar.markup(tag) for tag in self.inner_markup)
        arguments = grammar.json(f"arguments_{place}", parameters_schema(function))
        return grammar.rule(
            f"call_{place}", f"{begin} {quote(function['name'])} {separator} {arguments} {end}"
        )

    def _calls(self, grammar: Grammar, *, several: bool) -> str:
        between = quote(self.between_calls) if self.between_calls else ""
        more = f"( {between} body )*" if several else ""
        grammar.rule("calls_behind_opener", f"body {more} {grammar.markup(self.closer)}")
        return grammar.rule("calls", f"{grammar.markup(self.opener)} calls_behind_opener")


class DeepSeekFencedFormat(DeepSeekFormat):
    """The same with `function` before the separator and the JSON in a fence: V3 and R1."""

    __slots__ = ()
    name = "deepseek"
    between_calls = "\n"

    def new_reader(self, tools: Tools) -> Callable[[], CallReader]:
        return lambda: SeparatedCallReader(has_fence=True)

    def _body(self, grammar: Grammar, place: int, function: Mapping[str, Any]) -> str:
        begin, separator, end = (grammar.markup(tag) for tag in self.inner_markup)
        arguments = grammar.json(f"arguments_{place}", parameters_schema(function))
        fence = quote(f"{function['name']}\n```json\n")
        call = f'{begin} "function" {separator} {fence} {arguments} "\\n```" {end}'
        return grammar.rule(f"call_{place}", call)


class LlamaFormat(TagFormat):
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
        # The whole answer is a call where it begins with a brace, so text begins with another sign.
        grammar.rule("NO_CALL", r"/\s*[^{\s](?s:.*)/")
        return f"NO_CALL? | {calls}"


def _properties(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """The schemas of each tool's parameters, by tool."""
    properties: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        properties[tool["function"]["name"]] = schema.get("properties") or {}
    return properties
