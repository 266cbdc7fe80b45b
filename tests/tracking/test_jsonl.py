import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rllm.errors import ConfigError, StorageError
from rllm.tracking import JsonlTracker, read_metrics, truncate_after
from rllm.tracking.jsonl import read_metrics_after

ORDER = ["untrained", "train", "after"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def _clock(*times_s: float) -> Callable[[], float]:
    remaining = iter(times_s)
    return lambda: next(remaining)


def _write_run(path: Path) -> None:
    tracker = JsonlTracker(path)
    tracker.log(0, "untrained", {"success": 0.0})
    for step in (1, 2, 3):
        tracker.log(step, "train", {"success": step / 10})
    tracker.log(0, "after", {"success": 0.9})
    tracker.close()


def test_a_line_is_readable_as_soon_as_it_is_logged(path: Path) -> None:
    tracker = JsonlTracker(path, clock=_clock(100.0, 101.5))
    tracker.log(1, "train", {"success": 0.5, "note": "fast", "steps": np.int64(3), "loss": np.float32(0.5)})
    assert read_metrics(path) == [
        {"phase": "train", "step": 1, "time_s": 1.5, "success": 0.5, "note": "fast", "steps": 3, "loss": 0.5}
    ]
    tracker.close()
    tracker.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), None, [1], object()])
def test_what_is_no_measurement_is_refused_by_name(path: Path, value: object) -> None:
    tracker = JsonlTracker(path)
    with pytest.raises(ValueError, match="`loss` at step 7 of train"):
        tracker.log(7, "train", {"success": 1.0, "loss": value})  # pyright: ignore[reportArgumentType]
    tracker.close()
    assert path.read_bytes() == b""


def test_a_metric_may_not_take_the_place_of_the_phase(path: Path) -> None:
    tracker = JsonlTracker(path)
    with pytest.raises(ValueError, match="Metric `phase`"):
        tracker.log(7, "train", {"phase": "x"})
    tracker.close()


def test_a_resumed_run_counts_its_seconds_on(path: Path) -> None:
    first = JsonlTracker(path, clock=_clock(100.0, 160.0))
    first.log(1, "train", {})
    first.close()
    second = JsonlTracker(path, clock=_clock(9000.0, 9002.0))
    second.log(2, "train", {})
    second.close()
    assert [line["time_s"] for line in read_metrics(path)] == [60.0, 62.0]


def test_a_torn_last_line_is_skipped_by_readers_and_removed_by_the_next_writer(path: Path) -> None:
    _write_run(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"phase": "tra')
    assert len(read_metrics(path)) == 5
    JsonlTracker(path).close()
    assert path.read_bytes() == whole


def test_other_damage_is_an_error_with_its_line(path: Path) -> None:
    _write_run(path)
    whole = path.read_bytes()
    path.write_bytes(b'{"phase": "tra\n' + whole)
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        read_metrics(path)
    path.write_bytes(whole + b"[1]\n")
    with pytest.raises(ConfigError, match="line 6 "):
        read_metrics(path)


@pytest.mark.parametrize(
    ("phase", "step", "num_kept"), [("untrained", 0, 1), ("train", 0, 1), ("train", 2, 3), ("after", 0, 5)]
)
def test_lines_beyond_the_resume_point_are_dropped(path: Path, phase: str, step: int, num_kept: int) -> None:
    _write_run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b'{"torn')
    truncate_after(path, ORDER, phase, step)
    assert path.read_bytes() == b"".join(lines[:num_kept])


def test_a_file_that_was_cut_and_has_grown_since_is_read_from_its_beginning(path: Path) -> None:
    _write_run(path)
    lines, start, end = read_metrics_after(path, 0)
    assert (len(lines), start, end) == (5, 0, path.stat().st_size)
    truncate_after(path, ORDER, "train", 1)
    tracker = JsonlTracker(path)
    tracker.log(2, "train", {"note": "a" * end})
    tracker.close()
    assert read_metrics_after(path, end) == (read_metrics(path), 0, path.stat().st_size)
    end = path.stat().st_size
    assert read_metrics_after(path, end) == ([], end, end)


def test_a_run_without_metrics_has_nothing_to_drop(path: Path) -> None:
    truncate_after(path, ORDER, "train", 1)
    assert not path.exists()
    assert read_metrics(path) == []


def test_a_phase_without_a_place_in_the_order_is_named(path: Path) -> None:
    _write_run(path)
    with pytest.raises(ValueError, match="'after'"):
        truncate_after(path, ["untrained", "train"], "train", 1)


def test_a_disk_that_fills_within_a_line_leaves_no_half_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_run(path)
    whole = path.read_bytes()
    write = os.write
    room = iter([10])

    def fills_up(descriptor: int, data: bytes) -> int:
        for num_bytes in room:
            return write(descriptor, data[:num_bytes])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tracker = JsonlTracker(path)
    monkeypatch.setattr(os, "write", fills_up)
    with pytest.raises(StorageError, match=r"metrics\.jsonl.*No space left"):
        tracker.log(1, "after", {"success": 0.5})
    tracker.close()
    assert path.read_bytes() == whole


def test_a_full_device_is_a_storage_error() -> None:
    tracker = JsonlTracker(Path("/dev/full"))
    with pytest.raises(StorageError, match="No space left"):
        tracker.log(1, "train", {})
    tracker.close()
