"""Chat completions: what clients send is understood as the conversation that it is."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from rllm.errors import RequestRefused
from rllm.gateway.dialects.chat import ChatDialect
from rllm.types.wire import (
    Answer,
    Choice,
    ToolChoice,
    ToolMode,
    WireToolCall,
)

sys.path.insert(0, str(Path(__file__).parent))
from chat_client import WEATHER, parsed


def refusal(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        parsed(**fields)
    assert caught.value.status == 400
    return caught.value


def said(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return ChatDialect().parse({"messages": list(messages)}).messages


def test_everything_that_a_request_sets_is_read() -> None:
    request = parsed(
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        max_completion_tokens=64,
        stop=["Observation:", "</code>"],
        seed=7,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        presence_penalty=0.5,
        frequency_penalty=0,
    )
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (0.5, 0.9, 20, 64)
    assert (request.stop, request.seed, request.n) == (["Observation:", "</code>"], 7, 3)
    assert (request.stream, request.include_usage) == (True, True)
    assert (request.logprobs, request.top_logprobs, request.return_token_ids) == (True, 2, True)
    assert request.tools == [WEATHER]
    assert request.tool_choice == ToolChoice(mode=ToolMode.REQUIRED)
    assert request.parallel_tool_calls is False
    assert request.penalties == {"presence_penalty": 0.5}


def test_what_is_left_open_stays_open() -> None:
    request = parsed(stream=False, temperature=None, stop=None, tools=None, tool_choice=None, n=None)
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (None,) * 4
    assert (request.stream, request.stop, request.n, request.tools) == (False, [], 1, [])
    assert request.penalties == {}


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 8.0}, 8),
        ({"max_tokens": None, "max_completion_tokens": 9}, 9),
    ],
)
def test_the_size_has_two_names(sizes: dict[str, Any], tokens: int) -> None:
    assert parsed(**sizes).max_tokens == tokens


def test_two_sizes_that_differ_are_refused() -> None:
    error = refusal(max_tokens=5, max_completion_tokens=6)
    assert error.param == "max_completion_tokens"
    assert "5" in error.message
    assert "6" in error.message


def test_unknown_fields_of_platforms_and_frameworks_are_tolerated() -> None:
    request = parsed(metadata={"a": "b"}, store=True, prompt_cache_key="k", session_id="s", user="u", x={})
    assert request.body["session_id"] == "s"
    assert request.penalties == {}


def test_fields_of_engines_that_change_the_answer_are_kept_for_the_engine_to_decide() -> None:
    fields = {"min_p": 0.1, "ignore_eos": True, "guided_regex": "a+", "chat_template_kwargs": {"x": 1}}
    assert parsed(**fields).penalties == fields
    assert parsed(min_p=0, ignore_eos=False, repetition_penalty=1.0, logit_bias={}).penalties == {}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_developer_is_a_system(role: str) -> None:
    assert said({"role": role, "content": "Be kind"}) == [{"role": "system", "content": "Be kind"}]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_parts_become_text_in_every_role(role: str) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    assert said({"role": role, "content": parts}) == [{"role": role, "content": "ab"}]


def test_parts_that_are_not_text_stay_parts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    text = {"type": "text", "text": "What is it?"}
    assert said({"role": "user", "content": [text, image]})[0]["content"] == [text, image]


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_an_assistant_that_only_calls_has_one_shape(content: dict[str, Any]) -> None:
    message = {"role": "assistant", "tool_calls": [CALL], "provider_specific_fields": {"a": 1}} | content
    assert said(message) == [{"role": "assistant", "content": None, "tool_calls": [CALL]}]


def test_what_an_sdk_echoes_of_an_answer_is_that_answer() -> None:
    choice = Choice(text="", tool_calls=[WireToolCall(id="call_1", name="weather", arguments="{}")])
    reply = ChatDialect().reply(parsed(), Answer(id="x", model="m", created=1, choices=[choice]))
    echoed = ChatCompletion.model_validate(reply).choices[0].message.model_dump()
    assert said(echoed) == [choice.message()]
    assert said(reply["choices"][0]["message"]) == [choice.message()]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_tool_may_answer_nothing(content: dict[str, Any]) -> None:
    message = {"role": "tool", "tool_call_id": "call_1", "name": "weather"} | content
    assert said(message) == [{"role": "tool", "content": "", "tool_call_id": "call_1", "name": "weather"}]


def test_a_tool_may_answer_in_parts() -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "12 C"}]}
    assert said(message)[0]["content"] == "12 C"


def test_thoughts_in_the_history_are_kept_under_one_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        assert said({"role": "assistant", "content": "4", name: "2+2"})[0]["reasoning_content"] == "2+2"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ToolChoice(mode=ToolMode.NONE)),
        ("auto", ToolChoice(mode=ToolMode.AUTO)),
        ("required", ToolChoice(mode=ToolMode.REQUIRED)),
        (
            {"type": "function", "function": {"name": "weather"}},
            ToolChoice(mode=ToolMode.NAMED, name="weather"),
        ),
        (None, ToolChoice(mode=ToolMode.AUTO)),
    ],
)
def test_every_tool_choice_is_understood(choice: Any, expected: ToolChoice) -> None:
    assert parsed(tools=[WEATHER], tool_choice=choice).tool_choice == expected


def test_a_tool_without_parameters_takes_none() -> None:
    tool = parsed(tools=[{"type": "function", "function": {"name": "now", "strict": False}}]).tools[0]
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}
    assert tool["function"]["strict"] is False


@pytest.mark.parametrize(
    ("chosen", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}},
            {"type": "array"},
        ),
    ],
)
def test_every_response_format_is_understood(chosen: dict[str, Any], schema: Any) -> None:
    assert parsed(response_format=chosen).response_schema == schema


def test_a_bad_value_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for fields, param in [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"model": 7}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**5000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"50256": 101}}, "logit_bias.50256"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
    ]:
        with subtests.test(fields=fields, param=param):
            error = refusal(**fields)
            assert error.param == param
            assert f"`{param.partition('[')[0]}" in error.message
