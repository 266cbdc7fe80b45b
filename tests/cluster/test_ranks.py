"""Ranks of the trainer as actors in a placement group: the same run as on this machine, and the same end when
one of them ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import letter_world
import psutil
import pytest
from two_nodes import Nodes

from rllm.models.directory import load_model

SHORT = (
    "steps=2",
    "threads=1",
    "task.environment_args={size=3,max_steps=12}",
    "warm_start.steps=4",
    "warm_start.episodes_per_step=16",
    "rollout.tasks_per_step=4",
    "rollout.group_size=4",
    "evaluation.num_tasks=4",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=1",
)
END_S = 30.0
"""Within which all ranks end once one has."""


@pytest.fixture(scope="module")
def roomy(nodes: Nodes) -> Iterator[Nodes]:
    """Room for two ranks on either of two nodes, beside the workers of other tests."""
    before = set(nodes.cluster.list_all_nodes())
    nodes.add(num_cpus=2)
    nodes.add(num_cpus=2)
    yield nodes
    for node in set(nodes.cluster.list_all_nodes()) - before:
        nodes.remove(node)


def command(run: Path, *settings: str, num_ranks: int = 2) -> list[str]:
    words = [word for each in (*SHORT, *settings) for word in ("--set", each)]
    start = [sys.executable, "-m", "rllm", "train", "frozenlake", "--json", "--output", str(run)]
    return [*start, "--nproc", str(num_ranks), *words]


def placed(nodes: Nodes, placement: str = "spread", **more: Any) -> list[str]:
    cluster = {"kind": "ray", "address": nodes.address, "workers": 1, "timeout_s": 900.0, **more}
    return [
        f"distributed.placement={placement}",
        *(f"cluster.{name}={value}" for name, value in cluster.items()),
    ]


def rank_processes(run: Path) -> list[psutil.Process]:
    """Of this run, in the order of their ranks; none where they have not all begun."""
    ranks = {
        int(variables["RANK"]): each
        for each in psutil.process_iter(["cmdline"])
        if str(run) in (each.info["cmdline"] or []) and "RANK" in (variables := environment(each))
    }
    return [ranks[number] for number in range(2)] if ranks.keys() == {0, 1} else []


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def until(look: Callable[[], Any], process: "subprocess.Popen[str]", within_s: float = 600.0) -> Any:
    """What `look` finds, once it finds something while the process works."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if found := look():
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    raise AssertionError(f"nothing within {within_s} s")


def has_learned(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and '"phase": "train"' in metrics.read_text()


def begin(run: Path, *settings: str) -> "subprocess.Popen[str]":
    """Tests that a shell runs in the background are deaf to Ctrl-C, and so would be what they start."""
    return subprocess.Popen(
        command(run, *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_placed_ranks_come_to_what_ranks_of_one_machine_come_to(
    roomy: Nodes, tmp_path: Path, strategy: str
) -> None:
    """Rank 0 drives the workers; the same loop runs in each rank, and both print what they print."""
    shared = f"distributed.strategy={strategy}"
    for run, more in (
        ("here", [each for each in placed(roomy) if "placement" not in each]),
        ("run", placed(roomy)),
    ):
        done = subprocess.run(
            command(tmp_path / run, shared, *more), stdout=subprocess.PIPE, text=True, check=True
        )
        assert json.loads(done.stdout)["run"] == str(tmp_path / run), "rank 0 prints for the command"
    run, here = tmp_path / "run", tmp_path / "here"
    letter_world.require_same_tokens(run, here)
    mine, theirs = (load_model(each / "model").model.state_dict_hf() for each in (run, here))
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-3
    assert (run / "cluster.log").is_file(), "what workers print comes to the run"


def test_a_rank_that_is_killed_ends_all_with_its_number_and_place_and_the_run_goes_on(
    roomy: Nodes, tmp_path: Path
) -> None:
    run, settings = tmp_path / "run", [*placed(roomy), "steps=30"]
    process = begin(run, *settings)
    try:
        until(lambda: has_learned(run), process)
        ranks = until(lambda: rank_processes(run), process)
        actor = ranks[1].parent()
        assert "RankHost" in " ".join(actor.cmdline()), "each rank is an actor's"
        actor.kill()
        assert psutil.wait_procs(ranks, timeout=END_S)[1] == []
        _, errors = process.communicate(timeout=900.0)
    finally:
        process.kill()
    assert process.returncode == 1
    assert re.search(r"Rank 1 was lost with its actor, rank-1 on \S+ \(.+\); all ranks have ended", errors)
    assert re.search(r"Rank 1 ended.*at the (episodes of|update of policy version) \S*\d", errors), errors
    assert re.search(r"goes on.* checkpoint", errors)
    subprocess.run(command(run, *placed(roomy), "steps=30"), stdout=subprocess.DEVNULL, check=True)
    assert (run / "summary.json").is_file()


def test_ranks_start_again_elsewhere_when_their_node_is_lost(roomy: Nodes, tmp_path: Path) -> None:
    """`distributed.restarts` makes another placement group, on the nodes that are left."""
    run = tmp_path / "run"
    process = begin(run, *placed(roomy, "strict_pack"), "distributed.restarts=1", "steps=12")
    try:
        until(lambda: has_learned(run), process)
        ranks = until(lambda: rank_processes(run), process)
        first, second = (roomy.of(each) for each in ranks)
        assert first is second, "they are packed"
        roomy.remove(first)
        output, errors = process.communicate(timeout=900.0)
    finally:
        process.kill()
        roomy.add(num_cpus=2)
    assert process.returncode == 0, errors
    assert "All 2 ranks start again" in errors
    assert json.loads(output)["run"] == str(run), "and nothing of Ray beside it"


@pytest.mark.parametrize("fate", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_rank_and_goes_on(
    roomy: Nodes, tmp_path: Path, fate: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = begin(run, *placed(roomy, "pack"), "steps=30", "checkpoint.every_steps=50")
    try:
        until(lambda: has_learned(run), process)
        ranks = until(lambda: rank_processes(run), process)
        os.kill(process.pid, fate)
        _, errors = process.communicate(timeout=120.0)
    finally:
        process.kill()
    assert process.returncode == (-signal.SIGKILL if fate == signal.SIGKILL else 130), errors
    assert psutil.wait_procs(ranks, timeout=60.0)[1] == []
    if fate != signal.SIGKILL:
        newest = max((run / "checkpoints").glob("step-*"))
        assert json.loads((newest / "state.json").read_text())["steps"] >= 1, "what it had is saved"


def test_ranks_that_no_node_has_room_for_are_refused_with_what_there_is(roomy: Nodes, tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path / "run", *placed(roomy, "strict_pack", timeout_s=5.0), "threads=40"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    errors = " ".join(done.stderr.split())
    assert "no room for 2 ranks for 5 s" in errors
    assert "each asks for 40 CPUs (`threads`)" in errors
    assert not (tmp_path / "run").exists()


def test_a_cluster_is_started_for_the_ranks_where_none_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["distributed.placement=strict_pack", "cluster.kind=ray", "cluster.workers=1"]
    before = {each.pid for each in psutil.process_iter()}
    subprocess.run(command(run, *settings, "cluster.timeout_s=900"), stdout=subprocess.DEVNULL, check=True)
    assert (run / "summary.json").is_file()
    left = [
        each
        for each in psutil.process_iter(["name"])
        if each.pid not in before and each.info["name"] in ("raylet", "gcs_server")
    ]
    assert psutil.wait_procs(left, timeout=60.0)[1] == []
