"""Whatever JSON a client sends, every dialect answers it or refuses it, and can say so in its own form."""

import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import RequestRefused
from rllm.gateway.dialects.registry import DIALECTS
from rllm.types.wire import Answer, Choice, Dialect, WireToolCall

sys.path.insert(0, str(Path(__file__).parent))
from dialect_server import any_json, with_one_change
from responses_client import FILES

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
FUNCTION = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True},
}
GOOD: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be kind"}]},
            {"role": "user", "content": "Hi", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "so"},
            {"role": "tool", "tool_call_id": "call_1", "content": "12"},
        ],
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 5,
        "stop": ["a"],
        "logit_bias": {"5": 1},
        "functions": None,
        "function_call": None,
        "n": 2,
    },
    Dialect.COMPLETIONS: {
        "model": "m",
        "prompt": "Once",
        "suffix": "end",
        "logprobs": 2,
        "echo": True,
        "best_of": 1,
        "n": 1,
        "max_tokens": 5,
        "stop": ["a"],
        "logit_bias": {"5": 1},
        "stream": False,
    },
    Dialect.MESSAGES: {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Rules"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "s"},
                    {"type": "text", "text": "Yes"},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"_raw": "x"}},
                    {"type": "server_tool_use", "id": "b", "name": "web_search", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
                ],
            },
            {"role": "system", "content": "More rules"},
        ],
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}, {"type": "web_search_20250305"}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "stop_sequences": ["x"],
        "temperature": 1,
        "top_k": 5,
    },
    Dialect.RESPONSES: {
        "model": "m",
        "instructions": "Rules",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]},
            {
                "type": "function_call",
                "call_id": "a",
                "name": "read",
                "namespace": "mcp__files",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "web_search_call", "id": "ws"},
        ],
        "tools": [
            {"type": "function", "name": "weather", "parameters": {"type": "object"}},
            FILES,
            {"type": "web_search"},
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "weather"}],
        },
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "include": ["message.output_text.logprobs"],
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "temperature": 1,
        "stop": ["x"],
        "stream": False,
    },
}


def require_answered_or_refused(dialect: Dialect, body: Any) -> None:
    there = DIALECTS[dialect]
    refused: RequestRefused | None = None
    try:
        request = there.parse(body)
    except RequestRefused as error:
        refused = error
    if refused is not None:
        assert refused.status == 400
        assert refused.param
        orjson.dumps(there.error(refused))
        return
    call = WireToolCall(id="call_0", name="weather", arguments="{}")
    answer = Answer(
        id="a", model="m", created=1, choices=[Choice(text="Hi", reasoning="Hm", tool_calls=[call])]
    )
    orjson.dumps(there.reply(request, answer))


@pytest.mark.parametrize("dialect", GOOD)
def test_a_good_body_is_answered(dialect: Dialect) -> None:
    DIALECTS[dialect].parse(GOOD[dialect])


@pytest.mark.parametrize("dialect", GOOD)
@given(st.data())
def test_any_json_is_answered_or_refused(dialect: Dialect, data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from([*GOOD[dialect], "x"]), any_json, max_size=5))
    is_whole = data.draw(st.booleans())
    body = GOOD[dialect] | fields if is_whole else fields
    require_answered_or_refused(dialect, body)


@pytest.mark.parametrize("dialect", GOOD)
@given(st.data())
def test_a_good_body_with_one_change_is_answered_or_refused(dialect: Dialect, data: st.DataObject) -> None:
    require_answered_or_refused(dialect, data.draw(with_one_change(GOOD[dialect])))


def test_a_body_that_is_no_object_is_refused(subtests: pytest.Subtests) -> None:
    for dialect in GOOD:
        for body in (None, True, 3, "Hi", [], [{}]):
            with subtests.test(dialect=dialect, body=body):
                require_answered_or_refused(dialect, body)
