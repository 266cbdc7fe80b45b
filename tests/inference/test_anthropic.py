"""Anthropic's own API: what is sent in its form, what is read back, and what its refusals mean."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rllm.errors import ConfigError, InferenceError
from rllm.inference.anthropic import AnthropicClient
from rllm.inference.openai_http import HttpRefusal
from rllm.types.messages import FinishReason, Message, SamplingParams, ToolCall

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
HISTORY: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it raining?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "t1", "function": {"name": "weather", "arguments": '{"place": "here"}'}}],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "rain"},
    {"role": "user", "content": [{"type": "text", "text": "And?"}]},
]


class Api:
    """Answers with what is put into `reply`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.reply: dict[str, Any] = said({"type": "text", "text": "Yes."})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                data = json.dumps(outer.reply).encode()
                self.send_response(outer.status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def client(self) -> AnthropicClient:
        return AnthropicClient(f"http://127.0.0.1:{self.http.server_port}/v1", "claude", "key")


def said(*blocks: dict[str, Any], stop_reason: str = "end_turn") -> dict[str, Any]:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 20, "output_tokens": 3}
    return {"id": "msg_1", "content": list(blocks), "stop_reason": stop_reason, "usage": usage}


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    thread = threading.Thread(target=made.http.serve_forever, daemon=True)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


async def test_what_is_left_at_its_default_is_not_sent(api: Api) -> None:
    client = api.client()
    async with client.session(("", 0)) as session:
        await session.respond(HISTORY[:2], SamplingParams(max_tokens=9))
    await client.close()
    (body,) = api.bodies
    assert body.keys() == {"model", "system", "max_tokens", "messages"}


async def test_a_conversation_with_tools_is_sent_in_its_form(api: Api) -> None:
    client = api.client()
    async with client.session(("", 0)) as session:
        sampling = SamplingParams(temperature=0.5, top_k=7, max_tokens=9, stop=("END",))
        await session.respond(HISTORY, sampling, tools=[WEATHER])
        assert session.prompt_tokens(HISTORY) == -1
    await client.close()
    assert api.bodies == [
        {
            "model": "claude",
            "system": "Be brief.",
            "max_tokens": 9,
            "temperature": 0.5,
            "top_k": 7,
            "stop_sequences": ["END"],
            "tools": [
                {
                    "name": "weather",
                    "description": "Of a place.",
                    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
                }
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Is it raining?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "here"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                        {"type": "text", "text": "And?"},
                    ],
                },
            ],
        }
    ]


async def test_text_thought_calls_and_counts_are_read(api: Api) -> None:
    api.reply = said(
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t2", "name": "weather", "input": {"place": "there"}},
        stop_reason="tool_use",
    )
    client = api.client()
    output = await client.get_model_response([{"role": "user", "content": "?"}])
    await client.close()
    assert (output.content, output.reasoning, output.finish_reason) == (
        "I look.",
        "hm",
        FinishReason.TOOL_CALLS,
    )
    assert output.tool_calls == [ToolCall(name="weather", arguments={"place": "there"}, id="t2")]
    assert output.usage == {"prompt_tokens": 25, "completion_tokens": 3, "cached_tokens": 20}
    assert output.completion_ids == []


@pytest.mark.parametrize(
    ("reason", "means"),
    [
        ("end_turn", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("max_tokens", FinishReason.LENGTH),
        ("model_context_window_exceeded", FinishReason.LENGTH),
    ],
)
async def test_why_it_ended_is_known(api: Api, reason: str, means: FinishReason) -> None:
    api.reply = said({"type": "text", "text": "x"}, stop_reason=reason)
    client = api.client()
    assert (await client.get_model_response([{"role": "user", "content": "?"}])).finish_reason is means
    await client.close()


@pytest.mark.parametrize(
    ("status", "reply", "error", "says"),
    [
        (401, {"error": {"message": "invalid x-api-key"}}, ConfigError, "refuses the key"),
        (404, {"error": {"message": "model: claude"}}, ConfigError, "has no model `claude`"),
        (400, {"error": {"message": "temperature: bad"}}, InferenceError, "refused the request"),
        (529, {"error": {"message": "Overloaded"}}, InferenceError, "529: Overloaded"),
        (200, said(stop_reason="pause_turn"), InferenceError, "`pause_turn`"),
        (200, {"content": "text"}, InferenceError, "a form that cannot be read"),
        (200, said({"type": "text"}), InferenceError, "a form that cannot be read"),
    ],
)
async def test_failures_are_told_apart(
    api: Api, status: int, reply: dict[str, Any], error: type[Exception], says: str
) -> None:
    api.status, api.reply = status, reply
    client = api.client()
    with pytest.raises(error, match=says):
        await client.get_model_response([{"role": "user", "content": "?"}])
    await client.close()


@pytest.mark.parametrize(
    ("refusal", "kind", "is_final"),
    [
        (HttpRefusal(400, "no"), InferenceError, True),
        (HttpRefusal(413, "no"), InferenceError, True),
        (HttpRefusal(422, "no"), InferenceError, True),
        (HttpRefusal(418, "no"), InferenceError, False),
        (HttpRefusal(400, "<html>", is_json=False), InferenceError, False),
        (HttpRefusal(401, "no"), ConfigError, None),
        (HttpRefusal(403, "no"), ConfigError, None),
        (HttpRefusal(404, "no"), ConfigError, None),
    ],
)
async def test_a_refusal_is_final_where_the_same_request_would_be_refused_again(
    api: Api, refusal: HttpRefusal, kind: type[Exception], is_final: bool | None
) -> None:
    client = api.client()
    error = client._error_of(refusal)
    assert type(error) is kind
    assert getattr(error, "is_final", None) is is_final
    assert refusal.message in str(error)
    await client.close()


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (SamplingParams(temperature=1.5), "takes 0 to 1"),
        (SamplingParams(top_logprobs=2), "`top_logprobs` is 2"),
        (SamplingParams(stop_token_ids=(3,)), "`stop_token_ids`"),
    ],
)
async def test_what_it_cannot_do_is_refused_before_anything_is_sent(
    api: Api, sampling: SamplingParams, says: str
) -> None:
    client = api.client()
    with pytest.raises(ConfigError, match=says):
        await client.get_model_response([{"role": "user", "content": "?"}], sampling)
    with pytest.raises(ConfigError, match="sends text alone"):
        await client.get_model_response([{"role": "user", "content": [{"type": "image_url"}]}])
    await client.close()
    assert api.bodies == []
