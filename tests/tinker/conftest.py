"""A real Tinker service: a model directory and a server of SkyRL that serves it.

`make test-tinker` runs these tests in environments of their own; without them nothing is collected.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.models.builtin import create_model

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-skyrl" / "bin" / "python"
if importlib.util.find_spec("tinker") is None or not PYTHON.exists():
    collect_ignore_glob = ["*"]
START_S = 600.0
"""Its imports alone take a minute on two busy cores."""
SETTINGS = {
    "max_lora_adapters": 24,
    "max_lora_rank": 8,
    "train_micro_batch_size": 16,
    "sample_max_num_sequences": 32,  # every batch is filled up to it, so one program is compiled
}


class LocalService:
    """The server process; a `with` block ends it."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model, self.directory = model, directory
        self.checkpoints = directory / "checkpoints"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to know."""
        return {"TINKER_BASE_URL": self.base_url, "TINKER_API_KEY": "tml-local"}

    def start(self) -> None:
        """Raises AssertionError with the end of the server's log where it does not come up."""
        self.directory.mkdir(exist_ok=True)
        words = {
            "port": self._port,
            "base-model": self.model,
            "backend": "jax",
            "backend-config": json.dumps(SETTINGS),
            "database-url": f"sqlite:///{self.directory / 'service.db'}",
            "checkpoints-base": self.checkpoints,
        }
        flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [PYTHON, Path(__file__).with_name("skyrl_server.py"), *flags],
                stdout=log,
                stderr=log,
                env=os.environ | compile_once(),
                start_new_session=True,  # so that its engine ends with it
            )
        end = time.monotonic() + START_S
        while not self._is_up():
            ended = self._process.poll() is not None or time.monotonic() > end
            assert not ended, (self.directory / "server.log").read_text()[-3000:]
            time.sleep(1)

    def kill(self) -> None:
        """As the machine under it would: nothing is said to anybody."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/api/v1/healthz", timeout=5):
                return True
        except OSError:
            return False

    def __enter__(self) -> "LocalService":
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.kill()


def compile_once() -> dict[str, str]:
    """Programs that jax has compiled are kept beside it: each takes most of a minute."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".venv-skyrl" / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "HF_HUB_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "lake"
    create_model(path, "tiny")
    return path


@pytest.fixture(scope="session")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with LocalService(model, tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def connected(service: LocalService, monkeypatch: pytest.MonkeyPatch) -> LocalService:
    """This process's environment names it."""
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    return service
