"""Grammars are checked by the library that enforces them."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import product
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
from rllm.rendering.answers import CLOSE_THINK, OPEN_THINK
from rllm.rendering.grammars import Thinking, thinking_of
from rllm.rendering.tools import (
    MARKUP,
    DeepSeekFencedFormat,
    DeepSeekFormat,
    DsmlFormat,
    GlmFormat,
    HarmonyFormat,
    HarmonyPlainFormat,
    HermesFormat,
    LlamaFormat,
    MistralArgsFormat,
    MistralFormat,
    QwenCoderFormat,
    schema_grammar,
)

ADDED = tuple(sorted(MARKUP - {"<|end|>"}))
IN_A_TAG = "｜DSML｜"
"""The built-in tokenizer has `<|end|>` already, for the end of an answer."""


@cache
def _tokenizer(added: str) -> tuple[Tokenizer, Any]:
    """The built-in one, whose markup is ordinary text, or one with markup as single tokens.

    In `channels`, `<|end|>` ends a message and `<|return|>` the answer; for `in a tag`, one token stands in
    the middle of tags that are text.
    """
    tokenizer = create_tokenizer()
    if added:
        tags = (IN_A_TAG,) if added == "in a tag" else ADDED
        tokens = [AddedToken(tag, special=added != "added", normalized=False) for tag in tags]
        tokenizer.add_tokens(tokens)
    eos_token = "<|return|>" if added == "channels" else "<|end|>"
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token)
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
JSON_KINDS = [
    HermesFormat,
    MistralFormat,
    MistralArgsFormat,
    DeepSeekFormat,
    DeepSeekFencedFormat,
    LlamaFormat,
]
KINDS = [*JSON_KINDS, QwenCoderFormat, GlmFormat, DsmlFormat]
SPELLINGS = ["", "added", "special"]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write(kind: Any, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as the chat templates of each family write them."""
    match kind.name:
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(_json_call(kind, call) for call in calls)}]"
        case "llama":
            return "; ".join(_json_call(kind, call) for call in calls)
        case "mistral-args":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)
        case "deepseek-v3.1" | "deepseek":
            return _write_deepseek(kind, calls)
        case "deepseek-v3.2":
            invoked = "".join(_invoked(name, arguments) for name, arguments in calls)
            return f"{kind.opener}\n{invoked}{kind.closer}"
        case "harmony":
            ((name, arguments),) = calls
            header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            return f"{header}{_json(arguments)}"
        case "glm":
            bodies = [f"{name}\n{_pairs(arguments)}" for name, arguments in calls]
            return "\n".join(f"<tool_call>{body}</tool_call>" for body in bodies)
        case "qwen-coder":
            bodies = [f"<function={name}>\n{_tags(arguments)}</function>" for name, arguments in calls]
        case _:
            bodies = [_json_call(kind, call) for call in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def _json_call(kind: Any, call: tuple[str, dict[str, Any]]) -> str:
    return _json({"name": call[0], kind.arguments_key: call[1]})


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _tags(arguments: dict[str, Any]) -> str:
    return "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())


def _pairs(arguments: dict[str, Any]) -> str:
    return "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
        for key, value in arguments.items()
    )


def _invoked(name: str, arguments: dict[str, Any]) -> str:
    opened = [f'name="{key}" string="{_json(isinstance(value, str))}"' for key, value in arguments.items()]
    tags = [
        f"<｜DSML｜parameter {tag}>{_bare(value)}</｜DSML｜parameter>\n"
        for tag, value in zip(opened, arguments.values(), strict=True)
    ]
    return f'<｜DSML｜invoke name="{name}">\n{"".join(tags)}</｜DSML｜invoke>\n'


def _write_deepseek(kind: Any, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    fenced = kind is DeepSeekFencedFormat
    bodies = [
        f"function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        if fenced
        else f"{name}<｜tool▁sep｜>{_json(arguments)}"
        for name, arguments in calls
    ]
    marked = [f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies]
    return f"{kind.opener}{kind.between_calls.join(marked)}{kind.closer}"


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


CASES = [*product(KINDS, SPELLINGS), (DsmlFormat, "in a tag")]


@pytest.mark.parametrize(("kind", "added"), CASES)
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


@pytest.mark.parametrize(("kind", "added"), CASES)
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


@pytest.mark.parametrize(("kind", "added"), CASES)
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


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_alone_is_held_to_a_schema(kind: Any) -> None:
    grammar = kind().schema_grammar({"type": "integer"})
    assert _follows(grammar, "5")
    assert not _follows(grammar, "five")


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
    must = Thinking(token_ids=may.token_ids, is_open=True)
    grammar = HermesFormat(token_ids=ids, thinking=must).grammar(TOOLS, required=True)
    assert _follows(grammar, f"Oslo?\n</think>\n\n{call}", added)
    assert not _follows(grammar, call, added)
    assert _follows(schema_grammar({"type": "integer"}, must), "One?</think>\n1", added)
    assert not _follows(schema_grammar({"type": "integer"}, must), "1", added)


def test_reasoning_that_the_prompt_opened_may_be_closed_by_ordinary_text() -> None:
    grammar = HermesFormat(thinking=Thinking(is_open=True)).grammar(TOOLS, required=True)
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


@pytest.mark.parametrize("kind", JSON_KINDS)
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
    with pytest.raises(ConfigError, match=r"`fly` .*weather"):
        HermesFormat().grammar(TOOLS, required=True, name="fly")
    with pytest.raises(ConfigError, match=r"`parameters` .*`f` is 3"):
        HermesFormat().grammar([_tool("f", 3)], required=True)


@pytest.mark.parametrize("kind", [QwenCoderFormat, GlmFormat])
@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}, "`pattern`"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "`anyOf`"),
    ],
)
def test_what_the_tag_form_cannot_enforce_is_refused(
    parameters: dict[str, Any], word: str, kind: Any
) -> None:
    with pytest.raises(ConfigError, match=word):
        kind().grammar([_tool("f", parameters)], required=True)


@pytest.mark.parametrize("kind", [QwenCoderFormat, GlmFormat])
def test_a_value_that_may_be_text_is_written_bare_in_a_form_that_does_not_say_which_it_is(kind: Any) -> None:
    either = {"type": "object", "properties": {"a": {"type": ["string", "integer"]}}, "required": ["a"]}
    for parameters in (either, None):
        grammar = kind().grammar([_tool("f", parameters)], required=True)
        for value in ("Oslo, or so", 3):
            assert _follows(grammar, _write(kind, ("f", {"a": value})))


def test_thoughts_are_marked_by_tokens_where_a_vocabulary_has_both_marks() -> None:
    both = {OPEN_THINK: 5, CLOSE_THINK: 7}
    assert thinking_of(f"x{OPEN_THINK}\n", both) == Thinking(is_open=True, token_ids=(5, 7))
    for mark in both:
        assert thinking_of("x", {mark: 5}) == Thinking(is_open=False, token_ids=None)


def test_a_reference_that_a_whole_call_would_bend_is_refused() -> None:
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    with pytest.raises(ConfigError, match="refers to `#`"):
        LlamaFormat().grammar([_tool("f", tree)], required=True)
    grammar = HermesFormat().grammar([_tool("f", tree)], required=True)
    assert _follows(grammar, _write(HermesFormat, ("f", {"next": {"next": None}})))


# ---- channels ------------------------------------------------------------------------------------------

THOUGHT = "<|channel|>analysis<|message|>Oslo?<|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


def _channel_ids() -> dict[str, int]:
    end = _tokenizer("channels")[0].token_to_id("<|end|>")
    assert end is not None
    return {**_token_ids("channels"), "<|end|>": end}


def test_a_call_in_a_channel_is_held_to_its_schema_behind_any_thoughts() -> None:
    tool_format = HarmonyFormat(token_ids=_channel_ids())
    grammar = tool_format.grammar(TOOLS, required=True)
    for calls in GOOD:
        written = _write(HarmonyFormat, calls[0])
        for text in (written, THOUGHT + written, THOUGHT * 2 + written):
            assert _follows(grammar, text, "channels"), text
        (call,) = tool_format.parse(THOUGHT + written).calls
        assert (call.name, json.loads(call.arguments)) == calls[0]
    for call in BAD:
        assert not _follows(grammar, _write(HarmonyFormat, call), "channels"), call
    for text in ("", "no", "<|channel|>final<|message|>no", THOUGHT, SAID + _write(HarmonyFormat, OSLO)):
        assert not _follows(grammar, text, "channels"), text


def test_where_a_call_in_a_channel_is_optional_there_is_a_last_message_or_the_call() -> None:
    tool_format = HarmonyFormat(token_ids=_channel_ids())
    grammar = tool_format.grammar(TOOLS, required=False)
    call = _write(HarmonyFormat, OSLO)
    for text in ("<|channel|>final<|message|>Up", call, SAID + call, THOUGHT + SAID + call):
        assert _follows(grammar, text, "channels"), text
    bad = _write(HarmonyFormat, ("weather", {}))
    for text in ("Up", bad, SAID + bad, f"<|channel|>final<|message|>Up<|end|><|start|>assistant{bad}"):
        assert not _follows(grammar, text, "channels"), text


def test_a_schema_holds_for_the_last_message() -> None:
    ids = _channel_ids()
    schema = {"type": "integer"}
    for grammar in (
        HarmonyFormat(token_ids=ids).schema_grammar(schema),
        HarmonyPlainFormat(token_ids=ids).schema_grammar(schema),
        HarmonyFormat(token_ids=ids).grammar(TOOLS, required=False, schema=schema),
    ):
        assert _follows(grammar, f"{THOUGHT}<|channel|>final<|message|>12", "channels")
        assert not _follows(grammar, f"{THOUGHT}<|channel|>final<|message|>twelve", "channels")
        assert not _follows(grammar, "12", "channels")
