"""Threads of torch, by what a process may use."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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
