"""What a server of ours is started with."""

import asyncio
import dataclasses
import itertools
import json
import os
import shlex
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.inference import vllm_process
from rllm.inference.vllm_process import ServerProcess, ServerSettings, start_replicas

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


def test_the_number_of_a_gpu_is_that_among_those_which_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu = dataclasses.replace(SETTINGS, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-6f")
    assert [on_gpu.environment(each)["CUDA_VISIBLE_DEVICES"] for each in (0, 1)] == ["4", "GPU-6f"]
    for variable, gpu in [("4,GPU-6f", 2), ("", 0)]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        with pytest.raises(ConfigError, match=f"GPU {gpu}.*leaves {min(gpu, 2)}"):
            on_gpu.environment(gpu)


async def test_no_server_starts_where_one_of_them_would_have_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    settings = dataclasses.replace(SETTINGS, device="cuda", python="/nobody/starts/this")
    async with AsyncExitStack() as servers:
        with pytest.raises(ConfigError, match="leaves 1"):
            await start_replicas(settings, 2, tmp_path / "logs", servers)
    assert not (tmp_path / "logs").exists()


def test_a_server_is_started_for_tensors_only_where_it_gets_some() -> None:
    assert "--weight-transfer-config" not in SETTINGS.command(8000)
    options = dict(itertools.pairwise(dataclasses.replace(SETTINGS, takes_tensors=True).command(8000)))
    assert json.loads(options["--weight-transfer-config"]) == {"backend": "nccl"}


def test_a_group_of_processes_lives_as_long_as_one_of_them() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert vllm_process._group_lives(process.pid, 0.1)
        assert process.poll() is None, "it is only looked at"
        process.kill()
    assert not vllm_process._group_lives(process.pid, 5.0)


HEALTHY = f"""#!/bin/sh
''':'
exec {shlex.quote(sys.executable)} "$0" "$@"
'''
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

print("on GPU", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.parametrize(("spared_gpu", "gpus"), [(None, "0123"), (0, "1234"), (2, "0134")])
async def test_replicas_of_a_second_policy_have_other_gpus_than_those_of_the_first_and_the_trainer(
    tmp_path: Path, spared_gpu: int | None, gpus: str
) -> None:
    python = tmp_path / "python"
    python.write_text(HEALTHY)
    python.chmod(0o755)
    settings = dataclasses.replace(SETTINGS, python=str(python), device="cuda")
    async with AsyncExitStack() as servers:
        for place, policy in enumerate(("solver", "judge")):
            logs = tmp_path / policy
            await start_replicas(settings, 2, logs, servers, first_gpu=2 * place, spared_gpu=spared_gpu)
    printed = {log.parent.name + "/" + log.stem: log.read_text() for log in tmp_path.glob("*/*.log")}
    names = ("solver/replica-0", "solver/replica-1", "judge/replica-0", "judge/replica-1")
    assert printed == {name: f"on GPU {gpu}\n" for name, gpu in zip(names, gpus, strict=True)}


async def test_a_server_that_was_ready_once_has_all_its_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_process, "CHECK_EVERY_S", 1.0)
    python, starts = tmp_path / "python", tmp_path / "starts"
    has_started = (
        f"if os.path.exists({str(starts)!r}):\n    sys.exit('no memory')\nos.mkdir({str(starts)!r})\n"
    )
    serve_once = HEALTHY.replace(".serve_forever()", ".handle_request()")
    python.write_text(serve_once.replace("class Handler", f"{has_started}\nclass Handler"))
    python.chmod(0o755)
    settings = dataclasses.replace(SETTINGS, python=str(python), device="cuda")
    async with ServerProcess(settings, 0, tmp_path / "log") as server, asyncio.timeout(60.0):
        while not (ends := [each for each in caplog.messages if "before it was ready" in each]):
            await asyncio.sleep(0.05)
        assert server.num_starts == 1 + vllm_process.MAX_FAILED_STARTS
    assert "no memory" in ends[0]
