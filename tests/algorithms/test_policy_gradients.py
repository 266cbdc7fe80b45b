"""Exact policy gradients: every outcome of a small decision process, in every group it can be drawn in.

    start ──left──► near  ──x──► paid r(left, x)
      └────right──► far   ──y──► paid r(right, y)       each turn may pay as well

The policy is a softmax of a table, so what an estimator does on average, and what it ought to do, are finite
sums. No sampling, no tolerance but rounding.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from rllm.algorithms.advantages import Attempt, pass_at_k_advantages
from rllm.algorithms.estimators import ESTIMATORS
from rllm.algorithms.grouping import group_advantages, group_episodes
from rllm.algorithms.returns import gae, returns_to_go
from rllm.types.episode import Episode, Outcome, Step, Trajectory

Array = NDArray[np.float64]
EXACT = 1e-12


@dataclass(kw_only=True, slots=True, frozen=True)
class Play:
    """One outcome of the process, and what its probability depends on."""

    probability: float
    paid_K: Array
    states_K: tuple[str, ...]
    scores_K_P: Array
    """Gradient of the log-probability of each turn's action by the policy's table."""
    num_tokens: int

    @property
    def reward(self) -> float:
        return float(self.paid_K.sum())

    @property
    def attempt(self) -> Attempt:
        return Attempt(
            reward=self.reward,
            num_tokens=self.num_tokens,
            turn_rewards_K=self.paid_K,
            returns_K=returns_to_go(self.paid_K, 1.0),
            states_K=self.states_K,
        )


def _process(paid: dict[str, float], *, tokens: dict[str, int] | None = None, seed: int = 0) -> list[Play]:
    """All outcomes. `paid` by what was done so far: "l", "r", then "lx", "ly", "rx", "ry"; 0 where unsaid."""
    table = np.random.default_rng(seed).normal(size=(3, 2))
    policy = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    plays: list[Play] = []
    for first, second in itertools.product(range(2), range(2)):
        states, actions = (0, 1 + first), (first, second)
        scores_K_P = np.zeros((2, *table.shape))
        for turn, (state, action) in enumerate(zip(states, actions, strict=True)):
            scores_K_P[turn, state] = np.eye(2)[action] - policy[state]
        name = "lr"[first] + "xy"[second]
        plays.append(
            Play(
                probability=float(policy[0, first] * policy[1 + first, second]),
                paid_K=np.array([paid.get(name[0], 0.0), paid.get(name, 0.0)]),
                states_K=("start", ("near", "far")[first]),
                scores_K_P=scores_K_P.reshape(2, -1),
                num_tokens=(tokens or {}).get(name, 2),
            )
        )
    return plays


SOLVED = _process({"lx": 1.0, "ry": 1.0})
"""Paid 0 or 1 at the end."""
GRADED = _process({"l": 0.25, "lx": 1.0, "ly": -0.5, "ry": 0.75}, seed=1)
"""Paid at both turns, also less than nothing."""


def _gradient(plays: Sequence[Play], advantages: Sequence[Array]) -> Array:
    """Of the loss: the mean over attempts of advantage times score, added up over turns."""
    return sum(
        (a_K @ play.scores_K_P for play, a_K in zip(plays, advantages, strict=True)), np.zeros(6)
    ) / len(plays)


def _on_average(
    process: Sequence[Play], size: int, advantages_of: Callable[[Sequence[Play]], Sequence[Array]]
) -> Array:
    return sum(
        (
            math.prod(play.probability for play in group) * _gradient(group, advantages_of(group))
            for group in itertools.product(process, repeat=size)
        ),
        np.zeros(6),
    )


def _estimated(process: Sequence[Play], size: int, name: str) -> Array:
    estimate = ESTIMATORS[name].estimate
    return _on_average(process, size, lambda group: estimate([play.attempt for play in group]))


def _best_of(process: Sequence[Play], k: int) -> Array:
    """Gradient of the expected best of k attempts; k = 1 is that of the expected reward."""
    best = lambda group: [np.full(2, k * max(play.reward for play in group))] * k  # noqa: E731
    return _on_average(process, k, best)


def _true(process: Sequence[Play]) -> Array:
    return _best_of(process, 1)


def _cosine(one: Array, other: Array) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_the_true_gradient_is_that_of_finite_differences() -> None:
    table = np.random.default_rng(1).normal(size=(3, 2))

    def expected(moved: Array) -> float:
        policy = np.exp(moved) / np.exp(moved).sum(1, keepdims=True)
        return sum(
            policy[0, first] * policy[1 + first, second] * GRADED[2 * first + second].reward
            for first in range(2)
            for second in range(2)
        )

    step = 1e-5
    for place in np.ndindex(3, 2):
        nudge = np.zeros((3, 2))
        nudge[place] = step
        slope = (expected(table + nudge) - expected(table - nudge)) / (2 * step)
        assert _true(GRADED).reshape(3, 2)[place] == pytest.approx(slope, abs=1e-9)


def test_reinforce_and_rloo_are_unbiased(subtests: pytest.Subtests) -> None:
    for process in (SOLVED, GRADED):
        for size in (2, 3):
            for name in ("reinforce", "rloo"):
                with subtests.test(process=process, size=size, name=name):
                    assert _estimated(process, size, name) == pytest.approx(_true(process), abs=EXACT)


def test_who_is_part_of_the_mean_moves_less_by_one_attempt(subtests: pytest.Subtests) -> None:
    """OPO as well, here where all attempts are equally long."""
    for process in (SOLVED, GRADED):
        for size in (2, 4):
            for name in ("dr_grpo", "reinforce_baseline", "opo"):
                with subtests.test(process=process, size=size, name=name):
                    expected = (size - 1) / size * _true(process)
                    assert _estimated(process, size, name) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("size", [1, 2])
def test_remax_is_unbiased_with_one_attempt_already(size: int) -> None:
    greedy = max(GRADED, key=lambda play: play.probability).reward

    def advantages(group: Sequence[Play]) -> Sequence[Array]:
        return ESTIMATORS["remax"].estimate([replace(play.attempt, baseline=greedy) for play in group])

    assert _on_average(GRADED, size, advantages) == pytest.approx(_true(GRADED), abs=EXACT)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_maxrl_adds_up_the_first_terms_of_maximum_likelihood(size: int) -> None:
    p = sum(play.probability for play in SOLVED if play.reward)
    terms = sum((1.0 - p) ** (k - 1) for k in range(1, size))  # ∇ pass@k / k = (1 - p)^(k - 1) ∇ p
    assert _estimated(SOLVED, size, "maxrl") == pytest.approx(terms * _true(SOLVED), abs=EXACT)

    def successes_alone(group: Sequence[Play]) -> Sequence[Array]:
        mean = sum(play.reward for play in group) / size
        return [np.full(2, play.reward / mean if mean else 0.0) for play in group]

    one_more = terms + (1.0 - p) ** (size - 1)  # without the mean subtracted
    assert _on_average(SOLVED, size, successes_alone) == pytest.approx(one_more * _true(SOLVED), abs=EXACT)
    pass_at_2 = _best_of(SOLVED, 2) / 2
    assert pass_at_2 == pytest.approx((1.0 - p) * _true(SOLVED), abs=EXACT)


@pytest.mark.parametrize(("size", "k"), [(2, 2), (4, 2), (4, 3), (4, 4)])
@pytest.mark.parametrize("process", [SOLVED, GRADED], ids=["solved", "graded"])
def test_pass_at_k_is_unbiased_for_the_best_of_k(process: list[Play], size: int, k: int) -> None:
    def advantages(group: Sequence[Play]) -> Sequence[Array]:
        rewards = np.array([play.reward for play in group])
        return [np.full(2, each) for each in pass_at_k_advantages(rewards, k=k)]

    assert _on_average(process, size, advantages) == pytest.approx(_best_of(process, k), abs=EXACT)


def test_opo_is_biased_where_attempts_are_not_equally_long_and_less_so_in_larger_groups() -> None:
    process = _process({"lx": 1.0, "ry": 1.0}, tokens={"lx": 9, "ly": 1, "rx": 4, "ry": 2})
    biases = [
        np.linalg.norm(_estimated(process, size, "opo") * size / (size - 1) - _true(process))
        for size in (2, 3, 4, 5)
    ]
    assert biases == sorted(biases, reverse=True)
    assert biases[0] > 0.1 * np.linalg.norm(_true(process))
    assert biases[-1] < 0.5 * biases[0]


@pytest.mark.parametrize("name", ["grpo", "gigpo"])
def test_who_divides_by_the_spread_of_a_task_counts_tasks_of_small_spread_more(name: str) -> None:
    """Two tasks that are learned from alike: one pays a tenth of the other."""
    large = _process({"lx": 1.0, "ry": 1.0})
    small = _process({"lx": 0.1, "ry": 0.1})
    assert _true(small) == pytest.approx(0.1 * _true(large), abs=EXACT)
    gradients = [_estimated(process, 3, name) for process in (large, small)]
    assert gradients[1] == pytest.approx(gradients[0], rel=1e-4)


def test_grpo_does_not_point_where_the_gradient_does() -> None:
    process = _process({"lx": 1.0, "rx": 0.1, "ry": 0.1})
    assert _cosine(_estimated(process, 2, "grpo"), _true(process)) < 0.9
    assert _cosine(_estimated(process, 2, "rloo"), _true(process)) == pytest.approx(1.0, abs=EXACT)


def test_the_bias_of_reinforce_plus_plus_vanishes_with_the_size_of_the_batch() -> None:
    rewards = np.array([play.reward for play in GRADED])
    probabilities = np.array([play.probability for play in GRADED])
    spread = math.sqrt(probabilities @ (rewards - probabilities @ rewards) ** 2)
    biases = [
        np.linalg.norm(_estimated(GRADED, size, "reinforce_plus_plus") * spread - _true(GRADED))
        for size in (2, 3, 4, 5, 6)
    ]
    assert biases == sorted(biases, reverse=True)
    assert biases[-1] < 0.5 * biases[0]


def test_gpg_makes_up_for_groups_that_tie_and_is_biased_by_it() -> None:
    """A step of two tasks, two attempts each: the more often one ties, the more the other counts."""
    tasks = (SOLVED, _process({"lx": 1.0}, seed=3))

    def gradient(name: str) -> Array:
        found = np.zeros(6)
        pairs = [list(itertools.product(task, repeat=2)) for task in tasks]
        for one, other in itertools.product(*pairs):
            attempts = [
                Attempt(
                    reward=play.reward,
                    num_tokens=2,
                    turn_rewards_K=play.paid_K,
                    returns_K=play.paid_K,
                    group=number,
                )
                for number, pair in enumerate((one, other))
                for play in pair
            ]
            advantages = ESTIMATORS[name].estimate(attempts)
            chance = math.prod(play.probability for play in (*one, *other))
            found += chance * _gradient((*one, *other), advantages)
        return found

    true = (_true(tasks[0]) + _true(tasks[1])) / 2
    assert gradient("reinforce") == pytest.approx(true, abs=EXACT)
    assert gradient("reinforce_baseline") == pytest.approx(3 / 4 * true, abs=EXACT)
    assert np.linalg.norm(gradient("gpg")) > 1.1 * np.linalg.norm(
        true / 2
    )  # Dr. GRPO is half of the true one
    assert _cosine(gradient("gpg"), true) < 1.0 - 1e-6


# Credit of turns


def _credited(process: Sequence[Play], size: int, name: str, credit: str) -> Array:
    """As a run does it: episodes, groups, advantages."""

    def advantages(group: Sequence[Play]) -> Sequence[Array]:
        episodes = [
            Episode(
                task_id="task",
                rollout_idx=number,
                outcome=Outcome.SCORED,
                trajectories=[
                    Trajectory(
                        uid=str(number),
                        reward=play.reward,
                        steps=[Step(reward=paid, response_ids=[1]) for paid in play.paid_K.tolist()],
                    )
                ],
            )
            for number, play in enumerate(group)
        ]
        groups, counts = group_episodes(episodes)
        found = group_advantages(groups, lambda role: name, counts, credit=credit)
        return [found[str(number)] for number in range(len(group))]

    return _on_average(process, size, advantages)


def test_every_way_to_credit_turns_is_unbiased_where_attempts_have_equally_many(
    subtests: pytest.Subtests,
) -> None:
    """Discounted by 1, that is: less of it favours the last turns, which is its point and its bias."""
    for credit in ("trajectory", "turn", "discounted"):
        for name in ("reinforce", "rloo"):
            with subtests.test(credit=credit, name=name):
                assert _credited(GRADED, 2, name, credit) == pytest.approx(_true(GRADED), abs=EXACT)


# GAE: a turn is a token here


def _valued(process: Sequence[Play], values: dict[str, float], lam: float) -> Array:
    def advantages(group: Sequence[Play]) -> Sequence[Array]:
        return [
            gae(play.paid_K, np.array([values[state] for state in play.states_K]), gamma=1.0, lam=lam)[0]
            for play in group
        ]

    return _on_average(process, 1, advantages)


def _value_of(process: Sequence[Play]) -> dict[str, float]:
    """What is paid from each state on, on average."""
    values: dict[str, float] = {}
    for turn in range(2):
        for state in {play.states_K[turn] for play in process}:
            here = [play for play in process if play.states_K[turn] == state]
            chance = sum(play.probability for play in here)
            values[state] = sum(play.probability * play.paid_K[turn:].sum() for play in here) / chance
    return values


WRONG = {"start": 3.0, "near": -1.0, "far": 0.5}


@pytest.mark.parametrize(("values", "lam"), [(WRONG, 1.0), (None, 0.0), (None, 0.5), (None, 1.0)], ids=str)
def test_gae_is_unbiased_with_a_true_critic_or_without_trust_in_it(
    values: dict[str, float] | None, lam: float
) -> None:
    found = _valued(GRADED, values or _value_of(GRADED), lam)
    assert found == pytest.approx(_true(GRADED), abs=EXACT)


def test_trust_in_a_wrong_critic_is_a_bias() -> None:
    biases = [np.linalg.norm(_valued(GRADED, WRONG, lam) - _true(GRADED)) for lam in (1.0, 0.9, 0.5, 0.0)]
    assert biases[0] < EXACT
    assert biases == sorted(biases)
    assert biases[-1] > 0.1
