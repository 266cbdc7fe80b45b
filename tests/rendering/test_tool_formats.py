import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.rendering.chat import ChatRenderer
from rllm.rendering.tools import (
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    ParsedAnswer,
    ParsedCall,
    PlainFormat,
    QwenCoderFormat,
    StreamEvent,
    tool_format_of,
)

Toy = Callable[..., Any]

HERMES, CODER, MISTRAL, LLAMA = HermesFormat(), QwenCoderFormat(), MistralFormat(), LlamaFormat()
FORMATS = [HERMES, CODER, MISTRAL, LLAMA]
WEATHER = ParsedCall(name="weather", arguments='{"city": "Oslo", "days": 3}')
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    "qwen-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
    "llama": '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}',
}
TWO_WRITTEN = {
    "hermes": f"{WRITTEN['hermes']}\n{WRITTEN['hermes']}",
    "qwen-coder": f"{WRITTEN['qwen-coder']}\n{WRITTEN['qwen-coder']}",
    "mistral": f"{WRITTEN['mistral'][:-1]}, {WRITTEN['mistral'].partition('[{')[2].join(['{', ''])}",
    "llama": f"{WRITTEN['llama']}; {WRITTEN['llama']}",
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


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_a_call_is_found_with_its_name_and_arguments(tool_format: Any) -> None:
    parsed = tool_format.parse(WRITTEN[tool_format.name])
    assert parsed == ParsedAnswer(content="", calls=[WEATHER])


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_parallel_calls_are_found_in_their_order(tool_format: Any) -> None:
    text = TWO_WRITTEN[tool_format.name].replace("Oslo", "Rome", 1)
    rome = ParsedCall(name="weather", arguments='{"city": "Rome", "days": 3}')
    assert tool_format.parse(text) == ParsedAnswer(content="", calls=[rome, WEATHER])


@pytest.mark.parametrize("tool_format", [HERMES, CODER, MISTRAL], ids=lambda each: each.name)
def test_text_before_a_call_is_content_without_the_space_between(tool_format: Any) -> None:
    parsed = tool_format.parse(f" I look it up.\n\n{WRITTEN[tool_format.name]}")
    assert parsed == ParsedAnswer(content=" I look it up.", calls=[WEATHER])


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_reasoning_is_split_off(tool_format: Any) -> None:
    parsed = tool_format.parse(f"<think>\nOslo, I think.\n</think>\n\n{WRITTEN[tool_format.name]}")
    assert parsed == ParsedAnswer(content="", reasoning="Oslo, I think.", calls=[WEATHER])
    assert tool_format.parse("<think>a</think>b ") == ParsedAnswer(content="b ", reasoning="a")
    assert tool_format.parse("<think>never done ") == ParsedAnswer(content="", reasoning="never done")


@pytest.mark.parametrize("text", ["", " ", "Up\n", "\n Up", "a < b", "<think", "{", '{"answer": 4}', "[TOOL"])
@pytest.mark.parametrize("tool_format", [*FORMATS, PlainFormat()], ids=lambda each: type(each).__name__)
def test_an_answer_that_is_text_stays_as_it_is(tool_format: Any, text: str) -> None:
    assert tool_format.parse(text).content == text


@pytest.mark.parametrize(
    ("tool_format", "text", "content"),
    [
        (HERMES, "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>"),
        (HERMES, 'so <tool_call>{"arguments": {}}', 'so <tool_call>{"arguments": {}}'),
        (HERMES, "<tool_call>", "<tool_call>"),
        (HERMES, '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>'),
        (CODER, "<tool_call>\nweather</tool_call>", "<tool_call>\nweather</tool_call>"),
        (MISTRAL, "[TOOL_CALLS] weather", "[TOOL_CALLS] weather"),
        (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]"),
        (LLAMA, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}'),
        (LLAMA, '{"name": "weather", "parameters": 3}', '{"name": "weather", "parameters": 3}'),
    ],
)
def test_markup_that_makes_no_call_is_text_and_is_flagged(tool_format: Any, text: str, content: str) -> None:
    assert tool_format.parse(text) == ParsedAnswer(content=content, unparsed_markup=True)


@pytest.mark.parametrize(
    ("tool_format", "text", "arguments"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, ', '{"a": [1, '),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": nope}}</tool_call>', '{"a": nope}'),
        (HERMES, '<tool_call>{"name": "f", "arguments": 5}</tool_call>', "5"),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"} or so', '{"a": 1}'),
        (CODER, "<tool_call><function=f>\n<parameter=a>\nhalf a", '{"a": "\\nhalf a'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        (LLAMA, '{"name": "f", "parameters": {"a"', '{"a"'),
    ],
)
def test_a_call_that_broke_off_or_is_no_json_is_kept_as_written_and_flagged(
    tool_format: Any, text: str, arguments: str
) -> None:
    parsed = tool_format.parse(text)
    assert parsed.calls == [ParsedCall(name="f", arguments=arguments)]
    assert parsed.unparsed_markup


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


def test_a_plain_format_takes_nothing_for_a_call() -> None:
    text = f"<think>x</think>{WRITTEN['hermes']}"
    assert PlainFormat().parse(text) == ParsedAnswer(content=WRITTEN["hermes"], reasoning="x")


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
        *(" ", "ab", "<", "1.5", "é", '"na\\u006de"', '"name"', *WRITTEN.values()),
    ]
)


@pytest.mark.parametrize("tool_format", [*FORMATS, PlainFormat()], ids=lambda each: type(each).__name__)
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


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_no_part_of_a_tag_is_ever_emitted_and_arguments_come_as_they_are_written(tool_format: Any) -> None:
    text = f"<think>Oslo</think>{WRITTEN[tool_format.name]}"
    _, events = _streamed(tool_format, list(text))
    assert [event.kind for event in events if event.kind == "text"] == []
    first, *others = [event for event in events if event.kind == "call"]
    assert first.name == "weather"
    assert len(others) >= 3
    assert not any(event.name for event in others)


def test_reading_a_long_answer_piece_by_piece_takes_each_piece_once() -> None:
    arguments = json.dumps({"text": "x" * 200_000})
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    parsed, events = _streamed(HERMES, [text[i : i + 4] for i in range(0, len(text), 4)])
    assert parsed.calls == [ParsedCall(name="f", arguments=arguments)]
    assert len(events) > 50_000


# ---- which format a model has --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("builtin", "hermes"),
        ("qwen", "hermes"),
        ("qwen_thinking", "hermes"),
        ("qwen_opened", "hermes"),
        ("qwen_coder", "qwen-coder"),
        ("llama_tools", "llama"),
        ("mistral_tools", "mistral"),
        ("chatml", None),
        ("llama", None),
        ("gemma", None),
        ("thinking", None),
    ],
)
def test_the_format_is_the_one_that_the_template_writes(toy: Toy, template: str, name: str | None) -> None:
    tool_format = ChatRenderer(toy(template)).tool_format
    assert (tool_format and tool_format.name) == name


@pytest.mark.parametrize(
    "breaks",
    [
        ("tojson }}}\n</tool_call>", "tojson }}\n</tool_call>"),  # a brace less
        ("<tool_call>", "<call>"),
        ("{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}", ""),  # calls, but no list of tools
        ("call.function.name | tojson", "'other' | tojson"),
    ],
)
def test_a_template_whose_calls_cannot_be_read_back_has_no_format(toy: Toy, breaks: tuple[str, str]) -> None:
    from_template = toy("qwen").template_text
    assert breaks[0] in from_template
    assert tool_format_of(toy(from_template.replace(*breaks))) is None


def test_markup_that_the_tokenizer_drops_leaves_no_format(toy: Toy) -> None:
    assert tool_format_of(toy(toy("qwen").template_text.replace("<tool_call>", "<head>"))) is None


def test_a_prompt_that_opens_the_reasoning_makes_answers_begin_with_it(toy: Toy) -> None:
    renderer = ChatRenderer(toy("qwen_opened"))
    assert renderer.tool_format is not None
    assert renderer.tool_format.parse("idea\n</think>\n\nUp") == ParsedAnswer(content="Up", reasoning="idea")
    assert renderer.plain_format.parse("idea\n</think>\n\nUp") == ParsedAnswer(content="Up", reasoning="idea")
