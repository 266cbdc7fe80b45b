"""Real vLLM on the processor: what it says of tokens, new weights between turns, a run on two replicas."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rllm.errors import ConfigError
from rllm.inference.vllm import VLLMClient
from rllm.inference.vllm_process import ServerProcess, ServerSettings
from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.canary import row_to_score
from rllm.trainer.replay import replay
from rllm.types.messages import SamplingParams

pytestmark = pytest.mark.slow
EXACT = 1e-4
"""Nats by which two float32 engines may differ."""


@pytest.fixture(scope="module")
def letters() -> ModuleType:
    import letter_game

    return letter_game


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one architecture whose heads vLLM has kernels for, with output layers of their own."""
    directory = tmp_path_factory.mktemp("models")
    for seed in range(2):
        create_model(directory / f"tied-{seed}", "small", seed)
        save_model(load_model(directory / f"tied-{seed}"), directory / f"{seed}", with_output_layer=True)
    return [directory / "0", directory / "1"]


def _scores(model: Path, ids: list[int], start: int) -> np.ndarray:
    backend = TorchBackend(load_model(model).model, publish=lambda version: None)
    return backend.score([row_to_score(np.array(ids))])[0][start:]


async def _try_a_server(python: str, models: list[Path], logs: Path) -> None:
    settings = ServerSettings(
        python=python,
        model=models[0],
        max_context=256,
        max_requests=16,
        max_prefill_tokens=512,
        dtype="float32",
    )
    prompt = list(range(5, 25))
    async with ServerProcess(settings, 0, logs / "server.log") as process:
        client = VLLMClient(process.url, models[0], processed_logprobs=True, sends_seeds=False)
        await client.require_tokenizer()
        other: Any = VLLMClient(process.url, models[0])
        other.tokenizer = SimpleNamespace(encode=lambda text: [1])
        with pytest.raises(ConfigError, match="tokenizer"):
            await other.require_tokenizer()
        await other.close()
        first = await client.generate_ids(prompt, SamplingParams(max_tokens=16))
        ids = prompt + first.completion_ids
        assert np.abs(np.array(first.logprobs) - _scores(models[0], ids, len(prompt))).max() < EXACT
        scored = await client.score(ids, 1)
        assert np.abs(np.array(scored) - _scores(models[0], ids, 1)).max() < EXACT
        assert set(first.policy_versions) == {0}

        await client.update_weights(models[1], 7)
        second = await client.generate_ids(ids, SamplingParams(max_tokens=8))
        longer = ids + second.completion_ids
        assert np.abs(np.array(second.logprobs) - _scores(models[1], longer, len(ids))).max() < EXACT
        assert set(second.policy_versions) == {7}

        pids = _group(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 600
        while process.num_starts < 2 or not await _answers(client):
            assert time.monotonic() < deadline
            await asyncio.sleep(1)
        again = await client.score(ids, 1)
        assert np.abs(np.array(again) - _scores(models[0], ids, 1)).max() < EXACT, "its first weights"
        await client.close()
        pids |= _group(process.pid)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _group(leader: int) -> set[int]:
    members = set[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == leader:
                    members.add(int(entry.name))
            except ProcessLookupError:
                continue
    return members


async def _answers(client: VLLMClient) -> bool:
    from rllm.errors import InferenceError

    try:
        await client.check()
    except InferenceError:
        return False
    return True


def test_a_server_says_what_the_trainer_says_before_and_after_new_weights_and_is_begun_anew(
    vllm_python: str, models: list[Path], tmp_path: Path
) -> None:
    asyncio.run(_try_a_server(vllm_python, models, tmp_path))


@pytest.fixture
def killer() -> Iterator[Any]:
    """Kills one server of a run once it has recorded some steps."""
    threads: list[threading.Thread] = []

    def kill_after(run: Path, steps: int) -> None:
        def work() -> None:
            metrics = run / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_text().count('"phase": "train"') >= steps):
                time.sleep(0.05)
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    try:
                        command = (entry / "cmdline").read_bytes().decode()
                    except OSError:
                        continue
                    if str(run) in command and "api_server" in command:
                        os.killpg(int(entry.name), signal.SIGKILL)
                        return

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()

    yield kill_after
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "there was a server to kill"


@pytest.mark.parametrize(
    "more",
    [{}, {"schedule": {"kind": "async", "max_staleness": 2}}, {"lora": {"rank": 4}}],
    ids=["sync", "async", "adapter"],
)
def test_a_run_learns_on_two_replicas_of_which_one_is_killed(
    vllm_python: str, letters: ModuleType, tmp_path: Path, killer: Any, more: dict[str, Any]
) -> None:
    changes = {
        "model": {"path": "builtin:small"},
        "inference": {
            "engine": "vllm",
            "lockstep": False,
            "replicas": 2,
            "server_python": vllm_python,
            "server_seeds": False,
        },
        "steps": 30,
        "checkpoint": {"every_steps": 30},
        **more,
    }
    run = tmp_path / "run"
    killer(run, 5)
    letters.make_trainer(run, changes).train()
    lines = [each for each in read_metrics(run / "metrics.jsonl") if each["phase"] == "train"]
    assert len(lines) == 30
    assert all(line["episodes"] == 6 and line["failed"] == 0 for line in lines)
    assert max(line["canary_gap"] for line in lines) < EXACT
    assert max(line["canary_moved"] for line in lines[1:]) > 0.0
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        assert sum(len(list(store.episodes("train", step))) for step in range(30)) == 180
    assert replay(letters.make_trainer(run, changes).run).is_identical
    # An adapter on weights of four imitated steps does not learn in thirty, and asynchronous runs gain 0.02
    # to 0.11 in them, with an error of 0.08: servers draw without seeds.
    if not more:
        rewards = [line["reward_mean"] for line in lines]
        assert np.mean(rewards[-10:]) > np.mean(rewards[:5])
