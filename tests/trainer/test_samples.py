from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rllm.algorithms.grouping import group_advantages, group_episodes
from rllm.algorithms.returns import gae
from rllm.errors import ConfigError, CountError
from rllm.trainer import samples
from rllm.trainer.samples import group_shares, training_batch, trajectory_rows
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.messages import LogprobMeaning, ModelOutput
from rllm.types.sample import NOT_SAMPLED

Turns = list[tuple[list[int], list[int]]]
"""(what is new in the prompt, what was sampled) turn by turn."""


def _steps(turns: Turns, version: int = 3, **output: Any) -> list[Step]:
    history: list[int] = []
    steps: list[Step] = []
    for index, (new, sampled) in enumerate(turns):
        prompt = history + new
        step = Step()
        step.record_output(
            ModelOutput(
                prompt_ids=prompt,
                completion_ids=sampled,
                logprobs=[-0.25 * (index + 1)] * len(sampled),
                policy_versions=[version] * len(sampled),
                **output,
            )
        )
        steps.append(step)
        history = prompt + sampled
    return steps


def _episode(
    turns: Turns, reward: float | None, attempt: int = 0, outcome: Outcome = Outcome.SCORED, task: str = "t"
) -> Episode:
    trajectory = Trajectory(uid=f"{task}/{attempt}", steps=_steps(turns), reward=reward)
    return Episode(task_id=task, rollout_idx=attempt, trajectories=[trajectory], outcome=outcome)


def _advantages(episodes: list[Episode]) -> dict[str, NDArray[np.float64]]:
    groups, counts = group_episodes(episodes)
    return group_advantages(groups, lambda role: "grpo", counts)


ids = st.lists(st.integers(0, 99), max_size=4)
turn_lists = st.lists(st.tuples(ids.filter(bool), ids), min_size=1, max_size=5)


def test_a_conversation_that_only_grows_is_one_row_with_its_sampled_tokens_marked() -> None:
    turns: Turns = [([1, 2, 3], [4, 5]), ([6], [7])]
    (row,) = trajectory_rows(Trajectory(name="solver", steps=_steps(turns)), "t", 2, 0, 0.5)
    assert row.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.policy_versions_T.tolist() == [NOT_SAMPLED] * 3 + [3, 3, NOT_SAMPLED, 3]
    assert row.trainable_T.tolist() == [False] * 3 + [True, True, False, True]
    assert row.logprobs_T.tolist() == [0, 0, 0, -0.25, -0.25, 0, -0.5]
    assert row.advantages_T.tolist() == [0, 0, 0, 0.5, 0.5, 0, 0.5]
    assert (row.group_key, row.order_key) == (("t", "solver"), ("t", 2, 0, 0))


@given(turn_lists)
def test_the_ids_trained_on_are_the_ids_emitted_and_no_other(turns: Turns) -> None:
    rows = trajectory_rows(Trajectory(steps=_steps(turns)), "t", 0, 0, 1.0)
    trained = [token for row in rows for token in row.token_ids_T[row.trainable_T].tolist()]
    assert trained == [token for _, sampled in turns for token in sampled]
    assert len(rows) == 1


@given(st.lists(turn_lists, min_size=1, max_size=4))
def test_a_rewritten_history_begins_a_new_row_and_loses_no_sampled_token(segments: list[Turns]) -> None:
    steps: list[Step] = []
    for number, turns in enumerate(segments):
        opening = [100 + number]  # no segment can go on from the one before
        steps += _steps([(opening + turns[0][0], turns[0][1]), *turns[1:]])
    rows = trajectory_rows(Trajectory(steps=steps), "t", 0, 0, 1.0)
    assert len(rows) == len(segments)
    assert [row.order_key for row in rows] == [("t", 0, 0, index) for index in range(len(rows))]
    trained = [token for row in rows for token in row.token_ids_T[row.trainable_T].tolist()]
    assert trained == [token for step in steps for token in step.response_ids]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1), turn_lists, st.sampled_from(list(Outcome))),
        max_size=12,
        unique_by=lambda each: (each[0], each[3], len(each[2])),
    )
)
def test_every_sampled_token_is_trained_or_dropped_for_a_reason(rows: list[Any]) -> None:
    episodes = [
        _episode(
            turns,
            float(reward) if outcome in (Outcome.SCORED, Outcome.TRUNCATED) else None,
            attempt=index,
            outcome=outcome,
            task=f"t{task}",
        )
        for index, (task, reward, turns, outcome) in enumerate(rows)
    ]
    batch = training_batch(episodes, _advantages(episodes))
    counts = batch.token_counts
    sampled = sum(len(sampled) for _, _, turns, _ in rows for _, sampled in turns)
    assert counts["sampled"] == sampled
    assert sampled == sum(count for name, count in counts.items() if name != "sampled")
    assert counts["trained"] == sum(row.num_trainable for row in batch.samples)
    keys = [row.order_key for row in batch.samples]
    assert keys == sorted(keys)


def test_rows_that_teach_nothing_are_rows_like_any_other() -> None:
    episodes = [_episode([([1], [2, 3])], 1.0, attempt) for attempt in range(2)]
    batch = training_batch(episodes, _advantages(episodes))
    assert (batch.token_counts["trained"], batch.token_counts["dropped.tied"]) == (4, 0)
    assert all(row.advantages_T.tolist() == [0.0] * 3 for row in batch.samples)


def test_a_token_that_a_grammar_forced_is_read_and_counted_but_never_trained_on() -> None:
    episodes = [_episode([([1], [2, 3, 4]), ([5], [6])], float(attempt), attempt) for attempt in range(2)]
    advantages = _advantages(episodes)
    episodes[1].trajectories[0].steps[0].policy_versions = [3, NOT_SAMPLED, 3]
    batch = training_batch(episodes, advantages)
    assert batch.token_counts == {
        "sampled": 8,
        "trained": 7,
        "masked.forced": 1,
        "dropped.failed": 0,
        "dropped.tied": 0,
    }
    row = batch.samples[1]
    assert row.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.trainable_T.tolist() == [False, True, False, True, False, True]
    assert row.advantages_T[~row.trainable_T].tolist() == [0.0] * 3
    assert row.logprobs_T.tolist() == [0, -0.25, 0, -0.25, 0, -0.5]


def test_forced_tokens_of_an_attempt_that_is_dropped_are_dropped_with_it() -> None:
    episodes = [_episode([([1], [2, 3])], 1.0, attempt) for attempt in range(2)]
    episodes[0].trajectories[0].steps[0].policy_versions = [3, NOT_SAMPLED]
    masked = {"t/0": "tied", "t/1": "tied"}
    counts = training_batch(episodes, _advantages(episodes), exclusion_reasons=masked).token_counts
    assert (counts["sampled"], counts["masked.forced"], counts["dropped.tied"]) == (4, 0, 4)


def test_tokens_that_do_not_add_up_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(*given: Any) -> list[Any]:
        return trajectory_rows(*given)[:-1]

    episodes = [_episode([([1], [2, 3])], float(attempt), attempt) for attempt in range(2)]
    monkeypatch.setattr(samples, "trajectory_rows", lossy)
    with pytest.raises(CountError, match=r"'sampled': 4, 'trained': 0, 'masked\.forced': 0"):
        training_batch(episodes, _advantages(episodes))


def _break(step: Step, **changes: Any) -> Step:
    for name, value in changes.items():
        setattr(step, name, value)
    return step


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logprobs": []}, "2 response ids and 0 log-probabilities"),
        ({"logprobs": [-0.5]}, "2 response ids and 1 log-probabilities"),
        ({"prompt_ids": []}, "0 prompt ids"),
        ({"policy_versions": []}, "0 policy versions for 2 sampled"),
    ],
)
def test_a_step_that_cannot_be_trained_on_is_refused_by_what_it_lacks(
    changes: dict[str, Any], named: str
) -> None:
    (step,) = _steps([([1], [2, 3])])
    with pytest.raises(ConfigError, match=named):
        trajectory_rows(Trajectory(steps=[_break(step, **changes)]), "t", 0, 0, 1.0)


def test_tokens_of_truncated_sampling_are_refused() -> None:
    steps = _steps([([1], [2])], logprob_meaning=LogprobMeaning.TRUNCATED)
    with pytest.raises(ConfigError, match="top-k or top-p"):
        trajectory_rows(Trajectory(steps=steps), "t", 0, 0, 1.0)


def test_tokens_of_a_server_that_does_not_tell_how_it_sampled_are_refused() -> None:
    steps = _steps([([1], [2])], logprob_meaning=LogprobMeaning.UNKNOWN)
    with pytest.raises(ConfigError, match=r"`temperature`, `top_p` .*`top_k`"):
        trajectory_rows(Trajectory(steps=steps), "t", 0, 0, 1.0)


@pytest.mark.parametrize(
    ("meaning", "sampled_at", "trained_at"),
    [
        (LogprobMeaning.TEMPERATURE, 0.6, 0.6),
        (LogprobMeaning.RAW, 1.0, 1.0),
        (LogprobMeaning.RAW, 0.0, 1.0),  # greedy answers are scored by the model as it is
    ],
)
def test_a_row_is_scored_at_the_temperature_its_log_probabilities_mean(
    meaning: LogprobMeaning, sampled_at: float, trained_at: float
) -> None:
    steps = _steps([([1], [2])], logprob_meaning=meaning, temperature=sampled_at)
    (row,) = trajectory_rows(Trajectory(steps=steps), "t", 0, 0, 1.0)
    assert row.temperature == trained_at


def test_two_temperatures_in_one_conversation_are_refused() -> None:
    steps = _steps([([1], [2]), ([3], [4])], logprob_meaning=LogprobMeaning.TEMPERATURE, temperature=0.6)
    assert steps[1].model_output is not None
    steps[1].model_output.temperature = 1.3
    with pytest.raises(ConfigError, match=r"temperature 0.6 .* 1.3"):
        trajectory_rows(Trajectory(steps=steps), "t", 0, 0, 1.0)


@given(st.lists(turn_lists, min_size=2, max_size=5), st.data())
def test_observation_tokens_inserted_anywhere_change_no_advantage(
    conversations: list[Turns], data: st.DataObject
) -> None:
    def longer(turns: Turns) -> Turns:
        return [
            (new + data.draw(st.lists(st.integers(0, 99), max_size=3)), sampled) for new, sampled in turns
        ]

    def trained(episodes: list[Episode]) -> list[tuple[list[int], list[float], list[float]]]:
        batch = training_batch(episodes, _advantages(episodes))
        return [
            tuple(
                column[row.trainable_T].tolist()
                for column in (row.token_ids_T, row.advantages_T, row.logprobs_T)
            )
            for row in batch.samples
        ]

    rewards = [data.draw(st.integers(0, 2)) / 2 for _ in conversations]
    plain, padded = (
        [
            _episode(each, reward, attempt)
            for attempt, (each, reward) in enumerate(zip(talks, rewards, strict=True))
        ]
        for talks in (conversations, [longer(turns) for turns in conversations])
    )
    assert trained(plain) == trained(padded)


def test_the_order_of_arrival_changes_no_row() -> None:
    episodes = [
        _episode([([1], [attempt + 2])], float(attempt), attempt, task=f"t{task}")
        for task in range(3)
        for attempt in range(3)
    ]
    rng = np.random.default_rng(0)
    expected = training_batch(episodes, _advantages(episodes)).samples
    shuffled = [episodes[index] for index in rng.permutation(len(episodes))]
    rows = training_batch(shuffled, _advantages(shuffled)).samples
    for row, other in zip(rows, expected, strict=True):
        assert row.order_key == other.order_key
        assert (row.token_ids_T == other.token_ids_T).all()
        assert (row.advantages_T == other.advantages_T).all()


def test_a_third_of_infrastructure_failures_changes_no_row() -> None:
    good = [_episode([([1], [attempt + 2, 9])], float(attempt % 3), attempt) for attempt in range(7)]
    failed = [
        _episode([([1], [50])], None, attempt, Outcome.INFRASTRUCTURE_FAILURE) for attempt in range(7, 10)
    ]
    alone = training_batch(good, _advantages(good))
    mixed = training_batch([*failed, *good], _advantages([*failed, *good]))
    assert mixed.token_counts == {
        **alone.token_counts,
        "sampled": alone.token_counts["sampled"] + 3,
        "dropped.failed": 3,
    }
    for row, other in zip(alone.samples, mixed.samples, strict=True):
        assert (row.token_ids_T == other.token_ids_T).all()
        assert (row.advantages_T == other.advantages_T).all()


@given(num_tasks=st.integers(0, 7), num_shares=st.integers(1, 4), data=st.data())
def test_updates_share_out_whole_tasks_with_all_their_roles_and_forget_none(
    num_tasks: int, num_shares: int, data: st.DataObject
) -> None:
    class Row:
        def __init__(self, task: int, role: str) -> None:
            self.group_key = (f"t{task}", role)

    rows: list[Any] = [
        Row(task, role)
        for task in range(num_tasks)
        for role in data.draw(st.lists(st.sampled_from(["solver", "judge"]), min_size=1, max_size=4))
    ]
    shares = list(group_shares(rows, num_shares))
    assert len(shares) == min(num_shares, num_tasks)
    assert sorted(map(id, rows)) == sorted(id(row) for share in shares for row in share)
    tasks = [{row.group_key[0] for row in share} for share in shares]
    assert sum(len(each) for each in tasks) == num_tasks
    if tasks:
        assert max(map(len, tasks)) - min(map(len, tasks)) <= 1


def test_tokens_of_roles_that_nobody_learns_from_and_of_masked_ones_are_counted_apart() -> None:
    episodes = [_episode([([1], [2, 3])], float(attempt), attempt) for attempt in range(3)]
    episodes[2].trajectories[0].name = "judge"
    advantages = {f"t/{attempt}": np.array([value]) for attempt, value in enumerate((-1.0, 1.0, 1.0))}
    batch = training_batch(
        episodes, advantages, exclusion_reasons={"t/1": "truncated"}, is_trained=lambda role: role != "judge"
    )
    assert [sample.order_key[1] for sample in batch.samples] == [0]
    assert batch.token_counts == {
        "sampled": 6,
        "trained": 2,
        "masked.forced": 0,
        "dropped.failed": 0,
        "dropped.tied": 0,
        "dropped.truncated": 2,
        "dropped.untrained": 2,
    }


# Turns


def test_every_turn_has_its_own_advantage_and_is_paid_at_its_last_sampled_token() -> None:
    turns: Turns = [([1, 2], [3, 4]), ([5], [6]), ([7, 8], [9, 10, 11])]
    (row,) = trajectory_rows(
        Trajectory(steps=_steps(turns)), "t", 0, 0, np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.0, -1.0])
    )
    assert row.advantages_T.tolist() == [0, 0, 1, 1, 0, 2, 0, 0, 3, 3, 3]
    assert row.rewards_T is not None
    assert row.rewards_T.tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, -1]


def test_rewards_are_in_the_rows_of_a_batch_as_they_are_paid() -> None:
    episodes = [_episode([([1], [2]), ([3], [4])], float(attempt), attempt) for attempt in range(2)]
    batch = training_batch(episodes, _advantages(episodes), rewards={"t/0": 5.0})
    paid = [row.rewards_T.tolist() for row in batch.samples if row.rewards_T is not None]
    assert paid == [[0, 0, 0, 5], [0, 0, 0, 1]]


def test_demonstrations_are_paid_nothing() -> None:
    (row,) = trajectory_rows(Trajectory(steps=_steps([([1], [2])])), "t", 0, 0, 1.0)
    assert row.rewards_T is None


def test_a_turn_that_sampled_nothing_hands_what_it_was_paid_to_the_one_before() -> None:
    """Nothing, or nothing but tokens that a grammar forced; what no token can have earned is left out."""
    steps = _steps([([1], []), ([2], [3, 4]), ([5], []), ([6], [7])])
    steps[1].policy_versions = [3, NOT_SAMPLED]
    steps[3].policy_versions = [NOT_SAMPLED]
    paid_K = np.array([9.0, 1.0, 2.0, 4.0])
    (row,) = trajectory_rows(Trajectory(steps=steps), "t", 0, 0, np.ones(4), paid_K)
    assert row.rewards_T is not None
    assert row.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.rewards_T.tolist() == [0, 0, 7, 0, 0, 0, 0]


@pytest.mark.parametrize("given", [np.ones(1), np.ones(3)])
def test_advantages_that_are_not_one_for_each_turn_are_an_error(given: NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match="zip"):
        trajectory_rows(Trajectory(steps=_steps([([1], [2]), ([3], [4])])), "t", 0, 0, given)


@given(st.lists(turn_lists, min_size=2, max_size=4), st.data())
def test_observation_tokens_inserted_anywhere_change_no_return_and_no_credit_of_a_turn(
    conversations: list[Turns], data: st.DataObject
) -> None:
    def columns(talks: list[Turns]) -> list[tuple[list[float], list[float], list[float]]]:
        """Of the trained tokens: advantages by turn, GAE of a critic that knows the token ids, returns."""
        episodes = [_episode(turns, 0.0, attempt) for attempt, turns in enumerate(talks)]
        for episode, rewards in zip(episodes, paid, strict=True):
            (trajectory,) = episode.trajectories
            for step, reward in zip(trajectory.steps, rewards, strict=True):
                step.reward = reward
            trajectory.reward = sum(rewards)
        groups, counts = group_episodes(episodes)
        advantages = group_advantages(groups, lambda role: "rloo", counts, gamma=0.9, credit="turn")
        found = []
        for row in training_batch(episodes, advantages).samples:
            trained = row.trainable_T
            assert row.rewards_T is not None
            gained_T, returns_T = gae(
                row.rewards_T[trained], row.token_ids_T[trained] / 100, gamma=0.9, lam=0.8
            )
            found.append((row.advantages_T[trained].tolist(), gained_T.tolist(), returns_T.tolist()))
        return found

    def longer(turns: Turns) -> Turns:
        return [
            (new + data.draw(st.lists(st.integers(0, 99), max_size=3)), sampled) for new, sampled in turns
        ]

    paid = [[data.draw(st.integers(-2, 2)) / 2 for _ in turns] for turns in conversations]
    assert columns(conversations) == columns([longer(turns) for turns in conversations])
