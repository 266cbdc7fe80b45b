"""Calls answered by another server over a real socket: what is asked for, what is captured, what is told."""

import asyncio
import gzip
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rllm.errors import ConfigError, RequestRefused
from rllm.gateway.dialects.registry import DIALECTS
from rllm.gateway.upstream import UpstreamPolicy
from rllm.types.messages import LogprobMeaning
from rllm.types.wire import CallRecord, CallRequest, Dialect

sys.path.insert(0, str(Path(__file__).parent))
import fake_upstream as fake

Connect = Callable[..., Any]
ALL_SET = {"temperature": 0.5, "top_p": 1.0, "top_k": 0}
"""Nothing is left to the server."""


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with fake.FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def connect(server: Any) -> AsyncIterator[Connect]:
    """Starts policies in front of the server; when the test ends, none of them may have a call under way."""
    policies: list[UpstreamPolicy] = []

    async def start(*urls: str, **options: Any) -> UpstreamPolicy:
        policy = UpstreamPolicy(urls or [server.url], **{"max_wait_s": 5.0} | options)
        policies.append(policy)
        await policy.start()
        return policy

    yield start
    for policy in policies:
        assert policy.health()["in_flight"] == 0
        assert all(each["in_flight"] == 0 for each in policy.health()["upstreams"])
        await policy.close()


async def test_an_answer_of_vllm_is_captured_whole_and_the_client_gets_what_it_asked_for(
    server: Any, connect: Connect
) -> None:
    policy = await connect()
    answer = await policy.answer(fake.chat("hi"), fake.Session())
    (choice,) = answer.choices
    assert choice.prompt_ids == fake.ids_of("user:hi\nassistant:")
    assert choice.completion_ids == [*fake.ids_of("ok"), 0]
    assert len(choice.logprobs) == len(choice.policy_versions) == 3
    assert choice.logprob_meaning is LogprobMeaning.RAW
    assert answer.usage["prompt_tokens"] == 18
    assert answer.upstream == server.url
    assert answer.no_ids_because == ""
    assert b"token_ids" not in orjson.dumps(answer.raw)
    assert answer.raw["choices"][0]["logprobs"] is None
    assert server.bodies[0]["return_token_ids"] is True


@pytest.mark.parametrize("dialect", [Dialect.RESPONSES, Dialect.MESSAGES])
async def test_clients_of_other_protocols_get_ids_captured_too(
    server: Any, connect: Connect, dialect: Dialect
) -> None:
    policy = await connect()
    body: dict[str, Any] = {"model": "m", "input": "hi"}
    if dialect is Dialect.MESSAGES:
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    answer = await policy.answer(DIALECTS[dialect].parse(body), fake.Session())
    assert answer.choices[0].completion_ids == [*fake.ids_of("ok"), 0]
    assert server.asked[0].path == "/v1/chat/completions"


async def test_bare_prompts_go_to_completions_beside_chat(server: Any, connect: Connect) -> None:
    policy = await connect()
    request = DIALECTS[Dialect.COMPLETIONS].parse({"model": "m", "prompt": [1, 2, 3]})
    answer = await policy.answer(request, fake.Session())
    assert answer.choices[0].prompt_ids == [1, 2, 3]
    assert answer.choices[0].text == "ok"
    assert server.asked[0].path == "/v1/completions"


async def test_every_choice_of_n_is_captured(server: Any, connect: Connect) -> None:
    policy = await connect()
    answer = await policy.answer(fake.chat("hi", n=3), fake.Session())
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.completion_ids for choice in answer.choices)
    assert {(choice.conversation, choice.segment) for choice in answer.choices} == {(0, 0)}


async def test_sampling_of_the_session_wins_and_is_what_the_server_reads(
    server: Any, connect: Connect
) -> None:
    policy = await connect()
    session = fake.Session(sampling={"temperature": 0.5, "max_tokens": 7, "top_k": 3, "min_p": 0.1})
    answer = await policy.answer(fake.chat("hi", temperature=1.5, max_tokens=9, top_p=0.9), session)
    sent = server.bodies[0]
    assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["min_p"]) == (0.5, 3, 0.9, 0.1)
    assert {sent.get("max_tokens"), sent.get("max_completion_tokens")} == {7, None}
    assert answer.choices[0].temperature == 0.5


async def test_unknown_fields_of_the_client_reach_a_server_of_its_protocol(
    server: Any, connect: Connect
) -> None:
    policy = await connect()
    await policy.answer(fake.chat("hi", chat_template_kwargs={"enable_thinking": False}), fake.Session())
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}


# ---- what a server knows -----------------------------------------------------------------------------------


async def test_a_hosted_model_is_not_asked_for_ids_and_the_trace_says_why_there_are_none(
    server: Any, connect: Connect
) -> None:
    server.engine = "system"
    policy = await connect()
    answer = await policy.answer(fake.chat("hi"), fake.Session())
    assert "return_token_ids" not in server.bodies[0]
    assert server.bodies[0]["logprobs"] is True
    assert "vLLM" in answer.no_ids_because
    assert "--capture logprobs,token_ids,usage" in answer.no_ids_because
    assert answer.choices[0].policy_versions == []
    told = await connect(capture=frozenset({"logprobs", "token_ids", "usage"}))
    answer = await told.answer(fake.chat("hi"), fake.Session())
    assert (answer.choices[0].completion_ids, answer.no_ids_because) == ([*fake.ids_of("ok"), 0], "")


async def test_what_to_capture_can_be_set(server: Any, connect: Connect) -> None:
    policy = await connect(capture=frozenset({"usage"}))
    answer = await policy.answer(fake.chat("hi", seed=3), fake.Session())
    assert set(server.bodies[0]) == {"model", "messages", "seed"}
    assert "--capture token_ids" in answer.no_ids_because


async def test_a_field_that_the_server_refuses_is_left_out_once_and_for_all(
    server: Any, connect: Connect
) -> None:
    server.default = fake.refuse_field("return_token_ids")
    policy = await connect()
    answer = await policy.answer(fake.chat("hi"), fake.Session())
    assert answer.choices[0].text == "ok"
    assert "token ids" in answer.no_ids_because
    assert [("return_token_ids" in body, "logprobs" in body) for body in server.bodies] == [
        (True, True),
        (False, True),
    ]
    await policy.answer(fake.chat("hi"), fake.Session())
    assert len(server.bodies) == 3
    (refused,) = policy.health()["upstreams"][0]["refused_fields"]
    assert (refused["model"], refused["field"]) == ("m", "return_token_ids")
    assert "Unrecognized" in refused["error"]


@pytest.mark.parametrize("streamed_first", [False, True])
async def test_a_field_that_is_refused_in_streams_is_asked_for_in_whole_answers(
    server: Any, connect: Connect, streamed_first: bool
) -> None:
    """As SGLang 0.5.23 does with ids of chat completions: nobody sees an error, whole answers keep ids."""

    async def no_ids_in_streams(asked: Any) -> Any:
        if asked.body.get("stream") and asked.body.get("return_token_ids"):
            why = "return_token_ids is not supported with streaming on /v1/chat/completions."
            return await fake.refuse(400, why)(asked)
        return await fake.speak(asked)

    server.engine, server.default = "sglang", no_ids_in_streams
    policy = await connect()
    for stream in (streamed_first, not streamed_first) * 2:
        answer = await policy.answer(fake.chat("hi", stream=stream), fake.Session(), fake.Heard())
        assert answer.choices[0].text == "ok"
        assert bool(answer.choices[0].completion_ids) != stream
        assert ("with streaming" in answer.no_ids_because) == stream
    assert len(server.bodies) == 5, "it was asked for once in vain"


async def test_two_refused_fields_are_found_one_after_the_other(server: Any, connect: Connect) -> None:
    async def strict(asked: Any) -> Any:
        for name in ("return_token_ids", "logprobs"):
            if name in asked.body:
                return await fake.refuse(400, "unsupported", param=name)(asked)
        return await fake.speak(asked)

    server.default = strict
    policy = await connect()
    await policy.answer(fake.chat("hi"), fake.Session())
    assert len(server.bodies) == 3


async def test_what_the_client_got_wrong_is_not_asked_twice(server: Any, connect: Connect) -> None:
    policy = await connect()
    server.default = fake.refuse(400, "messages[0] is wrong", param="messages")
    with pytest.raises(RequestRefused, match="is wrong") as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert (refused.value.status, refused.value.param) == (400, "messages")
    server.default = fake.refuse(400, "logprobs must be true or false")
    with pytest.raises(RequestRefused, match="true or false"):
        await policy.answer(fake.chat("hi", logprobs=True, return_token_ids=True), fake.Session())
    assert len(server.bodies) == 2


async def test_an_error_that_repeats_the_whole_request_does_not_end_the_capture(
    server: Any, connect: Connect
) -> None:
    policy = await connect()
    await policy.answer(fake.chat("hi"), fake.Session())
    server.script = [fake.refuse(400, "bad request: {'logprobs': True, 'return_token_ids': True}")]
    with pytest.raises(RequestRefused, match="bad request"):
        await policy.answer(fake.chat("hi"), fake.Session())
    assert len(server.bodies) == 2
    assert (await policy.answer(fake.chat("hi"), fake.Session())).choices[0].completion_ids


@pytest.mark.parametrize(
    ("sampling", "options", "engine", "meaning"),
    [
        ({"temperature": 0.5, "top_p": 0.5}, {}, "vllm", LogprobMeaning.RAW),
        ({}, {}, "vllm", LogprobMeaning.RAW),
        (ALL_SET, {"processed_logprobs": True}, "vllm", LogprobMeaning.TEMPERATURE),
        (ALL_SET | {"temperature": 1.0}, {"processed_logprobs": True}, "vllm", LogprobMeaning.RAW),
        (ALL_SET | {"top_k": 4}, {"processed_logprobs": True}, "vllm", LogprobMeaning.TRUNCATED),
        ({"temperature": 0.5}, {"processed_logprobs": True}, "vllm", LogprobMeaning.UNKNOWN),
        ({"temperature": 0.5, "top_p": 0.5}, {}, "sglang", LogprobMeaning.TEMPERATURE),
        ({"temperature": 1.0}, {}, "sglang", LogprobMeaning.RAW),
        ({}, {}, "sglang", LogprobMeaning.UNKNOWN),
        (ALL_SET | {"temperature": 1.0, "top_k": 0}, {}, "rllm", LogprobMeaning.RAW),
        (ALL_SET, {}, "rllm", LogprobMeaning.UNKNOWN),
        (ALL_SET, {}, "hosted", LogprobMeaning.UNKNOWN),
    ],
)
async def test_log_probabilities_say_what_they_mean(
    server: Any, connect: Connect, sampling: Any, options: Any, engine: str, meaning: LogprobMeaning
) -> None:
    server.engine = engine
    policy = await connect(**options)
    answer = await policy.answer(fake.chat("hi", **sampling), fake.Session())
    assert answer.choices[0].logprob_meaning is meaning
    assert answer.choices[0].temperature == sampling.get("temperature")


async def test_a_call_without_a_seed_gets_one_of_its_session_and_its_prompt(
    server: Any, connect: Connect
) -> None:
    async def seeds(session: Any, *prompts: str) -> list[int]:
        policy = await connect()
        del server.asked[:]
        answers = [await policy.answer(fake.chat(prompt), session) for prompt in prompts]
        sent = [body["seed"] for body in server.bodies]
        assert [answer.choices[0].seed for answer in answers] == sent
        return sent

    first = await seeds(fake.Session(seed=7), "a", "b", "a")
    assert len(set(first)) == 3, "asked again, the same prompt is given other draws"
    assert all(0 <= seed < 2**63 for seed in first)
    other_order = await seeds(fake.Session(seed=7), "b", "a", "a")
    assert (other_order[0], other_order[1:]) == (first[1], [first[0], first[2]])
    assert not set(await seeds(fake.Session(seed=8), "a", "b")) & set(first)


async def test_a_seed_of_the_client_is_left_as_it_is(server: Any, connect: Connect) -> None:
    policy = await connect()
    answer = await policy.answer(fake.chat("hi", seed=3), fake.Session(seed=7))
    assert (server.bodies[0]["seed"], answer.choices[0].seed) == (3, 3)


async def test_a_gateway_that_sends_no_seeds_refuses_a_call_that_names_one(
    server: Any, connect: Connect
) -> None:
    policy = await connect(sends_seeds=False)
    answer = await policy.answer(fake.chat("hi"), fake.Session(seed=7))
    assert ("seed" in server.bodies[0], answer.choices[0].seed) == (False, None)
    for request, session in [
        (fake.chat("hi", seed=3), fake.Session()),
        (fake.chat("hi"), fake.Session(sampling={"seed": 3})),
    ]:
        with pytest.raises(RequestRefused, match="`seed` is 3") as refused:
            await policy.answer(request, session)
        assert (refused.value.status, refused.value.param) == (400, "seed")
    assert len(server.bodies) == 1


async def test_a_call_that_failed_is_sent_the_same_seed_when_it_is_asked_again(
    server: Any, connect: Connect
) -> None:
    policy, session = await connect(), fake.Session(seed=7)
    server.script = [fake.refuse(500)]
    with pytest.raises(RequestRefused):
        await policy.answer(fake.chat("hi"), session)
    for _ in range(2):
        await policy.answer(fake.chat("hi"), session)
    failed, again, next_one = [body["seed"] for body in server.bodies]
    assert again == failed != next_one


async def test_draws_go_on_where_they_were_when_a_session_is_remembered_from_the_ledger(
    server: Any, connect: Connect
) -> None:
    policy = await connect()
    session = fake.Session(seed=7)
    answer = await policy.answer(fake.chat("hi"), session)
    await policy.answer(fake.chat("hi"), session)
    request = fake.chat("hi")
    record = CallRecord(id=answer.id, session="s", messages=request.messages, response={"role": "assistant"})
    await policy.answer(request, fake.Session(seed=7, records=[record]))
    assert server.bodies[2]["seed"] == server.bodies[1]["seed"] != server.bodies[0]["seed"]


async def test_servers_that_take_no_seed_are_sent_none(server: Any, connect: Connect) -> None:
    server.engine = "hosted"
    policy = await connect()
    answer = await policy.answer(fake.chat("hi"), fake.Session(seed=7))
    assert "seed" not in server.bodies[0]
    assert answer.choices[0].seed is None
    server.engine = "vllm"
    server.default = fake.refuse_field("seed")
    tpu = await connect()
    assert (await tpu.answer(fake.chat("hi"), fake.Session(seed=7))).choices[0].seed is None
    assert [("seed" in body) for body in server.bodies[1:]] == [True, False]


async def test_a_session_that_turns_top_k_off_says_so_in_the_servers_words(
    server: Any, connect: Connect
) -> None:
    policy = await connect()
    await policy.answer(fake.chat("hi", top_k=9), fake.Session(sampling={"top_k": 0, "temperature": 0.0}))
    assert (server.bodies[0]["top_k"], server.bodies[0]["temperature"]) == (-1, 0.0)


async def test_models_and_health_tell_what_is_there(server: Any, connect: Connect) -> None:
    policy = await connect()
    health = policy.health()
    assert policy.models() == ["m"]
    assert health["healthy"]
    (upstream,) = health["upstreams"]
    assert (upstream["engine"], upstream["version"]) == ("vllm", "0.12.0")
    assert upstream["capture"] == ["logprobs", "token_ids", "usage"]


async def test_tokens_are_counted_by_the_server_or_the_request_is_refused(
    server: Any, connect: Connect
) -> None:
    policy = await connect()
    server.script = [fake.body(b'{"count": 17, "max_model_len": 4096, "tokens": []}')]
    assert await policy.count_tokens(fake.chat("hi")) == 17
    assert server.asked[0].path == "/tokenize"
    server.script = [fake.refuse(404)]
    for _ in range(2):
        with pytest.raises(RequestRefused, match="cannot count tokens") as refused:
            await policy.count_tokens(fake.chat("hi"))
        assert refused.value.status == 400
    assert len(server.asked) == 2
    assert await policy.count_tokens(CallRequest(dialect=Dialect.COMPLETIONS, body={}, prompt=[1, 2])) == 2


async def test_the_key_goes_where_the_protocol_wants_it(server: Any, connect: Connect) -> None:
    policy = await connect(api_key="secret")
    await policy.answer(fake.chat("hi"), fake.Session())
    assert server.asked[0].http.headers["Authorization"] == "Bearer secret"
    message = {"type": "message", "id": "msg_1", "content": [{"type": "text", "text": "ok"}], "model": "m"}
    server.script = [fake.body(orjson.dumps(message)), fake.body(b'{"input_tokens": 5}')]
    anthropic = await connect(api_key="secret", dialect=Dialect.MESSAGES)
    answer = await anthropic.answer(fake.chat("hi"), fake.Session())
    assert answer.choices[0].text == "ok"
    assert server.asked[1].http.headers["x-api-key"] == "secret"
    assert server.asked[1].path == "/v1/messages"
    assert await anthropic.count_tokens(fake.chat("hi")) == 5
    assert set(server.bodies[2]) == {"model", "messages"}


# ---- versions ----------------------------------------------------------------------------------------------


async def test_tokens_carry_the_version_that_their_call_began_with(server: Any, connect: Connect) -> None:
    policy = await connect()
    policy.set_policy_version(4)
    hold = asyncio.Event()
    server.script = [fake.say("ok", hold=hold)]
    call = asyncio.create_task(policy.answer(fake.chat("hi"), fake.Session()))
    while not server.asked:
        await asyncio.sleep(0)
    policy.set_policy_version(5)
    hold.set()
    crossed = (await call).choices[0]
    assert (crossed.policy_versions, crossed.mixed_versions) == ([4, 4, 4], True)
    after = (await policy.answer(fake.chat("hi"), fake.Session())).choices[0]
    assert (after.policy_versions, after.mixed_versions) == ([5, 5, 5], False)
    assert policy.health()["calls_across_versions"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "told",
    [
        {"headers": {"X-Policy-Version": "9"}},
        {"extra": {"weight_version": 9}},
        {"extra": {"metadata": {"weight_version": "9"}}},
    ],
)
async def test_the_version_that_a_server_tells_wins(
    server: Any, connect: Connect, stream: bool, told: dict[str, Any]
) -> None:
    policy = await connect()
    policy.set_policy_version(4)
    server.script = [fake.say("ok", **told)]
    answer = await policy.answer(fake.chat("hi", stream=stream), fake.Session(), fake.Heard())
    assert answer.choices[0].policy_versions == [9, 9, 9]
    assert policy.health()["policy_versions"] == [9]


# ---- bodies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_answers_are_unpacked(
    server: Any, connect: Connect, encoding: str, stream: bool
) -> None:
    policy = await connect()
    server.script = [
        fake.stream("hello", encoding=encoding) if stream else fake.say("hello", encoding=encoding)
    ]
    answer = await policy.answer(fake.chat("hi", stream=stream), fake.Session(), fake.Heard())
    assert answer.choices[0].text == "hello"


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (fake.body(b"<html>502 for you</html>"), "no JSON"),
        (fake.body(b"[1, 2]"), "type list"),
        (fake.body(b"{}"), "`choices`"),
        (fake.body(b""), "no JSON"),
        (fake.body(b"\xff\xfe"), "no JSON"),
        (fake.body(b'{"choices": [{"message": 3}]}'), "message"),
        (fake.body(b'{"choices": 3}'), "choices"),
        (fake.body(b"[" * 100_000), "no JSON"),
    ],
)
async def test_a_body_that_is_no_answer_is_a_502_that_says_so(
    server: Any, connect: Connect, behaviour: Any, why: str
) -> None:
    policy = await connect(max_retries=0)
    server.script = [behaviour]
    with pytest.raises(RequestRefused, match=why) as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert refused.value.status == 502


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_a_body_over_the_limit_is_a_502_and_not_read(
    server: Any, connect: Connect, encoding: str
) -> None:
    policy = await connect(max_body_bytes=100_000)
    whole = b'{"x": "%b"}' % (b"x" * 1_000_000)
    server.script = [
        fake.body(gzip.compress(whole), Content_Encoding="gzip") if encoding else fake.body(whole)
    ]
    with pytest.raises(RequestRefused, match="more than 100000 bytes") as refused:
        await policy.answer(fake.chat("hi"), fake.Session())
    assert refused.value.status == 502
    assert (await policy.answer(fake.chat("hi"), fake.Session())).choices[0].text == "ok"


async def test_a_request_of_many_megabytes_is_sent_whole(server: Any, connect: Connect) -> None:
    policy = await connect()
    text = "word " * 300_000
    await policy.answer(fake.chat(text), fake.Session())
    assert server.bodies[0]["messages"][0]["content"] == text


async def test_ids_that_no_vocabulary_has_are_not_recorded(server: Any, connect: Connect) -> None:
    policy = await connect()
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a"},
        "finish_reason": "stop",
        "token_ids": [2**40],
        "logprobs": {"content": [{"token": "a", "logprob": -1.0}]},
    }
    server.script = [fake.body(orjson.dumps({"choices": [choice], "prompt_token_ids": [1]}))]
    answer = await policy.answer(fake.chat("hi"), fake.Session())
    assert answer.choices[0].completion_ids == []
    assert "outside" in answer.no_ids_because


@pytest.mark.parametrize(
    "options",
    [
        {"capture": frozenset({"ids"})},
        {"timeout_s": 0},
        {"connect_timeout_s": -1},
        {"max_retries": -1},
        {"weights": []},
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        UpstreamPolicy(["http://127.0.0.1:1"], **options)
