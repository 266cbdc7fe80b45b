"""Grammars are checked by the library that enforces them."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import llguidance
import llguidance.hf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from rllm.errors import ConfigError
from rllm.models.builtin import create_tokenizer
from rllm.rendering.grammars import Thinking
from rllm.rendering.tools import HermesFormat, LlamaFormat, MistralFormat, QwenCoderFormat, schema_grammar

ADDED = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>")


@cache
def _tokenizer(added: str) -> tuple[Tokenizer, Any]:
    """The built-in one, whose markup is ordinary text, or one with markup as single tokens."""
    tokenizer = create_tokenizer()
    if added:
        tokens = [AddedToken(tag, special=added == "special", normalized=False) for tag in ADDED]
        tokenizer.add_tokens(tokens)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    return tokenizer, llguidance.hf.from_tokenizer(wrapped)


def _token_ids(added: str) -> dict[str, int]:
    ids = {tag: _tokenizer(added)[0].token_to_id(tag) for tag in ADDED}
    return {tag: token_id for tag, token_id in ids.items() if token_id is not None}


def _follows(grammar: str, text: str, added: str = "") -> bool:
    tokenizer, for_grammars = _tokenizer(added)
    matcher = llguidance.LLMatcher(for_grammars, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = _tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "days"],
    },
)
TOOLS = [WEATHER, _tool("weather_now"), _tool("stop", {})]
KINDS = [HermesFormat, QwenCoderFormat, MistralFormat, LlamaFormat]
SPELLINGS = ["", "added", "special"]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write(kind: Any, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as the chat templates of each family write them."""
    bodies = [_json({"name": name, kind.arguments_key: arguments}) for name, arguments in calls]
    if kind is MistralFormat:
        return f"[TOOL_CALLS][{', '.join(bodies)}]"
    if kind is LlamaFormat:
        return "; ".join(bodies)
    if kind is QwenCoderFormat:
        bodies = [
            f"<function={name}>\n"
            + "".join(
                f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            + "</function>"
            for name, arguments in calls
        ]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


OSLO = ("weather", {"city": 'Oslo "N" \\ é\n', "days": -3})
NOW = ("weather_now", {})
GOOD: list[Sequence[tuple[str, dict[str, Any]]]] = [
    [OSLO],
    [("weather", {"city": "", "days": 0, "unit": "F"})],
    [("weather_now", {"anything": 5})],
    [("stop", {})],
    [OSLO, NOW],
    [NOW, OSLO, ("stop", {"why": "done"})],
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": "Oslo"}),
    ("weather", {"city": "Oslo", "days": "three"}),
    ("weather", {"city": "Oslo", "days": 1.5}),
    ("weather", {"city": "Oslo", "days": 3, "unit": "K"}),
    ("weather_soon", {}),
    ("", {}),
]


@pytest.mark.parametrize("added", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_required_calls_are_held_to_their_schemas_and_text_is_refused(kind: Any, added: str) -> None:
    tool_format = kind(token_ids=_token_ids(added))
    grammar = tool_format.grammar(TOOLS, required=True)
    for calls in GOOD:
        written = _write(kind, *calls)
        assert _follows(grammar, written, added), written
        parsed = tool_format.parse(written, TOOLS)
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == list(calls)
    for call in BAD:
        assert not _follows(grammar, _write(kind, call), added), call
        assert not _follows(grammar, _write(kind, OSLO, call), added), call
    for text in ("", "no", f"so {_write(kind, OSLO)}", f"{_write(kind, OSLO)} so", _write(kind, OSLO)[:-4]):
        assert not _follows(grammar, text, added), text


@pytest.mark.parametrize("added", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_named_tool_is_the_only_one_and_without_parallel_calls_there_is_one(kind: Any, added: str) -> None:
    tool_format = kind(token_ids=_token_ids(added))
    named = tool_format.grammar(TOOLS, required=True, name="weather_now")
    assert _follows(named, _write(kind, NOW), added)
    assert not _follows(named, _write(kind, OSLO), added)
    one = tool_format.grammar(TOOLS, required=True, parallel=False)
    assert _follows(one, _write(kind, OSLO), added)
    assert not _follows(one, _write(kind, OSLO, NOW), added)
    of_one_call = kind(token_ids=_token_ids(added), one_call=True).grammar(TOOLS, required=True)
    assert not _follows(of_one_call, _write(kind, OSLO, NOW), added)


@pytest.mark.parametrize("added", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_where_a_call_is_optional_text_is_free_and_calls_are_not(kind: Any, added: str) -> None:
    grammar = kind(token_ids=_token_ids(added)).grammar(TOOLS, required=False)
    for text in ("", "Up", "a <b> [c]\n\n", _write(kind, OSLO), _write(kind, OSLO, NOW)):
        assert _follows(grammar, text, added), text
    assert not _follows(grammar, _write(kind, ("weather", {})), added)
    if kind is not LlamaFormat:
        assert _follows(grammar, f"I look.\n{_write(kind, OSLO, NOW)}", added)
        assert not _follows(grammar, f"I look.\n{_write(kind, ('weather', {}))}", added)
        one = kind(token_ids=_token_ids(added)).grammar(TOOLS, required=False, parallel=False)
        assert not _follows(one, f"I look.\n{_write(kind, OSLO, NOW)}", added)


@pytest.mark.parametrize("added", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_a_call_may_be_held_to_a_schema(kind: Any, added: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    grammar = kind(token_ids=_token_ids(added)).grammar(TOOLS, required=False, schema=schema)
    assert _follows(grammar, '{"n": 1}', added)
    assert _follows(grammar, _write(kind, OSLO), added)
    assert not _follows(grammar, '{"n": "1"}', added)
    assert not _follows(grammar, "one", added)


@pytest.mark.parametrize("added", ["added", "special"])
def test_a_model_that_thinks_may_do_so_before_it_calls(added: str) -> None:
    ids = _token_ids(added)
    may = Thinking(token_ids=(ids["<think>"], ids["</think>"]))
    grammar = HermesFormat(token_ids=ids, thinking=may).grammar(TOOLS, required=True)
    call = _write(HermesFormat, OSLO)
    assert _follows(grammar, call, added)
    assert _follows(grammar, f"<think>\nOslo?\n\nYes.\n</think>\n\n{call}", added)
    assert not _follows(grammar, f"<think>\nOslo?\n</think>\n\nNo.\n{call}", added)
    must = Thinking(token_ids=may.token_ids, opened=True)
    grammar = HermesFormat(token_ids=ids, thinking=must).grammar(TOOLS, required=True)
    assert _follows(grammar, f"Oslo?\n</think>\n\n{call}", added)
    assert not _follows(grammar, call, added)
    assert _follows(schema_grammar({"type": "integer"}, must), "One?</think>\n1", added)
    assert not _follows(schema_grammar({"type": "integer"}, must), "1", added)


def test_reasoning_that_the_prompt_opened_may_be_closed_by_ordinary_text() -> None:
    grammar = HermesFormat(thinking=Thinking(opened=True)).grammar(TOOLS, required=True)
    assert _follows(grammar, f"Oslo?\n</think>\n\n{_write(HermesFormat, OSLO)}")
    assert not _follows(grammar, _write(HermesFormat, OSLO))


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(TEXTS, JSON_VALUES, max_size=4), st.sampled_from([None, (",", ":")]))
def test_any_object_is_taken_by_a_tool_that_names_no_parameters(
    arguments: dict[str, Any], signs: Any
) -> None:
    grammar = HermesFormat().grammar(TOOLS, required=True)
    written = json.dumps(arguments, separators=signs, ensure_ascii=False)
    assert _follows(grammar, f'<tool_call>\n{{"name": "stop", "arguments": {written}}}\n</tool_call>')
    assert _follows(schema_grammar({"type": "object"}), written)


@pytest.mark.parametrize("kind", [HermesFormat, MistralFormat, LlamaFormat])
def test_schemas_may_refer_to_their_own_definitions(kind: Any) -> None:
    tree = {
        "properties": {"root": {"$ref": "#/$defs/Node"}},
        "required": ["root"],
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    }
    grammar = kind().grammar([_tool("tree", tree)], required=True)
    assert _follows(grammar, _write(kind, ("tree", {"root": {"next": {"next": None}}})))
    assert not _follows(grammar, _write(kind, ("tree", {"root": {"next": 1}})))


def test_a_schema_cannot_loosen_its_own_enforcement() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "x-guidance": {"lenient": True}}
    assert not _follows(schema_grammar(schema), '{"n":    1}')
    unknown = schema_grammar({"type": "string", "format": "no-such-format", "x-guidance": {"lenient": True}})
    assert llguidance.LLMatcher(_tokenizer("")[1], unknown, log_level=0).is_error()


def test_a_call_of_a_tool_that_is_not_offered_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="A call of `fly` is asked for, but the tools are: weather"):
        HermesFormat().grammar(TOOLS, required=True, name="fly")
    with pytest.raises(ConfigError, match="`parameters` of the tool `f` is 3"):
        HermesFormat().grammar([_tool("f", 3)], required=True)


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}, "`pattern`"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "`anyOf`"),
    ],
)
def test_what_the_tag_form_cannot_enforce_is_refused(parameters: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        QwenCoderFormat().grammar([_tool("f", parameters)], required=True)


def test_a_reference_that_a_whole_call_would_bend_is_refused() -> None:
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    with pytest.raises(ConfigError, match="refers to `#`"):
        LlamaFormat().grammar([_tool("f", tree)], required=True)
    grammar = HermesFormat().grammar([_tool("f", tree)], required=True)
    assert _follows(grammar, _write(HermesFormat, ("f", {"next": {"next": None}})))
