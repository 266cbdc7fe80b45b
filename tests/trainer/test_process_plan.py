"""The processes of a run, and the ports that they listen on, as `--dry-run` tells them."""

from typing import Any

import pytest

from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.trainer.process_plan import process_plan

RAY = {"kind": "ray", "address": "10.0.0.1:6380", "workers": 12, "cpus_per_worker": 2}
SERVERS = {"kind": "ray", "model_servers": 2}


def planned(changes: dict[str, Any], num_ranks: int = 1, **facts: bool) -> dict[str, tuple[int, int, str]]:
    """name -> (number, cores, ports)."""
    plans = process_plan(
        load_config(changes), num_ranks=num_ranks, **{"is_program": False, "is_of_torchrun": False, **facts}
    )
    return {each.name: (each.number, each.cores, "; ".join(each.ports)) for each in plans}


def test_one_process_listens_nowhere_unless_a_program_calls_it() -> None:
    assert planned({"threads": 3}) == {"trainer": (1, 3, "")}
    assert planned({}, is_program=True) == {"trainer": (1, 0, "a free port of 127.0.0.1 (gateway)")}


def test_several_processes_meet_where_they_are_started() -> None:
    between = "free ports of its machine (gloo, between ranks)"
    here = f"a free port of 127.0.0.1 (rank 0, where ranks meet); {between}"
    assert planned({}, 2) == {"trainer": (2, 0, here)}
    torchrun = f"MASTER_PORT, as torchrun sets it (rank 0, where ranks meet); {between}"
    assert planned({}, 4, is_of_torchrun=True) == {"trainer": (4, 0, torchrun)}
    placed = {"threads": 2, "distributed": {"placement": "spread"}, "cluster": RAY}
    assert planned(placed, 2)["trainer"] == (
        2,
        2,
        f"a free port of its node (rank 0, where ranks meet); {between}",
    )


def test_a_cluster_has_workers_and_a_head_whose_ports_are_those_of_its_address() -> None:
    on_ray = planned({"cluster": RAY}, is_program=True)
    assert on_ray["trainer"] == (1, 0, ""), "programs run beside the workers"
    number, cores, ports = on_ray["rollout worker"]
    assert (number, cores) == (12, 2)
    assert "10002 to 19999" in ports
    assert "a free port of 127.0.0.1 (gateway)" in ports
    (workers,) = [
        each
        for each in process_plan(
            load_config({"cluster": RAY}), num_ranks=1, is_program=False, is_of_torchrun=False
        )
        if each.name == "rollout worker"
    ]
    assert "12" in str(workers)
    assert workers.facts().items() >= {"name": "rollout worker", "number": 12, "cores": 2}.items()
    assert on_ray["Ray head"][2].startswith("10.0.0.1:6380; ")
    assert "6379" in planned({"cluster": {"kind": "ray", "address": "auto"}})["Ray head"][2]
    started_here = planned({"cluster": SERVERS, "inference": {"lockstep": False}})
    assert started_here["Ray head"][2].startswith("a free port of this machine; ")
    assert started_here["rollout worker"][:2] == (0, 1), "as many as there is room for"
    assert started_here["model server"] == (2, 1, "a port that Ray chooses on each node")


def test_servers_that_the_run_starts_are_among_its_processes() -> None:
    fleet = {"engine": "vllm", "lockstep": False, "replicas": 2, "server_python": "python3"}
    assert planned({"inference": fleet})["vLLM server"] == (2, 0, "a free port of 127.0.0.1")
    two = {"inference": fleet, "policies": {"solver": {}, "judge": {"trainable": False}}}
    assert planned(two)["vLLM server"] == (4, 0, "a free port of 127.0.0.1"), "each policy has its own"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"threads": 1},
            r"`distributed\.placement` is 'pack', and there is no cluster .*`cluster\.kind` to ray",
        ),
        ({"cluster": RAY}, r"`threads` is 0, which shares a machine .*the cores that each of them asks for"),
    ],
)
def test_processes_that_are_placed_nowhere_or_ask_for_nothing_are_refused(
    changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config({**changes, "distributed": {"placement": "pack"}})
    with pytest.raises(ConfigError, match=r"'packed'.*pack"):
        load_config({**changes, "distributed": {"placement": "packed"}})
