"""Demonstrations and episodes in, optimizer updates out. Needs no engine: a stored run is replayed by it.

episodes ──► groups (task, role) ──► advantages ──► samples ──► each policy updates on its roles' samples
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllm.algorithms.grouping import group_advantages, group_episodes
from rllm.algorithms.losses import ImitationLoss, PolicyLoss
from rllm.algorithms.truncation import treat_truncated
from rllm.config.schema import TrainConfig
from rllm.data.sampler import TaskSampler
from rllm.trainer.backends.base import TrainingBackend
from rllm.trainer.outcomes import require_known_roles, step_metrics
from rllm.trainer.policies import Policies
from rllm.trainer.samples import group_shares, training_batch
from rllm.trainer.schedules import learning_rate, linear
from rllm.types.episode import Episode
from rllm.types.sample import TrainingBatch, TrainingSample

Demonstrations = Callable[[Sequence[Any], tuple[str | int, ...]], list[TrainingSample]]
"""(tasks, key of every draw) -> rows of one demonstration of each task."""


@dataclass(kw_only=True, slots=True)
class Learner:
    """What turns demonstrations and episodes into weights."""

    config: TrainConfig
    policies: Policies
    tasks: TaskSampler[Any]
    demonstrations: Demonstrations | None
    """None without an expert."""


def learn(learner: Learner, episodes: Sequence[Episode], step: int) -> tuple[TrainingBatch, dict[str, Any]]:
    """One step of reinforcement learning: the batch that was trained on, and what there is to say of it."""
    config, policies = learner.config, learner.policies
    algorithm = config.algorithm
    require_known_roles(episodes, config)
    treated = treat_truncated(episodes, config.rollout.truncation)
    groups, counts = group_episodes(episodes, treated.masked)
    advantages = group_advantages(
        groups,
        config.estimator_of,
        counts,
        rewards=treated.rewards,
        weight_of=lambda role: config.role(role).reward_weight,
    )
    loss = PolicyLoss(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        aggregation=algorithm.aggregation,
        entropy_coef=linear(algorithm.entropy_coef, step, config.steps, 0.0),
    )
    batch = training_batch(
        episodes,
        advantages,
        drop_tied=not loss.needs_every_row,
        masked=treated.masked,
        is_trained=policies.is_trained,
    )
    metrics = step_metrics(episodes, counts, batch)
    for name, backend in policies.trainable():
        samples = policies.samples_of(name, batch.samples)
        rate = learning_rate(config, step, policies[name].learning_rate)
        metrics |= policies.labelled(name, _updated(backend, samples, loss, rate, config))
    return batch, metrics


def _updated(
    backend: TrainingBackend,
    samples: Sequence[TrainingSample],
    loss: PolicyLoss,
    rate: float,
    config: TrainConfig,
) -> dict[str, float]:
    """The updates of one policy in one step; means of their metrics."""
    metrics = {"learning_rate": rate}
    if config.algorithm.old_logprobs == "trainer" and samples:
        samples, metrics["logprob_gap_sampler"] = _scored_again(backend, samples)
    shares = group_shares(samples, config.algorithm.updates_per_step)
    updates = [backend.update(share, loss, rate) for share in shares]
    if updates:
        metrics |= {name: sum(each[name] for each in updates) / len(updates) for name in updates[0]}
        # The first update still has the weights that sampled: any gap is a mismatch of the two passes.
        metrics["logprob_gap_first"] = updates[0]["logprob_gap_max"]
    return metrics


def _scored_again(
    backend: TrainingBackend, samples: Sequence[TrainingSample]
) -> tuple[list[TrainingSample], float]:
    """Samples with the trainer's own log-probabilities, and how far the sampler's were from them, in nats."""
    scores = backend.score(samples)
    gaps = [
        float(np.abs(mine_T - sample.logprobs_T)[sample.trainable_T].max(initial=0.0))
        for mine_T, sample in zip(scores, samples, strict=True)
    ]
    again = [replace(sample, logprobs_T=mine_T) for mine_T, sample in zip(scores, samples, strict=True)]
    return again, max(gaps)


def imitate(learner: Learner, step: int) -> dict[str, Any]:
    """One supervised update of each policy that learns, on new demonstrations of its roles."""
    config, warm = learner.config, learner.config.warm_start
    assert learner.demonstrations is not None, "warm_start checked it"
    tasks = learner.tasks.batch(step * warm.episodes_per_step, warm.episodes_per_step)
    demonstrated = learner.demonstrations(tasks, (config.seed, "warm_start", step))
    rate = linear(warm.learning_rate, step, warm.steps, config.optimizer.final_lr_fraction)
    metrics: dict[str, Any] = {}
    for name, backend in learner.policies.trainable():
        if samples := learner.policies.samples_of(name, demonstrated):
            metrics |= learner.policies.labelled(name, backend.update(samples, ImitationLoss(), rate))
    return metrics
