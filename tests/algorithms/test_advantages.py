import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.advantages import (
    Attempt,
    dr_grpo_advantages,
    gigpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    rloo_advantages,
)
from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.estimators import ESTIMATORS, estimator_named
from rllm.algorithms.returns import returns_to_go
from rllm.config.algorithm import AlgorithmConfig
from rllm.config.policies import ESTIMATORS as CONFIGURED
from rllm.config.policies import RoleConfig, validate_policies
from rllm.errors import ConfigError, RewardError

GROUPED = sorted(name for name, each in ESTIMATORS.items() if each.min_group > 1)
ALL_OF_A_STEP = sorted(name for name, each in ESTIMATORS.items() if not each.within_groups)
FROM_REWARDS = sorted(name for name, each in ESTIMATORS.items() if not each.token_level)

Rows = list[tuple[float, int, int, float]]
"""(reward, tokens, group, greedy reward) of each attempt."""
eighths = st.integers(0, 8).map(lambda number: number / 8)


def _attempts(rows: Rows) -> list[Attempt]:
    """Of one turn each, all from the same state."""
    return [
        Attempt(
            reward=reward,
            num_tokens=num_tokens,
            turn_rewards_K=np.array([reward]),
            returns_K=np.array([reward]),
            states_K=("start",),
            baseline=baseline,
            group=group,
        )
        for reward, num_tokens, group, baseline in rows
    ]


def _estimate(name: str, rows: Rows) -> list[float]:
    return [float(advantages_K[0]) for advantages_K in estimator_named(name).estimate(_attempts(rows))]


@st.composite
def steps(draw: st.DrawFn, groups: int = 3) -> Rows:
    """Attempts of a step, of one to three tasks; one task where `groups` is 1."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=groups))
    return [
        (draw(eighths), draw(st.integers(1, 20)), group, draw(eighths))
        for group, size in enumerate(sizes)
        for _ in range(size)
    ]


def _mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _scaled(numbers: list[float], center: float, ddof: int = 0, eps: float = 1e-6) -> list[float]:
    variance = math.fsum((number - center) ** 2 for number in numbers) / (len(numbers) - ddof)
    return [(number - center) / (math.sqrt(variance) + eps) for number in numbers]


def _by_group(rows: Rows) -> list[float]:
    """Each reward less the mean of the rewards of its group, found by looking at every pair."""
    return [row[0] - _mean([other[0] for other in rows if other[2] == row[2]]) for row in rows]


def _over_tokens(numbers: list[float], rows: Rows, ddof: int = 0) -> list[float]:
    """Normalised over a list in which every token of an attempt is written out."""
    tokens = [number for number, row in zip(numbers, rows, strict=True) for _ in range(row[1])]
    places = list(itertools.accumulate((row[1] for row in rows), initial=0))[:-1]
    scaled = _scaled(tokens, _mean(tokens), ddof)
    return [scaled[place] for place in places]


def _best_of_k(rows: Rows, k: int) -> list[float]:
    """What an attempt adds to the best of a set, over all sets of k in which it is."""
    size = len(rows)
    added: list[float] = []
    for mine in range(size):
        gains = []
        for chosen in itertools.combinations(range(size), k):
            if mine in chosen:
                others = [rows[other][0] for other in chosen if other != mine]
                gains.append(max([*others, rows[mine][0]]) - max(others))
        added.append(size * math.fsum(gains) / math.comb(size, k))
    return added


def _gpg(rows: Rows) -> list[float]:
    telling = [row for row in rows if len({other[0] for other in rows if other[2] == row[2]}) > 1]
    return [len(rows) / len(telling) * each if telling else 0.0 for each in _by_group(rows)]


def _opo(rows: Rows) -> list[float]:
    baseline = math.fsum(row[0] * row[1] for row in rows) / sum(row[1] for row in rows)
    return [row[0] - baseline for row in rows]


def _leave_one_out(rows: Rows) -> list[float]:
    rewards = [row[0] for row in rows]
    return [reward - _mean(rewards[:place] + rewards[place + 1 :]) for place, reward in enumerate(rewards)]


def _grpo(rows: Rows) -> list[float]:
    rewards = [row[0] for row in rows]
    return _scaled(rewards, _mean(rewards))


REFERENCES: dict[str, Callable[[Rows], list[float]]] = {
    "grpo": _grpo,
    "dr_grpo": lambda rows: [row[0] - _mean([each[0] for each in rows]) for row in rows],
    "rloo": _leave_one_out,
    "opo": _opo,
    "maxrl": lambda rows: [
        row[0] / mean - 1.0 if (mean := _mean([each[0] for each in rows])) else 0.0 for row in rows
    ],
    "pass_at_k": lambda rows: _best_of_k(rows, max(2, len(rows) // 2)),
    "gigpo": lambda rows: [2.0 * each for each in _grpo(rows)],  # one turn, from one state: the same twice
    "gpg": _gpg,
    "reinforce_plus_plus": lambda rows: _over_tokens([row[0] for row in rows], rows),
    "reinforce_plus_plus_baseline": lambda rows: _over_tokens(_by_group(rows), rows),
    "reinforce_baseline": lambda rows: [row[0] - _mean([each[0] for each in rows]) for row in rows],
    "prpo": _grpo,  # over the rows of all groups
    "reinforce": lambda rows: [row[0] for row in rows],
    "remax": lambda rows: [row[0] - row[3] for row in rows],
}


@pytest.mark.parametrize("name", FROM_REWARDS)
@given(data=st.data())
def test_every_estimator_equals_a_scalar_reference_to_the_tenth_digit(name: str, data: st.DataObject) -> None:
    rows = data.draw(steps(groups=3 if name in ALL_OF_A_STEP else 1))
    assert np.abs(np.array(_estimate(name, rows)) - REFERENCES[name](rows)).max() <= 1e-10


@pytest.mark.parametrize("name", FROM_REWARDS)
@given(data=st.data())
def test_the_order_of_attempts_does_not_matter(name: str, data: st.DataObject) -> None:
    rows = data.draw(steps(groups=3 if name in ALL_OF_A_STEP else 1))
    order = data.draw(st.permutations(range(len(rows))))
    before = _estimate(name, rows)
    after = _estimate(name, [rows[place] for place in order])
    assert after == pytest.approx([before[place] for place in order], abs=1e-12)


def test_a_group_that_ties_teaches_exactly_nothing_whatever_others_of_the_step_do(
    subtests: pytest.Subtests,
) -> None:
    for reward in (0.3, 1.0):
        for name in sorted({*GROUPED} - {"reinforce_plus_plus_baseline"}):
            with subtests.test(reward=reward, name=name):
                tied: Rows = [(reward / 3, 3 + place, 0, 0.0) for place in range(4)]
                others: Rows = [(0.0, 3, 1, 0.0), (1.0, 3, 1, 0.0)] if name in ALL_OF_A_STEP else []
                assert _estimate(name, tied + others)[:4] == [0.0] * 4


def test_equal_rewards_and_single_attempts_are_exact_zeros_whatever_the_mean_rounds_to(
    subtests: pytest.Subtests,
) -> None:
    for name in sorted({*GROUPED, "reinforce_plus_plus", "reinforce_baseline"}):
        for reward in (0.1, 1 / 3, 0.7, 1e9 + 0.1):
            with subtests.test(name=name, reward=reward):
                assert _estimate(name, [(reward, 3, 0, 0.0)] * 7) == [0.0] * 7
                assert _estimate(name, [(reward, 3, 0, 0.0)]) == [0.0]


def test_a_table_by_hand() -> None:
    rewards_G = np.array([1.0, 0.0, 0.0, 0.0])
    third, root = 1 / 3, math.sqrt(3)
    assert grpo_advantages(rewards_G, eps=0.0) == pytest.approx([root, *[-1 / root] * 3], abs=1e-12)
    assert dr_grpo_advantages(rewards_G).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert rloo_advantages(rewards_G) == pytest.approx([1.0, -third, -third, -third])
    assert maxrl_advantages(rewards_G).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert maxrl_advantages(np.array([0.0, 0.5, 1.0])).tolist() == [-1.0, 0.0, 1.0]
    assert pass_at_k_advantages(rewards_G, k=2).tolist() == [2.0, 0.0, 0.0, 0.0]
    assert pass_at_k_advantages(np.array([1.0, 1.0, 0.0, 0.0]), k=2) == pytest.approx(
        [4 / 3, 4 / 3, 0.0, 0.0]
    )
    for size, k in ((2, 2), (3, 2), (6, 3), (9, 4)):  # without a k: half of the group, 2 at least
        rewards_G = np.arange(float(size))
        assert pass_at_k_advantages(rewards_G).tolist() == pass_at_k_advantages(rewards_G, k=k).tolist()
    rewards_G = np.array([1.0, 0.0, 0.0, 0.0])
    assert opo_advantages(rewards_G, np.array([6.0, 2.0, 2.0, 2.0])).tolist() == [0.5, -0.5, -0.5, -0.5]


@given(st.lists(eighths, min_size=2, max_size=7), st.data())
def test_pass_at_k_is_what_an_attempt_adds_to_the_best_of_k_for_every_k(
    rewards: list[float], data: st.DataObject
) -> None:
    k = data.draw(st.integers(2, len(rewards)))
    expected = _best_of_k([(reward, 1, 0, 0.0) for reward in rewards], k)
    assert np.abs(pass_at_k_advantages(np.array(rewards), k=k) - expected).max() <= 1e-10


@pytest.mark.parametrize("k", [1, 4])
def test_pass_at_k_of_more_attempts_than_there_are_is_refused(k: int) -> None:
    with pytest.raises(ConfigError, match=f"pass@{k}.* 2 .* 3"):
        pass_at_k_advantages(np.zeros(3), k=k)


def test_maxrl_refuses_rewards_whose_mean_could_be_zero_without_a_tie() -> None:
    with pytest.raises(RewardError, match=r"-0.5.* 0 to 1"):
        maxrl_advantages(np.array([0.5, -0.5]))


def test_attempts_without_tokens_have_no_say_in_what_is_normalised_over_tokens() -> None:
    rewards, lengths = np.array([1.0, 0.0, 7.0]), np.array([2.0, 2.0, 0.0])
    assert reinforce_plus_plus_advantages(rewards, lengths, eps=0.0)[:2].tolist() == [1.0, -1.0]
    assert reinforce_plus_plus_advantages(rewards, np.zeros(3)).tolist() == [0.0] * 3
    assert opo_advantages(rewards, np.zeros(3)).tolist() == [0.0] * 3


def test_remax_without_a_greedy_attempt_is_refused() -> None:
    assert [name for name, each in ESTIMATORS.items() if each.needs_greedy] == ["remax"]
    assert [name for name, each in ESTIMATORS.items() if each.needs_critic] == ["gae"]
    attempts = _attempts([(1.0, 1, 0, 0.0), (0.0, 1, 0, None)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(RewardError, match=r"1 of 2 .*greedy"):
        estimator_named("remax").estimate(attempts)


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - set(FROM_REWARDS)))
def test_what_is_made_token_by_token_gives_attempts_nothing_that_could_be_taken_for_an_advantage(
    name: str,
) -> None:
    assert np.isnan(_estimate(name, [(1.0, 1, 0, 0.0)])[0])


# GiGPO


def _played(turns: list[tuple[str, float]], gamma: float) -> Attempt:
    """(state, paid) turn by turn."""
    paid_K = np.array([paid for _, paid in turns])
    return Attempt(
        reward=float(paid_K.sum()),
        num_tokens=len(turns),
        turn_rewards_K=paid_K,
        returns_K=returns_to_go(paid_K, gamma),
        states_K=tuple(state for state, _ in turns),
    )


def test_gigpo_compares_turns_that_began_in_the_same_state_whoever_and_whenever() -> None:
    """Two attempts meet in the hall, one of them twice; nobody else sees the cellar or the attic."""
    attempts = [
        _played([("hall", 0.0), ("cellar", 0.0), ("hall", 0.0)], gamma=0.5),
        _played([("hall", 0.0), ("attic", 1.0)], gamma=0.5),
    ]
    found = gigpo_advantages(attempts, omega=0.5)
    # As attempts: rewards 0 and 1, mean 1/2, std 1/2. In the hall: returns 0, 0 and 1/2, mean 1/6, std √2/6.
    hall = math.sqrt(0.5) * 0.5
    assert found[0] == pytest.approx([-1.0 - hall, -1.0, -1.0 - hall], abs=1e-4)
    assert found[1] == pytest.approx([1.0 + 2.0 * hall, 1.0], abs=1e-4)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), eighths), max_size=4), min_size=1, max_size=5))
def test_gigpo_equals_brute_force_over_all_pairs_of_turns(games: list[list[tuple[str, float]]]) -> None:
    attempts = [_played(turns, gamma=0.75) for turns in games]
    rewards = [math.fsum(paid for _, paid in turns) for turns in games]
    whole = _scaled(rewards, _mean(rewards))
    for mine, (turns, found) in enumerate(zip(games, gigpo_advantages(attempts), strict=True)):
        for turn, (state, _) in enumerate(turns):
            rivals = [
                math.fsum(paid * 0.75**later for later, (_, paid) in enumerate(other[place:]))
                for other in games
                for place, (seen, _) in enumerate(other)
                if seen == state
            ]
            own = math.fsum(paid * 0.75**later for later, (_, paid) in enumerate(turns[turn:]))
            spread = math.sqrt(_mean([(rival - _mean(rivals)) ** 2 for rival in rivals]))
            expected = whole[mine] + (own - _mean(rivals)) / (spread + 1e-6)
            assert found[turn] == pytest.approx(expected, abs=1e-10)


# One's own, the names, and the keys of single estimators


def test_the_keys_of_an_estimator_reach_its_formula() -> None:
    rows: Rows = [(reward, 1, 0, 0.0) for reward in (1.0, 0.5, 0.25, 0.0, 0.5)]
    attempts = _attempts(rows)

    def found(name: str, **keys: Any) -> list[float]:
        estimates = estimator_named(name, AlgorithmContext(config=AlgorithmConfig(**keys))).estimate(attempts)
        return [float(each[0]) for each in estimates]

    assert found("pass_at_k") == pytest.approx(_best_of_k(rows, 2))
    assert found("pass_at_k", pass_k=4) == pytest.approx(_best_of_k(rows, 4))
    rewards = [reward for reward, *_ in rows]
    grpo, centred = _grpo(rows), [each - _mean(rewards) for each in rewards]
    assert found("gigpo", gigpo_omega=0.25) == pytest.approx([1.25 * each for each in grpo])
    assert found("gigpo", gigpo_norm="none") == pytest.approx([2.0 * each for each in centred])
    assert found("gigpo", gigpo_omega=0.0) == pytest.approx(grpo)


def test_the_configuration_knows_the_same_estimators_and_which_need_two_attempts() -> None:
    assert {name: each.min_group > 1 for name, each in ESTIMATORS.items()} == CONFIGURED


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"`gpro`.*'prpo'.*grpo, dr_grpo"):
        estimator_named("gpro")


OWN = """
from functools import partial

from rllm.algorithms.advantages import pass_at_k_advantages
from rllm.algorithms.estimators import Estimator, to_all_turns

def best_only(rewards_G):
    return (rewards_G == rewards_G.max()) * 1.0

def too_few(rewards_G):
    return rewards_G[1:]

def broken(rewards_G):
    return rewards_G / 0.0

whole_step = Estimator(estimate=to_all_turns(lambda attempts: [7.0] * len(attempts)), within_groups=False)
best_of_3 = partial(pass_at_k_advantages, k=3)
number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return str(path)


def test_a_function_in_a_file_of_ones_own_is_an_estimator(own: str) -> None:
    rows: Rows = [(1.0, 1, 0, 0.0), (0.5, 1, 0, 0.0)]
    assert _estimate(f"{own}:best_only", rows) == [1.0, 0.0]
    assert _estimate(f"{own}:whole_step", rows) == [7.0, 7.0]
    assert not estimator_named(f"{own}:whole_step").within_groups
    assert _estimate(f"{own}:best_of_3", rows + rows) == _best_of_k(rows + rows, 3)


def test_a_role_may_have_an_estimator_of_ones_own(own: str) -> None:
    validate_policies({}, {"solver": RoleConfig(estimator=f"{own}:best_only")})


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(
    ("name", "named"),
    [
        (
            "too_few",
            r"too_few.*array\(\[0.5\]\).*\[1.0, 0.5\]",
        ),
        ("broken", r"broken made array\(\[inf, inf\]\)"),
        ("number", "is a int; an advantage estimator is a function"),
        ("missing", "missing"),
    ],
)
def test_ones_own_estimator_that_breaks_its_contract_is_named(own: str, name: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _estimate(f"{own}:{name}", [(1.0, 1, 0, 0.0), (0.5, 1, 0, 0.0)])


# verl 0.9.1


@pytest.fixture(scope="module")
def verl() -> dict[str, Any]:
    """What verl 0.9.1 computes in float32 for eight rows in groups a, a, a, b, b, c, c, d."""
    return json.loads((Path(__file__).parent / "data" / "verl_estimators.json").read_text())


def _verl_rows(verl: dict[str, Any]) -> Rows:
    return [
        (sum(rewards), sum(mask), "abcd".index(group), baseline)
        for rewards, mask, group, baseline in zip(
            verl["rewards"], verl["mask"], verl["groups"], verl["remax_baselines"], strict=True
        )
    ]


def _theirs(verl: dict[str, Any], name: str) -> np.ndarray:
    """verl hands out a value per token; all unmasked ones of a row are the same."""
    found = []
    for row, mask in zip(verl["advantages"][name], verl["mask"], strict=True):
        values = [value for value, kept in zip(row, mask, strict=True) if kept]
        assert max(values) - min(values) < 1e-6
        found.append(values[0])
    return np.array(found)


def _ours(verl: dict[str, Any], name: str) -> np.ndarray:
    rows = _verl_rows(verl)
    if not estimator_named(name).within_groups:
        return np.array(_estimate(name, rows))
    groups = [[row for row in rows if row[2] == group] for group in range(4)]
    return np.concatenate([_estimate(name, group) for group in groups])


SAMPLE_STD = np.sqrt(np.array([2 / 3, 2 / 3, 2 / 3, 1 / 2, 1 / 2, 1 / 2, 1 / 2]))
"""What dividing by the sample standard deviation (ddof = 1) makes of an advantage, row by row."""


@pytest.mark.parametrize(
    ("name", "theirs", "factor"),
    [
        ("grpo", "grpo", SAMPLE_STD),
        ("rloo", "rloo", 1.0),
        ("opo", "opo", 1.0),
        ("remax", "remax", 1.0),
        ("gpg", "gpg", 5 / 6),  # five attempts are in groups that do not tie, six rewards are not 0
    ],
)
def test_verl_agrees_where_a_group_has_two_attempts(
    verl: dict[str, Any], name: str, theirs: str, factor: Any
) -> None:
    assert _ours(verl, name)[:7] * factor == pytest.approx(_theirs(verl, theirs)[:7], abs=2e-6)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("grpo", 2.0), ("rloo", 2.0), ("rloo_vectorized", 0.0), ("opo", 2.0), ("gpg", 2.0 * 8 / 6)],
)
def test_verl_mostly_gives_a_lonely_attempt_its_raw_reward_where_we_give_nothing(
    verl: dict[str, Any], name: str, theirs: float
) -> None:
    assert _theirs(verl, name)[7] == pytest.approx(theirs, abs=1e-5)
    assert _ours(verl, name.removesuffix("_vectorized"))[7] == 0.0


def test_verl_normalises_over_tokens_as_reinforce_plus_plus_with_baseline_does(verl: dict[str, Any]) -> None:
    rows = _verl_rows(verl)
    centred, lengths = np.array(_by_group(rows)), np.array([float(row[1]) for row in rows])
    centred[7] = rows[7][0]  # theirs
    sample_std = math.sqrt((lengths.sum() - 1) / lengths.sum())
    found = reinforce_plus_plus_advantages(centred, lengths, eps=0.0) * sample_std
    assert found == pytest.approx(_theirs(verl, "reinforce_plus_plus_baseline"), abs=2e-6)
    ours = _ours(verl, "reinforce_plus_plus_baseline")
    assert ours[7] == ours[5] == ours[6]  # alone as tied: above and below nobody
