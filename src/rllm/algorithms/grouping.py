"""Episodes in, keyed groups with one advantage per trajectory out.

Groups are keyed by (task, role), never by position: shuffling or losing attempts changes no other attempt's
comparison.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rllm.algorithms.advantages import estimator_named
from rllm.errors import RewardError
from rllm.types.episode import Episode, Outcome, Trajectory, TrajectoryGroup

LEARNABLE = frozenset({Outcome.SCORED, Outcome.TRUNCATED})
"""Outcomes whose reward says something about the policy. A failure is removed and counted: it is never a
zero."""


@dataclass(kw_only=True, slots=True)
class GroupingCounts:
    """episodes = learnable + removed; groups = compared + tied + alone."""

    episodes: int = 0
    learnable: int = 0
    removed: int = 0
    """Failed or cancelled."""
    groups: int = 0
    compared: int = 0
    tied: int = 0
    """All rewards equal: nothing to learn from."""
    alone: int = 0
    """One attempt left: no baseline, so advantage 0."""


def group_episodes(
    episodes: Iterable[Episode],
) -> tuple[dict[tuple[str, str], TrajectoryGroup], GroupingCounts]:
    """Trajectories of the learnable episodes by (task_id, role), each group ordered by attempt."""
    groups: dict[tuple[str, str], TrajectoryGroup] = {}
    counts = GroupingCounts()
    for episode in sorted(episodes, key=lambda each: (each.task_id, each.rollout_idx)):
        counts.episodes += 1
        if episode.outcome not in LEARNABLE:
            counts.removed += 1
            continue
        counts.learnable += 1
        for trajectory in episode.trajectories:
            key = (episode.task_id, trajectory.name)
            group = groups.setdefault(key, TrajectoryGroup(task_id=key[0], role=key[1]))
            group.trajectories.append(trajectory)
    return groups, counts


def group_advantages(
    groups: Mapping[tuple[str, str], TrajectoryGroup], estimator: str, counts: GroupingCounts
) -> dict[str, float]:
    """Trajectory uid -> advantage.

    Raises RewardError for a trajectory whose reward is not a finite number.
    """
    estimate = estimator_named(estimator)
    advantages: dict[str, float] = {}
    for group in groups.values():
        rewards_G = np.array(
            [_reward_of(group, trajectory) for trajectory in group.trajectories], dtype=np.float64
        )
        counts.groups += 1
        if len(rewards_G) < 2:
            counts.alone += 1
        elif np.ptp(rewards_G) == 0.0:
            counts.tied += 1
        else:
            counts.compared += 1
        # Written out for ties, so that rounding of the mean cannot turn "nothing to learn" into noise.
        advantages_G = np.zeros_like(rewards_G) if np.ptp(rewards_G) == 0.0 else estimate(rewards_G)
        for trajectory, advantage in zip(group.trajectories, advantages_G.tolist(), strict=True):
            advantages[trajectory.uid] = advantage
    return advantages


def _reward_of(group: TrajectoryGroup, trajectory: Trajectory) -> float:
    reward = trajectory.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RewardError(
            f"Trajectory {trajectory.uid} of task {group.task_id} (role {group.role}) has reward {reward!r}; "
            "a reward must be a finite number. Mend the environment or evaluator that set it."
        )
    return float(reward)
