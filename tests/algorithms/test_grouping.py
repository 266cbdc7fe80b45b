import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.grouping import GroupingCounts, group_advantages, group_episodes
from rllm.errors import AgentError, RewardError
from rllm.types.episode import Episode, Outcome, Trajectory

FAILURES = (Outcome.POLICY_FAILURE, Outcome.INFRASTRUCTURE_FAILURE, Outcome.CANCELLED)


def _advantages(episodes: list[Episode], estimator: str = "grpo") -> tuple[dict[str, float], GroupingCounts]:
    groups, counts = group_episodes(episodes)
    return group_advantages(groups, lambda role: estimator, counts), counts


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
        ]
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
            trajectories=[Trajectory(name="solver", reward=None)],
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
    assert all(
        isinstance(value, float) and not isinstance(value, np.generic) for value in advantages.values()
    )


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
                assert advantage == pytest.approx(weights[role] * expected[uid], abs=1e-6)


def test_reinforce_pays_what_was_earned_and_compares_it_with_nothing(episode: Callable[..., Episode]) -> None:
    episodes = [episode("a", attempt, {"agent": 0.5}) for attempt in range(3)]
    assert list(_advantages(episodes, "reinforce")[0].values()) == [0.5, 0.5, 0.5]


def test_masked_trajectories_are_in_no_group_and_others_may_be_paid_otherwise(
    episode: Callable[..., Episode],
) -> None:
    episodes = [episode("a", attempt, {"agent": float(attempt)}) for attempt in range(3)]
    groups, counts = group_episodes(episodes, masked={"a/2/agent"})
    advantages = group_advantages(groups, lambda role: "dr_grpo", counts, rewards={"a/1/agent": -1.0})
    assert advantages == {"a/0/agent": 0.5, "a/1/agent": -0.5}
    assert (counts.masked, counts.learnable, counts.compared) == (1, 3, 1)


def test_two_trajectories_that_cannot_be_told_apart_are_named(episode: Callable[..., Episode]) -> None:
    twice = episode("a", 0, {"solver": 1.0})
    twice.trajectories.append(Trajectory(uid="a/0/solver", name="solver", reward=0.0))
    with pytest.raises(AgentError, match=r"Episode a:0 .* role solver with the uid of another, a/0/solver"):
        group_episodes([twice])
