"""A process that ends in the middle, without a word of its own: what is said of it, and when."""

import subprocess
import sys
from pathlib import Path

import pytest

from rllm.cli.plan import announce_run, interruption
from rllm.store.run_directory import RunDirectory

WRITER = """
import os, sys
from pathlib import Path
from rllm.store.run_directory import RunDirectory

with RunDirectory.create_or_open(Path(sys.argv[1])) as run:
    run.write_config({"steps": 3})
    if sys.argv[2] == "lost":
        os._exit(0)
"""


def written(run: Path, how: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", WRITER, str(run), how]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)


def test_a_run_whose_process_called_os_exit_is_said_to_be_left_in_the_middle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "run", "lost")
    run = RunDirectory.read(tmp_path / "run")
    pid = run.lost_writer_pid
    assert pid is not None
    assert run.writer_pid is None
    assert announce_run(run.path) is False
    said = " ".join(capsys.readouterr().err.split())
    assert f"process {pid}" in said
    assert "os._exit" in said
    assert "last checkpoint" in said


def test_a_run_that_was_closed_lost_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "run", "closed")
    run = RunDirectory.read(tmp_path / "run")
    assert run.lost_writer_pid is None
    assert announce_run(run.path) is False
    assert "was stopped" in " ".join(capsys.readouterr().err.split())
    with RunDirectory.create_or_open(run.path) as held:
        held.write_summary({})
        assert held.lost_writer_pid is None, "it is being written"
    assert announce_run(run.path) is True


def test_who_is_interrupted_hears_whether_there_is_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["rllm", "sft", "my rows.jsonl"]
    nothing_yet = "Interrupted. There is no checkpoint yet. Begin again with: rllm sft 'my rows.jsonl'"
    assert str(interruption(run, words)) == nothing_yet
    written(run, "closed")
    assert str(interruption(run, words)) == nothing_yet
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    going_on = "Interrupted. Go on from the last checkpoint with: rllm sft 'my rows.jsonl'"
    assert str(interruption(run, words)) == going_on


def test_a_crash_of_the_interpreter_names_the_code_that_crashed_it(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import ctypes\n\ndef boom():\n    ctypes.string_at(0)\n\nboom()\n")
    words = [sys.executable, "-m", "rllm", "agent", "info", f"{tmp_path}/crash.py:Agent"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode < 0
    assert "Segmentation fault" in ended.stderr
    assert "crash.py" in ended.stderr
    assert "in boom" in ended.stderr
