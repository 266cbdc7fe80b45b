# pyright: reportMissingImports=false
"""The ranks of the trainer as actors in a placement group, one for each bundle of cores.

    placement group ──► RankHost on a node, one a rank ──► python -m rllm WORDS, as torchrun would start it
         ▲                    └─ ends, with its node or by itself ─► a rank that was killed
         └──── `distributed.restarts`: another group, wherever there is room now

What a rank is, and how all end when one does, is `rllm.distributed.launch`'s to say: this is where they run.
"""

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rllm.config.schema import TrainConfig
from rllm.distributed.launch import POLL_S, RankProcess, RankStarter, ending_of, rank_variables
from rllm.errors import ClusterError, ConfigError, RllmError
from rllm.integrations.ray.answers import ENDED, first_line
from rllm.integrations.ray.job import Machine, require_same_versions, this_machine
from rllm.integrations.ray.rank_host import RankHost, RankOutput
from rllm.integrations.ray.session import PLACED_ON

MAX_FAILED_STARTS = 5
"""Actors of one rank that may end before they answer, as on a crowded node."""
ANSWER_S = 60.0
"""For an actor that has answered once."""
STOP_S = 10.0
"""For a rank that is killed to be gone before its actor is ended with it."""


def rank_starter(config: TrainConfig, directory: Path) -> RankStarter:
    """`directory` is the run that all ranks write."""
    return partial(_ranks_in_group, config, directory)


@contextmanager
def _ranks_in_group(
    config: TrainConfig, directory: Path, words: Sequence[str], outputs: Sequence[IO[bytes] | None]
) -> Iterator[Sequence[RankProcess]]:
    num_ranks, hosts, ranks = len(outputs), list[Any](), list[PlacedRank]()
    group = placement_group(
        [{"CPU": config.threads}] * num_ranks, strategy=config.distributed.placement.upper()
    )
    try:
        # A group is placed as a whole: ranks that begin without the others would only wait for them.
        if not group.wait(config.cluster.timeout_s):
            raise ClusterError(_shortage(config, num_ranks))
        hosts += (_new_host(number, group, config) for number in range(num_ranks))  # all begin together
        machines = [_machine_of(number, hosts, group, config) for number in range(num_ranks)]
        for machine in machines:
            require_same_versions(this_machine(), machine)
        _require_shared_files(hosts, machines, directory)
        places = _places(group, machines, _answer(hosts[0].free_port.remote()))
        for number, (host, variables) in enumerate(zip(hosts, places, strict=True)):
            _answer(host.start.remote(list(words), variables, os.getcwd()))
            ranks.append(PlacedRank(host, f"rank-{number} on {machines[number].host}", outputs[number]))
        yield ranks
    finally:
        _end(ranks)
        for host in hosts:
            ray.kill(host, no_restart=True)
        remove_placement_group(group)


def _new_host(number: int, group: PlacementGroup, config: TrainConfig) -> Any:
    """The actor of a rank, which begins where the group has its cores."""
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    options: dict[str, Any] = {
        "num_cpus": config.threads,
        "max_restarts": 0,  # the ranks beside it end as well: all of them start again, or none
        "max_task_retries": 0,
        "max_concurrency": 4,  # a signal goes out while `look` waits
        "scheduling_strategy": place,
    }
    return ray.remote(RankHost).options(**options).remote(f"rank-{number}")


def _machine_of(number: int, hosts: list[Any], group: PlacementGroup, config: TrainConfig) -> Machine:
    """The machine of the actor of a rank; another one takes its place where Ray gives up on starting it."""
    for attempt in range(1, MAX_FAILED_STARTS + 1):
        try:
            return ray.get(hosts[number].machine.remote(), timeout=config.cluster.timeout_s)
        except ENDED as error:
            if attempt == MAX_FAILED_STARTS:
                raise ClusterError(
                    f"{attempt} actors of rank {number} have ended before they answered, the last: "
                    f"{first_line(error)}. Is there memory on the nodes?"
                ) from error
            hosts[number] = _new_host(number, group, config)
        except GetTimeoutError as error:
            raise ClusterError(
                f"The actor of rank {number} has not answered for {config.cluster.timeout_s:.0f} s "
                "(`cluster.timeout_s`): its node is overloaded, or cut off."
            ) from error
    raise AssertionError("the last attempt returns or raises")


def _places(group: PlacementGroup, machines: Sequence[Machine], port: int) -> list[dict[str, str]]:
    """The environment of each rank."""
    address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_of = placement_group_table(group)["bundles_to_node_id"]
    addresses = [address_of[node_of[number]] for number in range(len(machines))]
    cluster, num_before = ray.get_runtime_context().gcs_address, Counter[str]()
    places: list[dict[str, str]] = []
    for number, (address, machine) in enumerate(zip(addresses, machines, strict=True)):
        # A rank is a child of its actor, whose end it has to notice.
        places.append(
            {
                **rank_variables(
                    number, len(machines), host=addresses[0], port=port, starter_pid=machine.pid
                ),
                "LOCAL_RANK": str(num_before[address]),
                "LOCAL_WORLD_SIZE": str(addresses.count(address)),
                PLACED_ON: cluster,
            }
        )
        num_before[address] += 1
    return places


class PlacedRank:
    """A `RankProcess` that is an actor's child."""

    def __init__(self, host: Any, name: str, output: IO[bytes] | None) -> None:
        """`output`: the place for what it prints; None is where this process prints."""
        self.returncode: int | None = None
        self._host, self._name, self._output = host, name, output
        self._look = host.look.remote()
        self._loss = ""
        """The reason for which its actor has ended."""

    def poll(self) -> int | None:
        # `look` waits at the actor for news; here is only seen whether its answer has come.
        if self.returncode is None and ray.wait([self._look], timeout=0)[0]:
            try:
                output: RankOutput = ray.get(self._look)
            except ENDED as error:
                # The rank was killed with its actor.
                self._loss, self.returncode = first_line(error), -signal.SIGKILL
            else:
                self._write(output)
                self.returncode = output.code
                if output.code is None:
                    self._look = self._host.look.remote()
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        self._host.send_signal.remote(sig)

    def interrupt(self) -> None:
        """Ctrl-C does not get there by itself, and Ray starts its processes deaf to it."""
        self.send_signal(signal.SIGTERM)

    @property
    def ending(self) -> str:
        if self._loss:
            return f"was lost with its actor, {self._name} ({self._loss})"
        return ending_of(self.returncode or 0)

    def _write(self, output: RankOutput) -> None:
        for text, own in ((output.stdout, sys.stdout), (output.stderr, sys.stderr)):
            stream = own.buffer if self._output is None else self._output
            stream.write(text)
            stream.flush()


def _end(ranks: Sequence[PlacedRank]) -> None:
    """End those that are left; one that does not end in time ends with its actor."""
    deadline_s = time.monotonic() + STOP_S
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGKILL)
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _require_shared_files(hosts: Sequence[Any], machines: Sequence[Machine], directory: Path) -> None:
    """Raises ConfigError where a node does not see what the ranks read and write together: the directory in
    which the command was given, and the one that the run is in."""
    # The run itself may not be there yet.
    above = next(each for each in directory.absolute().parents if each.is_dir())
    with ExitStack() as marks:
        paths = [
            marks.enter_context(tempfile.NamedTemporaryFile(prefix=".rllm-shared-", dir=place)).name
            for place in dict.fromkeys((Path.cwd(), above))
        ]
        for host, machine in zip(hosts, machines, strict=True):
            for path in _answer(host.unreadable.remote(paths)):
                raise ConfigError(
                    f"Node {machine.host} cannot read {Path(path).parent}, and ranks write one run together: "
                    "give the command, and its --output, in a file system that all nodes see, or leave "
                    "`distributed.placement` at here."
                )


def _answer(ref: Any) -> Any:
    """An actor's answer. Raises ClusterError where there is none, and what it raised itself."""
    try:
        return ray.get(ref, timeout=ANSWER_S)
    except RayTaskError as error:
        if isinstance(error.cause, RllmError):
            raise error.cause from error
        raise ClusterError(f"A rank could not be started: {first_line(error.cause)}") from error
    except (*ENDED, GetTimeoutError) as error:
        raise ClusterError(f"A rank could not be started: {first_line(error)}") from error


def _shortage(config: TrainConfig, num_ranks: int) -> str:
    nodes = ", ".join(
        f"{node['NodeManagerAddress']} {node['Resources'].get('CPU', 0):g} CPUs"
        for node in ray.nodes()
        if node["Alive"]
    )
    return (
        f"The nodes have had no room for {num_ranks} ranks for {config.cluster.timeout_s:.0f} s "
        f"(`cluster.timeout_s`): each asks for {config.threads} CPUs (`threads`), placed by "
        f"`distributed.placement` {config.distributed.placement}, and the nodes have in all: "
        f"{nodes or 'none is alive'}. Add a node, end what else uses them, or ask for less."
    )
