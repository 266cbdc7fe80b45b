"""Which tasks are whose: every task is with one worker at a time, and its episodes are taken once.

    tasks ──► leases of about `lease_episodes` ──take──► worker ──finish──► done
                     ▲                                     │
                     └────────────── give_back ◄───────────┘ the worker has ended

Which tasks share a lease depends on their order alone, never on who plays them: so what is sampled together,
and with it the last bit of every log-probability, is the same on any number of workers.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.engine.attempts import attempts_at
from rllm.errors import ClusterError, CountError
from rllm.types.task import EpisodeId

MAX_LOSSES = 3
"""Workers that may end with a lease before the run does: then it is the lease that ends them."""


@dataclass(kw_only=True, slots=True, eq=False)
class Lease:
    """Tasks that one worker plays together, every attempt at each."""

    tasks: Sequence[Any]
    num_episodes: int
    losses: list[str] = field(default_factory=list[str])
    """The reasons for which workers that had it before have not finished it."""


class Leases:
    """The leases of one wave of tasks; each waits, is out, or is done."""

    def __init__(
        self, tasks: Sequence[Any], *, group_size: int, size: int, skip: Collection[EpisodeId] = ()
    ) -> None:
        """`tasks` have ids of their own; a lease has `size` of them. Attempts to `skip` are not played."""
        shares = [tasks[start : start + size] for start in range(0, len(tasks), size)]
        leases = [
            Lease(tasks=share, num_episodes=len(attempts_at(share, group_size, skip=skip)))
            for share in shares
        ]
        self._waiting = deque(each for each in leases if each.num_episodes)
        self._out = set[Lease]()
        self.num_episodes = sum(each.num_episodes for each in self._waiting)

    @property
    def are_open(self) -> bool:
        """Whether any is not done."""
        return bool(self._waiting or self._out)

    @property
    def have_waiting(self) -> bool:
        """Whether any is with no worker."""
        return bool(self._waiting)

    def take(self) -> Lease | None:
        """The next one, for a worker; None where all are out or done."""
        if not self._waiting:
            return None
        lease = self._waiting.popleft()
        self._out.add(lease)
        return lease

    def finish(self, lease: Lease, num_episodes: int) -> None:
        """Raises CountError where the worker has played another number of episodes than it was given."""
        self._out.remove(lease)
        if num_episodes != lease.num_episodes:
            raise CountError(
                f"A worker was given {lease.num_episodes} episodes and has returned {num_episodes}."
            )

    def give_back(self, lease: Lease, cause: str = "") -> None:
        """Its worker has ended: the next worker gets it. `cause` is empty where the worker had not begun.

        Raises ClusterError for one that too many workers have ended with.
        """
        self._out.remove(lease)
        if cause:
            lease.losses.append(cause)
        if len(lease.losses) >= MAX_LOSSES:
            names = ", ".join(
                str(each["task_id"] if isinstance(each, dict) else each.task_id) for each in lease.tasks[:4]
            )
            raise ClusterError(
                f"{len(lease.losses)} rollout workers have ended with the same tasks ({names}), the last: "
                f"{cause} If they were short of memory, lower `cluster.lease_episodes`; if the environment "
                "ends its process, it has to be mended."
            )
        # To the front: it has been waited for longest.
        self._waiting.appendleft(lease)
