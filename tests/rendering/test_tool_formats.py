import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.rendering.calls import MAX_NAME
from rllm.rendering.harmony import MAX_HEADER
from rllm.rendering.named_calls import MAX_HEAD
from rllm.rendering.tools import (
    MARKUP as TAGS,
)
from rllm.rendering.tools import (
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
    ParsedAnswer,
    ParsedCall,
    PlainFormat,
    QwenCoderFormat,
    StreamEvent,
)

Toy = Callable[..., Any]

HERMES, CODER, MISTRAL, LLAMA = HermesFormat(), QwenCoderFormat(), MistralFormat(), LlamaFormat()
GLM, MISTRAL_ARGS, HARMONY = GlmFormat(), MistralArgsFormat(), HarmonyFormat()
DEEPSEEK, DEEPSEEK_FENCED, DSML = DeepSeekFormat(), DeepSeekFencedFormat(), DsmlFormat()
BEHIND_TEXT = [HERMES, CODER, GLM, MISTRAL, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_FENCED, DSML]
"""Calls that text may stand before, and thoughts in tags."""
WITH_TAGS = [*BEHIND_TEXT, LLAMA]
FORMATS = [*WITH_TAGS, HARMONY]
READERS = [*FORMATS, PlainFormat(), HarmonyPlainFormat()]
WEATHER = ParsedCall(name="weather", arguments='{"city": "Oslo", "days": 3}')
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    "qwen-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
    "llama": '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}',
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "mistral-args": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 3}<|call|>',
}
OPENED = f'{DSML.opener}\n<｜DSML｜invoke name="f">\n'
TWO_WRITTEN = {
    "hermes": f"{WRITTEN['hermes']}\n{WRITTEN['hermes']}",
    "qwen-coder": f"{WRITTEN['qwen-coder']}\n{WRITTEN['qwen-coder']}",
    "mistral": f"{WRITTEN['mistral'][:-1]}, {WRITTEN['mistral'].partition('[{')[2].join(['{', ''])}",
    "llama": f"{WRITTEN['llama']}; {WRITTEN['llama']}",
    "glm": f"{WRITTEN['glm']}\n{WRITTEN['glm']}",
    "mistral-args": WRITTEN["mistral-args"] * 2,
    "deepseek-v3.1": WRITTEN["deepseek-v3.1"].replace(
        "<｜tool▁calls▁end｜>", WRITTEN["deepseek-v3.1"].removeprefix("<｜tool▁calls▁begin｜>")
    ),
    "deepseek": WRITTEN["deepseek"].replace(
        "<｜tool▁calls▁end｜>", "\n" + WRITTEN["deepseek"].removeprefix("<｜tool▁calls▁begin｜>")
    ),
    "deepseek-v3.2": WRITTEN["deepseek-v3.2"].replace(
        "</｜DSML｜function_calls>", WRITTEN["deepseek-v3.2"].removeprefix("<｜DSML｜function_calls>\n")
    ),
    "harmony": f"{WRITTEN['harmony']}<|start|>assistant{WRITTEN['harmony']}",
}


def _streamed(tool_format: Any, pieces: list[str]) -> tuple[ParsedAnswer, list[StreamEvent]]:
    stream = tool_format.stream()
    events = [event for piece in pieces for event in stream.feed(piece)] + stream.finish()
    calls: list[ParsedCall] = []
    for event in events:
        if event.kind == "call":
            if event.name:
                calls.append(ParsedCall(name=event.name, arguments=""))
                assert event.index == len(calls) - 1
            calls[event.index].arguments += event.text
    said = {kind: "".join(e.text for e in events if e.kind == kind) for kind in ("text", "reasoning")}
    return ParsedAnswer(
        content=said["text"],
        reasoning=said["reasoning"],
        calls=calls,
        unparsed_markup=stream.unparsed_markup,
    ), events


def test_a_call_is_found_with_its_name_and_arguments(subtests: pytest.Subtests) -> None:
    for tool_format in FORMATS:
        with subtests.test(tool_format=tool_format):
            written = WRITTEN[tool_format.name]
            for parsed in (tool_format.parse(written), _streamed(tool_format, list(written))[0]):
                assert parsed == ParsedAnswer(content="", calls=[WEATHER])


def test_arguments_within_arguments_are_whole(subtests: pytest.Subtests) -> None:
    flat, nested = (
        '{"city": "Oslo", "days": 3}',
        '{"city": {"at": [[59], {"x": {}}], "name": "Oslo"}, "days": 3}',
    )
    for tool_format in FORMATS:
        written = WRITTEN[tool_format.name].replace(flat, nested)
        if nested not in written:
            continue
        with subtests.test(tool_format=tool_format):
            whole = ParsedAnswer(content="", calls=[ParsedCall(name="weather", arguments=nested)])
            assert tool_format.parse(written) == _streamed(tool_format, list(written))[0] == whole


@pytest.mark.parametrize(("tool_format", "end"), [(DEEPSEEK, ""), (DEEPSEEK_FENCED, "\n```")])
def test_a_call_that_does_not_end_as_it_should_is_read_and_told_of(tool_format: Any, end: str) -> None:
    text = WRITTEN[tool_format.name].replace(f"{end}<｜tool▁call▁end｜>", "")
    assert tool_format.parse(text) == ParsedAnswer(content="", calls=[WEATHER], unparsed_markup=True)


def test_parallel_calls_are_found_in_their_order(subtests: pytest.Subtests) -> None:
    for tool_format in FORMATS:
        with subtests.test(tool_format=tool_format):
            text = TWO_WRITTEN[tool_format.name].replace("Oslo", "Rome", 1)
            rome = ParsedCall(name="weather", arguments='{"city": "Rome", "days": 3}')
            assert tool_format.parse(text) == ParsedAnswer(content="", calls=[rome, WEATHER])


def test_text_before_a_call_is_content_without_the_space_between(subtests: pytest.Subtests) -> None:
    for tool_format in BEHIND_TEXT:
        with subtests.test(tool_format=tool_format):
            parsed = tool_format.parse(f" I look it up.\n\n{WRITTEN[tool_format.name]}")
            assert parsed == ParsedAnswer(content=" I look it up.", calls=[WEATHER])


def test_text_behind_calls_is_content_too(subtests: pytest.Subtests) -> None:
    for tool_format in (HERMES, CODER, GLM, DEEPSEEK, DEEPSEEK_FENCED, DSML):
        with subtests.test(tool_format=tool_format):
            text = f"{WRITTEN[tool_format.name]}\nSo much."
            for parsed in (tool_format.parse(text), _streamed(tool_format, list(text))[0]):
                assert parsed == ParsedAnswer(content="So much.", calls=[WEATHER])


def test_reasoning_is_split_off(subtests: pytest.Subtests) -> None:
    for tool_format in WITH_TAGS:
        with subtests.test(tool_format=tool_format):
            parsed = tool_format.parse(f"<think>\nOslo, I think.\n</think>\n\n{WRITTEN[tool_format.name]}")
            assert parsed == ParsedAnswer(content="", reasoning="Oslo, I think.", calls=[WEATHER])
            assert tool_format.parse("<think>a</think>b ") == ParsedAnswer(content="b ", reasoning="a")
            for thought in ("never done", "never done </th"):
                assert tool_format.parse(f"<think>{thought}").reasoning == thought
            assert tool_format.parse("<think>never done ") == ParsedAnswer(content="", reasoning="never done")


def test_an_answer_that_is_text_stays_as_it_is() -> None:
    for tool_format in READERS:
        for text in ("", " ", "Up\n", "\n Up", "a < b", "<think", "{", '{"answer": 4}', "[TOOL"):
            assert tool_format.parse(text).content == text, type(tool_format).__name__


def test_markup_that_makes_no_call_is_text_and_is_flagged(subtests: pytest.Subtests) -> None:
    for tool_format, text, content in [
        (HERMES, "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>"),
        (HERMES, 'so <tool_call>{"arguments": {}}', 'so <tool_call>{"arguments": {}}'),
        (HERMES, "<tool_call>", "<tool_call>"),
        (HERMES, '<tool_call>{: 1, "name": "f"}</tool_call>', '<tool_call>{: 1, "name": "f"}</tool_call>'),
        (HERMES, '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>'),
        (CODER, "<tool_call>\nweather</tool_call>", "<tool_call>\nweather</tool_call>"),
        (MISTRAL, "[TOOL_CALLS] weather", "[TOOL_CALLS] weather"),
        (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]"),
        (LLAMA, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}'),
        (LLAMA, '{"age": 36, "name": "f", "parameters": {}}', '{"age": 36, "name": "f", "parameters": {}}'),
        (LLAMA, '{"name": "weather", "parameters": 3}', '{"name": "weather", "parameters": 3}'),
        (GLM, "<tool_call>\n two words</tool_call>", "<tool_call>\n two words</tool_call>"),
        (GLM, "<tool_call>weather\n", "<tool_call>weather\n"),
        (GLM, WRITTEN["hermes"], WRITTEN["hermes"]),
        (MISTRAL_ARGS, "[TOOL_CALLS]weather[ARGS]3", "[TOOL_CALLS]weather[ARGS]3"),
        (MISTRAL_ARGS, "so [TOOL_CALLS]weather[ARG", "so [TOOL_CALLS]weather[ARG"),
        (MISTRAL_ARGS, WRITTEN["mistral"], WRITTEN["mistral"]),
        (MISTRAL, WRITTEN["mistral-args"], WRITTEN["mistral-args"]),
        (DEEPSEEK, "<｜tool▁calls▁begin｜>none", "<｜tool▁calls▁begin｜>none"),
        (DEEPSEEK, WRITTEN["deepseek"], WRITTEN["deepseek"]),
        (DEEPSEEK_FENCED, WRITTEN["deepseek-v3.1"], WRITTEN["deepseek-v3.1"]),
        (
            DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
        ),
        (DSML, f"{DSML.opener}\n<｜DSML｜invoke>", f"{DSML.opener}\n<｜DSML｜invoke>"),
        (DSML, f'{DSML.opener}\n<｜DSML｜invoke name="f', f'{DSML.opener}\n<｜DSML｜invoke name="f'),
        (DSML, f"so {DSML.opener}\n{DSML.closer}", f"so {DSML.opener}\n{DSML.closer}"),
        (HARMONY, "<|channel|>commentary to=functions.f", "<|channel|>commentary to=functions.f"),
    ]:
        with subtests.test(tool_format=tool_format, text=text, content=content):
            assert tool_format.parse(text) == ParsedAnswer(content=content, unparsed_markup=True)


def test_a_head_that_is_longer_than_any_name_is_text() -> None:
    long = "x" * 10_000
    for tool_format in (DEEPSEEK, DEEPSEEK_FENCED, MISTRAL_ARGS):
        text = WRITTEN[tool_format.name].replace("weather", long)
        parsed = tool_format.parse(text)
        assert (parsed.content, parsed.calls, parsed.unparsed_markup) == (text, [], True)
        assert tool_format.stream().feed(text), "it is known by its head"


def test_a_call_that_broke_off_or_is_no_json_is_kept_as_written_and_flagged(
    subtests: pytest.Subtests,
) -> None:
    with_key = '<｜DSML｜parameter name="a" string="false">1, "b": 2'
    for tool_format, text, arguments in [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, ', '{"a": [1, '),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": nope}}</tool_call>', '{"a": nope}'),
        (HERMES, '<tool_call>{"name": "f", "arguments": 5}</tool_call>', "5"),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"} or so', '{"a": 1}'),
        (CODER, "<tool_call><function=f>\n<parameter=a>\nhalf a", '{"a": "\\nhalf a'),
        (CODER, "<tool_call><function=f>\n<parameter=ä>\nhalf ö", '{"ä": "\\nhalf ö'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        (LLAMA, '{"name": "f", "parameters": {"a"', '{"a"'),
        (LLAMA, '{"name": "f", "parameters": {}{"name": "g", "parameters": {}}', "{}"),
        (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>half a</arg_v", '{"a": "half a</arg_v'),
        (GLM, "<tool_call>f<arg_key>a</arg_key>no value", "{"),
        (GLM, "<tool_call>f<arg_key>a<b</arg_key><arg_value>no name</arg_value></tool_call>", "{"),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": [1, ', '{"a": [1, '),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": nope}', '{"a": nope}'),
        (DEEPSEEK, f"{DEEPSEEK.opener}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{", "{"),
        (DEEPSEEK, f"{DEEPSEEK.opener}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}} or so", "{}"),
        (DSML, f'{OPENED}<｜DSML｜parameter name="a" string="true">half a</｜DS', '{"a": "half a</｜DS'),
        (DSML, f'{OPENED}<｜DSML｜parameter name="a" string="false">[1, ', '{"a": [1, '),
        # JSON as a whole, though the value is none:
        (DSML, f"{OPENED}{with_key}</｜DSML｜parameter></｜DSML｜invoke>{DSML.closer}", '{"a": 1, "b": 2}'),
        (DSML, f"{OPENED}no parameter", "{"),
        (DSML, f"{OPENED}</｜DSML｜invoke>\nor so", "{}"),
        (HARMONY, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": ', '{"a": '),
        (HARMONY, "<|channel|>commentary to=functions.f<|message|>nope<|call|>", "nope"),
    ]:
        with subtests.test(tool_format=tool_format, text=text, arguments=arguments):
            parsed = tool_format.parse(text)
            assert parsed.calls == [ParsedCall(name="f", arguments=arguments)]
            assert parsed.unparsed_markup


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_an_answer_that_is_cut_off_within_a_call_is_a_call_or_text_and_never_half_of_each(
    tool_format: Any,
) -> None:
    written = WRITTEN[tool_format.name]
    for length in range(1, len(written)):
        cut = written[:length]
        for parsed in (tool_format.parse(cut), _streamed(tool_format, list(cut))[0]):
            assert parsed.calls == [] or parsed.content == "", cut


@pytest.mark.parametrize(
    ("tool_format", "mark"), [(DEEPSEEK, "<｜tool▁call▁end"), (DSML, "\n</｜DSML｜function_calls")]
)
def test_an_answer_that_ends_within_its_last_marks_is_whole(tool_format: Any, mark: str) -> None:
    written = WRITTEN[tool_format.name]
    whole = tool_format.parse(written)
    for length in range(written.index(mark), len(written)):
        assert tool_format.parse(written[:length]) == whole
        parsed, _ = _streamed(tool_format, list(written[:length]))
        assert parsed == whole


@pytest.mark.parametrize(("beyond", "content"), [(0, "hi"), (1, None)])
def test_a_header_is_so_long_at_most(beyond: int, content: str | None) -> None:
    text = "<|channel|>commentary".ljust(MAX_HEADER + beyond) + "<|message|>hi<|end|>"
    for parsed in (HARMONY.parse(text), _streamed(HARMONY, list(text))[0]):
        assert (parsed.content == content) == (content is not None)


@pytest.mark.parametrize(
    ("tool_format", "begin"),
    [
        (MISTRAL_ARGS, "[TOOL_CALLS]"),
        (DEEPSEEK, "<｜tool▁call▁begin｜>"),
        (DEEPSEEK_FENCED, "<｜tool▁call▁begin｜>"),
    ],
)
def test_what_stands_before_arguments_is_so_long_at_most(tool_format: Any, begin: str) -> None:
    written = WRITTEN[tool_format.name]
    length = written.index("{") - written.index(begin) - len(begin)
    for beyond, num_calls in ((0, 1), (1, 0)):
        name = "x" * (MAX_HEAD - length + len("weather") + beyond)
        text = written.replace("weather", name)
        for parsed in (tool_format.parse(text), _streamed(tool_format, list(text))[0]):
            assert [each.name for each in parsed.calls] == [name] * num_calls


def test_the_name_in_a_header_is_as_long_as_a_name_at_most() -> None:
    for num_letters, num_calls in ((MAX_NAME, 1), (MAX_NAME + 1, 0)):
        text = WRITTEN["harmony"].replace("weather", "x" * num_letters)
        assert len(HARMONY.parse(text).calls) == num_calls


def test_a_message_without_a_header_is_what_the_model_says() -> None:
    assert HARMONY.parse("<|message|>hello<|return|>") == ParsedAnswer(content="hello")


def test_a_call_without_arguments_has_an_empty_object_of_them() -> None:
    parsed = HERMES.parse('<tool_call>{"name": "now"}</tool_call>')
    assert parsed == ParsedAnswer(content="", calls=[ParsedCall(name="now", arguments="{}")])


def test_keys_of_a_call_may_come_in_any_order_and_with_others() -> None:
    text = (
        '<tool_call>{"id": {"x": "}"}, "arguments": {"a": "</tool_call> \\" }"}, "name": "f"}</tool_call> ok'
    )
    assert HERMES.parse(text) == ParsedAnswer(
        content="ok", calls=[ParsedCall(name="f", arguments='{"a": "</tool_call> \\" }"}')]
    )


def test_a_call_without_a_tag_has_the_keys_of_a_call_and_no_other() -> None:
    for text in (
        '{"type": "function", "id": 3, "name": "f", "parameters": {}}',
        '{"parameters": {}, "name": "f"}',
    ):
        assert LLAMA.parse(text) == ParsedAnswer(content="", calls=[ParsedCall(name="f", arguments="{}")])


def test_values_of_tag_parameters_have_the_type_that_the_tool_says() -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "properties": {
                        "zip": {"type": "string"},
                        "deep": {"type": "boolean"},
                        "limit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "rows": {"type": "array"},
                    }
                },
            },
        }
    ]
    values = {"zip": "0150", "deep": "True", "limit": "null", "rows": '["a", 1]'}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (call,) = CODER.parse(f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>", tools).calls
    assert json.loads(call.arguments) == {"zip": "0150", "deep": True, "limit": None, "rows": ["a", 1]}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (None, {"3": 3, "x": "x", '"q"': '"q"', "True": "True"}),
        ({}, {"3": 3, "x": "x", '"q"': '"q"'}),
        ({"type": "string"}, {"3": "3", '"q"': '"q"', "True": "True"}),
        ({"type": "integer"}, {"3": 3, "3.5": 3.5, "x": "x", "None": None, '"q"': "q"}),
        ({"type": ["integer", "string"]}, {"3": 3, "3.5": "3.5", "true": "true", '"q"': '"q"'}),
        ({"type": "boolean"}, {"true": True, "False": False, "1": 1}),
        ({"type": ["boolean", "string"]}, {"true": True, "1": "1", "x": "x"}),
        ({"enum": ["1", "2"]}, {"1": "1"}),
        ({"enum": [1, "a"]}, {"1": 1, "a": "a", "true": "true"}),
        ({"const": True}, {"true": True, "True": True}),
        ({"const": "5"}, {"5": "5"}),
        ({"anyOf": [{"type": "integer"}, {"const": "x"}]}, {"3": 3, "true": "true"}),
        ({"oneOf": [{"type": "string"}, {}]}, {"3": 3}),
    ],
)
def test_a_value_is_of_a_type_that_its_schema_admits(schema: Any, values: dict[str, Any]) -> None:
    properties = {} if schema is None else {"v": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    for text, value in values.items():
        written = f"<tool_call>\n<function=f>\n<parameter=v>\n{text}\n</parameter>\n</function>\n</tool_call>"
        (call,) = CODER.parse(written, [tool]).calls
        assert json.loads(call.arguments) == {"v": value}
        assert type(json.loads(call.arguments)["v"]) is type(value)


def test_values_and_their_names_are_written_as_they_are_in_any_alphabet() -> None:
    (call,) = CODER.parse("<tool_call>\n<function=f>\n<parameter=où>\nœuf\n</parameter>\n</function>").calls
    assert call.arguments == '{"où": "œuf"}'


def test_a_value_says_itself_whether_it_is_text() -> None:
    values = [
        ("a", "true", "3\\n "),
        ("b", "false", '{"x": ["</p>"]}'),
        ("c", "true", ""),
        ("d", "false", "null"),
    ]
    tags = "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>'
        for key, is_text, value in values
    )
    (call,) = DSML.parse(f"{OPENED}{tags}\n</｜DSML｜invoke>\n{DSML.closer}").calls
    assert json.loads(call.arguments) == {"a": "3\\n ", "b": {"x": ["</p>"]}, "c": "", "d": None}


def test_a_plain_format_takes_nothing_for_a_call() -> None:
    text = f"<think>x</think>{WRITTEN['hermes']}"
    assert PlainFormat().parse(text) == ParsedAnswer(content=WRITTEN["hermes"], reasoning="x")


# ---- channels ------------------------------------------------------------------------------------------

THOUGHT = "<|channel|>analysis<|message|>Oslo, I think.<|end|><|start|>assistant"


def test_a_channel_says_what_is_reasoning_what_is_text_and_what_is_a_call() -> None:
    text = (
        f"{THOUGHT}<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant{WRITTEN['harmony']}"
    )
    assert HARMONY.parse(text) == ParsedAnswer(
        content="I look it up.", reasoning="Oslo, I think.", calls=[WEATHER]
    )
    assert HARMONY.parse(f"{THOUGHT}<|channel|>final<|message|>Oslo.<|return|>") == ParsedAnswer(
        content="Oslo.", reasoning="Oslo, I think."
    )
    assert HARMONY.parse(f"{THOUGHT}<|channel|>final<|message|>Os") == ParsedAnswer(
        content="Os", reasoning="Oslo, I think."
    )
    for ends in ("<|end|><|end|>", "<|end|> <|return|>", "<|return|><|call|>"):
        assert HARMONY.parse(f"{THOUGHT}<|channel|>final<|message|>Oslo.{ends}More.") == ParsedAnswer(
            content="Oslo.\nMore.", reasoning="Oslo, I think."
        )
    for next_message in ("<|channel|>", "<|start|>assistant<|channel|>"):  # the one before has no end
        unended = f"<|channel|>analysis<|message|>Hm{next_message}final<|message|>Oslo."
        assert HARMONY.parse(unended) == ParsedAnswer(content="Oslo.", reasoning="Hm")


def test_space_around_a_thought_is_no_part_of_it() -> None:
    text = "<|channel|>analysis<|message|>\n Oslo, I think. <|end|><|channel|>final<|message|>Oslo."
    assert HARMONY.parse(text) == ParsedAnswer(content="Oslo.", reasoning="Oslo, I think.")


def test_thoughts_and_texts_of_several_messages_stand_in_lines_of_their_own() -> None:
    parsed = HARMONY.parse(
        f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>a<|end|><|start|>assistant<|message|>b"
    )
    assert parsed == ParsedAnswer(content="a\nb", reasoning="Oslo, I think.\nOslo, I think.")


def test_whom_a_call_is_for_may_stand_behind_the_role() -> None:
    text = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo", "days": 3}'
    assert HARMONY.parse(text) == ParsedAnswer(content="", calls=[WEATHER])


def test_a_call_of_a_tool_of_the_models_own_is_a_call_too() -> None:
    (call,) = HARMONY.parse("<|channel|>analysis to=python code<|message|>1 + 1<|call|>").calls
    assert call == ParsedCall(name="python", arguments="1 + 1")


def test_plain_answers_in_channels_are_read_and_hold_no_call() -> None:
    plain = HarmonyPlainFormat()
    assert plain.parse(f"{THOUGHT}<|channel|>final<|message|>Oslo.") == ParsedAnswer(
        content="Oslo.", reasoning="Oslo, I think."
    )
    not_called = plain.parse(f"{THOUGHT}{WRITTEN['harmony']}")
    assert not not_called.calls
    assert not_called.content.endswith('{"city": "Oslo", "days": 3}')


MARKUP = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "[TOOL_CALLS]",
            "<function=f>",
            "</function>",
        ),
        *("<parameter=a>", "</parameter>", '{"name": "f", "arguments": {"a": "}"}}', '{"name": "f", '),
        *(
            '"parameters": {"b": [1, "]"]}}',
            '"arguments": ',
            "{",
            "}",
            "[",
            "]",
            ",",
            "; ",
            '"',
            "\\",
            ":",
            "\n",
        ),
        *(" ", "ab", "<", "1.5", "é", '"na\\u006de"', '"name"', *WRITTEN.values(), *sorted(TAGS)),
        *("to=functions.f", "analysis", "final", "commentary", "assistant", "```json\n", "[CALL_ID]", "f"),
    ]
)


@pytest.mark.parametrize("tool_format", READERS, ids=lambda each: type(each).__name__)
@given(parts=st.lists(MARKUP, max_size=14), data=st.data())
def test_a_streamed_answer_amounts_to_the_parsed_one_however_it_is_cut(
    tool_format: Any, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parsed = tool_format.parse(text)
    assert _streamed(tool_format, pieces)[0] == parsed
    assert _streamed(tool_format, list(text))[0] == parsed


def test_a_quote_behind_a_backslash_ends_no_text_wherever_the_answer_is_cut() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "x\\"}</tool_call>\\\\"}}</tool_call>'
    whole = ParsedAnswer(content="", calls=[ParsedCall(name="f", arguments='{"a": "x\\"}</tool_call>\\\\"}')])
    for cut in range(len(text) + 1):
        assert _streamed(HERMES, [text[:cut], text[cut:]])[0] == whole


NO_HEADS = [f'{sign}{"§<>" * 100}\n"§' for sign in ("", "<", ">", '"', "\n")]
"""Go on no call, wherever its head was cut off, and are longer than any name."""


@pytest.mark.parametrize("tool_format", WITH_TAGS, ids=lambda each: each.name)
def test_a_head_is_held_back_while_it_may_be_one_and_given_back_at_once_when_it_cannot(
    tool_format: Any,
) -> None:
    """At every place before the call is sure, in one piece and sign by sign."""
    written = WRITTEN[tool_format.name]

    def begins(text: str) -> bool:
        return any(event.kind == "call" for event in tool_format.stream().feed(text))

    # What follows `"arguments":` is their value, also where it is no JSON.
    heads = [written[:cut] for cut in range(len(tool_format.opener) or 1, len(written))]
    heads = [each for each in heads if not begins(each) and '"arguments":' not in each]
    assert len(heads) >= 9
    for head, no_head in product(heads, NO_HEADS):
        if begins(head + no_head[0]):
            continue
        for first, second in ([head], [no_head]), (head, no_head):
            stream = tool_format.stream()
            assert not [event for piece in first for event in stream.feed(piece)], head
            given_back = [event for piece in second for event in stream.feed(piece)]
            assert {event.kind for event in given_back} == {"text"}, (head, no_head[0])
            assert "".join(event.text for event in given_back) == head + no_head
            assert not stream.finish()
            assert stream.unparsed_markup or not tool_format.opener


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_no_part_of_a_tag_is_ever_emitted_and_arguments_come_as_they_are_written(tool_format: Any) -> None:
    thought = "<|channel|>analysis<|message|>Oslo<|end|>" if tool_format is HARMONY else "<think>Oslo</think>"
    text = f"{thought}{WRITTEN[tool_format.name]}"
    _, events = _streamed(tool_format, list(text))
    assert [event.kind for event in events if event.kind == "text"] == []
    first, *others = [event for event in events if event.kind == "call"]
    assert first.name == "weather"
    assert len(others) >= 3
    assert not any(event.name for event in others)


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_reading_a_long_answer_piece_by_piece_takes_each_piece_once(tool_format: Any) -> None:
    text = WRITTEN[tool_format.name].replace("Oslo", "x" * 80_000)
    parsed, events = _streamed(tool_format, [text[i : i + 4] for i in range(0, len(text), 4)])
    (call,) = parsed.calls
    assert json.loads(call.arguments) == {"city": "x" * 80_000, "days": 3}
    if tool_format not in (CODER, GLM):  # whose values are known once they are whole
        assert len(events) > 19_000
    if tool_format.name in ("hermes", "mistral", "llama"):  # whose names are quoted
        for num_letters, num_calls in ((MAX_NAME - 2, 1), (MAX_NAME - 1, 0)):
            named = WRITTEN[tool_format.name].replace("weather", "x" * num_letters)
            assert len(tool_format.parse(named).calls) == num_calls, "more is no name but an answer"


@pytest.mark.parametrize(
    ("tool_format", "most"), [(GLM, MAX_NAME), (DSML, MAX_NAME), (CODER, MAX_NAME - len("<parameter=>"))]
)
def test_a_key_between_tags_is_as_long_as_a_name_at_most_also_where_its_tag_comes_in_pieces(
    tool_format: Any, most: int
) -> None:
    for num_letters, is_key in ((most, True), (most + 1, False)):
        written = WRITTEN[tool_format.name].replace("city", "x" * num_letters)
        for parsed in (_streamed(tool_format, list(written))[0], tool_format.parse(written)):
            assert [("x" * num_letters in call.arguments) for call in parsed.calls] == [is_key]
            assert parsed.unparsed_markup != is_key


def test_the_name_in_a_tag_is_as_long_as_a_name_at_most_with_its_tag() -> None:
    for beyond, num_calls in ((0, 1), (1, 0)):
        name = "x" * (MAX_NAME - len("<function=>") + beyond)
        assert len(CODER.parse(WRITTEN["qwen-coder"].replace("weather", name)).calls) == num_calls


@pytest.mark.parametrize("tool_format", BEHIND_TEXT, ids=lambda each: each.name)
def test_a_name_without_end_or_with_signs_that_are_not_printed_is_no_name(tool_format: Any) -> None:
    for name in ("x" * 4 * MAX_NAME, "wea\x07ther"):
        text = WRITTEN[tool_format.name].replace("weather", name)
        for parsed in (_streamed(tool_format, list(text))[0], tool_format.parse(text)):
            assert parsed == ParsedAnswer(content=text, unparsed_markup=True)
    endless = WRITTEN[tool_format.name].partition("weather")[0] + "x" * 4 * MAX_NAME
    stream = tool_format.stream()
    assert "".join(event.text for event in stream.feed(endless)) == endless, "it is given back at once"


def test_an_answer_is_handed_on_with_its_first_piece() -> None:
    for answer_stream in (HERMES.stream(), PlainFormat().stream()):
        assert "".join(event.text for event in answer_stream.feed("Hello there")) == "Hello there"
