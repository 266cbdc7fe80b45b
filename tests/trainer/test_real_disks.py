"""A disk that really fills while a run writes to it, and one that really is read-only when a run goes on: a
tmpfs that is mounted anew. The kernel lets no file system become read-only under files that are being written
to, so that is injected, at every place of the code: test_kills.py.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.files.atomic import verify_manifest
from rllm.store.run_directory import RunDirectory

Ask = Callable[..., dict[str, Any]]
THREE_STEPS: dict[str, Any] = {"steps": 3, "checkpoint": {"every_steps": 1}}


def _mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of the test's own."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() or not shutil.which("mount") or not _mount("-t", "tmpfs", "tmpfs", str(place)):
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_a_run_on_a_full_and_then_a_read_only_disk_ends_with_one_message_and_goes_on_where_it_can_write(
    disk: Path, tmp_path: Path, ask: Ask
) -> None:
    run, whole = disk / "run", tmp_path / "whole"
    assert ask(whole, changes=THREE_STEPS)["signal"] == 0
    for line in (["warm_start", 1], ["train", 0], ["train", 2]):
        ended = ask(run, changes=THREE_STEPS, fill_disk_at_line=line, errno=0)
        _require_one_sentence(ended, "could not be written", "free space")
        for checkpoint in (run / "checkpoints").glob("step-*"):
            verify_manifest(checkpoint)
        assert _mount("-o", "remount,ro,size=50%", str(disk))
        _require_one_sentence(ask(run, changes=THREE_STEPS, errno=0), "mount it writable")
        assert _mount("-o", "remount,rw", str(disk))
    assert ask(run, changes=THREE_STEPS)["signal"] == 0
    weights = Path("model") / "model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    assert _reports(run) == _reports(whole)


def _require_one_sentence(ended: dict[str, Any], *words: str) -> None:
    assert ended["error"] == "StorageError", ended
    assert [word for word in words if word not in ended["message"]] == [], ended["message"]


def _reports(run: Path) -> list[Any]:
    summary = RunDirectory.read(run).summary()
    assert summary is not None
    return [summary[name]["success"] for name in ("untrained", "before", "after")]
