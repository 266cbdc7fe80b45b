import hashlib
import json
import math
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from rllm.config.schema import CheckpointConfig
from rllm.distributed import RankGroup
from rllm.errors import CheckpointError, StorageError
from rllm.files.atomic import MANIFEST
from rllm.trainer import checkpoint
from rllm.trainer.backends.base import Saveable
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.checkpoint import Checkpoints, RunState, load_latest, ranks_of, save_checkpoint

Make = Callable[..., Any]


def _state(steps: int) -> RunState:
    return RunState(
        warm_steps=4,
        steps=steps,
        reports={"before": {"success": 0.25, "success_interval": [0.1, 0.5]}},
        phase_s={"train": 1.5},
        sampled_tokens=70 * steps,
    )


@pytest.fixture
def learner(decoder: Make, backend: Make) -> TorchBackend:
    return backend(decoder())


def _shifted(learner: TorchBackend, amount: float) -> None:
    with torch.no_grad():
        learner.model.norm.fill_(amount)


def test_a_checkpoint_gives_back_where_the_run_was_and_its_weights(
    learner: TorchBackend, tmp_path: Path
) -> None:
    _shifted(learner, 7.0)
    assert save_checkpoint(tmp_path, _state(3), {"": learner}, keep=2) == tmp_path / "step-000007"
    _shifted(learner, 0.0)
    assert load_latest(tmp_path, {"": learner}) == _state(3)
    assert (learner.model.norm == 7.0).all()


def test_seconds_of_a_phase_add_up_over_its_blocks_also_those_that_raise() -> None:
    state, start_s = RunState(phase_s={"train": 100.0}), time.perf_counter()
    with state.time_phase("report"):
        time.sleep(0.001)
    with pytest.raises(KeyboardInterrupt), state.time_phase("train"):
        raise KeyboardInterrupt
    elapsed_s = time.perf_counter() - start_s
    assert 0.0 < state.phase_s["report"] <= elapsed_s
    assert 100.0 < state.phase_s["train"] <= 100.0 + elapsed_s
    assert state.wall_s == sum(state.phase_s.values())


def test_several_policies_have_a_directory_each(decoder: Make, backend: Make, tmp_path: Path) -> None:
    both: dict[str, TorchBackend] = {"solver": backend(decoder()), "judge": backend(decoder(seed=1))}
    _shifted(both["solver"], 7.0)
    _shifted(both["judge"], 3.0)
    saved = save_checkpoint(tmp_path, _state(3), both, keep=2)
    assert sorted(path.name for path in saved.iterdir()) == [
        "about.json",
        "judge",
        MANIFEST,
        "solver",
        "state.json",
    ]
    for each in both.values():
        _shifted(each, 0.0)
    assert load_latest(tmp_path, both) == _state(3)
    assert (both["solver"].model.norm == 7.0).all()
    assert (both["judge"].model.norm == 3.0).all()
    (saved / "judge" / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"`judge/weights\.safetensors` is missing"):
        load_latest(tmp_path, both)


def test_without_a_checkpoint_the_run_is_new(learner: TorchBackend, tmp_path: Path) -> None:
    assert load_latest(tmp_path, {"": learner}) is None
    assert load_latest(tmp_path / "absent", {"": learner}) is None
    assert ranks_of(tmp_path) == 1


def test_the_newest_are_kept_and_the_newest_is_read(learner: TorchBackend, tmp_path: Path) -> None:
    for steps in (1, 2, 3, 96):
        _shifted(learner, float(steps))
        save_checkpoint(tmp_path, _state(steps), {"": learner}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000007", "step-000100"]
    assert load_latest(tmp_path, {"": learner}) == _state(96)
    assert (learner.model.norm == 96.0).all()


def test_the_best_stays_beside_the_newest(learner: TorchBackend, tmp_path: Path) -> None:
    state = _state(0)
    for steps, score in ((1, 0.2), (2, 0.9), (3, 0.9), (4, 0.4), (5, 0.1)):
        state.steps = steps
        assert state.is_best(score) is (steps <= 2)
        save_checkpoint(tmp_path, state, {"": learner}, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006", "step-000009"]
    read = load_latest(tmp_path, {"": learner})
    assert read is not None
    assert read.best == {"position": 6, "score": 0.9}


def test_a_score_that_is_no_number_is_never_the_best() -> None:
    state = _state(0)
    for steps, score in ((1, math.nan), (2, 0.5), (3, math.nan), (4, 0.4)):
        state.steps = steps
        assert state.is_best(score) is (steps == 2)
    assert state.best == {"position": 6, "score": 0.5}


def test_a_checkpoint_says_what_made_it(learner: TorchBackend, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    saved = save_checkpoint(tmp_path / "checkpoints", _state(1), {"": learner}, keep=1)
    about = json.loads((saved / "about.json").read_text())
    assert about["packages"]["torch"] == torch.__version__
    assert about["config_sha256"] == hashlib.sha256(b"{}").hexdigest()


def test_of_a_package_that_is_not_there_the_version_is_empty(
    learner: TorchBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(checkpoint.metadata, "version", nowhere)
    checkpoint._version.cache_clear()
    try:
        saved = save_checkpoint(tmp_path, _state(1), {"": learner}, keep=1)
    finally:
        checkpoint._version.cache_clear()
    about = json.loads((saved / "about.json").read_text())
    assert set(about["packages"].values()) == {""}
    assert about["config_sha256"] == "", "of a checkpoint without its run"


def test_saving_a_position_again_replaces_it(learner: TorchBackend, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _state(3), {"": learner}, keep=2)
    again = _state(3)
    again.reports["after"] = {"success": 1.0}
    save_checkpoint(tmp_path, again, {"": learner}, keep=2)
    assert load_latest(tmp_path, {"": learner}) == again
    assert len(list(tmp_path.iterdir())) == 1


def test_half_written_ones_are_removed_and_never_read(learner: TorchBackend, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _state(3), {"": learner}, keep=2)
    half = tmp_path / ".step-000009.tmp-12345"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    assert load_latest(tmp_path, {"": learner}) == _state(3)
    assert not half.exists()


def test_one_that_was_being_replaced_is_put_back(learner: TorchBackend, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, _state(3), {"": learner}, keep=2)
    saved.rename(tmp_path / f".{saved.name}.old-12345")
    assert load_latest(tmp_path, {"": learner}) == _state(3)


FILES = ["weights.safetensors", "optimizer.safetensors", "state.json", MANIFEST]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "torn", "a flipped bit"])
def test_a_damaged_checkpoint_is_named_and_never_fallen_back_from_in_silence(
    learner: TorchBackend, tmp_path: Path, name: str, damage: str
) -> None:
    save_checkpoint(tmp_path, _state(2), {"": learner}, keep=2)
    saved = save_checkpoint(tmp_path, _state(3), {"": learner}, keep=2)
    path = saved / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    before = learner.model.norm.detach().clone()
    with pytest.raises(CheckpointError, match=r"step-000007.*one before"):
        load_latest(tmp_path, {"": learner})
    assert torch.equal(before, learner.model.norm)


def test_after_deleting_the_damaged_one_the_one_before_is_read(learner: TorchBackend, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _state(2), {"": learner}, keep=2)
    saved = save_checkpoint(tmp_path, _state(3), {"": learner}, keep=2)
    for path in saved.iterdir():
        path.unlink()
    saved.rmdir()
    assert load_latest(tmp_path, {"": learner}) == _state(2)


def test_a_save_that_the_disk_refuses_leaves_the_ones_before(learner: TorchBackend, tmp_path: Path) -> None:
    class FullDisk(TorchBackend):
        def save(self, directory: Path) -> None:
            (directory / "weights.safetensors").write_bytes(b"some of it")
            raise OSError(28, "No space left on device")

    save_checkpoint(tmp_path, _state(2), {"": learner}, keep=1)
    full = FullDisk(learner.model, publish=lambda version: None)
    with pytest.raises(StorageError, match="free space"):
        save_checkpoint(tmp_path, _state(3), {"": full}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]
    assert load_latest(tmp_path, {"": learner}) == _state(2)


class SlowCopy:
    """A copy that is not written before the test lets it."""

    def __init__(self, copy: Saveable, may_write: threading.Event) -> None:
        self._copy, self._may_write = copy, may_write

    def save(self, directory: Path) -> None:
        assert self._may_write.wait(30.0)
        self._copy.save(directory)


class SlowlySaved(TorchBackend):
    may_write: threading.Event

    def snapshot(self, ranks: RankGroup) -> Any:
        return SlowCopy(super().snapshot(ranks), self.may_write)


def test_a_checkpoint_in_the_background_holds_what_was_true_when_it_was_saved(
    decoder: Make, tmp_path: Path
) -> None:
    learner = SlowlySaved(decoder(), publish=lambda version: None)
    learner.may_write = threading.Event()
    state = _state(2)
    with Checkpoints(tmp_path, CheckpointConfig(background=True)) as checkpoints:
        _shifted(learner, 7.0)
        checkpoints.save(state, {"": learner})
        _shifted(learner, 0.0)
        state.steps, state.phase_s["train"] = 3, 9.0
        assert not list(tmp_path.glob("step-*")), "a checkpoint has its name once it is whole"
        learner.may_write.set()
        checkpoints.finish()
        assert load_latest(tmp_path, {"": learner}) == _state(2)
        assert (learner.model.norm == 7.0).all()
        _shifted(learner, 3.0)
        checkpoints.save(state, {"": learner})
    assert load_latest(tmp_path, {"": learner}) == state
    assert (learner.model.norm == 3.0).all()


def test_a_checkpoint_that_a_thread_cannot_write_ends_the_run_at_the_next_one(
    learner: TorchBackend, tmp_path: Path
) -> None:
    class FullDisk:
        def save(self, directory: Path) -> None:
            (directory / "weights.safetensors").write_bytes(b"some of it")
            raise OSError(28, "No space left on device")

    class OnAFullDisk(TorchBackend):
        def snapshot(self, ranks: RankGroup) -> Any:
            return FullDisk()

    full = OnAFullDisk(learner.model, publish=lambda version: None)
    with Checkpoints(tmp_path, CheckpointConfig(background=True)) as checkpoints:
        checkpoints.save(_state(1), {"": learner})
        checkpoints.save(_state(2), {"": full})
        with pytest.raises(StorageError, match="free space"):
            checkpoints.save(_state(3), {"": learner})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    with (
        pytest.raises(StorageError, match="free space"),
        Checkpoints(tmp_path, CheckpointConfig(background=True)) as checkpoints,
    ):
        checkpoints.save(_state(2), {"": full})


def test_going_on_with_another_number_of_threads_is_remarked_on(
    learner: TorchBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        save_checkpoint(tmp_path, _state(3), {"": learner}, keep=2)
        load_latest(tmp_path, {"": learner})
        assert not caplog.records
        torch.set_num_threads(1)
        load_latest(tmp_path, {"": learner})
        assert "2 threads" in caplog.text
    finally:
        torch.set_num_threads(num_threads)
