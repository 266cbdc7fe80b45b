"""What a server of ours is started with."""

import dataclasses
import itertools
import os
from pathlib import Path

from rllm.inference.vllm_process import ServerSettings

SETTINGS = ServerSettings(
    python="python",
    model=Path("model"),
    max_context=64,
    max_requests=2,
    max_prefill_tokens=16,
    dtype="float32",
)


def test_a_server_is_started_for_adapters_only_where_it_gets_some() -> None:
    command = SETTINGS.command(8000)
    assert not [each for each in command if "lora" in each]
    options = dict(itertools.pairwise(command))
    assert (options["--host"], options["--port"], options["--model"]) == ("127.0.0.1", "8000", "model")
    assert (options["--max-model-len"], options["--max-num-seqs"]) == ("64", "2")
    assert options["--max-num-batched-tokens"] == "64", "a prompt of the whole context is read at once"
    for rank, known in [(1, "1"), (2, "8"), (8, "8"), (9, "16"), (513, "513")]:
        command = dataclasses.replace(SETTINGS, adapter_rank=rank).command(8000)
        assert "--enable-lora" in command
        assert dict(itertools.pairwise(command))["--max-lora-rank"] == known


def test_a_server_on_a_gpu_has_the_one_of_its_number_and_one_on_a_cpu_has_its_own_settings() -> None:
    on_cpu = SETTINGS.environment(1)
    on_gpu = dataclasses.replace(SETTINGS, device="cuda").environment(1)
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_gpu
    assert on_cpu["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert on_cpu.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    for each in (on_cpu, on_gpu):
        assert (each["VLLM_SERVER_DEV_MODE"], each["HF_HUB_OFFLINE"]) == ("1", "1")
        assert each["PATH"] == os.environ["PATH"]
