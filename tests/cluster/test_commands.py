"""`rllm cluster status` and `check` on a cluster of three nodes, through the front door."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from two_nodes import Nodes

from rllm.config.cluster import ClusterConfig
from rllm.integrations.ray import RAY, inspection


def rllm(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rllm", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def report(nodes: Nodes, cwd: Path, *words: str) -> dict[str, Any]:
    done = rllm("cluster", *words, "--address", nodes.address, "--json", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_status_lists_what_nodes_have(nodes: Nodes, tmp_path: Path) -> None:
    listed = report(nodes, tmp_path, "status")
    assert sorted(each["cpus"] for each in listed["nodes"])[-2:] == [1.0, 1.0]
    assert all(90 < each["object_store_mb"] < 120 for each in listed["nodes"])
    assert listed["broadcast_mb_per_s"] is None


def test_check_asks_every_node_and_measures_a_broadcast(nodes: Nodes, tmp_path: Path) -> None:
    checked = report(nodes, tmp_path, "check", "--broadcast-mb", "8")
    assert checked["problems"] == checked["remarks"] == []
    assert checked["broadcast_mb_per_s"] > 0.0
    for each in checked["nodes"]:
        assert each["versions"] == checked["versions"]
        assert each["sees_directory"] is True
        assert abs(each["clock_skew_s"]) < 1.0  # one clock
    assert list(tmp_path.iterdir()) == []


def test_a_node_gets_a_broadcast_while_the_time_is_taken_and_not_before(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = inspection._fetch

    def fetch_or_nothing(block: Any) -> tuple[float, int]:
        seconds, digest = fetch(block)
        return (0.0 if isinstance(block, np.ndarray) else seconds), digest

    monkeypatch.setattr(inspection, "_fetch", fetch_or_nothing)
    checked = RAY.report(ClusterConfig(address=nodes.address), broadcast_mb=8)
    assert len(checked.nodes) == 3
    assert all(each.fetch_s for each in checked.nodes)


def test_an_address_where_nobody_is_is_refused(tmp_path: Path) -> None:
    done = rllm("cluster", "status", "--address", "127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
