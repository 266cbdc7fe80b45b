"""`cluster.kind = "ray"` without a cluster: what is refused before any work, and leases. Needs no Ray."""

import importlib.util
import random
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rllm import AgentTrainer
from rllm.agents.conversation import ConversationAgent
from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.cli.main import rllm as front_door
from rllm.config.cluster import ClusterConfig
from rllm.config.distill import DistillConfig
from rllm.config.schema import TrainConfig
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.errors import ClusterError, ConfigError, CountError
from rllm.integrations.ray.leases import MAX_LOSSES, Lease, Leases
from rllm.integrations.ray.session import require_address, require_answer, with_second_try
from rllm.integrations.ray.weights import pack, split, unpack
from rllm.trainer.cluster import clock_skew, require_cluster
from rllm.types.task import EpisodeId

REFUSED = {
    "backend=verl": r"`backend` is 'verl': set it to that, or leave `cluster\.kind` at local",
    "model.device=cuda": r"sample on the CPU, and `model\.device` is 'cuda'",
    "cluster.address=ray://head:10001": r"`cluster\.address` is 'ray://head:10001'.*HOST:6379",
    "cluster.address=head": r"`cluster\.address` is 'head'; write HOST:PORT with a port from 1 to 65535",
    "cluster.address=head:66000": r"`cluster\.address` is 'head:66000'; write HOST:PORT",
    "cluster.address=local": r"`cluster\.address` is 'local'; write HOST:PORT",
    "cluster.kind=": r"`cluster\.kind` is ''",
    "cluster.workers=-1": r"`cluster\.workers` is -1; it must be at least 0",
    "cluster.workers=two": r"`cluster\.workers`.*two",
    "cluster.workers=100000": r"`cluster\.workers` is 100000, each with 1 cores.*fewer workers, or give the",
    "cluster.model_servers=-1": r"`cluster\.model_servers` is -1; it must be at least 0",
    "cluster.model_servers=2": r"`cluster\.model_servers` is 2.*`inference\.lockstep` is true: set that",
    "cluster.cpus_per_worker=0": r"`cluster\.cpus_per_worker` is 0; it must be at least 1",
    "cluster.cpus_per_worker=5000": r"`cluster\.cpus_per_worker` is 5000, and .* cores; ask for at most",
    "cluster.lease_episodes=0": r"`cluster\.lease_episodes` is 0; it must be at least 1",
    "cluster.object_store_mb=10": r"`cluster\.object_store_mb` is 10; it must be at least 100",
    "cluster.object_store_mb=900000000": r"`cluster\.object_store_mb` is 900000000, and .* MB of memory; ask",
    "cluster.timeout_s=0": r"`cluster\.timeout_s` is 0.*a finite number above 0",
    "cluster.timeout_s=nan": r"`cluster\.timeout_s` is nan.*a finite number above 0",
}
WITHOUT_RAY = importlib.util.find_spec("ray") is None


@pytest.mark.parametrize("assignment", REFUSED)
def test_what_workers_of_a_cluster_would_not_honour_is_refused_by_key(
    assignment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.integrations.verl.kind.VerlKind.require", lambda self, config: None)
    settings = ("cluster.kind=ray", "algorithm.estimator=grpo", assignment)
    with pytest.raises(ConfigError, match=REFUSED[assignment]):
        build_run(training_config("frozenlake", None, settings), Path("unused"))


def test_a_key_of_a_cluster_that_a_run_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`cluster\.workers` is 2, .* ray"):
        training_config("frozenlake", None, ("cluster.workers=2",))


def test_a_teacher_is_refused() -> None:
    config = TrainConfig(cluster=ClusterConfig(kind="ray"), distill=DistillConfig(teacher="there"))
    with pytest.raises(ConfigError, match=r"teacher, .*`distill\.teacher` is 'there'"):
        require_cluster(config)


@pytest.mark.skipif(not WITHOUT_RAY, reason="Ray is installed")
@pytest.mark.parametrize("way", ["key", "argument"])
def test_without_ray_the_extra_is_named(way: str) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'rllm\[ray\]'"):
        _trainer({"cluster": {"kind": "ray"}} if way == "key" else {}, "" if way == "key" else "ray")


def test_a_kind_of_cluster_that_does_not_exist_is_refused_with_the_one_that_does() -> None:
    with pytest.raises(ConfigError, match=r"`rai`.*`ray`"):
        _trainer({"cluster": {"kind": "rai"}})


def test_addresses_of_nodes_are_taken() -> None:
    for address in ("", "auto", "10.0.0.1:6379", "[fe80::1]:6379"):
        require_address(address)


def test_an_address_that_is_none_is_refused_by_the_command_that_looks(subtests: pytest.Subtests) -> None:
    for words in ("status", "check"):
        for address, reason in [
            ("", r"--address is empty.*write HOST:PORT"),
            ("head", r"--address is 'head'; write HOST:PORT with a port from 1 to 65535"),
            ("head:0", r"--address is 'head:0'; write HOST:PORT"),
            ("ray://head:10001", r"--address is 'ray://head:10001', Ray's client protocol"),
        ]:
            with subtests.test(words=words, address=address, reason=reason):
                done = CliRunner().invoke(
                    front_door, ["cluster", words, "--address", address], prog_name="rllm"
                )
                assert done.exit_code == 2
                assert re.search(reason, " ".join(done.stderr.split()))


@given(
    num_tasks=st.integers(1, 20),
    group_size=st.integers(1, 9),
    size=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_every_episode_is_played_once_whoever_ends(
    num_tasks: int, group_size: int, size: int, seed: int
) -> None:
    """Workers take leases, lose some and finish others in any order."""
    draw = random.Random(seed)
    tasks = [{"task_id": str(number)} for number in range(num_tasks)]
    skip = {EpisodeId(task_id=str(draw.randrange(num_tasks)), attempt=0) for _ in range(draw.randrange(3))}
    leases = Leases(tasks, group_size=group_size, size=size, skip=skip)
    out, played = list[Lease](), Counter[str]()
    while leases.are_open:
        if draw.random() < 0.5 and (lease := leases.take()) is not None:
            out.append(lease)
        elif out:
            lease = out.pop(draw.randrange(len(out)))
            if draw.random() < 0.3 and len(lease.losses) < MAX_LOSSES - 1:
                leases.give_back(lease, "killed")
                continue
            leases.finish(lease, lease.num_episodes)
            played.update(each["task_id"] for each in lease.tasks)
    left_out = {name for name in (each["task_id"] for each in tasks) if name not in played}
    assert set(played.values()) == {1} or not played
    assert all(group_size == 1 and EpisodeId(task_id=name, attempt=0) in skip for name in left_out)
    assert leases.num_episodes == num_tasks * group_size - len(skip)


def test_what_shares_a_lease_depends_on_the_tasks_alone() -> None:
    tasks = [{"task_id": str(number)} for number in range(5)]
    leases = Leases(tasks, group_size=4, size=2)
    first, second, third = (leases.take() for _ in range(3))
    assert first is not None
    leases.give_back(first)
    again = leases.take()
    assert again is first
    sizes = [len(each.tasks) for each in (first, second, third) if each is not None]
    assert sizes == [2, 2, 1]


def test_tasks_that_end_every_worker_end_the_run_and_are_named() -> None:
    leases = Leases([{"task_id": "bomb"}], group_size=1, size=1)
    for _ in range(MAX_LOSSES - 1):
        leases.give_back(_taken(leases), "worker-1 ended.")
    with pytest.raises(ClusterError, match=r"3 rollout workers .*\(bomb\).*lease_episodes"):
        leases.give_back(_taken(leases), "worker-2 ended.")


def test_a_worker_that_returns_too_few_episodes_is_an_error() -> None:
    leases = Leases([{"task_id": "t"}], group_size=4, size=1)
    with pytest.raises(CountError, match=r"4 episodes .* 3"):
        leases.finish(_taken(leases), 3)


def test_a_lease_has_as_many_tasks_as_make_up_its_episodes_and_one_at_least() -> None:
    cluster = ClusterConfig(kind="ray", lease_episodes=32)
    assert [cluster.tasks_per_lease(size) for size in (1, 8, 20, 64)] == [32, 4, 1, 1]


@pytest.mark.parametrize("kind", [RuntimeError, Exception])
def test_a_start_that_fails_is_tried_once_more(kind: type[Exception]) -> None:
    """Ray raises a bare Exception where a node takes longer than its own limit."""
    calls = list[str]()

    def start() -> None:
        calls.append("start")
        if calls.count("start") < fails:
            raise kind("Failed to get node info: Deadline Exceeded\nand more")

    fails = 2
    with_second_try(start, lambda: calls.append("clean up"), "", pause_s=0.0)
    assert calls == ["start", "clean up", "start"]
    calls.clear()
    fails = 3
    with pytest.raises(ClusterError, match=r"\(Failed to get node info.*Exceeded\)"):
        with_second_try(start, lambda: calls.append("clean up"), "", pause_s=0.0)
    assert calls == ["start", "clean up"] * 2


def test_an_error_that_is_not_of_the_start_is_not_tried_again() -> None:
    def start() -> None:
        raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        with_second_try(start, lambda: None, "", pause_s=0.0)


def test_an_address_where_nobody_listens_is_known_at_once() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        listening.listen()
        require_answer(address)
        require_answer("auto")
    with pytest.raises(ClusterError, match=f"'{address}'.*reached"):
        with_second_try(lambda: require_answer(address), lambda: None, address, pause_s=0.0)


def _taken(leases: Leases) -> Lease:
    lease = leases.take()
    assert lease is not None
    return lease


def _trainer(config: dict[str, Any], backend: str = "") -> AgentTrainer:
    return AgentTrainer(
        {"warm_start": {"steps": 0}, **config},
        [{"task_id": "t"}],
        backend=backend,
        agent_class=ConversationAgent,
        env_class=FrozenLakeEnv,
    )


@given(skew=st.floats(-100, 100), there=st.floats(0, 30), back=st.floats(0, 30))
def test_a_clock_is_off_by_what_no_way_of_its_answer_explains(skew: float, there: float, back: float) -> None:
    """A busy node takes seconds to answer: that alone is no reason to refuse it."""
    found = clock_skew(0.0, there + skew, there + back)
    assert abs(found) <= abs(skew) + 1e-9, "never more than it is"
    assert abs(skew) - max(there, back) - 1e-9 <= abs(found), "and less by one way at most"
    if there == back == 0.0:
        assert found == pytest.approx(skew)


def test_weights_travel_as_one_block_and_each_policy_gets_its_part() -> None:
    def models(seed: int) -> dict[str, torch.nn.Module]:
        torch.manual_seed(seed)
        made = {"solver": torch.nn.Linear(3, 2), "judge": torch.nn.Linear(2, 5).bfloat16()}
        made["judge"].bias.requires_grad_(False)  # of a model with an adapter, what is not trained stays
        return made

    mine, theirs, before = models(0), models(1), models(1)
    parts = split(pack(mine), theirs)
    for name, model in theirs.items():
        unpack(parts[name], model)
        for key, value in model.named_parameters():
            source = mine if value.requires_grad else before
            assert torch.equal(value, dict(source[name].named_parameters())[key])
    with pytest.raises(ClusterError, match="bytes of weights"):
        split(pack(mine)[:-1], theirs)
