"""Episodes in, keyed groups with one advantage per trajectory out.

Groups are keyed by (task, role), never by position: shuffling or losing attempts changes no other attempt's
comparison.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rllm.algorithms.advantages import Estimator, estimator_named
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
    """All rewards equal: nothing to learn from by comparing attempts at one task."""
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
    rule = estimator_named(estimator)
    advantages: dict[str, float] = {}
    rewards_of_role: dict[str, dict[str, float]] = {}
    for group in groups.values():
        rewards = {trajectory.uid: _reward_of(group, trajectory) for trajectory in group.trajectories}
        counts.groups += 1
        if len(rewards) < 2:
            counts.alone += 1
        elif len(set(rewards.values())) == 1:
            counts.tied += 1
        else:
            counts.compared += 1
        if rule.within_groups:
            advantages |= _compared(rewards, rule)
        else:
            rewards_of_role.setdefault(group.role, {}).update(rewards)
    for rewards in rewards_of_role.values():
        advantages |= _compared(rewards, rule)
    return advantages


def _compared(rewards: Mapping[str, float], rule: Estimator) -> dict[str, float]:
    """Advantages of what is compared with each other.

    Zeros are written out for ties, so that rounding of the mean cannot turn "nothing to learn" into noise.
    """
    if len(set(rewards.values())) < 2:
        return dict.fromkeys(rewards, 0.0)
    values = rule.estimate(np.array(list(rewards.values()), dtype=np.float64))
    return dict(zip(rewards, values.tolist(), strict=True))


def _reward_of(group: TrajectoryGroup, trajectory: Trajectory) -> float:
    reward = trajectory.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RewardError(
            f"Trajectory {trajectory.uid} of task {group.task_id} (role {group.role}) has reward {reward!r}; "
            "a reward must be a finite number. Mend the environment or evaluator that set it."
        )
    return float(reward)
