"""The attempts of a stored run ──► pairs of a success and a failure, counted.

    episodes ──► attempts of one role ──► at one task after one prompt ──► pairs

Attempts keep the ids that were sampled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.config.preference import PreferenceDataConfig
from rllm.trainer.traces import require_one_role
from rllm.types.episode import LEARNABLE, Episode, TerminationReason, Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class StoredAttempt:
    """One trajectory of a stored run that says something about the policy."""

    where: str
    """Its episode, for people."""
    task: str
    """The question, whatever the visit."""
    trajectory: Trajectory
    success: bool

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The ids that the attempt began with."""
        return tuple(self.trajectory.steps[0].prompt_ids)

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """Everything read and sampled, turn by turn: two attempts with the same are one."""
        return tuple((*step.prompt_ids, *step.response_ids) for step in self.trajectory.steps)


@dataclass(kw_only=True, slots=True)
class RunCounts:
    """The numbers of a run's trajectories by what became of them.

    trajectories = other_role + failed + timed_out + unscored + repeated + contradictory
                 + successes + failures
    """

    trajectories: int = 0
    other_role: int = 0
    failed: int = 0
    """The number of episodes that infrastructure or the agent failed, or that were cancelled: never a worse
    answer."""
    timed_out: int = 0
    """Cut off by the clock, which says nothing about the answer."""
    unscored: int = 0
    repeated: int = 0
    """Token for token as an attempt before it, with the same result."""
    contradictory: int = 0
    """Token for token as an attempt with the other result: chance decided, not the answer."""
    successes: int = 0
    failures: int = 0
    tasks: int = 0
    tasks_with_both: int = 0
    """With a success and a failure after one prompt."""


def plays_of(
    episodes: Iterable[Episode], task_of: Callable[[Episode], str], data: PreferenceDataConfig
) -> tuple[list[StoredAttempt], RunCounts]:
    """Successes and failures of one role, each sequence of tokens once.

    `task_of` says what was asked, whatever the visit. Raises ConfigError where the role has to be named, or
    is not there.
    """
    plays: list[StoredAttempt] = []
    counts = RunCounts()
    roles = set[str]()
    for episode in episodes:
        for trajectory in episode.trajectories:
            counts.trajectories += 1
            roles.add(trajectory.name)
            reward = trajectory.reward
            if data.role not in ("", trajectory.name):
                counts.other_role += 1
            elif episode.outcome not in LEARNABLE or not trajectory.steps:
                counts.failed += 1
            elif TerminationReason.TIMEOUT in (episode.termination_reason, trajectory.termination_reason):
                counts.timed_out += 1
            elif reward is None:
                counts.unscored += 1
            else:
                plays.append(
                    StoredAttempt(
                        where=f"episode {episode.id} ({trajectory.name})",
                        task=task_of(episode),
                        trajectory=trajectory,
                        success=reward >= data.min_reward,
                    )
                )
    require_one_role(data, roles)
    return _each_once(plays, counts), counts


def _each_once(plays: Sequence[StoredAttempt], counts: RunCounts) -> list[StoredAttempt]:
    keys = [(each.task, each.ids) for each in plays]
    results: dict[tuple[str, Any], set[bool]] = {}
    for key, each in zip(keys, plays, strict=True):
        results.setdefault(key, set()).add(each.success)
    first_plays: dict[tuple[str, Any], StoredAttempt] = {}
    for key, each in zip(keys, plays, strict=True):
        if len(results[key]) == 2:
            counts.contradictory += 1
        elif key in first_plays:
            counts.repeated += 1
        else:
            first_plays[key] = each
    counts.successes = sum(each.success for each in first_plays.values())
    counts.failures = len(first_plays) - counts.successes
    return list(first_plays.values())


def pairs_of(
    attempts: Sequence[StoredAttempt], data: PreferenceDataConfig, counts: RunCounts
) -> list[tuple[StoredAttempt, StoredAttempt]]:
    """(success, failure) at one task after one prompt, by `data.pairing`; of each task the first
    `data.max_per_task`."""
    after: dict[str, dict[tuple[int, ...], list[StoredAttempt]]] = {}
    for each in attempts:
        after.setdefault(each.task, {}).setdefault(each.prompt_ids, []).append(each)
    of_task = {
        task: [pair for group in prompts.values() for pair in _pairs(group, data.pairing)]
        for task, prompts in after.items()
    }
    counts.tasks = len(of_task)
    counts.tasks_with_both = sum(bool(pairs) for pairs in of_task.values())
    return [pair for pairs in of_task.values() for pair in pairs[: data.max_per_task or None]]


def _pairs(group: Sequence[StoredAttempt], pairing: str) -> Iterator[tuple[StoredAttempt, StoredAttempt]]:
    successes = [each for each in group if each.success]
    failures = [each for each in group if not each.success]
    if pairing == "all":
        return ((better, worse) for better in successes for worse in failures)
    return zip(successes, failures, strict=False)


def at_most(attempts: Sequence[StoredAttempt], limit: int, counts: RunCounts) -> list[StoredAttempt]:
    """The first `limit` answers to each task, for a loss that needs no pairs; 0 takes all."""
    of_task: dict[str, list[StoredAttempt]] = {}
    for each in attempts:
        of_task.setdefault(each.task, []).append(each)
    counts.tasks = len(of_task)
    counts.tasks_with_both = sum(len({each.success for each in mine}) == 2 for mine in of_task.values())
    return [each for mine in of_task.values() for each in mine[: limit or None]]
