"""What a reply in OpenAI's chat protocol says, and what a refusal is about: without a server."""

from typing import Any

import pytest

from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.inference.openai import OpenAIClient
from rllm.inference.openai_http import HttpRefusal
from rllm.inference.openai_replies import fields_refused, read_answer, room_told
from rllm.types.messages import FinishReason, SamplingParams

BODY = {"model": "m", "messages": [], "top_k": 3, "seed": 1, "temperature": 1.0}


def reply(choice: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    whole = {"finish_reason": "stop", "message": {"content": "a"}, **(choice or {})}
    return {"id": "c-1", "choices": [whole], **fields}


def test_a_reply_of_text_alone_is_an_answer_without_ids() -> None:
    output = read_answer(reply(), 3)
    assert (output.text, output.content, output.reasoning) == ("a", "a", "")
    assert (output.completion_ids, output.logprobs, output.policy_versions) == ([], [], [])
    assert (output.completion_id, output.finish_reason) == ("c-1", FinishReason.STOP)
    assert output.usage == {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    assert read_answer(reply({"message": {"content": None}}, id=None), 0).completion_id == ""


def test_usage_and_reasons_are_taken_as_they_are_told() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    output = read_answer(reply({"finish_reason": "length"}, usage=usage), 0)
    assert output.usage == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 4}
    assert output.finish_reason is FinishReason.LENGTH
    for reason in ("tool_calls", "function_call"):
        assert read_answer(reply({"finish_reason": reason}), 0).finish_reason is FinishReason.TOOL_CALLS
    for reason in (None, "content_filter"):
        with pytest.raises(InferenceError, match="not whole"):
            read_answer(reply({"finish_reason": reason}), 0)


VERSIONS: list[tuple[dict[str, Any], int]] = [
    ({}, 3),
    ({"weight_version": "7"}, 7),
    ({"metadata": {"weight_version": 8}}, 8),
    ({"weight_version": "default"}, 3),
    ({"metadata": None}, 3),
]


@pytest.mark.parametrize(("fields", "version"), VERSIONS)
def test_ids_carry_the_version_that_the_server_tells_or_else_the_known_one(
    fields: dict[str, Any], version: int
) -> None:
    choice = {
        "token_ids": [5, 6],
        "prompt_token_ids": [1],
        "logprobs": {"content": [{"logprob": -1}, {"logprob": -2.5}]},
    }
    output = read_answer(reply(choice, **fields), 3)
    assert (output.prompt_ids, output.completion_ids) == ([1], [5, 6])
    assert (output.logprobs, output.policy_versions) == ([-1.0, -2.5], [version] * 2)
    assert read_answer(reply(choice, prompt_token_ids=[9]), 3).prompt_ids == [9]
    assert read_answer(reply(choice | {"logprobs": None}), 3).logprobs == []
    for bad in ({"token_ids": ["5", 6]}, {"token_ids": [5]}):
        with pytest.raises(ValueError, match="token ids"):
            read_answer(reply(choice | bad), 3)


def test_a_call_whose_arguments_are_no_object_stays_text() -> None:
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"function": {"name": "g", "arguments": None}},
        {"function": {"name": "h", "arguments": {"b": 2}}},
        {"function": {"name": "i", "arguments": "nope"}},
        {"function": {"name": "j", "arguments": "[1]"}},
    ]
    output = read_answer(reply({"message": {"content": "so", "tool_calls": calls}}), 0)
    assert [(each.name, each.arguments, each.id) for each in output.tool_calls] == [
        ("f", {"a": 1}, "1"),
        ("g", {}, ""),
        ("h", {"b": 2}, ""),
    ]
    assert output.content == "so"
    assert output.text == 'so\n{"name": "i", "arguments": "nope"}\n{"name": "j", "arguments": "[1]"}'


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (HttpRefusal(400, "no", param="top_k"), {"top_k"}),
        (HttpRefusal(422, "no", param="body.seed"), {"seed"}),
        (HttpRefusal(400, "`seed` is bad", param="messages"), set()),
        (HttpRefusal(400, "unknown field 'top_k'"), {"top_k"}),
        (HttpRefusal(400, "Unrecognized request argument supplied: top_k"), {"top_k"}),
        (HttpRefusal(400, "the temperature outside"), set()),
        (HttpRefusal(400, "'top_k' 'input': {'seed': 1}"), {"top_k"}),
        (HttpRefusal(400, '"top_k" "input": {"seed": 1}'), {"top_k"}),
        (HttpRefusal(400, "'model' and 'messages'"), set()),
        (HttpRefusal(404, "no", param="top_k"), set()),
    ],
)
def test_a_refusal_is_about_the_fields_that_it_names(error: HttpRefusal, names: set[str]) -> None:
    assert fields_refused(error, BODY) == names


def test_the_room_behind_a_prompt_is_read_where_it_is_told() -> None:
    context = "maximum context length is 4096 tokens"
    assert room_told(f"This model's {context}, you asked for 9 (4000 in the messages, 5 more)") == 96
    assert room_told(f"the {context} and your request has 4095 input tokens") == 1
    assert room_told(f"This model's {context}.") == room_told("4000 in the messages") == 0


class Server:
    """Answers with what it was given, and keeps what it was asked."""

    def __init__(self, listing: Any, answer: Any = None) -> None:
        self.listing = listing
        self.answer = answer or reply()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []

    async def get(self, url: str) -> Any:
        return self.listing

    async def post(self, path: str, body: dict[str, Any], headers: Any = None) -> Any:
        self.bodies.append(body)
        self.headers.append(headers)
        return self.answer


def client_of(server: Server, model: str = "", **options: Any) -> OpenAIClient:
    client = OpenAIClient("http://s/v1/", model, **options)
    client._http = server  # type: ignore[assignment]
    return client


@pytest.mark.parametrize(
    ("model", "listing", "facts"),
    [
        ("", {"data": [{"id": "a", "owned_by": "VLLM", "max_model_len": 9}]}, ("a", "vllm", 9)),
        ("", {"data": [{"id": "a", "owned_by": "someone"}, "junk"]}, ("a", "", 0)),
        ("b", {"data": [{"id": "a", "max_model_len": 5}, {"id": "b", "max_model_len": 7}]}, ("b", "", 7)),
        ("b", {"data": [{"id": "a", "owned_by": "vllm"}]}, ("b", "", 0)),
        ("b", None, ("b", "", 0)),
        ("b", {"data": "junk"}, ("b", "", 0)),
        ("", {"data": [{"id": "a", "max_model_len": "9"}]}, ("a", "", 0)),
        ("", {"data": [{"id": "a", "max_model_len": True}]}, ("a", "", 0)),
        ("", {"data": [{"id": "a", "max_model_len": -1}]}, ("a", "", 0)),
    ],
)
async def test_a_servers_list_tells_its_model_its_engine_and_its_context(
    model: str, listing: Any, facts: tuple[str, str, int]
) -> None:
    found = await client_of(Server(listing), model)._find_out()
    assert (found.model, found.engine, found.max_context) == facts


async def test_without_one_model_a_name_is_asked_for() -> None:
    for listing, says in (({"data": [{"id": "a"}, {"id": "b"}]}, "a, b"), (None, "does not tell")):
        with pytest.raises(ConfigError, match=says):
            await client_of(Server(listing))._find_out()


async def test_an_answer_is_as_long_as_it_may_be_and_fits() -> None:
    listing = {"data": [{"id": "a", "max_model_len": 10}]}
    for num_prompt_tokens, max_tokens, sent in ((-1, 99, 99), (0, 99, 10), (9, 99, 1), (4, 3, 3)):
        server = Server(listing)
        sampling = SamplingParams(max_tokens=max_tokens)
        output = await client_of(server).answer([], sampling, num_prompt_tokens=num_prompt_tokens)
        assert (server.bodies[0]["max_tokens"], server.headers) == (sent, [None])
        assert output.latency_s > 0.0
    with pytest.raises(ContextLengthError, match=r"10 .* a .* 10"):
        await client_of(Server(listing)).answer([], SamplingParams(), num_prompt_tokens=10)
    server = Server({"data": [{"id": "a", "owned_by": "rllm"}]})
    await client_of(server).answer([], SamplingParams(), session="s-1", num_prompt_tokens=10**9)
    assert server.headers == [{"X-Session-ID": "s-1"}], "without a known context nothing is refused"


async def test_fields_are_sent_where_they_say_something() -> None:
    server = Server(None)
    client = client_of(server, "m", extra_body={"extra": 1})
    plain = SamplingParams(seed=2**63 + 5)
    rich = SamplingParams(top_k=4, stop=("x",), stop_token_ids=(7,), temperature=0.5)
    await client.answer([], plain)
    await client.answer([], rich, tools=[{"name": "t"}])
    first, second = server.bodies
    assert first["seed"] == 5
    assert first["extra"] == second["extra"] == 1
    for name, value in (("top_k", 4), ("stop", ["x"]), ("stop_token_ids", [7]), ("tools", [{"name": "t"}])):
        assert name not in first
        assert second[name] == value
    assert (second["temperature"], second["presence_penalty"], second["frequency_penalty"]) == (0.5, 0.0, 0.0)
    with_ids = client_of(Server(None), "m", return_token_ids=True)
    await with_ids.answer([], plain)
    (body,) = with_ids._http.bodies  # type: ignore[attr-defined]
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
    assert (body["logprobs"], body["return_token_ids"]) == (True, True)


async def test_a_schema_goes_to_a_server_that_follows_it_and_is_refused_elsewhere() -> None:
    async def follows(schema: Any) -> bool:
        return "yes" in schema

    client = client_of(Server(None), "m", follows_schema=follows)
    grammar = client.schema_grammar({"yes": 1})
    await client.answer([], SamplingParams(grammar=grammar))
    form = client._http.bodies[0]["response_format"]  # type: ignore[attr-defined]
    assert form["json_schema"] == {"name": "answer", "strict": True, "schema": {"yes": 1}}
    assert [await client.can_follow(client.schema_grammar({name: 1})) for name in ("yes", "no")] == [
        True,
        False,
    ]
    without = client_of(Server(None), "m")
    assert not await without.can_follow(grammar)
    for sampling in (SamplingParams(grammar=grammar), SamplingParams(top_logprobs=1)):
        with pytest.raises(ConfigError, match="token ids"):
            await without.answer([], sampling)
    with pytest.raises(ConfigError, match="top_logprobs"):
        await client.answer([], SamplingParams(top_logprobs=1))


async def test_what_says_nothing_is_left_out_for_a_server_that_minds_it_and_anything_else_is_not() -> None:
    idle = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0} | {
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "return_token_ids": True,
    }
    client = client_of(Server(None), "m")
    for name, value in idle.items():
        client._require_idle(name, value, "why")
        with pytest.raises(ConfigError, match=f"`{name}` = 7: why"):
            client._require_idle(name, 7, "why")
    client._require_idle("seed", 7, "why")
    client._require_idle("stop", None, "why")
    with pytest.raises(ConfigError, match="`stop`"):
        client._require_idle("stop", ["x"], "why")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([1], "no JSON object"),
        ({"error": {"message": "overloaded"}}, "overloaded"),
        ({"choices": []}, "cannot be read"),
        ({"choices": [{"finish_reason": "stop"}]}, "cannot be read"),
    ],
)
async def test_a_reply_that_is_no_answer_is_a_failure(answer: Any, says: str) -> None:
    with pytest.raises(InferenceError, match=says):
        await client_of(Server(None, answer), "m").answer([], SamplingParams())
