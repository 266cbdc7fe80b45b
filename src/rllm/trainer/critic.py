"""A critic's part in a step: what it expected, what follows from that, and what it learns.

rows ──values──► V of each token ──GAE over an attempt's turns──► returns, advantages ──whiten──► rows
                                                                      │
     policy.update ◄── one share of the groups ──► critic.update ◄────┘   or one update, on a shared trunk

Each policy that learns has a critic of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rllm.algorithms.returns import gae, whiten
from rllm.config.schema import TrainConfig
from rllm.distributed import ALONE, RankGroup
from rllm.models.directory import load_model
from rllm.trainer.backends.base import SeparateCritic
from rllm.trainer.backends.critic import CriticBackend
from rllm.trainer.backends.named import backend_kind
from rllm.trainer.policies import Policies
from rllm.types.sample import TrainingSample


def make_critics(
    config: TrainConfig, policies: Policies, ranks: RankGroup = ALONE
) -> dict[str, SeparateCritic]:
    """The critics with a trunk of their own, by policy: models like those that the policies began with, until
    `Learner.begin_reinforcement` gives them the weights of a warm start."""
    if config.critic.trunk != "separate":
        return {}
    kind = backend_kind(config.backend)
    critics: dict[str, SeparateCritic] = {}
    for name, _ in policies.trainable():
        if not config.needs_critic(name):
            continue
        model = policies[name].loaded_model
        if kind is not None:
            critics[name] = kind.critic(config, model)
        else:
            parameter = next(model.model.parameters())
            trunk = load_model(
                model.directory,
                device=str(parameter.device),
                dtype=parameter.dtype,
                trust_remote_code=model.trust_remote_code,
            )
            critics[name] = CriticBackend(trunk.model, config=config.optimizer, ranks=ranks)
    return critics


def with_gae(
    samples: Sequence[TrainingSample],
    values: Sequence[NDArray[np.float32]],
    *,
    gamma: float,
    lam: float,
    weight_of: Callable[[str], float | None],
) -> list[TrainingSample]:
    """Samples with values, returns (the critic's targets) and advantages that are white over all of them.

    `samples` are all rows of their attempts, with rewards, and in `advantages_T` the number of each token's
    turn: an agent that holds several conversations goes on in one row after it has spoken in another, and
    what is paid then belongs to both. `weight_of`: role -> what its advantages are multiplied by; None for
    one whose advantages are there already.
    """
    results = _results(samples, values, gamma=gamma, lam=lam)
    weights = [weight_of(sample.group_key[1]) for sample in samples]
    theirs = [index for index, weight in enumerate(weights) if weight is not None]
    white = dict(zip(theirs, whiten([results[index][0] for index in theirs]), strict=True))
    samples_out: list[TrainingSample] = []
    for index, (sample, values_T) in enumerate(zip(samples, values, strict=True)):
        returns_T = _spread(sample, results[index][1])
        weight, advantages_T = weights[index], sample.advantages_T
        if weight is not None:
            advantages_T = _spread(sample, weight * white[index])
        samples_out.append(replace(sample, values_T=values_T, returns_T=returns_T, advantages_T=advantages_T))
    return samples_out


def explained_variance(samples: Sequence[TrainingSample]) -> float:
    """1 - Var(returns - values) / Var(returns) over the trained tokens: 1 for a perfect critic, 0 for one
    that knows no more than the mean; 0 as well where all returns are the same."""
    returns, values = _trained_values(samples, "returns_T"), _trained_values(samples, "values_T")
    variance = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / variance if variance > 0.0 else 0.0


def _results(
    samples: Sequence[TrainingSample], values: Sequence[NDArray[np.float32]], *, gamma: float, lam: float
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """(advantages, returns) of the trained tokens of each sample."""
    attempts: dict[tuple[str, int, int], list[int]] = {}
    for index, sample in enumerate(samples):
        attempts.setdefault(sample.order_key[:3], []).append(index)
    results: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    for members in attempts.values():
        rows = [samples[index] for index in members]
        # Rows may take turns, and GAE needs the tokens in the order of time; `back` undoes that order.
        order = np.argsort(_trained_values(rows, "advantages_T"), kind="stable")  # by turn
        rewards = _trained_values(rows, "rewards_T")[order]
        expected = np.concatenate([values[index][samples[index].trainable_T] for index in members])[order]
        back = np.argsort(order, kind="stable")
        advantages, returns = (each[back] for each in gae(rewards, expected, gamma=gamma, lam=lam))
        ends = np.cumsum([row.num_trainable for row in rows])[:-1]
        parts = zip(np.split(advantages, ends), np.split(returns, ends), strict=True)
        results |= dict(zip(members, parts, strict=True))
    return [results[index] for index in range(len(samples))]


def _trained_values(samples: Sequence[TrainingSample], column: str) -> NDArray[np.float64]:
    """The trained tokens' entries of a column that all of the samples have, one after the other."""
    parts = [getattr(sample, column)[sample.trainable_T] for sample in samples]
    return np.concatenate(parts, dtype=np.float64) if parts else np.zeros(0)


def _spread(sample: TrainingSample, values: NDArray[np.float64]) -> NDArray[np.float32]:
    """[T] values at the trained tokens, 0 elsewhere."""
    spread_T = np.zeros(sample.num_tokens, dtype=np.float32)
    spread_T[sample.trainable_T] = values
    return spread_T
