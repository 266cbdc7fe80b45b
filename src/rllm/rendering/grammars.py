"""Grammars of answers, as Lark text for llguidance: tool calls with arguments, or JSON by a schema.

    tools, schemas ──► rules ──► Grammar.text ──► the engine's sampler, which compiles it

This file writes text and imports no grammar library. JSON schemas go in as they are (`%json {…}`): what
llguidance cannot enforce, it refuses when the grammar is compiled, so nothing is ignored. Values have no
space in them but one after a comma or colon: a model that may write any space can write nothing else for
long.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import ConfigError
from rllm.rendering.answers import CLOSE_THINK, OPEN_THINK
from rllm.rendering.tag_calls import allowed_types

_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(kw_only=True, slots=True, frozen=True)
class Thinking:
    """Where a model's reasoning may stand before its answer."""

    is_open: bool = False
    """The prompt ends inside of it: an answer begins with reasoning."""
    token_ids: tuple[int, int] | None = None
    """Ids of `<think>` and `</think>` where each is one token; such a model may think before it answers."""


NO_THINKING = Thinking()


@dataclass(slots=True)
class Grammar:
    """Rules under construction."""

    token_ids: Mapping[str, int]
    """Markup that is one token each. llguidance knows such a token by its id alone."""
    _rules: dict[str, str] = field(default_factory=dict[str, str])

    def rule(self, name: str, body: str) -> str:
        """The name to use in other rules."""
        assert self._rules.setdefault(name, body) == body, f"`{name}` is one rule"
        # What stands in brackets is an attribute of the rule and no part of its name.
        return name.split("[")[0]

    def markup(self, tag: str) -> str:
        return f"<[{self.token_ids[tag]}]>" if tag in self.token_ids else quote(tag)

    def json(self, name: str, schema: Mapping[str, Any]) -> str:
        # The library's own key: a tool's schema does not set the spacing.
        body = {key: value for key, value in schema.items() if key != "x-guidance"}
        return self.rule(name, f"%json {json.dumps({**body, 'x-guidance': _SPACING})}")

    def up_to(self, name: str, tag: str) -> str:
        """Any text that ends with the tag, be it text or a token."""
        if tag in self.token_ids:
            return self.rule(name, f"ANY {self.markup(tag)}")
        return self.text_up_to(name, tag)

    def text_up_to(self, name: str, tag: str) -> str:
        """Any text that ends with the tag and has it nowhere else. For a tag that is text."""
        return self.rule(f"{name}[lazy]", f"ANY {quote(tag)}")

    def text_without(self, name: str, tag: str) -> str:
        """Any text that does not contain the tag. For a tag that is text."""
        self.rule(f"HAS_{name}", f"ANY {quote(tag)} ANY")
        return self.rule(name, f"ANY & ~HAS_{name}")

    def begin(self, thinking: Thinking, answer: str) -> None:
        """The start rule: the answer, behind what reasoning there may be."""
        thought = ""
        if thinking.token_ids is not None:
            opener, closer = (f"<[{each}]>" for each in thinking.token_ids)
            # ANY matches no special token, so a thought ends at the first closing one.
            thought = f"ANY {closer} NEWLINES?"
            thought = thought if thinking.is_open else f"({opener} {thought})?"
        elif thinking.is_open:
            thought = f"{self.text_up_to('thought', CLOSE_THINK)} NEWLINES?"
        if thought:
            self.rule("NEWLINES", r"/\n{1,2}/")
        self.rule("start", f"{thought} ( {answer} )")

    @property
    def text(self) -> str:
        rules = {**self._rules, "ANY": r"/(?s:.*)/"}
        return "".join(f"{name}: {body}\n" for name, body in rules.items())


def quote(text: str) -> str:
    """A Lark string."""
    return json.dumps(text)


def alternatives(names: Sequence[str]) -> str:
    return f"( {' | '.join(names)} )"


def chosen_tools(tools: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The `function` of each tool that may be called; `name` leaves one."""
    functions = [tool["function"] for tool in tools]
    matches = [function for function in functions if name in ("", function["name"])]
    if not matches:
        names = ", ".join(str(function["name"]) for function in functions) or "none"
        raise ConfigError(
            f"A call of `{name}` is asked for, but the tools are: {names}; offer it or another."
        )
    return matches


def parameters_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whatever it says."""
    schema = function.get("parameters") or {}
    if not isinstance(schema, Mapping):
        raise ConfigError(
            f"`parameters` of the tool `{function['name']}` is {schema!r}; it must be a JSON schema."
        )
    return {"type": "object", **schema}


def call_schema(function: Mapping[str, Any], arguments_key: str) -> dict[str, Any]:
    """A whole call as one JSON schema, its definitions where their references look for them."""
    schema = parameters_schema(function)
    elsewhere = sorted(
        ref for ref in _references(schema) if not ref.startswith(("#/$defs/", "#/definitions/"))
    )
    if elsewhere:
        raise ConfigError(
            f"`parameters` of the tool `{function['name']}` refers to `{elsewhere[0]}`, which cannot be "
            "enforced in this model's form of calls; refer to `#/$defs/…`."
        )
    definitions = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, arguments_key: schema},
        "required": ["name", arguments_key],
        "additionalProperties": False,
        **definitions,
    }


def _references(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set[str]()
        return own.union(*map(_references, value.values()))
    return set[str]().union(*map(_references, value)) if isinstance(value, list) else set()


def thinking_of(prompt: str, token_ids: Mapping[str, int]) -> Thinking:
    """The reasoning form of a model, by a rendered prompt and a vocabulary."""
    both = (
        (token_ids[OPEN_THINK], token_ids[CLOSE_THINK])
        if OPEN_THINK in token_ids and CLOSE_THINK in token_ids
        else None
    )
    return Thinking(is_open=prompt.rstrip().endswith(OPEN_THINK), token_ids=both)


@dataclass(kw_only=True, slots=True, frozen=True)
class ParameterTags:
    """The marks around a parameter whose value is bare: Lark expressions."""

    begin: Callable[[str, bool], str]
    """From the expression of a name, and whether the value is text, to that of all before the value."""
    end: str
    up_to_end: Callable[[Grammar, str], str]
    """From the name for a rule to the expression of any text and the end."""
    say_what_is_text: bool
    """A value that need not be text is written as JSON then, and quoted where it is text."""


_CLOSE_PARAMETER = "\n</parameter>\n"
PARAMETER_TAGS = ParameterTags(
    begin=lambda name, is_text: f'"<parameter=" {name} ">\\n"',
    end=quote(_CLOSE_PARAMETER),
    up_to_end=lambda grammar, rule: grammar.text_up_to(rule, _CLOSE_PARAMETER),
    say_what_is_text=False,
)
"""The tags of Qwen3-Coder's form."""


def parameter_rules(grammar: Grammar, place: int, function: Mapping[str, Any], tags: ParameterTags) -> str:
    """Rules for tagged parameters with bare values, in the order of the schema.

    Strings are any text up to the closing tag; everything else is JSON by its own schema.
    """
    schema = parameters_schema(function)
    properties = schema.get("properties") or {}
    unknown = sorted(set(schema) - {"type", "properties", "required", *_ANNOTATIONS})
    if unknown:
        raise ConfigError(
            f"`parameters` of the tool `{function['name']}` uses {', '.join(f'`{key}`' for key in unknown)}, "
            "which this model's tag form of calls cannot enforce; write an object with `properties`."
        )
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules: list[str] = []
    for number, (key, each) in enumerate(properties.items()):
        value = _bare_value(
            grammar, f"value_{place}_{number}", (function["name"], key), each, definitions, tags
        )
        begin = tags.begin(quote(key), allowed_types(each) == {"string"})
        rule = grammar.rule(f"parameter_{place}_{number}", f"{begin} {value}")
        rules.append(rule if key in schema.get("required", ()) else f"{rule}?")
    if not rules and schema.get("additionalProperties", True) is not False:
        grammar.rule("NAMED", r"/[A-Za-z_][A-Za-z0-9_\-]{0,63}/")
        either = f"{tags.begin('NAMED', True)} {tags.up_to_end(grammar, 'any_value')}"
        if tags.say_what_is_text:
            either += f" | {tags.begin('NAMED', False)} {grammar.json('any_json', {})} {tags.end}"
        return f"( {either} )*"
    return " ".join(rules)


_ANNOTATIONS = ("additionalProperties", "$defs", "definitions", "title", "description", "$schema", "strict")
_STRING_NOTES = {"type", "title", "description", "default", "examples", "enum", "const"}


def _bare_value(
    grammar: Grammar,
    rule: str,
    of: tuple[str, str],
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    tags: ParameterTags,
) -> str:
    """The value of a parameter and the tag behind it; `of` is the tool and the parameter."""
    kinds = allowed_types(schema)
    is_json = kinds is not None and "string" not in kinds
    if is_json or (tags.say_what_is_text and kinds != {"string"}):
        return f"{grammar.json(rule, {**definitions, **schema})} {tags.end}"
    if kinds == {"string"} and ("enum" in schema or "const" in schema):
        values = schema.get("enum", [schema.get("const")])
        return f"{alternatives([quote(str(value)) for value in values])} {tags.end}"
    if kinds == {"string"} and set(schema) - _STRING_NOTES:
        limits = ", ".join(f"`{word}`" for word in sorted(set(schema) - _STRING_NOTES))
        raise ConfigError(
            f"`{of[1]}` of the tool `{of[0]}` is a string with {limits}, which this model's tag form of "
            "calls cannot enforce; leave it out, or use `enum`."
        )
    return tags.up_to_end(grammar, rule)
