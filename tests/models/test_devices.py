"""Threads of torch, by what a process may use."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from rllm.config.schema import ModelConfig
from rllm.errors import ConfigError
from rllm.models import devices


def test_as_many_threads_as_cores_are_left_to_the_process() -> None:
    program = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from rllm.models.devices import num_threads, use_threads
        use_threads(0)
        print(num_threads())
        use_threads(3)
        print(num_threads())
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "3"]


@pytest.mark.parametrize(("limit", "cores"), [("max 100000", 8), ("150000 100000", 2), ("900000 100000", 8)])
def test_a_container_s_share_of_the_processors_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(limit + "\n")
    monkeypatch.setattr(devices, "CGROUP_LIMIT", tmp_path / "cpu.max")
    assert devices.usable_cores() == cores
    monkeypatch.setattr(devices, "CGROUP_LIMIT", tmp_path / "absent")
    assert devices.usable_cores() == 8


def fake_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_a_gpu_without_bfloat16_is_refused_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, "Tesla T4", (7, 5))
    with pytest.raises(
        ConfigError, match=r"Tesla T4 of compute capability 7.5.*needs 8.0.*`model.dtype` to float32"
    ):
        devices.require_number_type("cuda:0", "bfloat16")
    devices.require_number_type("cuda:0", "float32")
    devices.require_number_type("cpu", "bfloat16")
    fake_gpu(monkeypatch, "NVIDIA A100", (8, 0))
    devices.require_number_type("cuda", "bfloat16")


def test_numbers_are_bfloat16_on_a_gpu_and_float32_on_a_processor_unless_told() -> None:
    for device, dtype, expected in (
        ("cuda", "auto", "bfloat16"),
        ("cuda:1", "auto", "bfloat16"),
        ("cpu", "auto", "float32"),
        ("cuda", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
    ):
        assert ModelConfig(device=device, dtype=dtype).number_type == expected


def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore.")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError, match=r"'cuda'.*too old \(found version 11040\)"):
        devices.require_device("cuda")
