"""A rank that ends badly ends the run on all of them, with its number, its place and the cause; the same
command goes on and comes to what an undisturbed run comes to."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rllm.files.atomic import verify_manifest

pytestmark = pytest.mark.slow

Letters = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def letters(ranks: Callable[..., list[dict[str, Any]]]) -> Letters:
    """Play the game on so many ranks, with the fate of one of them."""

    def play(run: Path, num_ranks: int, *fate: Any, **changes: Any) -> list[dict[str, Any]]:
        return ranks("letters", [run, json.dumps(changes), *fate], num_ranks)

    return play


def codes(ended: list[dict[str, Any]]) -> list[int]:
    return [each["code"] for each in ended]


def weights(run: Path) -> dict[str, bytes]:
    """Checkpoints and models."""
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*.safetensors"))}


def test_ranks_that_are_killed_and_started_again_end_with_the_same_bits(
    letters: Letters, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert codes(letters(whole, 2)) == [0, 0]
    for purpose in ("report/before", "train/0", "train/2"):
        assert codes(letters(killed, 2, "die", "all", purpose)) == [-9, -9]
        for each in (killed / "checkpoints").glob("step-*"):
            verify_manifest(each)
    assert codes(letters(killed, 2)) == [0, 0]
    assert weights(killed) == weights(whole)
    assert len(weights(whole)) > 3


def test_a_run_goes_on_with_another_number_of_ranks(letters: Letters, tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert codes(letters(whole, 1)) == [0]
    assert codes(letters(moved, 2, "die", "all", "train/1")) == [-9, -9]
    assert codes(letters(moved, 1, "die", "all", "train/2")) == [-9]
    assert codes(letters(moved, 3)) == [0, 0, 0]
    mine, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, moved))
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_other_within_half_a_minute(
    letters: Letters, tmp_path: Path, rank: int
) -> None:
    ended = letters(tmp_path / "run", 2, "die", rank, "train/1")
    killed, other = ended[rank], ended[1 - rank]
    assert (killed["code"], other["code"]) == (-9, 1)
    assert other["ended_s"] - killed["ended_s"] < 30.0
    assert f"Rank {rank} ended" in other["errors"]
    assert re.search(r"it was last at the (episodes of train/|update of policy version )\d", other["errors"])


@pytest.mark.parametrize("where", ["update/6", "step/6"])
def test_a_rank_that_is_killed_inside_a_sharded_update_is_named_and_the_run_goes_on(
    letters: Letters, tmp_path: Path, where: str
) -> None:
    sharded: dict[str, Any] = {"distributed": {"strategy": "shard"}, "optimizer": {"name": "muon"}}
    other, killed = letters(tmp_path / "run", 2, "die", 1, where, **sharded)
    assert (killed["code"], other["code"]) == (-9, 1)
    assert other["ended_s"] - killed["ended_s"] < 30.0
    assert "Rank 1 ended" in other["errors"]
    assert codes(letters(tmp_path / "run", 2, **sharded)) == [0, 0]
    assert codes(letters(tmp_path / "whole", 2, **sharded)) == [0, 0]
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    names = {each.name for each in (tmp_path / "run" / "model").glob("*.safetensors")}
    assert names == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


def test_ranks_that_are_done_are_alive_while_rank_0_still_writes(
    ranks: Callable[..., list[dict[str, Any]]],
) -> None:
    """A picture takes half a minute on a crowded machine; that was taken for the death of the others."""
    ended = ranks("late", [25.0], 2)
    assert codes(ended) == [0, 0], ended


def test_a_rank_that_fails_is_named_with_its_cause_by_the_other(letters: Letters, tmp_path: Path) -> None:
    failed, other = letters(tmp_path / "run", 2, "fail", 1, "train/1")[::-1]
    assert (failed["code"], other["code"]) == (1, 1)
    assert other["ended_s"] - failed["ended_s"] < 30.0
    assert "Rank 1 ended of ValueError: the dice fell off the table" in other["errors"]


def test_a_rank_that_hangs_is_named_and_ends_the_run(letters: Letters, tmp_path: Path) -> None:
    ended = letters(tmp_path / "run", 2, "hang", 1, "train/1", distributed={"timeout_s": 100.0})
    assert codes(ended) == [1, 1]
    errors = "".join(each["errors"] for each in ended)
    assert "Rank 1 hangs: for 100 s (`distributed.timeout_s`)" in errors, errors


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("distributed", [{"strategy": "shard"}, {"tensor_parallel": 2}])
def test_a_rank_that_hangs_inside_an_update_whose_layers_wait_for_each_other_is_named(
    letters: Letters, tmp_path: Path, rank: int, distributed: dict[str, Any]
) -> None:
    changes = {"distributed": {**distributed, "timeout_s": 100.0}}
    ended = letters(tmp_path / "run", 2, "hang", rank, "update/6", **changes)
    assert codes(ended) == [1, 1]
    errors = "".join(each["errors"] for each in ended)
    assert f"Rank {rank} hangs: for 100 s (`distributed.timeout_s`)" in errors, errors
    assert f"Rank {1 - rank} hangs" not in errors, errors


SMALL = (
    "threads=1 steps=2 warm_start.steps=2 warm_start.episodes_per_step=8 evaluation.num_tasks=8 "
    "evaluation.every_steps=0 rollout.tasks_per_step=2 rollout.group_size=4 checkpoint.every_steps=1"
)


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_command_says_which_rank_was_killed_and_goes_on_where_it_may(
    tmp_path: Path, restarts: int
) -> None:
    words = ["train", "frozenlake", "--nproc", "2", "--output", str(tmp_path / "run")]
    for assignment in (*SMALL.split(), f"distributed.restarts={restarts}"):
        words += ["--set", assignment]
    command = subprocess.Popen(
        [sys.executable, "-m", "rllm", *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.is_file() and "warm_start" in metrics.read_text()):
            assert command.poll() is None
            time.sleep(0.2)
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        subprocess.run(["kill", "-9", children[1]], check=True)
        _, errors = command.communicate(timeout=1_000 if restarts else 40)
    finally:
        command.kill()
    assert command.returncode == (0 if restarts else 1), errors
    assert ("All 2 ranks" in errors) == (restarts == 1)
    assert "Rank 1 was killed by SIGKILL" in errors
    assert "last checkpoint" in errors
