"""Two real vLLM servers, asked as fleets and the gateway ask: the transcript, versions within a sentence,
choices, stops and tool calls, a server that is killed in mid-sentence."""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rllm.build.gateways import Address, FleetSettings, fleet_gateway
from rllm.inference.client import TokenPiece
from rllm.inference.fleet import Fleet, WeightFiles
from rllm.inference.vllm import VLLMClient
from rllm.inference.vllm_process import ServerProcess, ServerSettings, start_replicas
from rllm.models.directory import load_model, save_model
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.canary import row_to_score
from rllm.types.messages import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
import transcript

pytestmark = pytest.mark.slow
EXACT = 1e-4
"""Nats by which two float32 engines may differ."""
PROMPT = list(range(5, 35))


class Replicas:
    """Two servers, kept alive in a loop of their own."""

    def __init__(self, python: str, directory: Path) -> None:
        self.models = transcript.make_models(directory)
        self.processes: list[ServerProcess] = []
        self._settings = ServerSettings(
            python=python,
            model=self.models[0],
            max_context=transcript.MAX_CONTEXT,
            max_requests=16,
            max_prefill_tokens=512,
            dtype="float32",
        )
        self._logs, self._open = directory, AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(1_800)

    def start(self) -> None:
        self.processes = self._run(start_replicas(self._settings, 2, self._logs, self._open))

    def stop(self) -> None:
        self._run(self._open.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def client(self, index: int, **more: Any) -> VLLMClient:
        url = self.processes[index].url
        return VLLMClient(url, self.models[0], processed_logprobs=True, sends_seeds=False, **more)


@pytest.fixture(scope="module")
def replicas(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    both = Replicas(vllm_python, tmp_path_factory.mktemp("servers"))
    try:
        both.start()
        yield both
    finally:
        both.stop()


def _gap(models: list[Path], versions: list[int], ids: list[int], logprobs: list[float]) -> float:
    """Nats between what servers and the trainer say of each token by the weights of its version: the first
    model's of even ones, the second's of odd ones."""
    scores = [
        TorchBackend(load_model(each).model, publish=lambda version: None).score(
            [row_to_score(np.array(PROMPT + ids))]
        )[0][len(PROMPT) :]
        for each in models
    ]
    mine = [scores[version % 2][place] for place, version in enumerate(versions)]
    return float(np.abs(np.array(mine) - np.array(logprobs)).max())


class Reached:
    """Waits until an answer has so many tokens."""

    def __init__(self) -> None:
        self.num_tokens, self.text = 0, ""
        self._changed = asyncio.Event()

    def __call__(self, piece: TokenPiece) -> None:
        self.num_tokens += len(piece.token_ids)
        self.text += piece.text
        self._changed.set()

    async def reach(self, num_tokens: int) -> None:
        async with asyncio.timeout(300):
            while self.num_tokens < num_tokens:
                self._changed.clear()
                await self._changed.wait()


async def test_vllm_says_what_the_transcript_of_the_fake_server_has(replicas: Replicas) -> None:
    said = await transcript.record(replicas.processes[0].url, replicas.models)
    assert not transcript.differences(json.loads(transcript.FILE.read_text()), said)


async def test_one_sentence_has_three_versions_and_each_token_the_one_that_sampled_it(
    replicas: Replicas,
) -> None:
    client, pieces = replicas.client(0, at_publish="recompute"), Reached()
    sampling = SamplingParams(max_tokens=90, stop_token_ids=())
    answer = asyncio.create_task(client.generate_ids(PROMPT, sampling, on_piece=pieces))
    for version in (1, 2):
        await pieces.reach(15 * version)
        await client.update_weights(replicas.models[version % 2], version)
    output = await answer
    assert (set(output.policy_versions), output.text) == ({0, 1, 2}, pieces.text)
    assert output.policy_versions == sorted(output.policy_versions)
    assert _gap(replicas.models, output.policy_versions, output.completion_ids, output.logprobs) < EXACT
    await client.close()


async def test_an_answer_goes_on_at_the_other_server_when_its_own_is_killed_in_mid_sentence(
    replicas: Replicas, tmp_path: Path
) -> None:
    model, pieces = load_model(replicas.models[1]), Reached()
    fleet = Fleet(
        [replicas.client(index) for index in range(2)],
        weights=WeightFiles(
            lambda target: save_model(model, target, with_output_layer=True), tmp_path / "weights"
        ),
        max_context=transcript.MAX_CONTEXT,
    )
    fleet.publish(1)
    answer = asyncio.create_task(fleet.generate_ids(PROMPT, SamplingParams(max_tokens=90), on_piece=pieces))
    await pieces.reach(15)
    busy = next(index for index, each in enumerate(fleet.replicas) if each.num_calls)
    num_starts = replicas.processes[busy].num_starts
    os.killpg(replicas.processes[busy].pid, signal.SIGKILL)
    output = await answer
    assert (fleet.num_moved, output.text) == (1, pieces.text)
    assert _gap(replicas.models, output.policy_versions, output.completion_ids, output.logprobs) < EXACT
    async with asyncio.timeout(1_200):
        while fleet.num_in_service < 2:
            await asyncio.sleep(0.5)
    assert replicas.processes[busy].num_starts == num_starts + 1
    assert len(await fleet.score(PROMPT, 1)) == len(PROMPT) - 1, "both agree"
    await fleet.close()


TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "go",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["left", "right"]}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}


async def test_programs_get_choices_stops_and_tool_calls_through_one_address(
    replicas: Replicas, tmp_path: Path
) -> None:
    settings = FleetSettings(
        servers=[each.url for each in replicas.processes], processed_logprobs=True, sends_seeds=False
    )
    address = Address(host="127.0.0.1", port=0, token="token", ledger=tmp_path / "ledger")
    async with (
        fleet_gateway(address, replicas.models[0], settings) as gateway,
        gateway,
        aiohttp.ClientSession() as http,
    ):

        async def chat(**more: Any) -> dict[str, Any]:
            url = f"{gateway.url}/k/{gateway.token}/sessions/one/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": "A 1"}], "max_tokens": 8, **more}
            async with http.post(url, json=body) as reply:
                assert reply.status == 200, await reply.text()
                return await reply.json()

        reply = await chat(n=3, logprobs=True, return_token_ids=True)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert {choice["finish_reason"] for choice in reply["choices"]} <= {"length", "stop"}
        assert reply["prompt_token_ids"], "what the model read"
        assert all(len(choice["token_ids"]) <= 8 for choice in reply["choices"])
        assert (await chat(max_tokens=1))["choices"][0]["finish_reason"] == "length"
        reply = await chat(tools=[TOOL], tool_choice="required", max_tokens=60)
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["to"] in ("left", "right")
        records = list(gateway.ledger.traces("one"))
    assert len(records) == 5, "one for each choice"
    assert all(record.completion_ids and record.prompt_ids for record in records)
