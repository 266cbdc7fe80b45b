"""What the tests of the command share: it in this process, it in one of its own, and a tiny finished run."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rllm.cli.main import rllm as front_door

TINY = (
    "warm_start.steps=2",
    "steps=1",
    "rollout.tasks_per_step=2",
    "rollout.group_size=2",
    "evaluation.num_tasks=4",
    "evaluation.every_steps=0",
    "task.num_train_tasks=100",
    "threads=1",
)
SOURCES = Path(__file__).resolve().parents[2] / "src"


@dataclass(kw_only=True, slots=True, frozen=True)
class FinishedRun:
    """What one whole `rllm train --json` left behind."""

    path: Path
    words: list[str]
    """The command's words without `--output` and its value."""
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def tiny_settings() -> list[str]:
    """`--set` words of a run that takes a second."""
    return [word for assignment in TINY for word in ("--set", assignment)]


@pytest.fixture
def rllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Runs `rllm WORD…` in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))

    def call(*words: str | Path) -> Result:
        return CliRunner().invoke(
            front_door, [str(word) for word in words], prog_name="rllm", catch_exceptions=False
        )

    return call


@pytest.fixture(scope="session")
def start_rllm() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `rllm WORD…` in a process of its own; what failing tests left running is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str | Path, cwd: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "rllm.cli.main", *map(str, words)],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(SOURCES)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that starts the tests in the background makes them, and all they start, deaf to Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_settings: list[str]) -> FinishedRun:
    """A whole run. Tests may read it, not change it."""
    path = tmp_path_factory.mktemp("finished") / "lake"
    words = ["train", "frozenlake", *tiny_settings]
    done = CliRunner().invoke(front_door, [*words, "--output", str(path), "--json"], prog_name="rllm")
    return FinishedRun(
        path=path, words=words, returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr
    )


@pytest.fixture
def stopped_run(finished_run: FinishedRun, tmp_path: Path) -> Path:
    """A copy of the finished run from before it had a result."""
    path = tmp_path / "stopped"
    shutil.copytree(finished_run.path, path)
    (path / "summary.json").unlink()
    return path
