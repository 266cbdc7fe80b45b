"""Rewards in, advantages out. Pure functions; their registry is `rllm.algorithms.estimators`.

    rewards_G ──► A_G                        a formula: one number per attempt, given to all of its turns
    attempts  ──► [K] per attempt            GiGPO, which tells the turns of an attempt apart
    attempts of a step ──► [K] per attempt   what is normalised over the whole step

What is compared with each other is either the attempts at one task, or all attempts of a step; always those
of one role. Formulas hold for a loss that adds up A_i · log π(attempt i) and divides by the number of
attempts; "unbiased" means that its gradient is, on average, that of the expected reward.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rllm.errors import ConfigError, RewardError

FloatArray = NDArray[np.float64]
TurnAdvantages = FloatArray | Sequence[FloatArray]
"""[K] one number for all tokens of a turn, or for each of K turns [R] one for each token of its answer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Attempt:
    """One trajectory as an estimator sees it."""

    reward: float
    """The reward of the whole trajectory."""
    num_tokens: int
    """Tokens that are trained on: those that the policy chose, in all turns."""
    turn_rewards_K: FloatArray
    """[K] what each turn was paid; they add up to `reward`."""
    returns_K: FloatArray
    """[K] what was paid from each turn on, discounted by `algorithm.gamma` a turn."""
    states_K: tuple[str, ...] = ()
    """[K] what the agent saw before each turn, as a key; only for an estimator with `needs_states`."""
    baseline: float | None = None
    """Reward of the greedy attempt at the same task; only for an estimator with `needs_greedy`."""
    group: int = 0
    """Attempts with the same number are attempts at one task."""
    role: str = ""
    """Whose attempt it is."""
    task_id: str = ""
    num_tokens_K: tuple[int, ...] = ()
    """[K] of `num_tokens`, those of each turn."""

    @property
    def num_turns(self) -> int:
        return len(self.returns_K)


@dataclass(slots=True, frozen=True)
class ByToken:
    """Advantages of single tokens, as an estimator may return them."""

    advantages: Sequence[FloatArray]
    """The advantages of each attempt [num_tokens]: its trained tokens in the order of its turns."""


def grpo_advantages(rewards_G: FloatArray, *, eps: float = 1e-6) -> FloatArray:
    """A_i = (r_i - mean(r)) / (std(r) + eps), over the G attempts at one task.

    Shao et al. 2024 (arXiv:2402.03300), section 4.1.2, outcome supervision. `std` is the population one
    (ddof = 0); verl divides by the sample one (ddof = 1), which is larger by sqrt(G / (G - 1)). Equal rewards
    give zeros: nothing to compare, so nothing to learn. A group of one gives zero as well, where verl hands
    out the reward itself. Biased: tasks with a small spread count more.
    """
    return _center(rewards_G) / (rewards_G.std() + eps)


def dr_grpo_advantages(rewards_G: FloatArray) -> FloatArray:
    """A_i = r_i - mean(r).

    Liu et al. 2025 (arXiv:2503.20783), section 3: no division by the standard deviation. An attempt is part
    of the mean it is compared with, so the gradient is (G - 1) / G of the true one: see RLOO.
    """
    return _center(rewards_G)


def rloo_advantages(rewards_G: FloatArray) -> FloatArray:
    """A_i = r_i - mean of the other G - 1 rewards = G / (G - 1) · (r_i - mean(r)).

    Kool et al. 2019 (Buy 4 REINFORCE samples, get a baseline for free); Ahmadian et al. 2024
    (arXiv:2402.14740). Unbiased. A group of one gives zero; of verl's two versions one gives
    zero too, the other the reward itself.
    """
    size = len(rewards_G)
    return _center(rewards_G) * (size / (size - 1)) if size > 1 else np.zeros(size)


def opo_advantages(rewards_G: FloatArray, lengths_G: FloatArray) -> FloatArray:
    """A_i = r_i - Σ l r / Σ l, the mean reward of the tokens, with l the number of trained tokens.

    Hao et al. 2025 (arXiv:2505.23585): the baseline of least variance where the gradients of
    tokens are equally large and orthogonal. An attempt is part of its own baseline, so the gradient is biased
    by O(1 / G); with equal lengths it is that of Dr. GRPO. A group of one gives zero, at verl the reward.
    """
    total = lengths_G.sum()
    if total == 0.0 or _are_equal(rewards_G):
        return np.zeros(len(rewards_G))
    return rewards_G - (lengths_G @ rewards_G) / total


def maxrl_advantages(rewards_G: FloatArray) -> FloatArray:
    """A_i = (r_i - mean(r)) / mean(r), and zeros where nobody was paid; rewards are 0 (failed) or 1 (solved).

    Tajwar, Zeng et al. 2026 (arXiv:2602.02710): maximum likelihood of success, ∇ log p = Σ_k ∇ pass@k / k. On
    average the gradient is the sum of the first G - 1 terms. Without the subtracted mean it is that of G, the
    paper's theorem; a group without success, which gives nothing, makes the difference. Rewards between 0 and
    1 are used as they are; negative ones raise RewardError, because their mean could be 0.
    """
    if (rewards_G < 0.0).any():
        raise RewardError(
            f"MaxRL divides by the mean reward of a group, but one of its rewards is {rewards_G.min():g}; "
            "pay 0 to 1, or choose another `algorithm.estimator`."
        )
    centred_G = _center(rewards_G)
    # Rewards are 0 or more here, so where their mean is 0 all of them are, and that is a tie.
    return centred_G / rewards_G.mean() if centred_G.any() else centred_G


def pass_at_k_advantages(rewards_G: FloatArray, *, k: int | None = None) -> FloatArray:
    """A_i = G / C(G, k) · Σ over the sets J of k - 1 other attempts of max(0, r_i - max r_J).

    Walder and Karkhanis 2025 (arXiv:2505.15201), equation 33 (PKPO, s^(loo-1)): what the attempt adds to the
    best of k. Unbiased for the gradient of the expected best of k attempts, which is
    pass@k where rewards are 0 and 1; the paper leaves out the factor G because it adds attempts up instead of
    taking their mean. Attempts that add nothing get 0, and none gets less. `k` is half of the group where it
    is None (`algorithm.pass_k` = 0), 2 at least. Not verl's `grpo_passk`, which is k = G. Raises ConfigError
    for k below 2 or above G.
    """
    size = len(rewards_G)
    k = max(2, size // 2) if k is None else k
    if size == 1:
        return np.zeros(1)
    if not 2 <= k <= size:
        raise ConfigError(f"pass@{k} needs k of 2 to the size of the group, {size}; raise group_size.")
    order = np.argsort(rewards_G, kind="stable")
    sorted_G = rewards_G[order]
    # Behind place j in ascending order stand C(j, k - 2) sets of k - 1 attempts whose best is the one at j.
    sets_G = np.array([math.comb(place, k - 2) for place in range(size)], dtype=np.float64)
    gains_G = np.maximum(sorted_G[:, None] - sorted_G[None, :], 0.0) @ sets_G
    advantages_G = np.empty(size)
    advantages_G[order] = gains_G * (size / math.comb(size, k))
    return advantages_G


def reinforce_baseline_advantages(rewards_B: FloatArray) -> FloatArray:
    """A_i = r_i - mean(r), over all B attempts of a step by one role, whatever their task.

    Williams 1992, with the mean of the step as baseline: (B - 1) / B of the true gradient.
    """
    return _center(rewards_B)


def prpo_advantages(rewards_B: FloatArray, *, eps: float = 1e-6) -> FloatArray:
    """A_i = (r_i - mean(r)) / (std(r) + eps), over all B attempts of a step by one role, whatever their task.

    The estimator `prpo` of published rLLM. `std` is the population one; an attempt counts once, however long
    it is, where REINFORCE++ counts its tokens.
    """
    return grpo_advantages(rewards_B, eps=eps)


def reinforce_plus_plus_advantages(
    rewards_B: FloatArray, lengths_B: FloatArray, *, eps: float = 1e-6
) -> FloatArray:
    """A_i = (r_i - mean) / (std + eps), mean and std over all trained tokens of a step by one role.

    Hu et al. 2025 (arXiv:2501.03262), global advantage normalisation; an attempt counts as often as it has
    tokens, as at OpenRLHF and verl. `std` is the population one. Its KL term belongs into the reward
    (`algorithm.kl_in`), its discount is by turn (`credit = "turn"`). A task that fails in every attempt is
    learned from: there is no group that could tie. The bias vanishes with the size of the batch.
    """
    total = lengths_B.sum()
    if total == 0.0 or _are_equal(rewards_B):
        return np.zeros(len(rewards_B))
    weights_B = lengths_B / total
    centred_B = rewards_B - weights_B @ rewards_B
    return centred_B / (math.sqrt(weights_B @ centred_B**2) + eps)


def reinforce_plus_plus_baseline_advantages(
    rewards_B: FloatArray, lengths_B: FloatArray, groups_B: NDArray[np.int64]
) -> FloatArray:
    """As REINFORCE++, of what each reward lies above the mean of its group.

    Hu et al. 2025 (arXiv:2501.03262), REINFORCE++ with baseline. A group of one gives what a tied group
    gives: 0 before the normalisation, where verl puts the reward itself.
    """
    return reinforce_plus_plus_advantages(_centred_within(rewards_B, groups_B), lengths_B)


def gpg_advantages(rewards_B: FloatArray, groups_B: NDArray[np.int64]) -> FloatArray:
    """A_i = α (r_i - mean of its group), α = B / (attempts in groups that do not tie).

    Chu et al. 2025 (arXiv:2504.02546), with F_norm = 1: a step in which many groups tie moves as
    far as one in which none does. verl divides by the number of rewards that are not 0 instead.
    """
    centred_B = _centred_within(rewards_B, groups_B)
    telling = np.isin(groups_B, groups_B[centred_B != 0.0]).sum()
    return centred_B * (len(rewards_B) / telling) if telling else centred_B


def reinforce_advantages(rewards_B: FloatArray) -> FloatArray:
    """A_i = r_i.

    Williams 1992, without a baseline: what is paid is done more often, also by all attempts alike. Unbiased,
    with the largest variance.
    """
    return rewards_B


def remax_advantages(rewards_G: FloatArray, baselines_G: FloatArray) -> FloatArray:
    """A_i = r_i - reward of the greedy attempt at the same task.

    Li et al. 2023 (arXiv:2310.10505). Unbiased, because the greedy attempt is not one of the
    sampled ones. One attempt is enough; equal rewards teach, where the greedy one is paid otherwise.
    """
    return rewards_G - baselines_G


def gigpo_advantages(
    attempts: Sequence[Attempt],
    *,
    omega: float = 1.0,
    compare: Callable[[FloatArray], FloatArray] = grpo_advantages,
) -> list[FloatArray]:
    """A_i,k = compare(rewards)_i + ω · compare(returns from turns that began in the same state)_i,k.

    Feng et al. 2025 (arXiv:2505.10978), A^E + ω A^S. `compare` is that of GRPO where the paper's F_norm is
    std (here the population one), and that of Dr. GRPO where it is 1: `algorithm.gigpo_norm`. Returns are
    discounted by `algorithm.gamma` a turn. Turns of all attempts at a task are compared where what the agent
    saw was the same, whenever it saw it. A state that was seen once adds nothing. Biased, as GRPO is.
    """
    whole_G = compare(np.array([each.reward for each in attempts]))
    advantages = [np.full(len(each.returns_K), whole) for each, whole in zip(attempts, whole_G, strict=True)]
    places_by_state: dict[str, list[tuple[int, int]]] = {}
    for number, attempt in enumerate(attempts):
        for turn, state in enumerate(attempt.states_K):
            places_by_state.setdefault(state, []).append((number, turn))
    for places in places_by_state.values():
        returns = np.array([attempts[number].returns_K[turn] for number, turn in places])
        for (number, turn), advantage in zip(places, compare(returns), strict=True):
            advantages[number][turn] += omega * advantage
    return advantages


def _are_equal(rewards: FloatArray) -> bool:
    return bool((rewards == rewards[:1]).all())


def _center(rewards: FloatArray) -> FloatArray:
    """Rewards less their mean.

    Zeros are written out for ties, so that rounding of the mean cannot turn "nothing to learn" into noise.
    """
    return np.zeros(len(rewards)) if _are_equal(rewards) else rewards - rewards.mean()


def _centred_within(rewards: FloatArray, groups: NDArray[np.int64]) -> FloatArray:
    """Each reward less the mean of its group; zeros where a group ties."""
    numbers, place = np.unique(groups, return_inverse=True)
    means = np.bincount(place, weights=rewards) / np.bincount(place)
    lowest, highest = np.full((2, len(numbers)), np.nan)
    # `fmin` and `fmax` pass over the NaN that each group begins with.
    np.fmin.at(lowest, place, rewards)
    np.fmax.at(highest, place, rewards)
    # Ties are found by the rewards themselves, because a mean is rounded; see `_center`.
    return np.where((lowest == highest)[place], 0.0, rewards - means[place])
