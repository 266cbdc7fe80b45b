"""Answers that go on: by new weights, or at another server, behind what has arrived of them."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from rllm.config.lora import LoraConfig
from rllm.errors import InferenceError
from rllm.inference.answer_parts import AnswerParts
from rllm.inference.client import TokenPiece
from rllm.inference.fleet import Fleet, WeightFiles
from rllm.inference.vllm import VLLMClient
from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model
from rllm.models.lora import save_adapter, with_adapter
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.canary import row_to_score
from rllm.types.messages import FinishReason, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from policy_server import PolicyServer

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=300, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for seed in range(3):
        create_model(directory / str(seed), "tiny", seed)
        _never_end(directory / str(seed))
    return directory


def _never_end(directory: Path) -> None:
    """Give a model an end token that it has no weights for: where an answer is cut differs from run to run,
    and what is drawn behind the cut may otherwise end it early."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|never|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, change in (
        ("tokenizer_config.json", {"eos_token": "<|never|>"}),
        ("config.json", {"eos_token_id": tokenizer.token_to_id("<|never|>")}),
    ):
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(content | change))


@pytest.fixture
def servers(models: Path) -> Iterator[list[PolicyServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(PolicyServer(models / "0")) for _ in range(2)]


def _client(server: PolicyServer, models: Path, at_publish: str = "recompute") -> VLLMClient:
    return VLLMClient(server.url, models / "0", processed_logprobs=True, at_publish=at_publish)


class Pieces:
    """Listener to an answer, with an event for each number of tokens that somebody waits for."""

    def __init__(self) -> None:
        self.text, self.num_tokens = "", 0
        self._reached: dict[int, asyncio.Event] = {}

    def __call__(self, piece: TokenPiece) -> None:
        self.text += piece.text
        self.num_tokens += len(piece.token_ids)
        for number, event in self._reached.items():
            if self.num_tokens >= number:
                event.set()

    async def reach(self, num_tokens: int) -> None:
        event = self._reached.setdefault(num_tokens, asyncio.Event())
        async with asyncio.timeout(60):
            await event.wait()


def _scores(model: Path, ids: list[int]) -> np.ndarray:
    backend = TorchBackend(load_model(model).model, publish=lambda version: None)
    return backend.score([row_to_score(np.array(ids))])[0]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_one_sentence_has_three_versions_and_each_token_the_one_that_sampled_it(
    models: Path, engine: str
) -> None:
    with PolicyServer(models / "0", engine=engine) as server:
        await _three_versions(server, models)
        managed = [path for path in server.paths if path not in ("/v1/models", "/version")]
    assert managed == [
        each for part in [[], *[TRANSCRIPTS[engine]] * 2] for each in [*part, "/v1/completions"]
    ]


TRANSCRIPTS = {
    "vllm": [
        "/pause?mode=wait",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ],
    "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
}


async def _three_versions(server: PolicyServer, models: Path) -> None:
    client, pieces = _client(server, models), Pieces()
    answer = asyncio.create_task(client.generate_ids(PROMPT, LONG, on_piece=pieces))
    for version in (1, 2):
        await pieces.reach(20 * version)
        await client.update_weights(models / str(version), version)
    output = await answer
    versions = output.policy_versions
    assert (set(versions), versions) == ({0, 1, 2}, sorted(versions))
    assert len(output.completion_ids) == len(output.logprobs) == 300
    assert (output.text, pieces.num_tokens) == (pieces.text, 300)
    whole = PROMPT + output.completion_ids
    scores = [_scores(models / str(version), whole)[len(PROMPT) :] for version in range(3)]
    mine = np.array([scores[version][place] for place, version in enumerate(versions)])
    assert np.abs(mine - np.array(output.logprobs)).max() < 1e-4, "read anew by the weights of each part"
    await client.close()


@pytest.mark.parametrize("at_publish", ["finish", "keep"])
async def test_an_answer_ends_by_its_weights_or_goes_on_with_what_they_read(
    servers: list[PolicyServer], models: Path, at_publish: str
) -> None:
    client, pieces = _client(servers[0], models, at_publish), Pieces()
    answer = asyncio.create_task(client.generate_ids(PROMPT, LONG, on_piece=pieces))
    await pieces.reach(20)
    await client.update_weights(models / "1", 1)
    assert set((await answer).policy_versions) == ({0} if at_publish == "finish" else {0, 1})
    managed = [path for path in servers[0].paths if path.startswith(("/pause", "/reset"))]
    assert (
        managed
        == {
            "finish": ["/pause?mode=wait", "/reset_prefix_cache"],
            "keep": ["/pause?mode=keep&clear_cache=false"],
        }[at_publish]
    )
    await client.close()


async def test_new_weights_cut_off_no_answer_that_follows_a_grammar(
    servers: list[PolicyServer], models: Path
) -> None:
    client = _client(servers[0], models)
    followed = SamplingParams(max_tokens=200, grammar="start: /a*/")
    answer = asyncio.create_task(client.generate_ids(PROMPT, followed))
    while not servers[0].paths or servers[0].paths[-1] != "/v1/completions":
        await asyncio.sleep(0.001)
    await client.update_weights(models / "1", 1)
    assert set((await answer).policy_versions) == {0}
    await client.close()


async def test_an_answer_goes_on_by_the_next_adapter(models: Path, tmp_path: Path) -> None:
    adapters = [with_adapter(load_model(models / "0"), LoraConfig(rank=2), seed) for seed in range(2)]
    with PolicyServer(models / "0") as server:
        client, pieces = _client(server, models), Pieces()
        for version, adapter in enumerate(adapters, 1):
            save_adapter(adapter, tmp_path / str(version))
        await client.load_adapter(tmp_path / "1", 1)
        answer = asyncio.create_task(client.generate_ids(PROMPT, LONG, on_piece=pieces))
        await pieces.reach(20)
        await client.load_adapter(tmp_path / "2", 2)
        assert set((await answer).policy_versions) == {1, 2}
        await client.close()


async def test_an_answer_goes_on_at_another_server_when_its_own_ends_in_mid_sentence(
    servers: list[PolicyServer], models: Path, tmp_path: Path
) -> None:
    model = load_model(models / "1")
    fleet = Fleet(
        [_client(each, models) for each in servers],
        weights=WeightFiles(
            lambda target: save_model(model, target, with_output_layer=True), tmp_path / "weights"
        ),
        max_context=512,
        patience_s=60.0,
    )
    fleet.publish(4)
    pieces = Pieces()
    answer = asyncio.create_task(fleet.generate_ids(PROMPT, LONG, on_piece=pieces))
    await pieces.reach(20)
    busy = next(each for each in servers if each.url == fleet.replicas[0].url)
    assert fleet.replicas[0].num_calls == 1
    await asyncio.to_thread(busy.stop)
    output = await answer
    assert (output.text, pieces.num_tokens, len(output.completion_ids)) == (pieces.text, 300, 300)
    assert (fleet.num_moved, set(output.policy_versions)) == (1, {4})
    whole = PROMPT + output.completion_ids
    gap = np.abs(_scores(models / "1", whole)[len(PROMPT) :] - np.array(output.logprobs)).max()
    assert gap < 1e-4, "no token is lost, doubled or of other weights"
    await fleet.close()


def _answer(models: Path, **sampling: Any) -> tuple[VLLMClient, AnswerParts]:
    client = VLLMClient("http://127.0.0.1:1/v1", models / "0", at_publish="recompute")
    return client, client.begin(PROMPT, SamplingParams(**sampling))


def _chunk(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, **more}]}


def test_a_stop_text_is_found_across_two_parts_and_ends_the_ids_where_it_ends(models: Path) -> None:
    client, answer = _answer(models, stop=("bc",))
    a, b, c, d = (client.tokenizer.encode(letter)[0] for letter in "abcd")
    answer.part("here", 0).hear(_chunk([a, b]))
    assert "".join(answer.text) == "a", "the beginning of a stop text is held back"
    second = answer.part("there", 1)
    assert second.read_ids == [*PROMPT, a, b]
    second.hear(_chunk([c, d], prompt_token_ids=[*PROMPT, a, b]))
    second.require_whole()
    answer.finish()
    output = answer.output()
    assert (output.text, output.completion_ids, output.stop_sequence) == ("a", [a, b, c], "bc")
    assert (output.policy_versions, output.finish_reason) == ([0, 0, 1], FinishReason.STOP)


@pytest.mark.parametrize("last", ["end", "stop", "length"])
async def test_nothing_is_asked_for_behind_an_answer_that_was_whole_when_it_was_cut_off(
    servers: list[PolicyServer], models: Path, last: str
) -> None:
    client = _client(servers[0], models)
    sampling = SamplingParams(max_tokens=3, stop_token_ids=(9,))
    answer = client.begin(PROMPT, sampling)
    end = {"end": client.tokenizer.end_token_id, "stop": 9, "length": 8}[last]
    answer.part(servers[0].url, 0).hear(_chunk([8, 8, end] if last == "length" else [8, end]))
    output = await client.go_on(answer)
    assert output.finish_reason is (FinishReason.LENGTH if last == "length" else FinishReason.STOP)
    assert "/v1/completions" not in servers[0].paths
    await client.close()


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        (_chunk([1], prompt_token_ids=[4]), "prompt of 1 ids where 3"),
        (_chunk([1], logprobs={"token_logprobs": []}), "no log-probabilities"),
        (_chunk([1, 2], logprobs={"token_logprobs": [-1.0]}), "2 token ids and 1 log-prob"),
        (_chunk([], logprobs={"token_logprobs": [-1.0]}), "no token ids"),
        (_chunk([1], finish_reason="abort"), "abort"),
    ],
)
def test_a_part_that_cannot_be_trusted_leaves_no_token_behind(
    models: Path, chunk: dict[str, Any], why: str
) -> None:
    _, answer = _answer(models)
    answer.part("here", 0).hear(_chunk([8]))
    answer.prompt_ids = PROMPT[:2]  # the next part sends three ids
    with pytest.raises(InferenceError, match=why):
        answer.part("here", 0).hear(chunk)
    assert answer.ids == [8]
