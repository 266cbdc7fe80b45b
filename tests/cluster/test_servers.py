"""Model servers: workers without weights ask them, and go on asking when one is killed."""

from pathlib import Path

import letter_world
import psutil
from two_nodes import Nodes

from rllm.tracking.jsonl import read_metrics


def test_calls_of_a_server_that_is_killed_go_to_the_next_one_with_the_same_tokens_and_versions(
    nodes: Nodes, tmp_path: Path
) -> None:
    start, plain, run, flag = (tmp_path / each for each in ("start", "plain", "run", "flag"))
    free = {"inference": {"lockstep": False}}
    letter_world.make_trainer(start, {**free, "steps": 0}).train()
    letter_world.make_trainer(plain, free).train()
    letter_world.make_trainer(
        run,
        {**free, **letter_world.on_cluster(nodes.address, workers=1, model_servers=1)},
        env_class=letter_world.ServerKillingEnv,
        env_args={"flag": str(flag)},
    ).train()
    assert not psutil.pid_exists(int(flag.read_text()))
    letter_world.require_same_tokens(run, plain)
    letter_world.require_same_learning(run, plain, start)
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert lines[-1]["cluster.servers_lost"] == 1
    assert lines[-1]["cluster.workers_lost"] == 0
