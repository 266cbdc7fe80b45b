"""The log-probabilities of sampled tokens under other weights: the trainer's before its first update, and the
reference's.

rows ──► old_logprobs = "trainer": score ──► kl_coef > 0: reference.score ──► rows with more columns
                                                   │
                                                   └─► divergence in nats per token ──► adaptive kl_coef
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllm.algorithms.kl import AdaptiveKL, kl_rewards
from rllm.config.algorithm import AlgorithmConfig
from rllm.config.schema import TrainConfig
from rllm.distributed import ALONE, RankGroup
from rllm.trainer.backends.base import TrainingBackend
from rllm.trainer.policies import Policies
from rllm.trainer.reference import ModelScorer, Scorer, copy_of, reference_of
from rllm.types.sample import TrainingSample


def make_references(
    config: TrainConfig, policies: Policies, ranks: RankGroup = ALONE
) -> dict[str, ModelScorer]:
    """The reference of each policy that learns; nothing where `kl_coef` is 0.

    After a warm start that is the policy as the warm start has left it, which `Learner.begin_reinforcement`
    sees to.
    """
    if not config.algorithm.kl_coef:
        return {}
    how: dict[str, Any] = {
        "micro_batch_tokens": config.optimizer.micro_batch_tokens,
        "logits_mb": config.optimizer.logits_mb,
        "ranks": ranks,
    }
    if not config.warm_start.steps:
        return {name: reference_of(policies[name], **how) for name, _ in policies.trainable()}
    return {name: copy_of(policies[name], config.adapter_of(name), **how) for name, _ in policies.trainable()}


def with_old_logprobs(
    samples: Sequence[TrainingSample], backend: TrainingBackend
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Samples with the trainer's own log-probabilities and the sampler's beside them; the largest gap between
    the two, and the divergence of the trainer from the sampler (k3, mean per token), in nats."""
    again = [
        replace(sample, logprobs_T=mine_T, rollout_logprobs_T=sample.logprobs_T)
        for sample, mine_T in zip(samples, backend.score(samples), strict=True)
    ]
    gaps = [
        float(np.abs(mine.logprobs_T - theirs.logprobs_T)[theirs.trainable_T].max(initial=0.0))
        for mine, theirs in zip(again, samples, strict=True)
    ]
    kl_tokens = [
        kl_rewards(theirs.logprobs_T, mine.logprobs_T, "k3")[theirs.trainable_T]
        for mine, theirs in zip(again, samples, strict=True)
    ]
    num_tokens = sum(len(kl) for kl in kl_tokens)
    return again, {
        "logprob_gap_sampler": float(np.max(gaps, initial=0.0)),  # Python's `max` passes over a NaN
        "sampler_kl": sum(float(kl.sum()) for kl in kl_tokens) / num_tokens if num_tokens else 0.0,
    }


def with_reference(samples: Sequence[TrainingSample], reference: Scorer) -> list[TrainingSample]:
    """Samples with the reference's log-probabilities."""
    return [
        replace(sample, ref_logprobs_T=theirs_T)
        for sample, theirs_T in zip(samples, reference.score(samples), strict=True)
    ]


def kl_of(sample: TrainingSample, kind: str) -> NDArray[np.float64]:
    """[T] divergence from the reference at each trained token before the first update, in nats; 0
    elsewhere."""
    assert sample.ref_logprobs_T is not None, "the reference was asked"
    # Kinds with a `+` differ from the others in their gradient alone, and here is none.
    kl_T = kl_rewards(sample.logprobs_T, sample.ref_logprobs_T, kind.removesuffix("+"))
    return np.where(sample.trainable_T, kl_T, 0.0)


def mean_kl(samples: Sequence[TrainingSample], kind: str) -> float:
    """Mean over the trained tokens; 0 of none."""
    num_tokens = sum(sample.num_trainable for sample in samples)
    return sum(float(kl_of(sample, kind).sum()) for sample in samples) / max(1, num_tokens)


def with_kl_paid(sample: TrainingSample, coef: float, kind: str) -> TrainingSample:
    """The sample with each token's divergence subtracted from what it is paid."""
    assert sample.rewards_T is not None, "a trajectory that is learned from was paid"
    rewards_T = (sample.rewards_T - coef * kl_of(sample, kind)).astype(np.float32)
    return replace(sample, rewards_T=rewards_T)


def adapted_kl_coef(algorithm: AlgorithmConfig, coef: float, kl: float) -> float:
    """The coefficient of the next step's divergence, after a step in which it came to `kl` nats per token."""
    controller = AdaptiveKL(coef=coef, target=algorithm.kl_target, horizon=float(algorithm.kl_horizon))
    controller.update(kl)
    return controller.coef
