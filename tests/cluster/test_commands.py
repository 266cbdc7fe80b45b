"""`rllm cluster status` and `check` on a cluster of three nodes, through the front door."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from two_nodes import Nodes


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


def test_an_address_where_nobody_is_is_refused(tmp_path: Path) -> None:
    done = rllm("cluster", "status", "--address", "127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
