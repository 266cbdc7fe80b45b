"""Workers of a cluster play further steps while one is learned from: no token is older than the bound; what
is under way goes on with new weights, and a worker or a driver that ends loses nothing."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import letter_world
import psutil
import pytest
from two_nodes import Nodes

from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.replay import replay

FREE = {"steps": 6, "inference": {"lockstep": False}}


def ahead(address: str, max_staleness: int = 1, workers: int = 2, **more: Any) -> dict[str, Any]:
    return {
        **FREE,
        "schedule": {"kind": "async", "max_staleness": max_staleness},
        **letter_world.on_cluster(address, workers=workers, **more),
    }


def require_whole(run: Path, max_staleness: int, *, rounds: int = 1) -> list[list[int]]:
    """Every attempt of every step once, its tokens no older than the bound; returns the versions of each."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert [line["step"] for line in lines] == list(range(FREE["steps"]))
    assert max(line["staleness_max"] for line in lines) <= max_staleness
    versions: list[list[int]] = []
    with EpisodeStore.open(RunDirectory.read(run).store_path, read_only=True) as store:
        for step in range(FREE["steps"]):
            episodes = list(store.episodes("train", step))
            attempts = Counter((each.task_id, each.rollout_idx) for each in episodes)
            group_size = RunDirectory.read(run).config()["rollout"]["group_size"]
            assert set(attempts.values()) == {1}
            assert (
                len(attempts) % (letter_world.SHORT["rollout"]["tasks_per_step"] * group_size) == 0
                or rounds > 1
            )
            versions += [
                [version for turn in trajectory.steps for version in turn.policy_versions]
                for each in episodes
                for trajectory in each.trajectories
            ]
    assert all(each == sorted(each) for each in versions)
    return versions


def test_steps_are_played_ahead_and_conversations_go_on_with_new_weights(
    nodes: Nodes, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    changes = ahead(nodes.address)
    letter_world.make_trainer(run, changes, env_args={"pause_s": 0.3}).train()
    versions = require_whole(run, 1)
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert max(line["staleness_max"] for line in lines) == 1
    assert any(len({*each}) > 1 for each in versions), "weights that arrive while a lease is played"
    assert "sampler_idle" not in lines[-1], "of workers elsewhere it is not known"
    assert replay(letter_world.make_trainer(run, changes).run).is_identical


def test_without_staleness_it_is_the_synchronous_run_to_the_last_bit(nodes: Nodes, tmp_path: Path) -> None:
    on_cluster = letter_world.on_cluster(nodes.address, workers=1)
    letter_world.make_trainer(tmp_path / "plain", on_cluster).train()
    schedule = {"kind": "async", "max_staleness": 0}
    letter_world.make_trainer(tmp_path / "run", {**on_cluster, "schedule": schedule}).train()
    assert letter_world.sampled(tmp_path / "run") == letter_world.sampled(tmp_path / "plain")
    assert letter_world.weights(tmp_path / "run") == letter_world.weights(tmp_path / "plain")


def test_a_worker_that_is_killed_while_steps_are_played_ahead_loses_nothing(
    nodes: Nodes, tmp_path: Path
) -> None:
    run, flag = tmp_path / "run", tmp_path / "flag"
    env_args = {"flag": str(flag), "pause_s": 0.1}
    letter_world.make_trainer(run, ahead(nodes.address, 2), env_args=env_args).train()
    assert not psutil.pid_exists(int(flag.read_text()))
    require_whole(run, 2)


def test_a_run_that_ends_early_lets_workers_go_from_the_steps_ahead_and_reports_with_them(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    changes = {
        **ahead(nodes.address, 2),
        "steps": 9,
        "warm_start": {"steps": 0},
        "optimizer": {"learning_rate": 1e-12},
        "evaluation": {"every_steps": 1, "patience": 2},
    }
    trainer = letter_world.make_trainer(run, changes, env_args={"pause_s": 0.3})
    assert trainer.train().summary["ended_early_after"] == 3
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert lines[-1]["steps_waiting"] + lines[-1]["steps_under_way"] == 2
    assert not [each for each in caplog.messages if "has ended" in each], "a worker that did not stop"
    with EpisodeStore.open(RunDirectory.read(run).store_path, read_only=True) as store:
        assert len(list(store.episodes("after"))) == 4


def test_model_servers_get_new_weights_while_they_answer(nodes: Nodes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = ahead(nodes.address, 1, workers=1, model_servers=1)
    letter_world.make_trainer(run, changes, env_args={"pause_s": 0.3}).train()
    assert any(len({*each}) > 1 for each in require_whole(run, 1))


def test_a_model_server_that_is_killed_while_steps_are_played_ahead_loses_nothing(
    nodes: Nodes, tmp_path: Path
) -> None:
    run, flag = tmp_path / "run", tmp_path / "flag"
    changes = ahead(nodes.address, 2, workers=1, model_servers=1)
    env_class, env_args = letter_world.ServerKillingEnv, {"flag": str(flag)}
    letter_world.make_trainer(run, changes, env_class=env_class, env_args=env_args).train()
    assert not psutil.pid_exists(int(flag.read_text()))
    require_whole(run, 2)
    *_, last = (line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train")
    assert last["cluster.servers_lost"] == 1
    assert last["cluster.workers_lost"] == 0


def test_further_rounds_of_a_step_are_played_while_another_is_learned_from(
    nodes: Nodes, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    filters = {"dynamic": True, "max_rounds": 3}
    changes = {**ahead(nodes.address, 1), "filters": filters, "rollout": {"group_size": 2}}
    letter_world.make_trainer(run, changes, env_args={"pause_s": 0.05}).train()
    require_whole(run, 1, rounds=3)


@pytest.mark.parametrize("fate", ["SIGKILL", "SIGTERM"])
def test_a_driver_that_is_ended_while_steps_are_played_ahead_goes_on(
    nodes: Nodes, tmp_path: Path, fate: str
) -> None:
    run, changes = tmp_path / "run", json.dumps(ahead(nodes.address))
    code = letter_world.driver(run, nodes.address, fate, changes)
    assert code == -9 if fate == "SIGKILL" else code != 0
    assert not RunDirectory.read(run).summary()
    assert letter_world.driver(run, nodes.address, "", changes) == 0
    require_whole(run, 1)
