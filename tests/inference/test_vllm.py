"""A server that is given ids and gives ids, over a real socket that speaks as vLLM does."""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.gateway.local import LocalPolicy
from rllm.inference.client import TokenPiece
from rllm.inference.vllm import VLLMClient
from rllm.types.messages import FinishReason, LogprobMeaning, Message, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
import fake_upstream as fake

PROMPT = [5, 6, 7]


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    async with fake.FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def client(server: Any, model_dir: Path) -> AsyncIterator[VLLMClient]:
    client = await VLLMClient.connect(server.url, model_dir)
    yield client
    await client.close()


def sampled(client: VLLMClient, text: str, **changes: Any) -> Any:
    """A behaviour: the ids of `text` in the model's own vocabulary, an end token, their log-probabilities."""
    ids = [*client.tokenizer.encode(text), client.tokenizer.end_token_id]
    choice = {
        "index": 0,
        "text": text,
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_token_ids": PROMPT,
        "token_ids": ids,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": [-0.5] * len(ids),
            "top_logprobs": [{f"token_id:{token}": -0.5, "token_id:1": -0.1} for token in ids],
        },
    } | changes

    async def behave(asked: Any) -> Any:
        if not asked.body.get("stream"):
            return await fake.body(orjson.dumps({"id": "cmpl-1", "choices": [choice]}))(asked)
        events: list[bytes] = []
        for place, token in enumerate(choice["token_ids"] or []):
            part = choice | {
                "token_ids": [token],
                "prompt_token_ids": choice["prompt_token_ids"] if place == 0 else None,
                "logprobs": {
                    "token_logprobs": choice["logprobs"]["token_logprobs"][place : place + 1],
                    "top_logprobs": choice["logprobs"]["top_logprobs"][place : place + 1],
                },
                "finish_reason": choice["finish_reason"] if place == len(choice["token_ids"]) - 1 else None,
            }
            events.append(b"data: " + orjson.dumps({"id": "cmpl-1", "choices": [part]}) + b"\n\n")
        return await fake.body(b"".join(events) + b"data: [DONE]\n\n", "text/event-stream")(asked)

    return behave


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_go_in_and_ids_come_out(server: Any, client: VLLMClient, stream: bool) -> None:
    client.set_policy_version(3)
    server.script = [sampled(client, "hello there")]
    pieces: list[TokenPiece] = []
    output = await client.generate_ids(PROMPT, SamplingParams(), on_piece=pieces.append if stream else None)
    ids = [*client.tokenizer.encode("hello there"), client.tokenizer.end_token_id]
    assert output.completion_ids == ids
    assert output.logprobs == [-0.5] * len(ids)
    assert output.policy_versions == [3] * len(ids)
    assert (output.text, output.finish_reason) == ("hello there", FinishReason.STOP)
    assert output.logprob_meaning is LogprobMeaning.RAW
    assert output.completion_id == "cmpl-1"
    assert server.bodies[0]["prompt"] == PROMPT
    if stream:
        assert len(pieces) > 1, "they come as they are sampled"
        assert "".join(piece.text for piece in pieces) == "hello there"
        assert [token for piece in pieces for token in piece.token_ids] == ids


@pytest.mark.parametrize(
    ("at_publish", "is_streamed"), [("finish", False), ("recompute", True), ("keep", True)]
)
async def test_an_answer_that_new_weights_may_cut_off_comes_token_by_token(
    server: Any, model_dir: Path, at_publish: str, is_streamed: bool
) -> None:
    """Only so is what was sampled before the cut still there after it."""
    client = VLLMClient(server.url, model_dir, at_publish=at_publish)
    server.script = [sampled(client, "hello there")]
    await client.generate_ids(PROMPT, SamplingParams())
    assert server.bodies[0].get("stream", False) is is_streamed
    await client.close()


async def test_every_sampling_field_is_sent_so_that_no_server_default_counts(
    server: Any, client: VLLMClient
) -> None:
    server.script = [sampled(client, "a")] * 2
    await client.generate_ids(PROMPT, SamplingParams())
    chosen = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, max_tokens=9_999, seed=2**64 - 1, stop=("x",)
    )
    await client.generate_ids(PROMPT, chosen)
    plain, sent = server.bodies
    assert (plain["temperature"], plain["top_p"], plain["top_k"], plain["seed"]) == (1.0, 1.0, -1, 0)
    assert (plain["min_p"], plain["repetition_penalty"], plain["presence_penalty"]) == (0.0, 1.0, 0.0)
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["stop"]) == (0.5, 0.9, 7, ["x"])
    assert sent["max_tokens"] == 4096 - len(PROMPT)
    assert 0 <= sent["seed"] < 2**63


async def test_ids_that_no_token_has_are_never_drawn_by_the_server(
    server: Any, client: VLLMClient, model_dir: Path, tmp_path: Path
) -> None:
    padded = tmp_path / "padded"
    shutil.copytree(model_dir, padded)
    config = json.loads((padded / "config.json").read_text())
    num_tokens = config["vocab_size"]
    (padded / "config.json").write_text(json.dumps(config | {"vocab_size": num_tokens + 2}))
    server.script = [sampled(client, "a")] * 2
    await client.generate_ids(PROMPT, SamplingParams())
    with_unused = await VLLMClient.connect(server.url, padded)
    await with_unused.generate_ids(PROMPT, SamplingParams())
    await with_unused.close()
    plain, biased = server.bodies
    assert "logit_bias" not in plain
    assert biased["logit_bias"] == {str(num_tokens): -100.0, str(num_tokens + 1): -100.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_the_text_and_not_the_ids(
    server: Any, client: VLLMClient, stream: bool
) -> None:
    server.script = [sampled(client, "hello STOP", stop_reason="STOP")]
    pieces: list[TokenPiece] = []
    output = await client.generate_ids(
        PROMPT, SamplingParams(stop=("STOP",)), on_piece=pieces.append if stream else None
    )
    assert (output.text, output.stop_sequence) == ("hello ", "STOP")
    assert client.tokenizer.decode(output.completion_ids) == "hello STOP"
    assert "".join(piece.text for piece in pieces) == ("hello " if stream else "")


async def test_alternatives_come_with_their_ids(server: Any, client: VLLMClient) -> None:
    server.script = [sampled(client, "a")]
    output = await client.generate_ids(PROMPT, SamplingParams(top_logprobs=1))
    assert output.top_logprobs == [[(1, -0.1)]] * len(output.completion_ids)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token_ids": None}, r"no token ids.*0\.10\.2.*return_token_ids"),
        ({"logprobs": None}, "no log-probabilities"),
        ({"token_ids": [1, 2, 3, 4, 5]}, "5 token ids"),
        ({"prompt_token_ids": [1, 5, 6, 7]}, "prompt of 4 ids"),
        ({"finish_reason": "abort"}, "abort"),
        ({"finish_reason": None}, "before it was complete"),
        ({"token_ids": ["a"]}, "no token id"),
        ({"logprobs": [1]}, "cannot be read"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_an_error(
    server: Any, client: VLLMClient, changes: dict[str, Any], why: str
) -> None:
    server.script = [sampled(client, "a", **changes)]
    with pytest.raises(InferenceError, match=why):
        await client.generate_ids(PROMPT, SamplingParams())


async def test_a_stream_that_breaks_off_is_an_error(server: Any, client: VLLMClient) -> None:
    server.script = [fake.stream("hello", drop_after=3), fake.stream("hello", end_after=3)]
    for _ in range(2):
        with pytest.raises(InferenceError, match=r"broke off|complete"):
            await client.generate_ids(PROMPT, SamplingParams(), on_piece=lambda piece: None)


async def test_another_way_to_meet_new_weights_is_refused(client: VLLMClient) -> None:
    with pytest.raises(ConfigError, match=r"'later'.*finish, recompute, keep"):
        VLLMClient(client.base_url, client.tokenizer, at_publish="later")


async def test_a_prompt_without_room_is_refused_before_it_is_sent(server: Any, client: VLLMClient) -> None:
    with pytest.raises(ContextLengthError, match="4096"):
        await client.generate_ids([1] * 4096, SamplingParams())
    assert not server.asked


async def test_a_message_that_cannot_fit_is_refused_before_it_is_encoded(
    server: Any, client: VLLMClient
) -> None:
    server.script = [sampled(client, "hello there")]
    await client.generate_ids(PROMPT, SamplingParams())  # from here on the server's context is known
    messages: list[Message] = [{"role": "user", "content": "x" * 2_000_000}]
    async with client.session(("", 0)) as session:
        with pytest.raises(ContextLengthError, match="2000000 characters"):
            await session.respond(messages, SamplingParams())
        with pytest.raises(ContextLengthError, match="2000000 characters"):
            session.prompt_tokens(messages)
    assert len(server.bodies) == 1


async def test_errors_of_the_server_keep_their_meaning(server: Any, client: VLLMClient) -> None:
    server.script = [
        fake.refuse(400, "This model's maximum context length is 4096 tokens"),
        fake.refuse(400, "bad grammar"),
        fake.refuse(500, "engine dead"),
    ]
    for error in (ContextLengthError, ValueError, InferenceError):
        with pytest.raises(error):
            await client.generate_ids(PROMPT, SamplingParams())


async def test_a_grammar_is_sent_where_the_server_knows_it_and_refused_elsewhere(
    server: Any, client: VLLMClient
) -> None:
    server.script = [sampled(client, "a")]
    await client.generate_ids(PROMPT, SamplingParams(grammar='start: "a"'))
    assert server.bodies[0]["structured_outputs"] == {"grammar": 'start: "a"'}
    client.facts.version = (0, 10, 2)
    with pytest.raises(ValueError, match=r"vllm 0\.10\.2.*grammar"):
        await client.generate_ids(PROMPT, SamplingParams(grammar='start: "a"'))


async def test_sglang_is_told_apart(server: Any, model_dir: Path) -> None:
    server.engine = "sglang"
    client = await VLLMClient.connect(server.url, model_dir)
    server.script = [sampled(client, "a")]
    output = await client.generate_ids(PROMPT, SamplingParams(temperature=0.5))
    assert output.logprob_meaning is LogprobMeaning.TEMPERATURE
    for sampling in (SamplingParams(top_logprobs=2), SamplingParams(grammar='start: "a"')):
        with pytest.raises(ValueError, match="sglang"):
            await client.generate_ids(PROMPT, sampling)
    await client.close()


async def test_cancelling_a_call_closes_the_connection(server: Any, client: VLLMClient) -> None:
    server.script = [fake.hang()]
    call = asyncio.create_task(client.generate_ids(PROMPT, SamplingParams()))
    while not server.asked:
        await asyncio.sleep(0.001)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(server.asked[0].gone.wait(), 10)


async def test_a_kept_connection_that_was_closed_is_not_noticed(server: Any, client: VLLMClient) -> None:
    server.script = [sampled(client, "a"), fake.drop, sampled(client, "b")]
    assert (await client.generate_ids(PROMPT, SamplingParams())).text == "a"
    assert (await client.generate_ids(PROMPT, SamplingParams())).text == "b"


async def test_a_server_without_the_model_is_an_error_that_names_what_it_has(
    server: Any, model_dir: Path
) -> None:
    with pytest.raises(InferenceError, match="serves m; `other` is wanted"):
        await VLLMClient.connect(server.url, model_dir, model="other")
    with pytest.raises(InferenceError, match="cannot be reached"):
        await VLLMClient.connect(f"http://127.0.0.1:{fake.closed_port()}/v1", model_dir)


async def test_the_gateway_renders_and_the_server_samples(server: Any, client: VLLMClient) -> None:
    """Token in, token out: the second prompt is the first one, its answer as sampled, and what is new."""
    server.script = [
        sampled(client, "one", prompt_token_ids=None),
        sampled(client, "two", prompt_token_ids=None),
    ]
    policy = LocalPolicy(client, "m")
    session = fake.Session()
    first = (await policy.answer(fake.chat("hi"), session)).choices[0]
    second = (await policy.answer(fake.chat("hi", "one", "more"), session)).choices[0]
    assert (first.text, second.text) == ("one", "two")
    sampled_so_far = [*first.prompt_ids, *first.completion_ids]
    assert second.prompt_ids[: len(sampled_so_far)] == sampled_so_far
    assert server.bodies[1]["prompt"] == second.prompt_ids


# ---- new weights -----------------------------------------------------------------------------------------


class Managed:
    """What vLLM does when it is told to take new weights: calls by path, and which weights answer."""

    def __init__(self, client: VLLMClient, *, lacks: str = "", keeps_cache: bool = False) -> None:
        self.client = client
        self.lacks = lacks
        self.keeps_cache = keeps_cache
        self.told: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def __call__(self, asked: Any) -> Any:
        if asked.path == "/v1/completions":
            self.told.append(f"asked with {len(asked.body['prompt'])}")
            await self.hold.wait()
            self.told.append("answered")
            return await sampled(self.client, "a", prompt_token_ids=asked.body["prompt"])(asked)
        self.told.append(asked.path)
        if asked.path == self.lacks:
            return await fake.refuse(404, "Not Found")(asked)
        if asked.path == "/collective_rpc":
            self.told.append(f"{asked.body['method']} {asked.body['kwargs']['weights_path']}")
        return await fake.body(orjson.dumps({"success": not self.keeps_cache}))(asked)


async def test_new_weights_wait_for_what_is_being_answered_and_later_calls_wait_for_them(
    server: Any, client: VLLMClient, model_dir: Path
) -> None:
    server.default = managed = Managed(client)
    managed.hold.clear()
    before = asyncio.create_task(client.generate_ids([5], SamplingParams()))
    while not managed.told:
        await asyncio.sleep(0.001)
    update = asyncio.create_task(client.update_weights(model_dir, 7))
    while not client._gate._is_closed:
        await asyncio.sleep(0)
    after = asyncio.create_task(client.generate_ids([5, 6], SamplingParams()))
    await asyncio.sleep(0.01)
    assert managed.told == ["asked with 1"]
    managed.hold.set()
    await update
    assert set((await before).policy_versions) == {0}
    assert set((await after).policy_versions) == {7}
    assert managed.told == [
        "asked with 1",
        "answered",
        "/pause",
        "/collective_rpc",
        f"reload_weights {model_dir.resolve()}",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
        "asked with 2",
        "answered",
    ]


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        ({"lacks": "/pause"}, ConfigError, "VLLM_SERVER_DEV_MODE=1"),
        ({"lacks": "/collective_rpc"}, ConfigError, "VLLM_SERVER_DEV_MODE=1"),
        ({"keeps_cache": True}, InferenceError, "keeps what the old ones have read"),
    ],
)
async def test_weights_that_did_not_arrive_are_an_error_and_answers_are_by_known_ones_alone(
    server: Any,
    client: VLLMClient,
    model_dir: Path,
    trouble: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    server.default = managed = Managed(client, **trouble)
    with pytest.raises(error, match=words):
        await client.update_weights(model_dir, 7)
    assert client.policy_version == 0
    assert managed.told[-1] in ("/resume", "/pause")
    if error is InferenceError:
        with pytest.raises(InferenceError, match="publish again"):
            await client.generate_ids([5], SamplingParams())
        managed.keeps_cache = False
        await client.update_weights(model_dir, 7)
    version = 7 if error is InferenceError else 0
    assert set((await client.generate_ids([5], SamplingParams())).policy_versions) == {version}


async def test_a_directory_without_weights_never_reaches_the_server(
    server: Any, client: VLLMClient, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        await client.update_weights(tmp_path, 7)
    assert server.asked == []


async def test_seeds_can_be_left_to_the_server(server: Any, model_dir: Path) -> None:
    client = await VLLMClient.connect(server.url, model_dir, sends_seeds=False)
    server.script = [sampled(client, "a")]
    await client.generate_ids(PROMPT, SamplingParams(seed=3))
    assert "seed" not in server.bodies[0]
    await client.close()
