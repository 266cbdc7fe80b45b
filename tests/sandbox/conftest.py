"""Which sandboxes this machine can run, and how a test gets one."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import RllmError
from rllm.sandbox import Limits, PythonRunner, Sandbox, open_sandbox

sys.path.insert(0, str(Path(__file__).parent))
from fake_docker import FakeDocker

LOCAL = ("bubblewrap", "unshare", "subprocess")
EVERY = (*LOCAL, "docker") if os.environ.get("DOCKER_HOST") else LOCAL
"""With docker where somebody names an engine to use: containers are slow, and the image must be there."""
SMALL = Limits(wall_s=10, cpu_s=8, memory_mb=128, output_kb=64, disk_mb=8, processes=16)


@functools.cache
def why_not(backend: str) -> str | None:
    """Why this machine cannot run a backend; None where it can."""
    if not sys.platform.startswith("linux") and backend != "docker":
        return "the local backends need Linux"
    try:
        open_sandbox(backend).close()
    except RllmError as error:
        return str(error)
    return None


def needed(backend: str) -> str:
    """`backend`, or skip the test."""
    why = why_not(backend)
    if why is not None:
        pytest.skip(f"{backend}: {why}")
    return backend


@pytest.fixture(scope="session")
def need() -> Callable[[str], str]:
    return needed


@pytest.fixture(scope="module", params=EVERY)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One of each kind for a whole file: tests use names of their own."""
    with open_sandbox(needed(request.param), limits=SMALL) as opened:
        yield opened


@pytest.fixture(scope="module", params=LOCAL)
def runner(request: pytest.FixtureRequest) -> Iterator[PythonRunner]:
    with PythonRunner(needed(request.param), limits=SMALL, workers=1) as opened:
        yield opened


@pytest.fixture
def fake_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The engine of fake_docker.py, which this process takes for the machine's."""
    made = FakeDocker(tmp_path / "docker.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{made.path}")
    server = made.serve()
    yield made
    server.shutdown()
    server.server_close()
