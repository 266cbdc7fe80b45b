"""The Messages protocol: what clients send is understood as the conversation that it is."""

import json
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rllm.gateway.dialects.messages import MessagesDialect
from rllm.gateway.dialects.tool_input import arguments_of, tool_input
from rllm.gateway.server.bodies import json_object
from rllm.types.wire import (
    Answer,
    Choice,
    ToolChoice,
    ToolMode,
)

sys.path.insert(0, str(Path(__file__).parent))
from dialect_server import calls
from messages_client import QUESTION, THINKING, WEATHER, WEB_SEARCH, parsed, refusal


def test_system_text_and_blocks_become_one_system_message() -> None:
    assert parsed(system="Be brief.").messages[0] == {"role": "system", "content": "Be brief."}
    blocks = [
        {"type": "text", "text": "One"},
        {"type": "text", "text": "Two", "cache_control": {"type": "ephemeral"}},
    ]
    assert parsed(system=blocks).messages == [{"role": "system", "content": "One\nTwo"}, QUESTION]
    assert parsed(system="").messages == parsed(system=[]).messages == [QUESTION]


def test_the_line_that_claude_code_changes_at_every_request_is_not_said_to_the_model() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.197; cch=eb6c6;"
    prompt = {"type": "text", "text": "You are an agent."}
    assert parsed(system=[{"type": "text", "text": line}, prompt]).messages[0]["content"] == prompt["text"]
    assert parsed(system=f"{line}\nYou are an agent.").messages[0]["content"] == prompt["text"]


def test_blocks_become_messages_in_their_order() -> None:
    request = parsed(
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "Weather in"}, {"type": "text", "text": "Rome?"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "AAAA"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                    {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "b",
                        "content": [{"type": "text", "text": "no city"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
            {"role": "system", "content": "The date is known."},
            {"role": "user", "content": "And?"},
        ]
    )
    assert request.messages == [
        {"role": "user", "content": "Weather in\nRome?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
                },
                {"id": "b", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
        {"role": "tool", "content": "Error: no city", "tool_call_id": "b"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "The date is known."},
        {"role": "user", "content": "And?"},
    ]


def test_text_before_a_tool_result_stays_before_it() -> None:
    content = [
        {"type": "text", "text": "Note"},
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "text", "text": "More"},
    ]
    assert parsed(messages=[{"role": "user", "content": content}]).messages == [
        {"role": "user", "content": "Note"},
        {"role": "tool", "content": "", "tool_call_id": "a"},
        {"role": "user", "content": "More"},
    ]


def test_images_and_documents_stay_parts() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    document = {"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}}
    request = parsed(
        messages=[{"role": "user", "content": [{"type": "text", "text": "See"}, image, document]}]
    )
    assert request.messages[0]["content"] == [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        document,
    ]


def test_what_cannot_be_answered_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for fields, param in [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [QUESTION, {"role": "assistant", "content": "The answer is ("}]}, "messages[1].role"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "x"}],
                    },
                    QUESTION,
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"system": 7}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stream": 1}, "stream"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "must"}}, "tool_choice.type"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
    ]:
        with subtests.test(fields=fields, param=param):
            assert refusal(**fields).param == param


def test_sampling_is_read_and_what_belongs_to_the_provider_is_left_alone() -> None:
    request = parsed(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["END"],
        stream=True,
        metadata={"user_id": "u"},
        context_management={"edits": []},
        betas=["x"],
        service_tier="auto",
        output_config={"effort": "high"},
        **THINKING,
    )
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 40)
    assert (request.max_tokens, request.stop, request.stream) == (64, ["END"], True)
    schema = {"type": "object"}
    asked = parsed(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert asked.response_schema == schema
    assert request.response_schema is None


def test_own_tools_are_offered_and_hosted_ones_are_not() -> None:
    request = parsed(tools=[WEATHER | {"type": "custom", "strict": True}, WEB_SEARCH])
    assert request.tools == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Weather of a city",
                "parameters": WEATHER["input_schema"],
                "strict": True,
            },
        }
    ]


@pytest.mark.parametrize(
    ("value", "expected", "parallel"),
    [
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "none"}, ToolChoice(mode=ToolMode.NONE), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(mode=ToolMode.REQUIRED), False),
        ({"type": "tool", "name": "weather"}, ToolChoice(mode=ToolMode.NAMED, name="weather"), True),
    ],
)
def test_tool_choices(value: object, expected: ToolChoice, parallel: bool) -> None:
    request = parsed(tools=[WEATHER], tool_choice=value)
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, parallel)


def test_counting_needs_no_limit_and_may_end_with_the_assistant() -> None:
    body = {
        "model": "m",
        "messages": [QUESTION, {"role": "assistant", "content": "Hello"}],
        "tools": [WEATHER],
    }
    request = MessagesDialect().parse_count(body)
    assert [message["role"] for message in request.messages] == ["user", "assistant"]
    assert len(request.tools) == 1


# ---- tool input --------------------------------------------------------------------------------------------


def test_arguments_become_an_object_and_themselves_again(subtests: pytest.Subtests) -> None:
    for arguments, value in [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ("{}", {}),
        ("", {}),
        ("city = Rome", {"_raw": "city = Rome"}),
        ('{"city": ', {"_raw": '{"city": '}),
        ("[1, 2]", {"_raw": "[1, 2]"}),
        ("3", {"_raw": "3"}),
        ('{"a": 1, "a": 2}', {"_raw": '{"a": 1, "a": 2}'}),
        ('{"a": [{"b": 1, "b": 1}]}', {"_raw": '{"a": [{"b": 1, "b": 1}]}'}),
        ('{"_raw": "x"}', {"_raw": '{"_raw": "x"}'}),
        ('{"a": NaN}', {"_raw": '{"a": NaN}'}),
        ('{"a": 1e999}', {"_raw": '{"a": 1e999}'}),
        ('{"a": 123456789012345678901234}', {"_raw": '{"a": 123456789012345678901234}'}),
        ('{"a": 18446744073709551615}', {"a": 18446744073709551615}),
        ('{"a": "\\ud800"}', {"_raw": '{"a": "\\ud800"}'}),
    ]:
        with subtests.test(arguments=arguments, value=value):
            assert tool_input(arguments) == value
            back = arguments_of(value)
            assert back == arguments or json.loads(back) == json.loads(arguments or "{}")


def test_arguments_too_deep_to_be_sent_travel_as_text() -> None:
    for depth in (10, *range(180, 260)):
        arguments = '{"a":' * depth + "1" + "}" * depth
        choice = Choice(tool_calls=calls(arguments))
        reply = MessagesDialect().reply(parsed(), Answer(id="a", model="m", created=1, choices=[choice]))
        back = orjson.loads(orjson.dumps(reply))["content"]
        json_object(
            orjson.dumps({"messages": [{"content": back}]})
        )  # the gateway takes it when it comes back
        echoed = parsed(messages=[QUESTION, {"role": "assistant", "content": back}, QUESTION])
        assert echoed.messages[1] == choice.message()


def test_a_tool_input_too_deep_to_be_written_is_refused() -> None:
    deep: Any = 1
    for _ in range(600):
        deep = {"a": deep}
    block = {"type": "tool_use", "id": "a", "name": "f", "input": deep}
    error = refusal(messages=[{"role": "assistant", "content": [block]}, QUESTION])
    assert error.param == "messages[0].content[0].input"
