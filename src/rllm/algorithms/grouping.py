"""Episodes in, keyed groups with one advantage per trajectory out.

Groups are keyed by (task, role), never by position: shuffling or losing attempts changes no other attempt's
comparison.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rllm.algorithms.advantages import Estimator, estimator_named
from rllm.errors import AgentError, RewardError
from rllm.types.episode import Episode, Outcome, TrajectoryGroup

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
    masked: int = 0
    """Trajectories of learnable episodes that are in no group."""


def group_episodes(
    episodes: Iterable[Episode], masked: Collection[str] = frozenset()
) -> tuple[dict[tuple[str, str], TrajectoryGroup], GroupingCounts]:
    """Trajectories of the learnable episodes by (task_id, role), each group ordered by attempt.

    `masked`: uids of trajectories that are left out. Raises AgentError for two with the same uid, which could
    not be told apart.
    """
    groups: dict[tuple[str, str], TrajectoryGroup] = {}
    counts = GroupingCounts()
    seen: set[str] = set()
    for episode in sorted(episodes, key=lambda each: (each.task_id, each.rollout_idx)):
        counts.episodes += 1
        if episode.outcome not in LEARNABLE:
            counts.removed += 1
            continue
        counts.learnable += 1
        for trajectory in episode.trajectories:
            if trajectory.uid in seen:
                raise AgentError(
                    f"Episode {episode.id} has a trajectory of role {trajectory.name} with the uid of "
                    f"another, {trajectory.uid}; make a new Trajectory for each, as an agent's reset() does."
                )
            seen.add(trajectory.uid)
            if trajectory.uid in masked:
                counts.masked += 1
                continue
            key = (episode.task_id, trajectory.name)
            group = groups.setdefault(key, TrajectoryGroup(task_id=key[0], role=key[1]))
            group.trajectories.append(trajectory)
    return groups, counts


def group_advantages(
    groups: Mapping[tuple[str, str], TrajectoryGroup],
    estimator_of: Callable[[str], str],
    counts: GroupingCounts,
    *,
    rewards: Mapping[str, float] = {},
    weight_of: Callable[[str], float] = lambda role: 1.0,
) -> dict[str, float]:
    """Trajectory uid -> advantage.

    `estimator_of` names the estimator of a role, `weight_of` says what its advantages are multiplied by.
    `rewards`: uid -> reward of trajectories that are paid otherwise than they say. Raises RewardError for a
    trajectory whose reward is not a finite number.
    """
    advantages: dict[str, float] = {}
    rewards_of_role: dict[str, dict[str, float]] = {}
    for group in groups.values():
        rule = estimator_named(estimator_of(group.role))
        paid = {each.uid: rewards.get(each.uid, each.reward) for each in group.trajectories}
        paid = {uid: _finite(group, uid, reward) for uid, reward in paid.items()}
        counts.groups += 1
        if len(paid) < 2:
            counts.alone += 1
        elif len(set(paid.values())) == 1:
            counts.tied += 1
        else:
            counts.compared += 1
        if rule.within_groups:
            advantages |= _compared(paid, rule, weight_of(group.role))
        else:
            rewards_of_role.setdefault(group.role, {}).update(paid)
    for role, paid in rewards_of_role.items():
        advantages |= _compared(paid, estimator_named(estimator_of(role)), weight_of(role))
    return advantages


def _compared(rewards: Mapping[str, float], rule: Estimator, weight: float) -> dict[str, float]:
    """Advantages of what is compared with each other.

    Zeros are written out for ties, so that rounding of the mean cannot turn "nothing to learn" into noise.
    """
    if rule.has_baseline and len(set(rewards.values())) < 2:
        return dict.fromkeys(rewards, 0.0)
    values = weight * rule.estimate(np.array(list(rewards.values()), dtype=np.float64))
    return dict(zip(rewards, values.tolist(), strict=True))


def _finite(group: TrajectoryGroup, uid: str, reward: object) -> float:
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RewardError(
            f"Trajectory {uid} of task {group.task_id} (role {group.role}) has reward {reward!r}; "
            "a reward must be a finite number. Mend the environment, workflow or evaluator that set it."
        )
    return float(reward)
