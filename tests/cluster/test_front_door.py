"""`rllm train frozenlake` on a cluster comes to what the plain command comes to."""

import subprocess
import sys
from pathlib import Path

import letter_world
import pytest
from two_nodes import Nodes

from rllm.models.directory import load_model
from rllm.tracking.jsonl import read_metrics

SHORT = (
    "steps=2",
    "threads=1",
    "task.environment_args={size=3,max_steps=12}",
    "warm_start.steps=20",  # until some attempts get across and others do not
    "warm_start.episodes_per_step=16",
    "rollout.tasks_per_step=4",
    "rollout.group_size=4",
    "evaluation.num_tasks=4",
    "evaluation.every_steps=0",
)


def train(run: Path, *settings: str, num_ranks: int = 1) -> Path:
    words = [word for each in (*SHORT, *settings) for word in ("--set", each)]
    command = [sys.executable, "-m", "rllm", "train", "frozenlake", "--output", str(run)]
    subprocess.run([*command, "--nproc", str(num_ranks), *words], check=True)
    return run


def on_two_workers(nodes: Nodes) -> tuple[str, ...]:
    place = f"cluster.address={nodes.address}"
    return "cluster.kind=ray", place, "cluster.workers=2", "cluster.timeout_s=900"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = train(tmp_path_factory.mktemp("plain") / "run")
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert all(losses), "every step has something to learn"
    return run


def test_leases_of_whole_waves_give_the_same_bits(nodes: Nodes, plain: Path, tmp_path: Path) -> None:
    """A worker that plays all tasks of a wave together has the batches that one process has."""
    run = train(tmp_path / "run", *on_two_workers(nodes), "cluster.lease_episodes=1000")
    assert letter_world.sampled(run) == letter_world.sampled(plain)
    assert letter_world.weights(run) == letter_world.weights(plain)


def test_small_leases_give_the_same_tokens_and_parameters_within_rounding(
    nodes: Nodes, plain: Path, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", *on_two_workers(nodes), "cluster.lease_episodes=4")
    require_same_within_rounding(run, plain)


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_two_ranks_learn_from_what_the_workers_of_rank_0_play(
    nodes: Nodes, tmp_path: Path, strategy: str
) -> None:
    shared = f"distributed.strategy={strategy}"
    run = train(tmp_path / "run", shared, *on_two_workers(nodes), "cluster.lease_episodes=4", num_ranks=2)
    require_same_within_rounding(run, train(tmp_path / "ranks", shared, num_ranks=2))
    steps = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert all(line["cluster.workers"] == 2 for line in steps)


def require_same_within_rounding(run: Path, plain: Path) -> None:
    letter_world.require_same_tokens(run, plain)
    mine, theirs = (load_model(each / "model").model.state_dict_hf() for each in (run, plain))
    assert mine.keys() == theirs.keys()
    # Of gradients that are all but 0 Adam makes steps of full length: rounding there is worth a part of one.
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-3
