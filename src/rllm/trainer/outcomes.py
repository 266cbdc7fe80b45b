"""The results of a batch of episodes: rewards, by role as well, failures, and what became of its calls."""

import difflib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rllm.config.schema import TrainConfig
from rllm.errors import AgentError, ConfigError, InferenceError
from rllm.trainer.judging import Judged
from rllm.types.episode import LEARNABLE, Episode, Outcome, TerminationReason, Trajectory
from rllm.types.sample import TrainingBatch, TrainingSample

log = logging.getLogger(__name__)

CALL_COUNTS = (
    "calls",
    "unclaimed_calls",
    "unclaimed_tokens",
    "retried_calls",
    "partial_calls",
    "failed_calls",
    "abandoned_threads",
    "abandoned_attempts",
)
"""Metrics of an episode that a step adds up."""


def require_one_that_did_not_fail(episodes: Sequence[Episode], max_context: int) -> None:
    """Raises AgentError, or InferenceError where the engine was to blame, when every episode failed.

    There is nothing to learn then, and most likely nothing ever will be: a bug, or a server that is gone.
    """
    if not episodes or any(episode.outcome in LEARNABLE for episode in episodes):
        return
    causes = Counter(_cause_of(episode) for episode in episodes)
    (cause, count) = causes.most_common(1)[0]
    longer = TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    if all(episode.termination_reason is longer for episode in episodes):
        raise AgentError(
            f"All {len(episodes)} conversations outgrew the context: raise `inference.max_context`, which is "
            f"{max_context}, or ask for less. The first said: {cause}"
        )
    message = f"All {len(episodes)} episodes failed, {count} of them with {cause}"
    if any(episode.outcome is Outcome.POLICY_FAILURE for episode in episodes):
        raise AgentError(f"{message} Mend it and start again: the run goes on from its last checkpoint.")
    raise InferenceError(f"{message} Start again when it is back: the run goes on from its last checkpoint.")


def warn_of_full_contexts(episodes: Sequence[Episode], max_context: int) -> None:
    """Say so when at least half of the episodes were cut off because their conversation filled the context:
    what an agent would have done next is then never learned."""
    full = sum(each.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED for each in episodes)
    if full and 2 * full >= len(episodes):
        log.warning(
            "%d of %d episodes ended because their conversation outgrew the context; raise "
            "`inference.max_context`, which is %d.",
            full,
            len(episodes),
            max_context,
        )


def _cause_of(episode: Episode) -> str:
    """Type and message, and the line of code where it is known."""
    infos = (episode.info, *(trajectory.info for trajectory in episode.trajectories))
    error = next((info["error"] for info in infos if "error" in info), {})
    lines = [line.strip() for line in error.get("traceback", "").splitlines() if "  File " in line]
    where = f" ({lines[-1]})" if lines else ""
    return f"{error.get('type', 'no cause on record')}: {error.get('message', '')}{where}."


def require_known_roles(episodes: Sequence[Episode], config: TrainConfig) -> None:
    """Raises ConfigError where more than `rollout.max_failed_fraction` of the episodes have a role that no
    policy is chosen for, and for a role of the configuration that nobody plays and whose name is nearly that
    of one somebody plays."""
    roles: set[str] = set()
    strays: list[ConfigError] = []
    for episode in episodes:
        try:
            for trajectory in episode.trajectories:
                config.policy_of(trajectory.name)
                roles.add(trajectory.name)
        except ConfigError as error:
            strays.append(error)
    if len(strays) > config.rollout.max_failed_fraction * len(episodes):
        raise strays[0]
    for role in config.roles.keys() - roles:
        if close := difflib.get_close_matches(role, roles - config.roles.keys(), n=1):
            raise ConfigError(
                f"`roles.{role}` is configured, but nobody plays it; there are {', '.join(sorted(roles))}: "
                f"did you mean `roles.{close[0]}`?"
            )


def num_sampled(episodes: Sequence[Episode]) -> int:
    """Tokens that were sampled in them."""
    return sum(
        len(step.response_ids) for each in episodes for trail in each.trajectories for step in trail.steps
    )


def step_metrics(episodes: Sequence[Episode], judgement: Judged, batch: TrainingBatch) -> dict[str, Any]:
    """The metrics of a training step's episodes.

    With `filters.first_attempts`, `success`, `reward_mean` and those of roles are of the first attempts.
    """
    counts = judgement.counts
    # Tasks that were solved first have fewer attempts: a mean over all would be one of the harder tasks.
    first = judgement.first_attempts
    first_episodes = [each for each in episodes if not first or each.rollout_idx < first]
    rewards = [episode.reward for episode in first_episodes if episode.outcome in LEARNABLE]
    turns = sum(len(each.steps) for episode in episodes for each in episode.trajectories)
    return {
        "success": sum(episode.is_correct for episode in first_episodes) / max(1, len(rewards)),
        "reward_mean": sum(rewards) / max(1, len(rewards)),
        "episodes": counts.episodes,
        "failed": counts.removed,
        **ending_counts(episodes),
        "groups": counts.groups,
        "groups_tied": counts.tied,
        "groups_alone": counts.alone,
        "groups_rejected": len(judgement.groups_without_signal),
        "groups_without_baseline": len(judgement.without_baseline),
        "turns_mean": turns / max(1, len(episodes)),
        **_entropy(batch.samples),
        **call_counts(episodes),
        **{f"tokens.{name}": count for name, count in batch.token_counts.items()},
        **{
            f"role.{role}.{name}": value
            for role, facts in role_facts(first_episodes).items()
            for name, value in facts.items()
        },
        **(
            {
                "tasks_solved_first": len(judgement.tasks_solved_first),
                "attempts_not_played": judgement.attempts_not_played,
            }
            if first
            else {}
        ),
    }


def _entropy(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Return `policy_entropy`, the mean of -log p over sampled tokens in nats, an unbiased estimate of the
    policy's entropy; nothing where no token was sampled."""
    logprobs = [sample.logprobs_T[sample.trainable_T] for sample in samples if sample.num_trainable]
    return {"policy_entropy": -float(np.concatenate(logprobs).mean(dtype=np.float64))} if logprobs else {}


def ending_counts(episodes: Sequence[Episode]) -> dict[str, int]:
    """The number of episodes by how they ended: `ended.REASON` of those that may be learned from,
    `failed.OUTCOME` of the others."""
    names = (
        f"ended.{each.termination_reason}" if each.outcome in LEARNABLE else f"failed.{each.outcome}"
        for each in episodes
        if each.outcome is not None
    )
    return dict(Counter(names))


def role_facts(episodes: Sequence[Episode]) -> dict[str, dict[str, float]]:
    """`reward_mean`, `turns_mean` and `trajectories` of each role in the episodes that did not fail.

    Nothing where there is only one role: then they are those of the episodes.
    """
    by_role: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        if episode.outcome in LEARNABLE:
            for trajectory in episode.trajectories:
                by_role.setdefault(trajectory.name, []).append(trajectory)
    if len(by_role) < 2:
        return {}
    return {
        role: {
            "reward_mean": sum(each.reward or 0.0 for each in mine) / len(mine),
            "turns_mean": sum(len(each.steps) for each in mine) / len(mine),
            "trajectories": len(mine),
        }
        for role, mine in sorted(by_role.items())
    }


def call_counts(episodes: Sequence[Episode]) -> dict[str, int]:
    """The numbers of model calls of programs and workflows by what became of them; nothing for episodes of
    agents, whose calls are steps."""
    return {
        name: int(sum(episode.metrics.get(name, 0.0) for episode in episodes))
        for name in CALL_COUNTS
        if any(name in episode.metrics for episode in episodes)
    }
