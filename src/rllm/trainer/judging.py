"""The pay of each trajectory of a step, its comparison group, and the trajectories left out, with the reason.

episodes ──► truncation ──► overlong answers ──► groups (task, role) ──► groups without signal are rejected
first attempts ──► the same payments ──► tasks that all of them solved alike are not played on
greedy attempts ──► the same payments ──► one baseline for each (task, role)

A pure function of the episodes, so that the loop can ask which tasks are worth a further round, and a stored
run comes to the same.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rllm.algorithms.estimators import estimator_named
from rllm.algorithms.filters import (
    GroupKey,
    Solution,
    are_solved_alike,
    continued_group_weight,
    is_reward,
    overlong_rewards,
    rejected_groups,
    solution_of,
)
from rllm.algorithms.grouping import GroupingCounts, group_episodes
from rllm.algorithms.truncation import treat_truncated
from rllm.config.schema import TrainConfig
from rllm.errors import RewardError
from rllm.types.episode import Episode, TrajectoryGroup

TRUNCATED, NO_SIGNAL, NO_BASELINE, TIED = "truncated", "no_signal", "no_baseline", "tied"
"""The reasons that a trajectory is left out: a limit cut it off, its group is filtered as one that teaches
nothing, the greedy attempt that it would be compared with failed, or its group ties and `algorithm.ties`
drops those."""


@dataclass(kw_only=True, slots=True)
class Judged:
    """The trajectories of a step."""

    groups: dict[GroupKey, TrajectoryGroup]
    """The groups that are learned from."""
    counts: GroupingCounts
    rewards: dict[str, float]
    """Uid -> reward of trajectories that are paid otherwise than they say."""
    left_out: dict[str, str]
    """Uid -> why it is left out."""
    groups_without_signal: list[GroupKey] = field(default_factory=list[GroupKey])
    """Groups without signal, where they are filtered."""
    without_baseline: list[GroupKey] = field(default_factory=list[GroupKey])
    baselines: dict[GroupKey, float] = field(default_factory=dict[GroupKey, float])
    """Mean reward of the greedy attempt's trajectories."""
    first_attempts: int = 0
    """`filters.first_attempts`."""
    tasks_solved_first: list[str] = field(default_factory=list[str])
    """Ids of the tasks that were not played on after their first attempts."""
    attempts_not_played: int = 0
    """The rest of the groups at those tasks."""
    task_weights: dict[str, float] = field(default_factory=dict[str, float])
    """Task id -> factor of its groups' advantages, of the tasks that were played on where others were not."""

    def leave_out(self, keys: Sequence[GroupKey], reason: str) -> None:
        """Neither compare nor learn from these groups."""
        for key in keys:
            for trajectory in self.groups.pop(key).trajectories:
                self.left_out[trajectory.uid] = reason


def judge(
    config: TrainConfig, episodes: Sequence[Episode], greedy: Sequence[Episode] | None = None
) -> Judged:
    """`greedy`: one more attempt at each task by the likeliest tokens, where an estimator compares with it;
    None where that is not asked yet."""
    cut_off, rewards = _paid_rewards(config, episodes)
    groups, counts = group_episodes(episodes, cut_off)
    result = Judged(groups=groups, counts=counts, rewards=rewards, left_out=dict.fromkeys(cut_off, TRUNCATED))
    if config.filters.first_attempts:
        _note_first_attempts(config, result, _solutions(episodes, rewards, cut_off))
    if config.filters.rejects:
        result.groups_without_signal = rejected_groups(groups, rewards, config.filters.min_reward_std)
        result.leave_out(result.groups_without_signal, NO_SIGNAL)
    if greedy is not None:
        result.baselines = _baselines(config, greedy)
        result.without_baseline = [
            key
            for key in result.groups
            if estimator_named(config.estimator_of(key[1])).needs_greedy and key not in result.baselines
        ]
        result.leave_out(result.without_baseline, NO_BASELINE)
    return result


def tasks_solved_first(config: TrainConfig, first_episodes: Sequence[Episode]) -> set[str]:
    """Ids of the tasks that all of their first attempts solved and were paid alike."""
    cut_off, rewards = _paid_rewards(config, first_episodes)
    solutions = _solutions(first_episodes, rewards, cut_off)
    return {task_id for task_id, solutions_K in solutions.items() if are_solved_alike(solutions_K)}


def _note_first_attempts(
    config: TrainConfig, judgement: Judged, solutions_by_task: Mapping[str, Sequence[Solution | None]]
) -> None:
    """Note which tasks were stopped after their first attempts, and the weights of those that went on."""
    judgement.first_attempts = first_attempts = config.filters.first_attempts
    for task_id, solutions in solutions_by_task.items():
        if len(solutions) <= first_attempts:
            judgement.tasks_solved_first.append(task_id)
            judgement.attempts_not_played += config.rollout.group_size - len(solutions)
        else:
            judgement.task_weights[task_id] = continued_group_weight(solutions, first_attempts)


def _solutions(
    episodes: Iterable[Episode], rewards: Mapping[str, float], cut_off: Collection[str]
) -> dict[str, list[Solution | None]]:
    """Task id -> what `solution_of` says of each of its attempts."""
    by_task: dict[str, list[Solution | None]] = {}
    for each in episodes:
        by_task.setdefault(each.task_id, []).append(solution_of(each, rewards, cut_off))
    return by_task


def needs_greedy(config: TrainConfig) -> bool:
    """Whether an estimator of the run compares with a greedy attempt."""
    return any(estimator_named(name).needs_greedy for name in config.estimators())


def tasks_with_signal(
    config: TrainConfig, episodes: Sequence[Episode], is_trained: Callable[[str], bool]
) -> set[str]:
    """Ids of the tasks at which a role that learns has a group that is not rejected."""
    return {task_id for task_id, role in judge(config, episodes).groups if is_trained(role)}


def _paid_rewards(config: TrainConfig, episodes: Iterable[Episode]) -> tuple[set[str], dict[str, float]]:
    """Uids that a limit cut off and that are left out; uid -> reward of those that are paid otherwise."""
    episodes, filters = list(episodes), config.filters
    treatment = treat_truncated(episodes, config.rollout.truncation)
    rewards = treatment.rewards
    if filters.overlong_buffer:
        # Behind truncation: the cost comes off what that has left.
        rewards |= overlong_rewards(
            episodes,
            rewards,
            limit_of=config.max_tokens_of,
            buffer=filters.overlong_buffer,
            penalty=filters.overlong_penalty,
        )
    return treatment.masked, rewards


def _baselines(config: TrainConfig, greedy: Sequence[Episode]) -> dict[GroupKey, float]:
    """Mean over the trajectories of a role: a workflow may have several of it in one attempt."""
    cut_off, rewards = _paid_rewards(config, greedy)
    baselines: dict[GroupKey, float] = {}
    for key, group in group_episodes(greedy, cut_off)[0].items():
        group_rewards = [rewards.get(each.uid, each.reward) for each in group.trajectories]
        numbers = [each for each in group_rewards if is_reward(each)]
        if len(numbers) != len(group_rewards):
            raise RewardError(
                f"The greedy attempt at task {key[0]} (role {key[1]}) was paid {group_rewards}; a reward "
                "must be a finite number. Mend the environment, workflow or evaluator that set it."
            )
        baselines[key] = sum(numbers) / len(numbers)
    return baselines
