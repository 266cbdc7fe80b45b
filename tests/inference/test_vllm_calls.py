"""What a vLLM or SGLang server is asked, call by call: the server is a list of replies."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.inference.answer_parts import version_of
from rllm.inference.publish_gate import Gate
from rllm.inference.vllm import AT_PUBLISH, VLLMClient
from rllm.inference.vllm_http import VLLMHttp, VLLMServerFacts
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.types.messages import FinishReason, LogprobMeaning, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Server:
    """Tells `facts`, answers calls that manage it from `replies` by path, and completions from `chunks`."""

    def __init__(self, **facts: Any) -> None:
        self.known = VLLMServerFacts(**{"model": "policy", "max_context": 10, "version": (0, 12)} | facts)
        self.replies: dict[str, Any] = {}
        self.chunks: list[dict[str, Any]] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.bodies: list[dict[str, Any]] = []

    async def facts(self, model: str) -> VLLMServerFacts:
        return self.known

    async def tell(self, path: str, body: dict[str, Any], needs: str = "") -> Any:
        self.requests.append((path, body))
        reply = self.replies.get(path, {"success": True})
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def tokenize(self, body: dict[str, Any]) -> Any:
        self.requests.append(("/tokenize", body))
        return self.replies.get("/tokenize")

    async def complete(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.bodies.append(body)
        yield self.chunks.pop(0)

    async def close(self) -> None: ...

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(model_dir)


def client_of(server: Server, tokenizer: HuggingFaceTokenizer, **options: Any) -> VLLMClient:
    client = VLLMClient("http://s/v1/", tokenizer, **options)
    client._http = client._checks = server  # type: ignore[assignment]
    return client


def chunk(ids: list[int], reason: str = "length", **fields: Any) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5] * len(ids)}
    return {
        "id": "c",
        "choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": reason}],
        **fields,
    }


@pytest.mark.parametrize("at_publish", AT_PUBLISH)
async def test_vllm_is_paused_given_weights_and_let_go_on(
    tokenizer: HuggingFaceTokenizer, model_dir: Path, at_publish: str
) -> None:
    server = Server()
    client = client_of(server, tokenizer, at_publish=at_publish)
    await client.update_weights(model_dir, 7)
    keeps = at_publish == "keep"
    assert server.paths == [
        "/pause?mode=keep&clear_cache=false" if keeps else "/pause?mode=wait",
        "/collective_rpc",
        *([] if keeps else ["/reset_prefix_cache"]),
        "/update_weight_version",
        "/resume",
    ]
    assert server.requests[1][1]["kwargs"] == {"weights_path": str(model_dir.resolve())}
    assert dict(server.requests)["/update_weight_version"] == {"new_version": "7"}
    assert client.policy_version == 7


@pytest.mark.parametrize("at_publish", AT_PUBLISH)
async def test_sglang_is_paused_given_weights_and_let_go_on(
    tokenizer: HuggingFaceTokenizer, model_dir: Path, at_publish: str
) -> None:
    server = Server(engine="sglang")
    client = client_of(server, tokenizer, at_publish=at_publish)
    await client.update_weights(model_dir, 7)
    keeps = at_publish == "keep"
    assert server.requests == [
        ("/pause_generation", {"mode": "in_place" if keeps else "retract"}),
        (
            "/update_weights_from_disk",
            {"model_path": str(model_dir.resolve()), "weight_version": "7", "flush_cache": not keeps},
        ),
        ("/continue_generation", {}),
    ]
    server.replies["/update_weights_from_disk"] = {"success": False}
    with pytest.raises(InferenceError, match="False"):
        await client.update_weights(model_dir, 8)
    assert (client.policy_version, server.paths[-1]) == (7, "/continue_generation")


async def test_a_server_that_fails_to_read_weights_goes_on_by_the_old_ones(
    tokenizer: HuggingFaceTokenizer, model_dir: Path, tmp_path: Path
) -> None:
    server = Server()
    client = client_of(server, tokenizer)
    server.replies["/collective_rpc"] = InferenceError("out of memory")
    with pytest.raises(InferenceError, match="out of memory"):
        await client.update_weights(model_dir, 7)
    assert (client.policy_version, server.paths[-1]) == (0, "/resume")
    server.replies = {"/reset_prefix_cache": {"success": False}}
    with pytest.raises(InferenceError, match="publish again"):
        await client.update_weights(model_dir, 7)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match="no model directory"):
            await client.update_weights(tmp_path, 7)
        (tmp_path / name).unlink()


async def test_two_adapters_are_kept_and_the_last_one_answers(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    server = Server()
    client = client_of(server, tokenizer)
    names: list[str] = []
    for version in (1, 2, 3):
        await client.load_adapter(tmp_path, version)
        _, body = next(each for each in reversed(server.requests) if each[0] == "/v1/load_lora_adapter")
        assert body["lora_path"] == str(tmp_path.resolve())
        assert body["lora_name"].startswith(f"adapter-{version}-")
        names.append(body["lora_name"])
        assert client.policy_version == version
    assert server.paths == ["/v1/load_lora_adapter"] * 3 + ["/v1/unload_lora_adapter"]
    assert server.requests[-1][1] == {"lora_name": names[0]}
    server.chunks = [chunk([5])]
    await client.generate_ids([1], SamplingParams(max_tokens=1))
    assert server.bodies[0]["model"] == names[2]
    server.replies["/v1/unload_lora_adapter"] = ConfigError("it began anew")
    server.requests.clear()
    await client.leave()
    assert [body["lora_name"] for _, body in server.requests] == names[1:]
    await client.leave()
    assert len(server.requests) == 2, "once each"
    with pytest.raises(ConfigError, match="SGLang"):
        await client_of(Server(engine="sglang"), tokenizer).load_adapter(tmp_path, 1)


async def test_an_answer_is_as_long_as_it_may_be_and_fits(tokenizer: HuggingFaceTokenizer) -> None:
    server = Server()
    client = client_of(server, tokenizer)
    assert client.max_context > 10**9, "nobody has asked yet"
    for num_prompt, max_tokens, sent in ((9, 5, 1), (4, 5, 5), (4, 9, 6)):
        server.chunks = [chunk([8] * sent)]
        output = await client.generate_ids([1] * num_prompt, SamplingParams(max_tokens=max_tokens))
        assert server.bodies[-1]["max_tokens"] == sent
        assert output.finish_reason is FinishReason.LENGTH
        assert output.latency_s > 0.0
    assert client.max_context == 10
    with pytest.raises(ContextLengthError, match=r"10 .*10"):
        await client.generate_ids([1] * 10, SamplingParams())
    server.chunks = [chunk([8])]
    with pytest.raises(InferenceError, match="`--generation-config vllm`"):
        await client.generate_ids([1], SamplingParams(max_tokens=2))


async def test_a_part_that_failed_is_asked_for_again_behind_what_arrived(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    server = Server()
    client = client_of(server, tokenizer)
    answer = client.begin([1, 2], SamplingParams(max_tokens=3, seed=2**63 + 4, top_logprobs=2))
    server.chunks = [chunk([8], reason=None)]  # type: ignore[arg-type]
    with pytest.raises(InferenceError, match="complete"):
        await client.go_on(answer)
    server.chunks = [chunk([9, 8])]
    output = await client.go_on(answer)
    assert output.completion_ids == [8, 9, 8]
    first, second = server.bodies
    assert (first["prompt"], second["prompt"]) == ([1, 2], [1, 2, 8])
    assert (first["max_tokens"], second["max_tokens"]) == (3, 2)
    assert first["seed"] == 4
    assert second["seed"] not in (4, 2**63 + 4), "other draws behind it"
    assert first["logprobs"] == second["logprobs"] == 2


async def test_an_answer_by_other_weights_than_were_given_is_refused_and_spoiled(
    tokenizer: HuggingFaceTokenizer, model_dir: Path
) -> None:
    server = Server()
    client = client_of(server, tokenizer)
    one = SamplingParams(max_tokens=1)
    server.chunks = [chunk([8], weight_version="3")]
    assert (await client.generate_ids([1], one)).policy_versions == [3], "whatever it has, nobody gave it any"
    await client.update_weights(model_dir, 7)
    server.chunks = [chunk([8]), chunk([8], weight_version="7")]
    for _ in range(2):
        assert (await client.generate_ids([1], one)).policy_versions == [7]
    for fields in ({"weight_version": "6"}, {}):  # the second: it has told before, and tells no more
        server.chunks = [chunk([8], **fields)]
        answer = client.begin([1], one)
        with pytest.raises(InferenceError, match="policy version 7"):
            await client.go_on(answer)
        assert answer.is_spoiled is not bool(fields), "a version that is told is told before any token"


async def test_what_arrived_before_other_weights_were_told_is_spoiled(
    tokenizer: HuggingFaceTokenizer, model_dir: Path
) -> None:
    class Streaming(Server):
        async def complete(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            for each in self.chunks:
                yield each

    server = Streaming()
    client = client_of(server, tokenizer)
    await client.update_weights(model_dir, 7)
    server.chunks = [chunk([8], reason=None), chunk([9], weight_version="6")]  # type: ignore[arg-type]
    answer = client.begin([1], SamplingParams(max_tokens=2))
    with pytest.raises(InferenceError, match="policy version 7"):
        await client.go_on(answer)
    assert (answer.ids, answer.is_spoiled) == ([8], True)


VERSIONS: list[tuple[dict[str, Any], int | None]] = [
    ({}, None),
    ({"weight_version": "default"}, None),
    ({"weight_version": 3}, 3),
    ({"metadata": {"weight_version": "4"}}, 4),
    ({"metadata": None}, None),
]


@pytest.mark.parametrize(("fields", "version"), VERSIONS)
def test_a_chunk_may_tell_the_version_of_its_weights(fields: dict[str, Any], version: int | None) -> None:
    assert version_of(fields) == version


async def test_what_the_server_had_read_before_and_the_best_tokens_are_told(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    server = Server()
    client = client_of(server, tokenizer)
    last_chunk = chunk([8], usage={"prompt_tokens_details": {"cached_tokens": 2}})
    last_chunk["choices"][0]["logprobs"]["top_logprobs"] = [
        {"token_id:5": -3.0, "token_id:8": -0.5, "word": -0.1, "token_id:6": -2.0}
    ]
    server.chunks = [last_chunk]
    output = await client.generate_ids([1, 2], SamplingParams(max_tokens=1, top_logprobs=2))
    assert output.usage == {"prompt_tokens": 2, "completion_tokens": 1, "cached_tokens": 2}
    assert output.top_logprobs == [[(8, -0.5), (6, -2.0)]]
    assert (output.completion_id, output.temperature) == ("c", 1.0)


@pytest.mark.parametrize(
    ("at_publish", "grammar", "listens", "streams"),
    [
        ("finish", "", False, False),
        ("finish", "", True, True),
        ("keep", "", False, True),
        ("recompute", "", False, True),
        ("recompute", 'start: "a"', False, False),
    ],
)
async def test_an_answer_that_somebody_hears_or_may_cut_off_is_streamed(
    tokenizer: HuggingFaceTokenizer, at_publish: str, grammar: str, listens: bool, streams: bool
) -> None:
    server = Server()
    server.chunks = [chunk([8])]
    client = client_of(server, tokenizer, at_publish=at_publish)
    sampling = SamplingParams(max_tokens=1, grammar=grammar or None)
    await client.generate_ids([1], sampling, on_piece=(lambda piece: None) if listens else None)
    (body,) = server.bodies
    wanted = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    assert {name: body[name] for name in body if name.startswith("stream")} == wanted


@pytest.mark.parametrize("has_text", [False, True])
async def test_every_field_of_sampling_is_sent(tokenizer: HuggingFaceTokenizer, has_text: bool) -> None:
    server = Server()
    server.chunks = [chunk([8])]
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.5,
        top_p=0.25,
        top_k=3 if has_text else 0,
        seed=7,
        stop=("x",) if has_text else (),
        stop_token_ids=(5,),
    )
    await client_of(server, tokenizer, sends_seeds=has_text).generate_ids([1, 2], sampling)
    (body,) = server.bodies
    assert body == {
        "model": "policy",
        "prompt": [1, 2],
        "max_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3 if has_text else -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        **({"seed": 7} if has_text else {}),
        "stop": ["x"] if has_text else [],
        "stop_token_ids": [5],
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": not has_text,
    }


async def test_a_grammar_needs_a_server_that_follows_it(tokenizer: HuggingFaceTokenizer) -> None:
    with_grammar = SamplingParams(max_tokens=1, grammar='start: "a"')
    server = Server()
    server.chunks = [chunk([8])]
    await client_of(server, tokenizer).generate_ids([1], with_grammar)
    assert server.bodies[0]["structured_outputs"] == {"grammar": 'start: "a"'}
    for facts in ({"version": (0, 11, 9)}, {"version": ()}, {"engine": "sglang"}):
        with pytest.raises(ValueError, match=r"0\.12"):
            await client_of(Server(**facts), tokenizer).generate_ids([1], with_grammar)
    with_alternatives, sglang = SamplingParams(top_logprobs=1), client_of(Server(engine="sglang"), tokenizer)
    with pytest.raises(ValueError, match="`top_logprobs` is 1"):
        await sglang.generate_ids([1], with_alternatives)


async def test_scores_are_those_of_the_ids_that_were_sent(tokenizer: HuggingFaceTokenizer) -> None:
    server = Server()
    entries = [None, {"6": {"logprob": -1.0}, "9": {"logprob": -9.0}}, {"7": {"logprob": -2.0}}]
    server.chunks = [{"choices": [{"prompt_logprobs": entries}]}, {"choices": [{}]}]
    client = client_of(server, tokenizer, at_publish="keep")
    assert await client.score([5, 6, 7], 1) == [-1.0, -2.0]
    (body,) = server.bodies
    assert (body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == ([5, 6, 7], 0, 1)
    assert (body["stream"], body["temperature"]) == (False, 0.0)
    assert not {"seed", "stream_options"} & body.keys()
    with pytest.raises(InferenceError, match="`prompt_logprobs`"):
        await client.score([5, 6, 7], 1)
    with pytest.raises(ValueError, match=r"`temperature` is 0\.5"):
        await client.score([5, 6], 1, 0.5)

    sglang = Server(engine="sglang")
    rows = [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    sglang.replies["/generate"] = {"meta_info": {"input_token_logprobs": rows}}
    client = client_of(sglang, tokenizer)
    assert await client.score([5, 6, 7], 2) == [-2.0]
    body = dict(sglang.requests)["/generate"]
    assert (body["input_ids"], body["return_logprob"], body["logprob_start_len"]) == ([5, 6, 7], True, 0)
    assert body["sampling_params"] == {"max_new_tokens": 1, "temperature": 1.0}
    with pytest.raises(InferenceError, match="`return_logprob`"):
        await client.score([5, 6, 8], 1)


async def test_a_server_of_another_tokenizer_is_refused_and_one_that_does_not_tell_is_not(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    server = Server()
    client = client_of(server, tokenizer)
    await client.require_tokenizer()
    (_, body) = server.requests[0]
    assert body["add_special_tokens"] is False
    server.replies["/tokenize"] = tokenizer.encode(body["prompt"])
    await client.require_tokenizer()
    server.replies["/tokenize"] = [1, 2, 3]
    with pytest.raises(ConfigError, match="tokenizer"):
        await client.require_tokenizer()


@pytest.mark.parametrize(
    ("models", "version", "facts"),
    [
        ([{"id": "a", "max_model_len": 9}], "0.12.1rc3", ("a", 9, "vllm", (0, 12, 1))),
        ([{"id": "a", "max_model_len": 9, "owned_by": "sglang"}, "junk"], None, ("a", 9, "sglang", ())),
        (
            [{"id": "a", "max_model_len": 9}, {"id": "policy", "max_model_len": 7}],
            "dev",
            ("a", 9, "vllm", ()),
        ),
        ([{"id": "a", "max_model_len": "9"}], None, None),
        ([{"id": 3}], None, None),
        (None, None, None),
    ],
)
async def test_a_server_tells_its_model_its_context_its_engine_and_its_version(
    models: Any, version: str | None, facts: tuple[Any, ...] | None
) -> None:
    class Http(VLLMHttp):
        async def get(self, url: str) -> Any:
            assert url in ("http://s/v1/models", "http://s/version")
            return {"data": models} if url.endswith("models") else version and {"version": version}

    http = Http("http://s/v1", api_key=None, timeout_s=1, connect_timeout_s=1)
    if facts is None:
        with pytest.raises(InferenceError):
            await http.facts("")
        return
    found = await http.facts("")
    assert (found.model, found.max_context, found.engine, found.version) == facts
    with pytest.raises(InferenceError, match="`other`"):
        await http.facts("other")
    if len(models) == 2 and isinstance(models[1], dict):
        assert (await http.facts("policy")).max_context == 7


@pytest.mark.parametrize(
    ("facts", "sampling", "meaning"),
    [
        ({}, SamplingParams(temperature=0.5), LogprobMeaning.RAW),
        ({"processed_logprobs": True}, SamplingParams(temperature=0.5), LogprobMeaning.TEMPERATURE),
        ({"processed_logprobs": True}, SamplingParams(top_p=0.5), LogprobMeaning.TRUNCATED),
        ({"engine": "sglang"}, SamplingParams(temperature=0.5), LogprobMeaning.TEMPERATURE),
        ({"engine": "sglang"}, SamplingParams(), LogprobMeaning.RAW),
        ({"engine": "sglang"}, GREEDY, LogprobMeaning.RAW),
    ],
)
def test_what_log_probabilities_mean_depends_on_the_engine(
    facts: dict[str, Any], sampling: SamplingParams, meaning: LogprobMeaning
) -> None:
    known = VLLMServerFacts(model="m", max_context=9, **facts)
    assert known.logprob_meaning(sampling) is meaning


async def test_who_closes_a_gate_is_alone_and_who_comes_meanwhile_waits() -> None:
    gate, log = Gate(), list[str]()

    async def call(name: str, may_leave: asyncio.Event) -> None:
        async with gate.passing():
            log.append(f"{name} in")
            await may_leave.wait()
            log.append(f"{name} out")

    async def close() -> None:
        async with gate.closed(lambda: log.append("hurry")):
            log.append("alone")
            await asyncio.sleep(0)
            log.append("done")

    leave = asyncio.Event()
    tasks = [asyncio.create_task(call(name, leave)) for name in ("a", "b")]
    await asyncio.sleep(0)
    closing = asyncio.create_task(close())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="closed already"):
        async with gate.closed():
            pass
    late = asyncio.create_task(call("c", leave))
    await asyncio.sleep(0)
    assert log == ["a in", "b in", "hurry"]
    leave.set()
    await asyncio.gather(*tasks, closing, late)
    assert log[3:] == ["a out", "b out", "alone", "done", "c in", "c out"]
    async with gate.closed():
        log.append("again")
    assert log[-1] == "again"
