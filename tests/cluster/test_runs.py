"""A run whose episodes are played by rollout workers comes to what one process comes to; so it does when
workers and nodes end on the way, and when its driver is killed and started again."""

import json
import re
from pathlib import Path
from typing import Any

import letter_world
import psutil
import pytest
from click.testing import CliRunner
from two_nodes import Nodes, full_stores

from rllm.cli.main import rllm as front_door
from rllm.errors import ConfigError
from rllm.tracking.jsonl import read_metrics
from rllm.types.names import object_named


@pytest.fixture(scope="module")
def calm_run(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two workers that nothing happens to. It may last a second, in which one could be alone."""
    folder = tmp_path_factory.mktemp("calm")
    hold = folder / "hold"
    letter_world.make_trainer(
        folder / "run",
        letter_world.on_cluster(nodes.address, workers=2),
        env_args={"hold": str(hold)},
        tracker=letter_world.WaitsForWorkers(hold, 2),
    ).train()
    return folder / "run"


def test_two_workers_sample_what_one_process_samples(calm_run: Path, whole_run: Path) -> None:
    letter_world.require_same_tokens(calm_run, whole_run)
    steps = [line for line in read_metrics(calm_run / "metrics.jsonl") if line["phase"] == "train"]
    assert all(line["cluster.workers"] == 2 for line in steps)
    assert all(line["cluster.broadcast_mb_per_s"] > 0.0 for line in steps)
    for line in steps:
        shares = [value for name, value in line.items() if name.endswith(".idle_share")]
        assert len(shares) == 2
        assert all(0.0 <= each <= 1.0 for each in shares)
    done = CliRunner().invoke(front_door, ["runs", "show", str(calm_run), "--json"])
    shown = json.loads(done.stdout)["cluster"]
    assert shown["slowest"] in shown["workers"]
    assert sum(each["tokens_per_s"] for each in shown["workers"].values()) > 0.0


def test_a_worker_that_is_killed_in_mid_episode_loses_nothing(
    nodes: Nodes, calm_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is what the command was asked for: Ray's line about it is in the log."""
    flag = tmp_path / "flag"
    named = f"{letter_world.__file__}:FragileEnv"  # a file of the user's: it travels as code
    trainer = letter_world.make_trainer(
        tmp_path / "run",
        letter_world.on_cluster(nodes.address, workers=2),
        env_class=object_named(named, group="rllm.environments", what="environment"),
        env_args={"flag": str(flag)},
    )
    trainer.train()
    assert not psutil.pid_exists(int(flag.read_text()))
    log = (tmp_path / "run" / "cluster.log").read_text().splitlines()
    assert any(re.fullmatch(rf".* worker-\d+ [\d.]+ \| {letter_world.LAST_WORDS}", line) for line in log)
    assert any(re.search(r"trainer \| worker-\d+ on .* has ended", line) for line in log)
    assert any(re.search(r" ray \| A worker died or was killed", line) for line in log)
    assert capsys.readouterr().out == ""
    assert letter_world.sampled(tmp_path / "run") == letter_world.sampled(calm_run)
    assert letter_world.weights(tmp_path / "run") == letter_world.weights(calm_run)


def test_a_node_is_lost_and_another_one_joins(nodes: Nodes, tmp_path: Path) -> None:
    calm = {"steps": 6, **letter_world.on_cluster(nodes.address, workers=2)}
    letter_world.make_trainer(tmp_path / "calm", calm).train()
    added = nodes.add()
    hold = tmp_path / "hold"
    change = letter_world.NodesComeAndGo(hold, 3, lose=lambda: nodes.remove(added), join=nodes.add)
    patient = {"step_timeout_s": 900.0, "episode_timeout_s": 1_800.0}
    trainer = letter_world.make_trainer(
        tmp_path / "run",
        # As many workers as there is room for.
        {"steps": 6, "rollout": patient, **letter_world.on_cluster(nodes.address)},
        env_args={"pause_s": 0.3, "hold": str(hold)},
        tracker=change,
    )
    trainer.train()
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "train"]
    assert [lines[at]["cluster.workers"] for at in (0, 2, -1)] == [3, 2, 3]
    assert lines[-1]["cluster.workers_lost"] >= 1
    assert letter_world.sampled(tmp_path / "run") == letter_world.sampled(tmp_path / "calm")
    assert letter_world.weights(tmp_path / "run") == letter_world.weights(tmp_path / "calm")


def actors_here() -> list[psutil.Process]:
    """Processes of rollout workers."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if "RolloutWorker" in " ".join(each.info["cmdline"] or [])
    ]


@pytest.mark.parametrize(
    ("fate", "place"),
    [("SIGKILL", "a running cluster"), ("SIGTERM", "a running cluster"), ("SIGKILL", "started on the spot")],
)
def test_a_driver_that_is_ended_leaves_nothing_and_goes_on(
    nodes: Nodes, calm_run: Path, tmp_path: Path, fate: str, place: str
) -> None:
    address = nodes.address if place == "a running cluster" else ""
    before = {each.pid for each in psutil.process_iter()}
    code = letter_world.driver(tmp_path / "run", address, fate)
    assert code == -9 if fate == "SIGKILL" else code != 0
    if fate == "SIGTERM":  # what it had is saved, though no checkpoint was due
        newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
        assert json.loads((newest / "state.json").read_text())["steps"] == 1
    ending = actors_here()
    if not address:
        ending += [
            each
            for each in psutil.process_iter(["name"])
            if each.pid not in before and each.info["name"] in ("raylet", "gcs_server")
        ]
    assert psutil.wait_procs(ending, timeout=60.0)[1] == []
    assert letter_world.driver(tmp_path / "run", address) == 0
    assert letter_world.weights(tmp_path / "run") == letter_world.weights(calm_run)


def test_a_run_goes_on_where_others_fill_the_object_stores(
    nodes: Nodes, calm_run: Path, tmp_path: Path
) -> None:
    with full_stores(nodes.address):
        letter_world.make_trainer(tmp_path / "run", letter_world.on_cluster(nodes.address)).train()
    assert letter_world.weights(tmp_path / "run") == letter_world.weights(calm_run)


def test_a_store_without_room_for_the_model_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    large: dict[str, Any] = {"model": {"path": "builtin:20m"}}
    with pytest.raises(ConfigError, match=r"node [\d.]+ has 10\d MB.*--object-store-memory"):
        letter_world.make_trainer(
            tmp_path / "run", {**large, **letter_world.on_cluster(nodes.address)}
        ).train()
