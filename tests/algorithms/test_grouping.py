import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.estimators import ESTIMATORS
from rllm.algorithms.grouping import (
    GroupingCounts,
    group_advantages,
    group_episodes,
    state_of,
    turn_rewards,
)
from rllm.config.algorithm import AlgorithmConfig
from rllm.config.learning import WITH_OWN_CREDIT
from rllm.errors import AgentError, ConfigError, RewardError
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.sample import NOT_SAMPLED

FAILURES = (Outcome.POLICY_FAILURE, Outcome.INFRASTRUCTURE_FAILURE, Outcome.CANCELLED)


def _turns(episodes: list[Episode], estimator: str = "grpo", **options: Any) -> dict[str, list[float]]:
    groups, counts = group_episodes(episodes)
    found = group_advantages(groups, lambda role: estimator, counts, **options)
    return {uid: advantages_K.tolist() for uid, advantages_K in found.items()}


def _advantages(episodes: list[Episode], estimator: str = "grpo") -> tuple[dict[str, float], GroupingCounts]:
    """One advantage per trajectory, which has one turn or several that get the same."""
    groups, counts = group_episodes(episodes)
    found = group_advantages(groups, lambda role: estimator, counts)
    return {uid: _same(advantages_K.tolist()) for uid, advantages_K in found.items()}, counts


def _same(values: list[float]) -> float:
    assert len(set(values)) == 1
    return values[0]


@st.composite
def batches(draw: st.DrawFn) -> list[Episode]:
    """Tasks × attempts with one to three roles each, of all outcomes; rewards that often tie."""
    episodes: list[Episode] = []
    for task in range(draw(st.integers(1, 4))):
        for attempt in range(draw(st.integers(1, 6))):
            outcome = draw(st.sampled_from([*[Outcome.SCORED] * 4, Outcome.TRUNCATED, *FAILURES]))
            roles = draw(
                st.lists(st.sampled_from(["solver", "judge", "critic"]), min_size=1, max_size=3, unique=True)
            )
            episodes.append(
                Episode(
                    task_id=f"task-{task}",
                    rollout_idx=attempt,
                    outcome=outcome,
                    trajectories=[
                        Trajectory(
                            uid=f"{task}/{attempt}/{role}",
                            name=role,
                            reward=None if outcome in FAILURES else draw(st.integers(-2, 4)) / 4,
                            steps=[Step(response_ids=[1, 2])] * draw(st.integers(1, 3)),
                        )
                        for role in roles
                    ],
                )
            )
    return episodes


def _oracle(episodes: list[Episode], estimator: str) -> dict[str, float]:
    """Every trajectory against all others of its task and role, found by looking at every pair."""
    judged = [
        (episode.task_id, trajectory)
        for episode in episodes
        if episode.outcome in (Outcome.SCORED, Outcome.TRUNCATED)
        for trajectory in episode.trajectories
    ]
    found: dict[str, float] = {}
    for task_id, mine in judged:
        rivals = [
            Fraction(other.reward)
            for task, other in judged
            if other.name == mine.name and (task == task_id or estimator == "reinforce_plus_plus")
            for _ in (other.steps if estimator == "reinforce_plus_plus" else other.steps[:1])
        ]  # a rival counts as often as it has tokens where all tokens of a step are compared
        mean = sum(rivals) / len(rivals)
        variance = sum((reward - mean) ** 2 for reward in rivals) / len(rivals)
        distance = float(Fraction(mine.reward) - mean)
        if estimator != "dr_grpo":
            distance /= float(variance) ** 0.5 + 1e-6
        found[mine.uid] = distance
    return found


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "reinforce_plus_plus"])
@given(data=st.data())
def test_advantages_are_those_of_a_brute_force_oracle_however_members_are_shuffled_lost_and_mixed(
    estimator: str, data: st.DataObject
) -> None:
    episodes = data.draw(batches())
    data.draw(st.randoms(use_true_random=False)).shuffle(episodes)
    kept = [episode for episode in episodes if data.draw(st.integers(0, 4)) > 0]
    advantages, counts = _advantages(kept, estimator)
    expected = _oracle(kept, estimator)
    assert advantages.keys() == expected.keys()
    for uid, advantage in advantages.items():
        assert advantage == pytest.approx(expected[uid], abs=1e-6)
    assert counts.episodes == len(kept) == counts.learnable + counts.removed
    assert counts.groups == counts.compared + counts.tied + counts.alone


@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_no_bit(episodes: list[Episode], rng: random.Random) -> None:
    before, _ = _advantages(episodes)
    shuffled = list(episodes)
    rng.shuffle(shuffled)
    assert _advantages(shuffled)[0] == before


def test_a_task_that_always_fails_is_learned_from_when_the_whole_step_is_compared(
    episode: Callable[..., Episode],
) -> None:
    episodes = [
        *(episode("hard", attempt, {"agent": 0.0}) for attempt in range(2)),
        *(episode("easy", attempt, {"agent": 1.0}) for attempt in range(2)),
    ]
    assert set(_advantages(episodes, "grpo")[0].values()) == {0.0}
    advantages, counts = _advantages(episodes, "reinforce_plus_plus")
    assert list(advantages.values()) == pytest.approx([1.0, 1.0, -1.0, -1.0], abs=1e-5)
    assert counts.tied == 2


def test_a_group_is_one_task_and_one_role_in_the_order_of_attempts(episode: Callable[..., Episode]) -> None:
    episodes = [
        episode("b", 0, {"solver": 1.0}),
        episode("a", 1, {"solver": 0.0, "judge": 1.0}),
        episode("a", 0, {"judge": 0.5, "solver": 1.0}),
    ]
    groups, counts = group_episodes(episodes)
    assert {key: [each.uid for each in group.trajectories] for key, group in groups.items()} == {
        ("a", "judge"): ["a/0/judge", "a/1/judge"],
        ("a", "solver"): ["a/0/solver", "a/1/solver"],
        ("b", "solver"): ["b/0/solver"],
    }
    group_advantages(groups, lambda role: "grpo", counts)
    assert (counts.groups, counts.compared, counts.tied, counts.alone) == (3, 2, 0, 1)


def test_a_group_that_lost_so_many_attempts_that_no_k_are_left_teaches_nothing_and_is_counted(
    episode: Callable[..., Episode],
) -> None:
    episodes = [episode("a", attempt, {"agent": float(attempt)}) for attempt in range(3)]
    episodes += [episode("b", attempt, {"agent": float(attempt)}) for attempt in range(2)]
    groups, counts = group_episodes(episodes)
    found = group_advantages(
        groups, lambda role: "pass_at_k", counts, context=AlgorithmContext(config=AlgorithmConfig(pass_k=3))
    )
    assert {uid: float(each.sum()) for uid, each in found.items()} == {
        "a/0/agent": 0.0,
        "a/1/agent": 0.0,
        "a/2/agent": 3.0,  # it alone raises the best of three, from 1 to 2
        "b/0/agent": 0.0,
        "b/1/agent": 0.0,
    }
    assert (counts.groups, counts.compared, counts.alone) == (2, 1, 1)


@given(batches(), st.randoms(use_true_random=False))
def test_a_third_of_failures_changes_no_advantage_of_the_rest(
    episodes: list[Episode], rng: random.Random
) -> None:
    learnable = [each for each in episodes if each.outcome not in FAILURES]
    failed = [
        Episode(
            task_id=rng.choice(["task-0", "task-1", "task-2"]),
            rollout_idx=100 + index,
            outcome=rng.choice(FAILURES),
            trajectories=[Trajectory(name="solver", reward=None, steps=[Step(response_ids=[1])])],
        )
        for index in range(1 + len(learnable) // 2)
    ]
    mixed = [*learnable, *failed]
    rng.shuffle(mixed)
    advantages, counts = _advantages(mixed)
    assert advantages == _advantages(learnable)[0]
    assert counts.removed == len(failed)


def test_a_failure_is_not_a_zero(episode: Callable[..., Episode]) -> None:
    episodes = [episode("a", 0, {"agent": 1.0}), episode("a", 1, {"agent": 1.0})]
    failed = episode("a", 2, {"agent": None}, Outcome.INFRASTRUCTURE_FAILURE)
    advantages, counts = _advantages([*episodes, failed])
    assert list(advantages.values()) == [0.0, 0.0]
    assert (counts.tied, counts.removed) == (1, 1)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e9 + 0.1])
def test_ties_are_exact_zeros_whatever_the_mean_rounds_to(
    episode: Callable[..., Episode], reward: float
) -> None:
    advantages, counts = _advantages([episode("a", index, {"agent": reward}) for index in range(7)])
    assert set(advantages.values()) == {0.0}
    assert counts.tied == 1


@pytest.mark.parametrize(
    "reward", [None, float("nan"), float("inf"), float("-inf"), "1.0", True, [1.0], 1 + 0j]
)
def test_a_reward_that_is_no_finite_number_is_named_with_its_trajectory(
    episode: Callable[..., Episode], reward: Any
) -> None:
    episodes = [episode("lake-7", 0, {"judge": 1.0}), episode("lake-7", 1, {"judge": reward})]
    with pytest.raises(RewardError) as caught:
        _advantages(episodes)
    for named in ("lake-7/1/judge", "task lake-7", "role judge", repr(reward)):
        assert named in str(caught.value)


def test_whole_numbers_are_rewards(episode: Callable[..., Episode]) -> None:
    advantages, _ = _advantages([episode("a", 0, {"agent": 1}), episode("a", 1, {"agent": 0})], "dr_grpo")
    assert list(advantages.values()) == [0.5, -0.5]


@given(batches())
def test_each_role_has_its_own_estimator_and_weight_and_the_others_do_not_matter(
    episodes: list[Episode],
) -> None:
    rules = {"solver": "grpo", "judge": "reinforce_plus_plus", "critic": "dr_grpo"}
    groups, counts = group_episodes(episodes)
    weights = {"solver": 1.0, "judge": 0.5, "critic": 0.0}
    advantages = group_advantages(groups, rules.__getitem__, counts, weight_of=weights.__getitem__)
    for role, rule in rules.items():
        expected = _oracle(episodes, rule)
        for uid, advantage in advantages.items():
            if uid.endswith(role):
                assert _same(advantage.tolist()) == pytest.approx(weights[role] * expected[uid], abs=1e-6)


@pytest.mark.parametrize(
    "estimator", sorted(name for name, each in ESTIMATORS.items() if not each.token_level)
)
@settings(max_examples=15)
@given(episodes=batches(), rng=st.randoms(use_true_random=False))
def test_with_every_estimator_a_role_learns_as_if_alone_and_in_whatever_order(
    estimator: str, episodes: list[Episode], rng: random.Random
) -> None:
    for episode in episodes:
        for trajectory in episode.trajectories:
            trajectory.reward = abs(trajectory.reward or 0.0)  # MaxRL takes no less than 0
    mixed = [*episodes]
    rng.shuffle(mixed)
    baselines = {(f"task-{task}", role): 0.25 for task in range(4) for role in ("solver", "judge", "critic")}
    together = _turns(mixed, estimator, baselines=baselines)
    for role in ("solver", "judge", "critic"):
        alone = [
            replace(episode, trajectories=[each for each in episode.trajectories if each.name == role])
            for episode in episodes
        ]
        found = _turns(alone, estimator, baselines=baselines)
        assert found == {uid: each for uid, each in together.items() if uid.endswith(role)}


def test_reinforce_pays_what_was_earned_and_compares_it_with_nothing(episode: Callable[..., Episode]) -> None:
    episodes = [episode("a", attempt, {"agent": 0.5}) for attempt in range(3)]
    assert list(_advantages(episodes, "reinforce")[0].values()) == [0.5, 0.5, 0.5]


def test_masked_trajectories_are_in_no_group_and_others_may_be_paid_otherwise(
    episode: Callable[..., Episode],
) -> None:
    episodes = [episode("a", attempt, {"agent": float(attempt)}) for attempt in range(3)]
    groups, counts = group_episodes(episodes, masked={"a/2/agent"})
    advantages = group_advantages(groups, lambda role: "dr_grpo", counts, rewards={"a/1/agent": -1.0})
    assert {uid: each.tolist() for uid, each in advantages.items()} == {
        "a/0/agent": [0.5],
        "a/1/agent": [-0.5],
    }
    assert (counts.masked, counts.learnable, counts.compared) == (1, 3, 1)


def test_two_trajectories_that_cannot_be_told_apart_are_named(episode: Callable[..., Episode]) -> None:
    twice = episode("a", 0, {"solver": 1.0})
    twice.trajectories.append(Trajectory(uid="a/0/solver", name="solver", reward=0.0))
    with pytest.raises(AgentError, match=r"a:0 .*solver.* a/0/solver"):
        group_episodes([twice])


# Turns


def _played(
    attempt: int, paid: list[float], reward: float | None = None, task: str = "t", **steps: Any
) -> Episode:
    """An attempt whose turns were paid so; `reward` where the whole was judged otherwise."""
    trajectory = Trajectory(
        uid=f"{task}/{attempt}",
        reward=sum(paid) if reward is None else reward,
        steps=[Step(reward=each, response_ids=[1], **steps) for each in paid],
    )
    return Episode(task_id=task, rollout_idx=attempt, trajectories=[trajectory], outcome=Outcome.SCORED)


def test_three_steps_by_hand() -> None:
    """Two attempts of three turns, paid 0, 1, 1 and 2, 0, -1; returns with γ = 1/2 below.

    |         | paid    | returns       | all turns: RLOO | each turn: RLOO       |
    |---------|---------|---------------|-----------------|-----------------------|
    | first   | 0 1 1   | 0.75 1.5  1   | 2 - 1 = 1       | -1  2  2              |
    | second  | 2 0 -1  | 1.75 -0.5 -1  | 1 - 2 = -1      |  1 -2 -2              |
    """
    episodes = [_played(0, [0.0, 1.0, 1.0]), _played(1, [2.0, 0.0, -1.0])]
    assert _turns(episodes, "reinforce") == {"t/0": [2.0] * 3, "t/1": [1.0] * 3}
    assert _turns(episodes, "reinforce", credit="turn", gamma=0.5) == {
        "t/0": [0.75, 1.5, 1.0],
        "t/1": [1.75, -0.5, -1.0],
    }
    assert _turns(episodes, "rloo", gamma=0.5) == {"t/0": [1.0] * 3, "t/1": [-1.0] * 3}
    assert _turns(episodes, "rloo", credit="turn", gamma=0.5) == {
        "t/0": [-1.0, 2.0, 2.0],
        "t/1": [1.0, -2.0, -2.0],
    }
    assert _turns(episodes, "rloo", credit="discounted", gamma=0.5) == {
        "t/0": [0.25, 0.5, 1.0],
        "t/1": [-0.25, -0.5, -1.0],
    }


def test_a_turn_that_only_one_attempt_came_to_is_compared_with_nothing() -> None:
    episodes = [_played(0, [1.0, 0.0, 5.0]), _played(1, [0.0, 2.0]), _played(2, [3.0])]
    found = _turns(episodes, "dr_grpo", credit="turn")  # returns 6 5 5, 2 2 and 3
    assert found["t/0"] == pytest.approx([6 - 11 / 3, 1.5, 0.0])
    assert found["t/1"] == pytest.approx([2 - 11 / 3, -1.5])
    assert found["t/2"] == pytest.approx([3 - 11 / 3])


def test_whoever_compares_the_whole_step_compares_all_turns_of_it() -> None:
    episodes = [_played(0, [0.0, 4.0]), _played(0, [1.0], task="u")]
    assert _turns(episodes, "reinforce_baseline", credit="turn") == {"t/0": [1.0, 1.0], "u/0": [-2.0]}


def test_within_a_step_turns_are_centred_on_those_at_their_place_of_their_task() -> None:
    """GPG: two tasks, and the second turns of the first one tie."""
    episodes = [
        _played(0, [0.0, 1.0]),
        _played(1, [1.0, 1.0]),
        _played(0, [0.0], task="u"),
        _played(1, [3.0], task="u"),
    ]
    found = _turns(episodes, "gpg", credit="turn")
    alpha = 6 / 4  # six turns, of which two tie
    assert found == {
        "t/0": [-0.5 * alpha, 0.0],
        "t/1": [0.5 * alpha, 0.0],
        "u/0": [-1.5 * alpha],
        "u/1": [1.5 * alpha],
    }


@given(st.lists(st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=4), min_size=1, max_size=4))
def test_without_discount_to_discount_is_to_give_every_turn_the_same(paid: list[list[float]]) -> None:
    episodes = [_played(attempt, each) for attempt, each in enumerate(paid)]
    assert _turns(episodes, "rloo", credit="discounted") == _turns(episodes, "rloo")


@given(
    st.lists(st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=4), min_size=2, max_size=5),
    st.sampled_from(["rloo", "dr_grpo", "grpo", "gigpo"]),
    st.randoms(use_true_random=False),
)
def test_losing_and_shuffling_attempts_changes_turns_only_by_who_is_left(
    paid: list[list[float]], estimator: str, rng: random.Random
) -> None:
    credit = "trajectory" if estimator == "gigpo" else "turn"
    episodes = [_played(attempt, each, observation="here") for attempt, each in enumerate(paid)]
    kept = [each for each in episodes if rng.random() < 0.7] or episodes[:1]
    shuffled = [*kept]
    rng.shuffle(shuffled)
    failed = Episode(task_id="t", rollout_idx=99, outcome=Outcome.POLICY_FAILURE)
    assert _turns([*shuffled, failed], estimator, credit=credit) == _turns(kept, estimator, credit=credit)


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - {"gae", "teacher", "remax"}))
def test_who_compares_attempts_at_a_task_gives_zeros_where_all_were_paid_alike(estimator: str) -> None:
    episodes = [
        _played(attempt, [paid], task=f"paid {paid}", observation="here")
        for paid in (1.0, 0.0)
        for attempt in range(2)
    ]
    advantages, _ = _advantages(episodes, estimator)
    assert any(advantages.values()) == (not ESTIMATORS[estimator].compares_attempts)


def test_a_baseline_of_the_task_is_whitened_over_the_batch() -> None:
    episodes = [
        _played(attempt, [paid], task=task)
        for task, rewards in (("mixed", [1.0, 0.0]), ("tied", [1.0, 1.0]))
        for attempt, paid in enumerate(rewards)
    ]
    advantages, _ = _advantages(episodes, "reinforce_plus_plus_baseline")
    assert list(advantages.values()) == pytest.approx([2**0.5, -(2**0.5), 0.0, 0.0], abs=1e-4)


def test_turns_that_began_in_one_state_are_compared_where_the_estimator_looks_at_states() -> None:
    """All four turns began in one state, two with a return of 1, two of 0; so were the attempts paid."""
    episodes = [
        _played(attempt, paid, observation="here") for attempt, paid in enumerate([[0.0, 1.0], [0.0, 0.0]])
    ]
    won, lost = _turns(episodes, "gigpo").values()
    assert won == pytest.approx([2.0, 2.0], abs=1e-4)
    assert lost == pytest.approx([-2.0, -2.0], abs=1e-4)


def test_what_a_trajectory_was_paid_beyond_its_steps_was_paid_at_its_last_turn() -> None:
    judged = _played(0, [0.0, 0.0, 0.0], reward=1.0).trajectories[0]
    assert turn_rewards(judged, 1.0).tolist() == [0.0, 0.0, 1.0]
    shaped = _played(0, [0.1, 0.2, 0.3]).trajectories[0]
    assert turn_rewards(shaped, sum([0.1, 0.2, 0.3])).tolist() == [0.1, 0.2, 0.3]
    assert turn_rewards(shaped, 0.0) == pytest.approx([0.1, 0.2, -0.3])
    assert turn_rewards(Trajectory(reward=1.0), 1.0).tolist() == []


def test_a_turn_that_was_paid_no_finite_number_is_named() -> None:
    with pytest.raises(RewardError, match=r"t/0 .*\[nan nan\]"):
        _turns([_played(0, [float("nan"), 1.0], reward=1.0), _played(1, [1.0])])
    with pytest.raises(RewardError, match=r"t/0 .*\[ 1. nan\]"):
        _turns([_played(0, [1.0, float("nan")], reward=1.0), _played(1, [1.0])])


@pytest.mark.parametrize("estimator", WITH_OWN_CREDIT)
def test_what_credits_turns_in_its_own_way_is_not_asked_to_credit_them(estimator: str) -> None:
    with pytest.raises(ConfigError, match=f"`algorithm.credit` is 'turn'.*{estimator}"):
        _turns([_played(0, [1.0]), _played(1, [0.0])], estimator, credit="turn")


def test_a_reward_too_large_to_be_compared_is_named() -> None:
    episodes = [_played(0, [1e308]), _played(1, [-1e308])]
    with (
        np.errstate(over="ignore", invalid="ignore"),
        pytest.raises(RewardError, match=r"reward 1e\+308 of trajec"),
    ):
        _turns(episodes, "rloo")
    only_the_last_turns_differ = [_played(0, [1e308, -1e308]), _played(1, [-1e308, 1e308])]
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(RewardError, match=r"inf.*reward 0"):
        _turns(only_the_last_turns_differ, "rloo", credit="turn")


def test_forced_tokens_do_not_count_where_tokens_are_weighed() -> None:
    long = _played(0, [1.0])
    long.trajectories[0].steps = [
        Step(response_ids=[1] * 4, logprobs=[0.0] * 4, policy_versions=[0, 0, 0, NOT_SAMPLED])
    ]
    found = _turns([long, _played(1, [0.0])], "opo")  # three tokens of reward 1, one of reward 0
    assert found == {"t/0": [0.25], "t/1": [-0.75]}


def test_remax_compares_with_the_greedy_attempt_at_the_same_task_by_the_same_role() -> None:
    episodes = [_played(0, [1.0]), _played(1, [1.0]), _played(0, [1.0], task="u")]
    found = _turns(episodes, "remax", baselines={("t", "agent"): 0.25, ("u", "agent"): 1.0})
    assert found == {"t/0": [0.75], "t/1": [0.75], "u/0": [0.0]}
    with pytest.raises(RewardError, match=r"1 of 1 .*greedy"):
        _turns(episodes, "remax", baselines={("t", "agent"): 0.25, ("u", "judge"): 1.0})


@pytest.mark.parametrize("estimator", ["gigpo", "gae"])
def test_who_credits_turns_itself_takes_no_other_credit(estimator: str) -> None:
    with pytest.raises(ConfigError, match=f"`algorithm.credit` is 'turn'.*{estimator}"):
        _turns([_played(0, [1.0])], estimator, credit="turn")


def test_an_unknown_credit_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"is 'step'; .*trajectory, turn, discounted"):
        _turns([_played(0, [1.0])], credit="step")


def test_equal_states_have_equal_keys_however_they_are_written() -> None:
    assert state_of(Step(observation="a lake")) == "a lake"
    one, other = {"x": 1, "board": np.zeros((40, 40))}, {"board": np.zeros((40, 40)), "x": 1}
    assert state_of(Step(observation=one)) == state_of(Step(observation=other))
    other["board"][20, 20] = 1.0
    assert state_of(Step(observation=one)) != state_of(Step(observation=other))
    keyed: dict[Any, Any] = {1: "a", "b": [{(2, 3): 4}, 5]}
    assert state_of(Step(observation=keyed)) == state_of(Step(observation=dict(reversed(keyed.items()))))
    assert state_of(Step(observation=keyed)) != state_of(Step(observation=keyed | {"b": [{(2, 3): 5}, 5]}))


def test_where_no_environment_is_known_the_state_is_what_the_model_was_last_told() -> None:
    said: list[Any] = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    assert state_of(Step(chat_completions=said)) == state_of(Step(chat_completions=[{}, *said]))
    assert state_of(Step(prompt_ids=[1, 2])) == "[1, 2]"


def test_groups_that_tie_teach_nothing_if_and_only_if_an_estimator_compares_attempts() -> None:
    """What `algorithm.ties = "drop"` relies on: beside a group that does not tie, for every estimator."""

    def attempt(task: str, number: int, reward: float) -> Episode:
        steps = [Step(response_ids=[1, 2], policy_versions=[0, 0])]
        trajectory = Trajectory(uid=f"{task}/{number}", reward=reward, steps=steps)
        return Episode(task_id=task, rollout_idx=number, outcome=Outcome.SCORED, trajectories=[trajectory])

    episodes = [attempt("tied", 0, 1.0), attempt("tied", 1, 1.0), attempt("x", 0, 0.0), attempt("x", 1, 0.75)]
    baselines = {(task, "agent"): 0.25 for task in ("tied", "x")}
    for name, rule in ESTIMATORS.items():
        if not rule.needs_critic and not rule.token_level:
            found = _turns(episodes, name, baselines=baselines)
            teaches = any(any(found[f"tied/{number}"]) for number in range(2))
            assert teaches != rule.compares_attempts, name


def test_equal_observations_are_one_state_whatever_they_are_made_of() -> None:
    alike: list[tuple[Any, Any]] = [
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
        ({"at": Fraction(1, 2)}, {"at": Fraction(2, 4)}),
        ({(0, 1): {"x": Fraction(1, 2)}}, {(0, 1): {"x": Fraction(1, 2)}}),
        ({1: ["a"], "b": ("c",)}, {"b": ["c"], 1: ("a",)}),
        (np.arange(3_000), np.arange(3_000)),
    ]
    for one, other in alike:
        assert state_of(Step(observation=one)) == state_of(Step(observation=other))
    states = [state_of(Step(observation=each)) for each, _ in alike]
    other_middle = np.where(np.arange(3_000) == 1_500, -1, np.arange(3_000))
    others = [
        state_of(Step(observation=each)) for each in ({"at": Fraction(1, 3)}, {(0, 2): {}}, other_middle, "x")
    ]
    assert len({*states, *others}) == len(states) + len(others)
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "up"}]
    assert "go" in state_of(Step(chat_completions=messages)), "of a program: the message before the answer"
    assert state_of(Step(chat_completions=messages[:1], prompt_ids=[1, 2])) == "[1, 2]"
