"""The Responses protocol: what clients send is understood as the conversation that it is."""

import sys
from pathlib import Path

import pytest
from responses_client import FILES, WEATHER, WEB_SEARCH, parsed, refusal

from rllm.gateway.dialects.responses import ResponsesDialect
from rllm.types.wire import (
    ToolChoice,
    ToolMode,
)

sys.path.insert(0, str(Path(__file__).parent))


def test_text_and_instructions_become_a_conversation() -> None:
    request = parsed(instructions="Be brief.", input="Hi")
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert request.model == "m"


def test_items_become_messages_with_parallel_calls_in_one() -> None:
    request = parsed(
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
            {"role": "user", "content": "Weather in Rome and Oslo?"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "no json"},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {
                "type": "function_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "snow"}],
            },
        ]
    )
    assert request.messages == [
        {"role": "system", "content": "Rules"},
        {"role": "user", "content": "Weather in Rome and Oslo?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
                },
                {"id": "b", "type": "function", "function": {"name": "weather", "arguments": "no json"}},
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
        {"role": "tool", "content": "snow", "tool_call_id": "b"},
    ]


def test_two_answers_in_a_row_stay_two() -> None:
    request = parsed(
        input=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "One"},
            {"role": "assistant", "content": "Two"},
        ]
    )
    assert [message["content"] for message in request.messages] == ["Hi", "One", "Two"]


def test_a_thought_in_plain_text_stays_with_its_answer() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    request = parsed(
        input=[{"role": "user", "content": "Hi"}, thought, {"role": "assistant", "content": "Yes"}]
    )
    assert request.messages[1] == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}


def test_images_stay_parts_in_the_chat_form() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}
    text = {"type": "input_text", "text": "What is this?"}
    request = parsed(input=[{"role": "user", "content": [text, image]}])
    assert request.messages[0]["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
    ]


def test_items_of_hosted_tools_keep_their_type_so_that_an_engine_can_refuse_them() -> None:
    item = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    request = parsed(input=[{"role": "user", "content": "Hi"}, item])
    assert request.messages[1] == {"role": "assistant", "content": [item]}


def test_what_cannot_be_answered_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for fields, param in [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": ["message"], "role": "user"}]}, "input[0].type"),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"conversation": "conv_0"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ]:
        with subtests.test(fields=fields, param=param):
            assert refusal(**fields).param == param


def test_kept_conversations_are_refused_with_what_to_do_instead() -> None:
    assert "previous_response_id" in refusal(conversation="conv_0").message
    assert parsed(previous_response_id="resp_0").previous_response_id == "resp_0"
    assert parsed(store=True, previous_response_id=None, background=False).messages


def test_sampling_and_formats_are_read() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    request = parsed(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=99,
        stream=True,
        parallel_tool_calls=False,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        metadata={"a": "b"},
        reasoning={"effort": "low"},
        something_new={"x": 1},
    )
    assert (request.temperature, request.top_p, request.max_tokens) == (0.5, 0.9, 99)
    assert (request.stream, request.parallel_tool_calls) == (True, False)
    assert (request.logprobs, request.top_logprobs) == (True, 2)
    assert request.response_schema == schema
    assert parsed(text={"format": {"type": "json_object"}}).response_schema == {"type": "object"}
    assert parsed(text={"format": {"type": "text"}, "verbosity": "low"}).response_schema is None


def test_functions_are_offered_and_hosted_tools_are_not() -> None:
    request = parsed(tools=[WEATHER, WEB_SEARCH, FILES, {"type": "custom", "name": "free"}])
    assert [tool["function"]["name"] for tool in request.tools] == ["weather", "mcp__files__read"]
    assert request.tools[0] == {
        "type": "function",
        "function": {key: WEATHER[key] for key in ("name", "description", "parameters", "strict")},
    }


def test_two_tools_that_the_model_could_not_tell_apart_are_refused() -> None:
    plain = {"type": "function", "name": "mcp__files__read", "parameters": {}}
    assert "another tool" in refusal(tools=[FILES, plain]).message
    assert "another tool" in refusal(tools=[plain, FILES]).message


def test_tool_choices(subtests: pytest.Subtests) -> None:
    for value, expected in [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(mode=ToolMode.NONE)),
        ("required", ToolChoice(mode=ToolMode.REQUIRED)),
        ({"type": "function", "name": "weather"}, ToolChoice(mode=ToolMode.NAMED, name="weather")),
        (
            {"type": "function", "name": "read", "namespace": "mcp__files"},
            ToolChoice(mode=ToolMode.NAMED, name="mcp__files__read"),
        ),
    ]:
        with subtests.test(value=value, expected=expected):
            assert parsed(tools=[WEATHER, FILES], tool_choice=value).tool_choice == expected


def test_allowed_tools_leave_only_those() -> None:
    allowed = {"type": "function", "name": "weather"}
    request = parsed(
        tools=[WEATHER, FILES],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [allowed, WEB_SEARCH]},
    )
    assert request.tool_choice == ToolChoice(mode=ToolMode.REQUIRED)
    assert [tool["function"]["name"] for tool in request.tools] == ["weather"]


def test_what_codex_sends_is_understood() -> None:
    body = {
        "model": "m",
        "instructions": "You are a coding agent.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "<permissions>"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}]},
            {
                "type": "function_call",
                "name": "read",
                "namespace": "mcp__files",
                "arguments": "{}",
                "call_id": "c1",
            },
            {"type": "function_call_output", "call_id": "c1", "output": "text"},
        ],
        "tools": [WEATHER | {"strict": False}, FILES, WEB_SEARCH],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x": "y"},
    }
    request = ResponsesDialect().parse(body)
    assert [message["role"] for message in request.messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert request.messages[3]["tool_calls"][0]["function"]["name"] == "mcp__files__read"
    assert not request.logprobs
