"""Rewards in, advantages out. Pure functions, one registry.

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

from rllm.config.names import object_named
from rllm.errors import ConfigError, RewardError

FloatArray = NDArray[np.float64]


@dataclass(kw_only=True, slots=True, frozen=True)
class Attempt:
    """One trajectory as an estimator sees it."""

    reward: float
    """Of the whole trajectory."""
    num_tokens: int
    """Tokens that are trained on."""
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


def grpo_advantages(rewards_G: FloatArray, *, eps: float = 1e-6) -> FloatArray:
    """A_i = (r_i - mean(r)) / (std(r) + eps), over the G attempts at one task.

    Shao et al. 2024 (arXiv:2402.03300), section 4.1.2, outcome supervision. `std` is the population one
    (ddof = 0); verl divides by the sample one (ddof = 1), which is larger by sqrt(G / (G - 1)). Equal rewards
    give zeros: nothing to compare, so nothing to learn. A group of one gives zero as well, where verl hands
    out the reward itself. Biased: tasks with a small spread count more.
    """
    return _centred(rewards_G) / (rewards_G.std() + eps)


def dr_grpo_advantages(rewards_G: FloatArray) -> FloatArray:
    """A_i = r_i - mean(r).

    Liu et al. 2025 (arXiv:2503.20783), section 3: no division by the standard deviation. An attempt is part
    of the mean it is compared with, so the gradient is (G - 1) / G of the true one: see RLOO.
    """
    return _centred(rewards_G)


def rloo_advantages(rewards_G: FloatArray) -> FloatArray:
    """A_i = r_i - mean of the other G - 1 rewards = G / (G - 1) · (r_i - mean(r)).

    Kool et al. 2019 (Buy 4 REINFORCE samples, get a baseline for free); Ahmadian et al. 2024
    (arXiv:2402.14740). Unbiased. A group of one gives zero; of verl's two versions one gives
    zero too, the other the reward itself.
    """
    size = len(rewards_G)
    return _centred(rewards_G) * (size / (size - 1)) if size > 1 else np.zeros(size)


def opo_advantages(rewards_G: FloatArray, lengths_G: FloatArray) -> FloatArray:
    """A_i = r_i - Σ l r / Σ l, the mean reward of the tokens, with l the number of trained tokens.

    Hao et al. 2025 (arXiv:2505.23585): the baseline of least variance where the gradients of
    tokens are equally large and orthogonal. An attempt is part of its own baseline, so the gradient is biased
    by O(1 / G); with equal lengths it is that of Dr. GRPO. A group of one gives zero, at verl the reward.
    """
    total = lengths_G.sum()
    if total == 0.0 or _tied(rewards_G):
        return np.zeros(len(rewards_G))
    return rewards_G - (lengths_G @ rewards_G) / total


def maxrl_advantages(rewards_G: FloatArray) -> FloatArray:
    """A_i = (r_i - mean(r)) / mean(r), and zeros where nobody was paid; rewards are 0 (failed) or 1 (solved).

    Tajwar, Zeng et al. 2026 (arXiv:2602.02710): maximum likelihood of success, ∇ log p = Σ_k ∇ pass@k / k. On
    average the gradient is the sum of the first G - 1 terms. Without the subtracted mean it is that of G, the
    paper's theorem; a group without success, which gives nothing, makes the difference. Rewards between 0 and
    1 are used as they are; negative ones raise RewardError, because their mean could be 0.
    """
    if rewards_G.min(initial=0.0) < 0.0:
        raise RewardError(
            f"MaxRL divides by the mean reward of a group, but one of its rewards is {rewards_G.min():g}; "
            "pay 0 to 1, or choose another `algorithm.estimator`."
        )
    centred_G = _centred(rewards_G)
    return centred_G / rewards_G.mean() if centred_G.any() else centred_G


def pass_at_k_advantages(rewards_G: FloatArray, *, k: int | None = None) -> FloatArray:
    """A_i = G / C(G, k) · Σ over the sets J of k - 1 other attempts of max(0, r_i - max r_J).

    Walder and Karkhanis 2025 (arXiv:2505.15201), equation 33 (PKPO, s^(loo-1)): what the attempt adds to the
    best of k. Unbiased for the gradient of the expected best of k attempts, which is
    pass@k where rewards are 0 and 1; the paper leaves out the factor G because it adds attempts up instead of
    taking their mean. Attempts that add nothing get 0, and none gets less. `k` is half of the group where it
    is None, 2 at least; for another one, `mine = partial(pass_at_k_advantages, k=4)` in a file of your own is
    an estimator. Not verl's `grpo_passk`, which is k = G. Raises ConfigError for k below 2 or above G.
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
    return _centred(rewards_B)


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
    if total == 0.0 or _tied(rewards_B):
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


def gigpo_advantages(attempts: Sequence[Attempt], *, weight: float = 1.0) -> list[FloatArray]:
    """A_i,k = grpo(rewards)_i + weight · grpo(returns from turns that began in the same state)_i,k.

    Feng et al. 2025 (arXiv:2505.10978), A^E + ω A^S with ω = 1 and F_norm = std, the population one. Returns
    are discounted by `algorithm.gamma` a turn. Turns of all attempts at a task are compared where what the
    agent saw was the same, whenever it saw it. A state that was seen once adds nothing. Biased, as GRPO is.
    """
    whole_G = grpo_advantages(np.array([each.reward for each in attempts]))
    advantages = [np.full(len(each.returns_K), whole) for each, whole in zip(attempts, whole_G, strict=True)]
    seen: dict[str, list[tuple[int, int]]] = {}
    for number, attempt in enumerate(attempts):
        for turn, state in enumerate(attempt.states_K):
            seen.setdefault(state, []).append((number, turn))
    for places in seen.values():
        returns = np.array([attempts[number].returns_K[turn] for number, turn in places])
        for (number, turn), advantage in zip(places, grpo_advantages(returns), strict=True):
            advantages[number][turn] += weight * advantage
    return advantages


def _tied(rewards: FloatArray) -> bool:
    return bool((rewards == rewards[:1]).all())


def _centred(rewards: FloatArray) -> FloatArray:
    """Rewards less their mean.

    Zeros are written out for ties, so that rounding of the mean cannot turn "nothing to learn" into noise.
    """
    return np.zeros(len(rewards)) if _tied(rewards) else rewards - rewards.mean()


def _centred_within(rewards: FloatArray, groups: NDArray[np.int64]) -> FloatArray:
    """Each reward less the mean of its group; zeros where a group ties."""
    numbers, place = np.unique(groups, return_inverse=True)
    means = np.bincount(place, weights=rewards) / np.bincount(place)
    lowest, highest = np.full((2, len(numbers)), np.nan)
    np.fmin.at(lowest, place, rewards)
    np.fmax.at(highest, place, rewards)
    return np.where((lowest == highest)[place], 0.0, rewards - means[place])


Estimate = Callable[[Sequence[Attempt]], list[FloatArray]]
"""Attempts that are compared with each other -> [K] advantages of the turns of each."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimator:
    """A rule, what it compares and what it needs."""

    estimate: Estimate
    within_groups: bool = True
    """The attempts at one task; otherwise all attempts of a step by the role."""
    has_baseline: bool = True
    """Rewards are compared with each other, so equal ones teach nothing."""
    min_group: int = 2
    """Attempts at one task without which there is nothing to compare: fewer get zeros."""
    needs_states: bool = False
    """`states_K` (GiGPO)."""
    needs_greedy: bool = False
    """`baseline`, from one more attempt at each task, by the likeliest tokens (ReMax)."""
    needs_critic: bool = False
    token_level: bool = False
    """Advantages are made from rows, token by token (`algorithms/returns.py`); the attempts get NaN until
    then, which nobody can take for an advantage."""
    tells_turns_apart: bool = False
    """It credits turns in its own way, so that `algorithm.credit` has nothing to say."""


def _rewards(attempts: Sequence[Attempt]) -> FloatArray:
    return np.array([each.reward for each in attempts], dtype=np.float64)


def _lengths(attempts: Sequence[Attempt]) -> FloatArray:
    return np.array([each.num_tokens for each in attempts], dtype=np.float64)


def _groups(attempts: Sequence[Attempt]) -> NDArray[np.int64]:
    return np.array([each.group for each in attempts], dtype=np.int64)


def _baselines(attempts: Sequence[Attempt]) -> FloatArray:
    missing = sum(each.baseline is None for each in attempts)
    if missing:
        raise RewardError(
            f"{missing} of {len(attempts)} attempts have no greedy attempt beside them, which ReMax compares "
            'with; mend what made it fail, or choose `algorithm.estimator = "rloo"`.'
        )
    return np.array([each.baseline for each in attempts], dtype=np.float64)


def to_all_turns(formula: Callable[[Sequence[Attempt]], FloatArray]) -> Estimate:
    """One number per attempt, given to all of its turns."""

    def estimate(attempts: Sequence[Attempt]) -> list[FloatArray]:
        advantages = formula(attempts)
        return [np.full(len(each.returns_K), a) for each, a in zip(attempts, advantages, strict=True)]

    return estimate


def _of_rewards(formula: Callable[[FloatArray], FloatArray]) -> Estimate:
    return to_all_turns(lambda attempts: formula(_rewards(attempts)))


def _later(attempts: Sequence[Attempt]) -> list[FloatArray]:
    return [np.full(len(each.returns_K), np.nan) for each in attempts]


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(estimate=_of_rewards(grpo_advantages)),
    "dr_grpo": Estimator(estimate=_of_rewards(dr_grpo_advantages)),
    "rloo": Estimator(estimate=_of_rewards(rloo_advantages)),
    "opo": Estimator(estimate=to_all_turns(lambda them: opo_advantages(_rewards(them), _lengths(them)))),
    "maxrl": Estimator(estimate=_of_rewards(maxrl_advantages)),
    "pass_at_k": Estimator(estimate=_of_rewards(pass_at_k_advantages)),
    "gigpo": Estimator(estimate=gigpo_advantages, needs_states=True, tells_turns_apart=True),
    "gpg": Estimator(
        estimate=to_all_turns(lambda them: gpg_advantages(_rewards(them), _groups(them))),
        within_groups=False,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        estimate=to_all_turns(
            lambda them: reinforce_plus_plus_baseline_advantages(
                _rewards(them), _lengths(them), _groups(them)
            )
        ),
        within_groups=False,
    ),
    "reinforce_plus_plus": Estimator(
        estimate=to_all_turns(lambda them: reinforce_plus_plus_advantages(_rewards(them), _lengths(them))),
        within_groups=False,
        min_group=1,
    ),
    "reinforce_baseline": Estimator(
        estimate=_of_rewards(reinforce_baseline_advantages), within_groups=False, min_group=1
    ),
    "reinforce": Estimator(
        estimate=_of_rewards(reinforce_advantages), within_groups=False, has_baseline=False, min_group=1
    ),
    "remax": Estimator(
        estimate=to_all_turns(lambda them: remax_advantages(_rewards(them), _baselines(them))),
        has_baseline=False,
        min_group=1,
        needs_greedy=True,
    ),
    "gae": Estimator(
        estimate=_later,
        has_baseline=False,
        min_group=1,
        needs_critic=True,
        token_level=True,
        tells_turns_apart=True,
    ),
    "teacher": Estimator(
        estimate=_later,
        within_groups=False,
        has_baseline=False,
        min_group=1,
        token_level=True,
        tells_turns_apart=True,
    ),
}
"""GAE, which is made from rows, is `rllm.algorithms.returns.gae`; what a teacher makes of rows is
`rllm.trainer.teacher`."""


def estimator_named(name: str) -> Estimator:
    """One of ESTIMATORS, or what `file.py:name` or `package.module:name` leads to.

    That is an `Estimator`, or a function rewards_G -> advantages_G of the attempts at one task, given to all
    turns of an attempt. Raises ConfigError for a name that leads nowhere.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" not in name:
        raise ConfigError(
            f"There is no advantage estimator `{name}`; choose one of {', '.join(ESTIMATORS)}, or write "
            "file.py:function for one of your own."
        )
    found = object_named(name, group="rllm.estimators", what="advantage estimator")
    if isinstance(found, Estimator):
        return found
    if not callable(found):
        raise ConfigError(
            f"`{name}` is a {type(found).__name__}; an advantage estimator is a function of the rewards of a "
            "group, or an rllm.algorithms.advantages.Estimator."
        )
    return Estimator(estimate=_of_user(name, found), has_baseline=False, min_group=1)


def _of_user(name: str, function: Callable[[FloatArray], object]) -> Estimate:
    def estimate(rewards_G: FloatArray) -> FloatArray:
        advantages_G = np.asarray(function(rewards_G.copy()), dtype=np.float64)
        if advantages_G.shape != rewards_G.shape or not np.isfinite(advantages_G).all():
            raise ConfigError(
                f"The estimator {name} made {advantages_G} of the rewards {rewards_G}; it must return one "
                "finite number for each."
            )
        return advantages_G

    return _of_rewards(estimate)
