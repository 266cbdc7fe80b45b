"""Servers that speak OpenAI's protocol, over real sockets: what is asked of them, and what becomes of it."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.inference.openai import OpenAIClient
from rllm.inference.scripted import CodepointTokenizer
from rllm.types.messages import FinishReason, LogprobMeaning, Message, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
import fake_upstream as fake

ASK: list[Message] = [{"role": "user", "content": "Where to?"}]
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with fake.FakeUpstream(answer="Right") as upstream:
        yield upstream


@pytest.fixture
async def client(server: Any) -> AsyncIterator[OpenAIClient]:
    client = OpenAIClient(server.url)
    yield client
    await client.close()


def reply(choice: dict[str, Any], **fields: Any) -> Any:
    whole = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"} | choice
    return fake.body(json.dumps({"id": "r", "choices": [whole], **fields}).encode())


# ---- ids ---------------------------------------------------------------------------------------------------


async def test_ids_and_logprobs_are_taken_from_a_server_that_has_them(
    server: Any, client: OpenAIClient
) -> None:
    client.set_policy_version(4)
    output = await client.get_model_response(ASK)
    ids = [*fake.ids_of("Right"), 0]
    assert (output.text, output.content, output.finish_reason) == ("Right", "Right", FinishReason.STOP)
    assert output.completion_ids == ids
    assert output.logprobs == [-token / 1000 for token in ids]
    assert output.prompt_ids == fake.ids_of("user:Where to?\nassistant:")
    assert output.policy_versions == [4] * len(ids)
    assert output.logprob_meaning is LogprobMeaning.RAW
    assert output.usage["completion_tokens"] == len(ids)
    assert output.completion_id == "up-1"
    assert {name: server.bodies[0][name] for name in NEUTRAL} == NEUTRAL, "no default of the server counts"
    assert server.bodies[0]["model"] == "m", "the one that it serves"


async def test_the_servers_own_word_on_its_weights_wins(server: Any, client: OpenAIClient) -> None:
    server.script = [fake.say("a", extra={"metadata": {"weight_version": "7"}})]
    output = await client.get_model_response(ASK)
    assert output.weight_version == 7


async def test_a_server_that_is_not_known_is_sent_openais_fields_alone(
    server: Any, client: OpenAIClient
) -> None:
    server.engine = "someone"
    output = await client.get_model_response(
        ASK, SamplingParams(temperature=0.5, max_tokens=7, seed=2**64 - 1)
    )
    assert (output.text, output.completion_ids, output.logprobs) == ("Right", [], [])
    assert set(server.bodies[0]) == {
        *("model", "messages", "temperature", "top_p", "max_tokens", "seed"),
        *("presence_penalty", "frequency_penalty"),
    }
    assert 0 <= server.bodies[0]["seed"] < 2**63


async def test_ids_of_a_server_that_is_not_known_are_asked_for_on_demand(server: Any) -> None:
    server.engine = "someone"
    client = OpenAIClient(server.url, "m", return_token_ids=True)
    assert (await client.get_model_response(ASK)).logprob_meaning is LogprobMeaning.RAW
    output = await client.get_model_response(ASK, SamplingParams(temperature=0.5))
    assert output.completion_ids
    assert output.logprob_meaning is LogprobMeaning.UNKNOWN, "raw or tempered: nobody tells"
    await client.close()


@pytest.mark.parametrize(
    ("engine", "processed", "sampling", "meaning"),
    [
        ("vllm", False, SamplingParams(temperature=0.5), LogprobMeaning.RAW),
        ("vllm", True, SamplingParams(temperature=0.5), LogprobMeaning.TEMPERATURE),
        ("sglang", False, SamplingParams(temperature=0.5), LogprobMeaning.TEMPERATURE),
        ("sglang", False, SamplingParams(temperature=0.0), LogprobMeaning.RAW),
        ("sglang", False, SamplingParams(top_p=0.9), LogprobMeaning.RAW),
        ("rllm", False, SamplingParams(temperature=0.5), LogprobMeaning.UNKNOWN),
    ],
)
async def test_what_logprobs_mean_depends_on_the_engine(
    server: Any, engine: str, processed: bool, sampling: SamplingParams, meaning: LogprobMeaning
) -> None:
    server.engine = engine
    client = OpenAIClient(server.url, processed_logprobs=processed)
    output = await client.get_model_response(ASK, sampling)
    assert output.logprob_meaning is meaning
    await client.close()


# ---- answers -----------------------------------------------------------------------------------------------


async def test_calls_and_thoughts_are_told_apart_from_text(server: Any, client: OpenAIClient) -> None:
    calls = [
        {"id": "1", "function": {"name": "go", "arguments": '{"way": "up"}'}},
        {"id": "2", "function": {"name": "go", "arguments": "{way: up"}},
    ]
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls}
    server.script = [reply({"message": message, "finish_reason": "tool_calls"})]
    output = await client.get_model_response(ASK, tools=[{"type": "function", "function": {"name": "go"}}])
    assert server.bodies[0]["tools"][0]["function"]["name"] == "go"
    assert (output.content, output.reasoning, output.finish_reason) == ("", "hm", FinishReason.TOOL_CALLS)
    assert [(call.name, call.arguments, call.id) for call in output.tool_calls] == [
        ("go", {"way": "up"}, "1")
    ]
    assert "{way: up" in output.text, "a call that cannot be read is text, and not lost"


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (reply({"finish_reason": "content_filter"}), "content_filter"),
        (reply({"finish_reason": "abort"}), "abort"),
        (reply({"finish_reason": None}), "None"),
        (reply({"message": None}), "cannot be read"),
        (reply({"token_ids": ["a"]}), "cannot be read"),
        (reply({"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}}), "2 token ids and 1"),
        (fake.body(b'{"choices": []}'), "cannot be read"),
        (fake.body(b"[1]"), "no JSON object"),
        (fake.body(b"<html>"), "no JSON object"),
        (fake.body(b'{"error": {"message": "out of memory"}}'), "out of memory"),
    ],
)
async def test_an_answer_that_is_not_whole_is_an_error_and_is_asked_for_once(
    server: Any, client: OpenAIClient, behaviour: Any, why: str
) -> None:
    server.script = [behaviour]
    with pytest.raises(InferenceError, match=why):
        await client.get_model_response(ASK)
    assert len(server.asked) == 1
    assert (await client.get_model_response(ASK)).text == "Right"


# ---- errors ------------------------------------------------------------------------------------------------


async def test_a_server_that_is_busy_says_when_to_come_back(server: Any, client: OpenAIClient) -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    server.script = [
        fake.refuse(429, retry_after="2.5"),
        fake.refuse(503, retry_after=later),
        fake.refuse(500),
        fake.refuse(529, retry_after="inf"),
    ]
    waits: list[float | None] = []
    for _ in range(4):
        with pytest.raises(InferenceError, match=r"answered (4|5)") as caught:
            await client.get_model_response(ASK)
        waits.append(caught.value.retry_after_s)
    assert waits[0] == 2.5
    assert waits[1] is not None
    assert 50 < waits[1] <= 100
    assert waits[2:] == [None, None]
    assert len(server.asked) == 4, "nothing is tried again"


@pytest.mark.parametrize(
    ("status", "error", "mend"),
    [(401, ConfigError, "api_key"), (403, ConfigError, "api_key"), (404, ConfigError, "model")],
)
async def test_what_would_fail_every_time_names_the_mend(
    server: Any, client: OpenAIClient, status: int, error: type[Exception], mend: str
) -> None:
    server.script = [fake.refuse(status, "no such thing")]
    with pytest.raises(error, match=f"no such thing.*{mend}"):
        await client.get_model_response(ASK)


async def test_a_page_of_something_in_between_is_no_word_of_the_server(
    server: Any, client: OpenAIClient
) -> None:
    async def page(asked: Any) -> Any:
        from aiohttp import web

        return web.Response(status=404, text="<html>no backend</html>")

    server.script = [page]
    with pytest.raises(InferenceError, match="no backend"):
        await client.get_model_response(ASK)


async def test_a_server_that_is_gone_is_an_error_and_one_that_is_back_answers(
    server: Any, client: OpenAIClient
) -> None:
    await server.stop()
    with pytest.raises(InferenceError, match="cannot be reached"):
        await client.get_model_response(ASK)
    await server.start()
    assert (await client.get_model_response(ASK)).text == "Right"
    await server.stop()
    with pytest.raises(InferenceError, match="cannot be reached"):
        await client.get_model_response(ASK)


async def test_a_kept_connection_that_was_closed_is_not_noticed(server: Any, client: OpenAIClient) -> None:
    server.script = [fake.say("a"), fake.drop, fake.say("b")]
    assert (await client.get_model_response(ASK)).text == "a"
    assert (await client.get_model_response(ASK)).text == "b"


async def test_a_connection_that_breaks_off_is_an_error(server: Any, client: OpenAIClient) -> None:
    server.script = [fake.drop, fake.drop]  # the kept connection, and the new one
    with pytest.raises(InferenceError, match="broke off"):
        await client.get_model_response(ASK)
    assert len(server.asked) == 2


async def test_cancelling_a_call_closes_the_connection(server: Any, client: OpenAIClient) -> None:
    server.script = [fake.hang()]
    call = asyncio.create_task(client.get_model_response(ASK))
    while not server.asked:
        await asyncio.sleep(0.001)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(server.asked[0].gone.wait(), 10)


async def test_a_server_that_says_nothing_for_too_long_is_an_error(server: Any) -> None:
    client = OpenAIClient(server.url, timeout_s=0.2)
    server.script = [fake.hang()]
    with pytest.raises(InferenceError, match="broke off"):
        await client.get_model_response(ASK)
    await client.close()


# ---- lengths -----------------------------------------------------------------------------------------------


async def test_without_a_tokenizer_nobody_knows_how_long_a_prompt_is(client: OpenAIClient) -> None:
    assert client.session(("t", 0)).prompt_tokens(ASK) == -1


async def test_with_a_tokenizer_a_prompt_without_room_is_never_sent(server: Any) -> None:
    client = OpenAIClient(server.url, tokenizer=CodepointTokenizer())
    async with client.session(("t", 0)) as session:
        long: list[Message] = [{"role": "user", "content": "x" * 4_090}]
        assert session.prompt_tokens(long) > 4_096
        with pytest.raises(ContextLengthError, match="4096"):
            await session.respond(long, SamplingParams())
        assert not server.asked
        await session.respond([{"role": "user", "content": "x" * 4_000}], SamplingParams(max_tokens=4_000))
        room = 4_096 - session.prompt_tokens([{"role": "user", "content": "x" * 4_000}])
        assert server.bodies[0]["max_tokens"] == room
    await client.close()


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 4352 tokens (4000 in the "
        "messages, 352 in the completion). Please reduce the length of the messages or completion.",
        "'max_tokens' or 'max_completion_tokens' is too large: 352. This model's maximum context length is "
        "4096 tokens and your request has 4000 input tokens (352 > 4096 - 4000).",
        "You passed 4000 input tokens and requested 352 output tokens. However, the model's context length "
        "is only 4096 tokens, resulting in a maximum input length of 3744 tokens.",
    ],
)
async def test_a_prompt_that_fits_is_answered_in_the_room_behind_it(
    server: Any, client: OpenAIClient, said: str
) -> None:
    server.script = [fake.refuse(400, said)]
    output = await client.get_model_response(ASK, SamplingParams(max_tokens=352))
    assert output.text == "Right"
    assert [body["max_tokens"] for body in server.bodies] == [352, 96]


@pytest.mark.parametrize("room", [1, 351])
async def test_any_room_behind_a_prompt_is_used(server: Any, client: OpenAIClient, room: int) -> None:
    context = f"maximum context length is 4096 tokens and your request has {4096 - room} input tokens"
    server.script = [fake.refuse(400, context)]
    await client.get_model_response(ASK, SamplingParams(max_tokens=352))
    assert [body["max_tokens"] for body in server.bodies] == [352, room]


async def test_a_server_that_shortens_again_is_not_asked_a_third_time(
    server: Any, client: OpenAIClient
) -> None:
    context = "maximum context length is 4096 tokens and your request has {} input tokens"
    server.script = [fake.refuse(400, context.format(size)) for size in (4000, 4050, 4060)]
    with pytest.raises(ContextLengthError):
        await client.get_model_response(ASK, SamplingParams(max_tokens=352))
    assert [body["max_tokens"] for body in server.bodies] == [352, 96]


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 4096 tokens. However, your request has 4096 input tokens.",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
    ],
)
async def test_a_prompt_that_does_not_fit_is_a_context_overflow(
    server: Any, client: OpenAIClient, said: str
) -> None:
    server.script = [fake.refuse(400, said)]
    with pytest.raises(ContextLengthError, match="4096"):
        await client.get_model_response(ASK)
    assert len(server.asked) == 1


# ---- fields that a server does not know --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "param"),
    [
        *((name, None) for name in NEUTRAL if name not in ("temperature", "top_p")),
        ("return_token_ids", None),
        ("logprobs", None),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
    ],
)
async def test_a_field_that_says_nothing_is_left_out_where_the_server_minds_it(
    server: Any, client: OpenAIClient, name: str, param: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def minds(asked: Any) -> Any:
        if name in asked.body:
            said = f"Unrecognized request argument supplied: {name}"
            return await fake.refuse(400, said, param=param)(asked)
        return await fake.speak(asked)

    server.default = minds
    for _ in range(2):
        assert (await client.get_model_response(ASK)).text == "Right"
    assert [name in body for body in server.bodies] == [True, False, False], "it is learned once"
    assert name in caplog.text


async def test_the_new_name_of_max_tokens_is_used_where_the_old_one_is_refused(
    server: Any, client: OpenAIClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def modern(asked: Any) -> Any:
        if "max_tokens" in asked.body:
            said = "Unsupported parameter: 'max_tokens' is not supported with this model."
            return await fake.refuse(400, said, param="max_tokens")(asked)
        return await fake.speak(asked)

    server.default = modern
    for _ in range(2):
        await client.get_model_response(ASK, SamplingParams(max_tokens=9))
    assert [body.get("max_completion_tokens") for body in server.bodies] == [None, 9, 9]
    assert "max_tokens" in caplog.text


async def test_a_field_that_would_change_the_answer_is_never_left_out(
    server: Any, client: OpenAIClient
) -> None:
    server.default = fake.refuse_field("top_k")
    with pytest.raises(ConfigError, match="`top_k` = 5"):
        await client.get_model_response(ASK, SamplingParams(top_k=5))
    assert (await client.get_model_response(ASK)).text == "Right"
    with pytest.raises(ConfigError, match="`top_k` = 5"):
        await client.get_model_response(ASK, SamplingParams(top_k=5))
    assert len(server.asked) == 3, "what it does not know is not sent again"


@pytest.mark.parametrize(("status", "is_final"), [(400, True), (413, True), (422, True), (418, False)])
async def test_a_refusal_of_one_conversation_is_no_fault_of_the_fields(
    server: Any, client: OpenAIClient, status: int, is_final: bool
) -> None:
    server.script = [fake.refuse(status, "the model stops: messages must not be empty", param="messages[0]")]
    with pytest.raises(InferenceError, match="empty") as refused:
        await client.get_model_response(ASK, SamplingParams(stop=("x",)))
    assert len(server.asked) == 1
    assert refused.value.is_final is is_final, "whether the same conversation would be refused again"


@pytest.mark.parametrize(
    ("usage", "cached_tokens"),
    [({}, 0), ({"prompt_tokens_details": None}, 0), ({"prompt_tokens_details": {"cached_tokens": 7}}, 7)],
)
async def test_tokens_count_as_cached_where_the_server_says_so(
    server: Any, client: OpenAIClient, usage: dict[str, Any], cached_tokens: int
) -> None:
    server.script = [reply({}, usage={"prompt_tokens": 9, "completion_tokens": 1, **usage})]
    output = await client.get_model_response(ASK)
    assert output.usage == {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": cached_tokens}


@pytest.mark.parametrize("sampling", [SamplingParams(grammar='start: "a"'), SamplingParams(top_logprobs=2)])
async def test_what_needs_ids_is_refused(client: OpenAIClient, sampling: SamplingParams) -> None:
    with pytest.raises(ConfigError, match="VLLMClient"):
        await client.get_model_response(ASK, sampling)


# ---- the server --------------------------------------------------------------------------------------------


async def test_a_thousand_calls_are_open_at_once_and_ask_once_what_is_served(
    server: Any, client: OpenAIClient
) -> None:
    hold = asyncio.Event()
    server.default = fake.say("a", hold=hold)
    calls = [asyncio.create_task(client.get_model_response(ASK)) for _ in range(1_000)]
    async with asyncio.timeout(60):
        while len(server.asked) < 1_000:
            await asyncio.sleep(0.01)
        hold.set()
        outputs = await asyncio.gather(*calls)
    assert {output.text for output in outputs} == {"a"}
    assert server.num_probes == 1


async def test_calls_beyond_the_limit_wait_for_a_connection(server: Any) -> None:
    client = OpenAIClient(server.url, max_connections=3)
    outputs = await asyncio.gather(*(client.get_model_response(ASK) for _ in range(20)))
    assert len(outputs) == 20
    assert server.num_connections <= 3
    await client.close()


async def test_several_models_need_a_name(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from aiohttp import web

    def two(path: str) -> web.Response:
        return web.json_response({"data": [{"id": "one"}, {"id": "two"}]})

    monkeypatch.setattr(server, "_told", two)
    client = OpenAIClient(server.url)
    with pytest.raises(ConfigError, match="one, two"):
        await client.get_model_response(ASK)
    await client.close()


def test_a_client_serves_one_event_loop_after_another() -> None:
    server: Any = fake.FakeUpstream(answer="Right")
    asyncio.run(_started_and_stopped(server))
    client = OpenAIClient(server.url)

    async def ask() -> str:
        async with server:
            text = (await client.get_model_response(ASK)).text
            await client.close()
            return text

    assert [asyncio.run(ask()), asyncio.run(ask())] == ["Right", "Right"]


async def _started_and_stopped(server: Any) -> None:
    """So that it has a port, which it keeps."""
    async with server:
        pass


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"base_url": "http://a/v1", "timeout_s": 0.0}, "timeout_s"),
        ({"base_url": "http://a/v1", "max_connections": -1}, "max_connections"),
    ],
)
def test_what_cannot_work_is_refused_at_once(args: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        OpenAIClient(**args)
