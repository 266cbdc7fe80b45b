"""Which groups are learned from, and what long answers cost. Pure functions.

groups ──► rejected_groups(min_reward_std) ──► left out, counted; replaced by further tasks where sampling is
                                        dynamic
first attempts ──► all solved, paid alike? ──yes──► the group stops
                       └──no──► the others are played; continued_group_weight makes up for those that stopped
answer of L tokens ──► overlong_cost(L) ──► less reward
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeGuard

import numpy as np

from rllm.errors import CountError
from rllm.types.episode import LEARNABLE, Episode, TrajectoryGroup

GroupKey = tuple[str, str]
"""(task_id, role)."""


def has_signal(rewards_G: Sequence[float], min_reward_std: float = 0.0) -> bool:
    """Whether attempts at one task were paid so differently that comparing them teaches something.

    Yu et al. 2025 (arXiv:2503.14476), section 3.2, equation 11: a group whose attempts are all right, or all
    wrong, has no gradient. Here: two different rewards at least, and a standard deviation (ddof = 0) above
    `min_reward_std`. One attempt is compared with nothing, so it has none.
    """
    return len(set(rewards_G)) > 1 and float(np.std(rewards_G)) > min_reward_std


def rejected_groups(
    groups: Mapping[GroupKey, TrajectoryGroup], rewards: Mapping[str, float], min_reward_std: float
) -> list[GroupKey]:
    """Keys of the groups without signal, in their order.

    `rewards`: uid -> reward of trajectories that are paid otherwise than they say. A group with a reward that
    is no finite number stays: whoever compares it names it.
    """
    keys: list[GroupKey] = []
    for key, group in groups.items():
        group_rewards = [rewards.get(each.uid, each.reward) for each in group.trajectories]
        numbers = [float(each) for each in group_rewards if is_reward(each)]
        if len(numbers) == len(group_rewards) and not has_signal(numbers, min_reward_std):
            keys.append(key)
    return keys


Solution = tuple[tuple[str, float], ...]
"""The reward of each role, of an attempt that solved its task."""


def solution_of(
    episode: Episode, rewards: Mapping[str, float], cut_off: Collection[str] = frozenset()
) -> Solution | None:
    """The rewards of an attempt that solved its task; None for any other attempt.

    None as well where it failed, where a trajectory is `cut_off` (uids) or has no finite reward, and where
    two trajectories of one role were paid differently: comparing these teaches something. `rewards`: uid ->
    reward of trajectories that are paid otherwise than they say.
    """
    if episode.outcome not in LEARNABLE or not episode.is_correct:
        return None
    by_role: dict[str, float] = {}
    for trajectory in episode.trajectories:
        reward = rewards.get(trajectory.uid, trajectory.reward)
        if trajectory.uid in cut_off or not is_reward(reward):
            return None
        if by_role.setdefault(trajectory.name, reward) != reward:
            return None
    return tuple(sorted(by_role.items())) or None


def are_solved_alike(solutions_K: Sequence[Solution | None]) -> bool:
    """Whether all attempts solved their task and were paid alike, role by role."""
    return None not in solutions_K and len(set(solutions_K)) == 1


def continued_group_weight(solutions_G: Sequence[Solution | None], first_attempts: int) -> float:
    """1 / (1 - Σ_v C(n_v, k) / C(G, k)), where n_v of the G attempts have the solution v and k is
    `first_attempts`.

    The sum is the chance that the first k of these attempts, in a random order, are solved alike, so that the
    group would have been stopped. Attempts at one task are exchangeable: weighted by one over the chance of
    being played on (Horvitz and Thompson 1952, J. Amer. Stat. Assoc. 47), a group that was played on
    contributes on average what whole groups contribute. Raises CountError for attempts that are all solved
    alike: no order of them is played on.
    """
    counts = Counter(each for each in solutions_G if each is not None)
    num_orders = math.comb(len(solutions_G), first_attempts)
    num_stopped = sum(math.comb(count, first_attempts) for count in counts.values())
    if num_stopped == num_orders:
        raise CountError(
            f"A group of {len(solutions_G)} attempts that are all solved alike was played on after its first "
            f"{first_attempts}; was `filters.first_attempts` another when it was played?"
        )
    return num_orders / (num_orders - num_stopped)


def is_reward(value: object) -> TypeGuard[float]:
    """Whether it is a finite number, as a reward must be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def overlong_cost(num_tokens: int, limit: int, buffer: int, penalty: float) -> float:
    """The cost of an answer of `num_tokens` tokens: 0 up to `limit - buffer`, then linear up to `penalty` at
    `limit`.

    Yu et al. 2025 (arXiv:2503.14476), section 3.4, equation 13 (soft overlong punishment), there with a
    penalty of 1. Beyond `limit` there are no answers here; the cost would stay at `penalty`.
    """
    return penalty * min(1.0, max(0.0, (num_tokens - (limit - buffer)) / buffer))


def overlong_rewards(
    episodes: Iterable[Episode],
    rewards: Mapping[str, float],
    *,
    limit_of: Callable[[str], int],
    buffer: int,
    penalty: float,
) -> dict[str, float]:
    """Uid -> reward of every trajectory of the learnable episodes that an overlong answer costs something.

    Of several answers the longest counts. `limit_of`: role -> most tokens of an answer. `rewards`: uid ->
    reward of trajectories that are paid otherwise than they say.
    """
    less: dict[str, float] = {}
    for episode in episodes:
        if episode.outcome not in LEARNABLE:
            continue
        for trajectory in episode.trajectories:
            longest = max((len(step.response_ids) for step in trajectory.steps), default=0)
            cost = overlong_cost(longest, limit_of(trajectory.name), buffer, penalty)
            reward = rewards.get(trajectory.uid, trajectory.reward)
            if cost and is_reward(reward):
                less[trajectory.uid] = reward - cost
    return less
