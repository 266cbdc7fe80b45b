"""Episodes in, keyed groups with advantages of every turn of every trajectory out.

Groups are keyed by (task, role), never by position: shuffling or losing attempts changes no other attempt's
comparison.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rllm.algorithms.advantages import Attempt, ByToken, FloatArray, TurnAdvantages
from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.estimators import Estimator, estimator_named
from rllm.algorithms.returns import returns_to_go
from rllm.config.algorithm import CREDITS
from rllm.errors import AgentError, ConfigError, RewardError, choices_of
from rllm.types.episode import LEARNABLE, Episode, Step, Trajectory, TrajectoryGroup
from rllm.types.sample import NOT_SAMPLED


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
    """One attempt left, or fewer than the estimator compares: advantage 0 where that is the rule."""
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
    uids: set[str] = set()
    for episode in sorted(episodes, key=lambda each: (each.task_id, each.rollout_idx)):
        counts.episodes += 1
        if episode.outcome not in LEARNABLE:
            counts.removed += 1
            continue
        counts.learnable += 1
        for trajectory in episode.trajectories:
            if trajectory.uid in uids:
                raise AgentError(
                    f"Episode {episode.id} has a trajectory of role {trajectory.name} with the uid of "
                    f"another, {trajectory.uid}; make a new Trajectory for each, as an agent's reset() does."
                )
            uids.add(trajectory.uid)
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
    baselines: Mapping[tuple[str, str], float] = {},
    gamma: float = 1.0,
    credit: str = "trajectory",
    context: AlgorithmContext | None = None,
) -> dict[str, TurnAdvantages]:
    """Trajectory uid -> advantages of its turns.

    `estimator_of` names the estimator of a role, `weight_of` says what its advantages are multiplied by.
    `rewards`: uid -> reward of trajectories that are paid otherwise than they say. `baselines`: (task, role)
    -> reward of the greedy attempt. `gamma` discounts by turns. `context` has the keys of single
    estimators, and is what those of the user's may look at.

    `credit` says how the turns of a trajectory share what it earned:

    - `trajectory`: all of them get what the whole trajectory gets.
    - `discounted`: the last turn gets that, and each turn before `gamma` times what the next one gets.
    - `turn`: every turn is an attempt of its own, paid its return (what was paid from it on, discounted). It
      is compared with the turns at the same place of the other attempts at the task (the third with the
      third), or, by an estimator that compares the whole step, with all turns of the step. A turn that only
      one attempt came to is alone, so it gets 0 where attempts are compared.

    Raises RewardError for a trajectory whose reward, what one of its turns was paid, or its advantage is not
    a finite number; ConfigError for another `credit` than `trajectory` with an estimator that credits turns
    or tokens itself.
    """
    if credit not in CREDITS:
        raise ConfigError(f"`algorithm.credit` is {credit!r}; {choices_of(credit, CREDITS)}.")
    roles = dict.fromkeys(role for _, role in groups)
    rules = {role: _rule_of(estimator_of(role), credit, context) for role in roles}
    members_by_key: dict[tuple[str, ...], list[_Member]] = {}
    for number, (key, group) in enumerate(groups.items()):
        rule = rules[group.role]
        members = [
            _Member(
                trajectory=each,
                attempt=replace(
                    _attempt(each, _outcome_and_rewards(group, each, rewards), gamma),
                    states_K=tuple(map(state_of, each.steps)) if rule.needs_states else (),
                    baseline=baselines.get(key),
                    group=number,
                    task_id=group.task_id,
                ),
            )
            for each in group.trajectories
        ]
        _count(counts, [member.attempt.reward for member in members], rule.min_group)
        members_by_key.setdefault(key if rule.within_groups else (group.role,), []).extend(members)
    advantages: dict[str, TurnAdvantages] = {}
    for (*_, role), members in members_by_key.items():
        credits = _credit(members, rules[role], credit, gamma)
        weight = weight_of(role)
        by_token = isinstance(credits, ByToken)
        for member, values in zip(members, credits.advantages if by_token else credits, strict=True):
            if not (np.isfinite(values).all() or rules[role].token_level):
                raise RewardError(
                    f"{estimator_of(role)} makes the advantages {values} of the reward "
                    f"{member.attempt.reward:g} of trajectory {member.trajectory.uid} (role {role}); pay "
                    "smaller rewards, or mend the estimator."
                )
            weighted_values = weight * values
            advantages[member.trajectory.uid] = (
                _by_turn(member.trajectory, weighted_values) if by_token else weighted_values
            )
    return advantages


def _by_turn(trajectory: Trajectory, advantages_T: FloatArray) -> list[FloatArray]:
    """[K] of [R]: the trained tokens' advantages, and 0 where a grammar left no choice."""
    turns: list[FloatArray] = []
    start = 0
    for step in trajectory.steps:
        chosen_R = np.array(step.policy_versions) != NOT_SAMPLED
        end = start + int(chosen_R.sum())
        turn_R = np.zeros(len(step.response_ids))
        turn_R[chosen_R] = advantages_T[start:end]
        turns.append(turn_R)
        start = end
    return turns


def turn_rewards(trajectory: Trajectory, reward: float) -> FloatArray:
    """[K] what each turn was paid: as its step says; what the trajectory was paid beyond that, at the last.

    So they add up to `reward`, also where an evaluator judged the end or a limit changed what is paid.
    """
    step_rewards = [step.reward for step in trajectory.steps]
    rewards_K = np.array(step_rewards, dtype=np.float64)
    if step_rewards:
        rewards_K[-1] += reward - sum(step_rewards)
    return rewards_K


def num_forced(step: Step) -> int:
    """Tokens of an answer that no policy chose: a grammar left no choice."""
    versions = step.policy_versions
    # To count a number that is there is ten times as fast as to find that one is not.
    if versions and versions.count(versions[0]) == len(versions):
        return len(versions) if versions[0] == NOT_SAMPLED else 0
    return versions.count(NOT_SAMPLED)


def state_of(step: Step) -> str:
    """The agent's observation before a turn, as a key: equal for equal states.

    It is what the environment showed; for a program, of which no environment is known, the last message
    before the answer.
    """
    if isinstance(step.observation, str):
        return step.observation
    observation: object = step.observation
    if observation is None:
        observation = step.chat_completions[-2] if len(step.chat_completions) > 1 else step.prompt_ids
    try:
        return json.dumps(observation, sort_keys=True, default=_plain)
    except TypeError:  # keys that are tuples, or of several kinds, which have no order
        return json.dumps(_with_text_keys(observation), sort_keys=True, default=_plain)


def _with_text_keys(value: object) -> object:
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return {repr(key): _with_text_keys(each) for key, each in items}
    if isinstance(value, list | tuple):
        return [_with_text_keys(each) for each in cast("list[object]", value)]
    return value


def _plain(value: object) -> object:
    """A JSON form of a value that has none: arrays become lists, anything else its repr."""
    if isinstance(value, np.ndarray):
        return cast("NDArray[Any]", value).tolist()  # its repr leaves out the middle
    return repr(value)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Member:
    """An attempt, and the trajectory that its advantages are for."""

    trajectory: Trajectory
    attempt: Attempt


def _attempt(trajectory: Trajectory, outcome_and_rewards: tuple[float, FloatArray], gamma: float) -> Attempt:
    """The facts of a trajectory that need no other trajectory."""
    reward, turn_rewards_K = outcome_and_rewards
    num_tokens_K = tuple(map(_num_trained, trajectory.steps))
    return Attempt(
        reward=reward,
        num_tokens=sum(num_tokens_K),
        turn_rewards_K=turn_rewards_K,
        returns_K=returns_to_go(turn_rewards_K, gamma),
        role=trajectory.name,
        num_tokens_K=num_tokens_K,
    )


def _outcome_and_rewards(
    group: TrajectoryGroup, trajectory: Trajectory, rewards: Mapping[str, float]
) -> tuple[float, FloatArray]:
    """The reward of a trajectory and of each of its turns, where these are finite numbers."""
    where = f"Trajectory {trajectory.uid} of task {group.task_id} (role {group.role})"
    reward: object = rewards.get(trajectory.uid, trajectory.reward)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RewardError(
            f"{where} has reward {reward!r}; a reward must be a finite number. Mend the environment, "
            "workflow or evaluator that set it."
        )
    turn_rewards_K = turn_rewards(trajectory, float(reward))
    if not np.isfinite(turn_rewards_K).all():
        raise RewardError(
            f"{where} was paid {turn_rewards_K} turn by turn; each must be a finite number. Mend what set "
            "`step.reward`."
        )
    return float(reward), turn_rewards_K


def _num_trained(step: Step) -> int:
    return len(step.response_ids) - num_forced(step)


def _rule_of(name: str, credit: str, context: AlgorithmContext | None) -> Estimator:
    rule = estimator_named(name, context)
    if rule.tells_turns_apart and credit != "trajectory":
        raise ConfigError(
            f"`algorithm.credit` is {credit!r}, but {name} credits the turns of an attempt in its own way; "
            'set `credit = "trajectory"`.'
        )
    return rule


def _count(counts: GroupingCounts, rewards: Sequence[float], min_group: int) -> None:
    counts.groups += 1
    if len(rewards) < max(2, min_group):
        counts.alone += 1
    elif len(set(rewards)) == 1:
        counts.tied += 1
    else:
        counts.compared += 1


def _credit(
    members: Sequence[_Member], rule: Estimator, credit: str, gamma: float
) -> list[FloatArray] | ByToken:
    """[K] advantages of each of the members, which are compared with each other."""
    attempts = [member.attempt for member in members]
    if credit == "trajectory":
        return _estimate(attempts, rule)
    if credit == "discounted":
        return [
            advantages_K * gamma ** np.arange(len(advantages_K))[::-1]
            for advantages_K in _by_attempt(_estimate(attempts, rule), credit)
        ]
    turns: dict[int, list[tuple[int, int]]] = {}
    for number, attempt in enumerate(attempts):
        for turn in range(len(attempt.returns_K)):
            turns.setdefault(turn if rule.within_groups else 0, []).append((number, turn))
    advantages = [np.empty(len(attempt.returns_K)) for attempt in attempts]
    for places in turns.values():
        turn_advantages = _estimate([_turn_of(members[number], turn) for number, turn in places], rule)
        by_attempt = _by_attempt(turn_advantages, credit)
        for (number, turn), advantages_1 in zip(places, by_attempt, strict=True):
            advantages[number][turn] = advantages_1[0]
    return advantages


def _by_attempt(advantages: list[FloatArray] | ByToken, credit: str) -> list[FloatArray]:
    if isinstance(advantages, ByToken):
        raise ConfigError(
            f"`algorithm.credit` is {credit!r}, but the estimator credits every token by itself; set "
            '`credit = "trajectory"`.'
        )
    return advantages


def _turn_of(member: _Member, turn: int) -> Attempt:
    """A turn as an attempt of its own, paid its return; one of the turns at its place of its task."""
    returns_1 = member.attempt.returns_K[turn : turn + 1]
    return replace(
        member.attempt,
        reward=float(returns_1[0]),
        num_tokens=member.attempt.num_tokens_K[turn],
        num_tokens_K=member.attempt.num_tokens_K[turn : turn + 1],
        turn_rewards_K=returns_1,
        returns_K=returns_1,
        # A number for each group and place: no attempt has 2³² turns, so no two of them meet.
        group=(member.attempt.group << 32) + turn,
    )


def _estimate(attempts: Sequence[Attempt], rule: Estimator) -> list[FloatArray] | ByToken:
    if rule.within_groups and len(attempts) < rule.min_group:
        return [np.zeros(len(each.returns_K)) for each in attempts]
    return rule.estimate(attempts)
