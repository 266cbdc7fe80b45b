from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError, CountError
from rllm.models.directory import load_model
from rllm.store.episodes import GREEDY_PHASE, EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.critic import explained_variance, with_gae
from rllm.trainer.learning import Learner, imitate, learn
from rllm.types.episode import Episode, Outcome
from rllm.types.sample import NOT_SAMPLED, TrainingBatch, TrainingSample

Parameters = list[torch.Tensor]

# ---- a critic's advantages, row by row -------------------------------------------------------------------


def _row(pattern: str, paid: Sequence[float], *, attempt: int = 0, segment: int = 0) -> TrainingSample:
    """A digit is a token that was sampled in that turn, any other letter one that nobody sampled. `paid`: by
    turn, from 1 on, at its last token."""
    turns_T = np.array([int(letter) if letter.isdigit() else 0 for letter in pattern])
    rewards_T = np.zeros(len(pattern), dtype=np.float32)
    for turn, reward in enumerate(paid, start=1):
        if turn in turns_T:
            rewards_T[np.flatnonzero(turns_T == turn)[-1]] = reward
    return TrainingSample(
        token_ids_T=np.zeros(len(pattern), dtype=np.int64),
        policy_versions_T=np.where(turns_T > 0, 0, NOT_SAMPLED),
        logprobs_T=np.zeros(len(pattern), dtype=np.float32),
        advantages_T=turns_T.astype(np.float32),
        rewards_T=rewards_T,
        group_key=("t", "agent"),
        order_key=("t", attempt, 0, segment),
    )


def _spread(row: TrainingSample, values: Sequence[float]) -> np.ndarray:
    """[T] values at the sampled tokens."""
    values_T = np.zeros(row.num_tokens, dtype=np.float32)
    values_T[row.trainable_T] = values
    return values_T


def _gae(rows: list[TrainingSample], values: list[np.ndarray], **changes: Any) -> list[TrainingSample]:
    return with_gae(rows, values, **{"gamma": 1.0, "lam": 1.0, "weight_of": lambda role: 1.0, **changes})


def test_advantages_and_targets_of_three_turns_are_those_worked_out_by_hand() -> None:
    row = _row("pp11o2oo33", [1.0, 0.0, 2.0])
    values_T = _spread(row, [0.5, 1.0, 2.0, 1.0, 0.0])
    (whole,) = _gae([row], [values_T])
    assert whole.returns_T is not None
    assert whole.returns_T[row.trainable_T].tolist() == [3.0, 3.0, 2.0, 2.0, 2.0]
    # δ = 0.5, 2, -1, -1, 2 and A = δ + A' / 2, from the end.
    (half,) = _gae([row], [values_T], lam=0.5)
    assert half.returns_T is not None
    assert half.returns_T[row.trainable_T].tolist() == [1.75, 2.5, 1.0, 1.0, 2.0]
    advantages = np.array([1.25, 1.5, -1.0, 0.0, 2.0])
    white = (advantages - advantages.mean()) / advantages.std()
    assert half.advantages_T[row.trainable_T] == pytest.approx(white, abs=1e-6)
    assert not half.advantages_T[~row.trainable_T].any()
    assert not half.returns_T[~row.trainable_T].any()


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.floats(0.0, 1.0), st.floats(0.1, 1.0))
def test_what_the_environment_says_changes_no_advantage(counts: list[int], lam: float, gamma: float) -> None:
    said, paid, values = "112233", [0.3, -1.0, 1.0], [0.1, 0.4, -0.2, 0.9, 0.0, 0.5]
    plain = _row(f"p{said}", paid)
    widened = _row(
        "p" + "".join("o" * count + token for count, token in zip(counts, said, strict=True)), paid
    )
    results = [
        _gae([row], [_spread(row, values)], lam=lam, gamma=gamma)[0].advantages_T[row.trainable_T]
        for row in (plain, widened)
    ]
    assert results[0] == pytest.approx(results[1], abs=1e-6)


def test_an_agent_of_two_conversations_is_paid_in_the_order_of_its_turns() -> None:
    paid, values = [0.5, 0.25, 1.0], {1: 0.1, 2: 0.7, 3: -0.3}
    alone = _row("p1o2o3", paid)
    first, second = _row("p1oo3", paid), _row("pp2", paid, segment=1)
    (one,) = _gae([alone], [_spread(alone, list(values.values()))], lam=0.5, gamma=0.9)
    two = _gae([first, second], [_spread(first, [0.1, -0.3]), _spread(second, [0.7])], lam=0.5, gamma=0.9)
    for column in ("advantages_T", "returns_T"):
        found = [getattr(two[0], column)[1], getattr(two[1], column)[2], getattr(two[0], column)[4]]
        assert found == pytest.approx(getattr(one, column)[[1, 3, 5]], abs=1e-6)


def test_a_role_that_counts_half_gets_half_the_advantage_and_the_critic_all_of_its_targets() -> None:
    rows = [_row("p1o2", [0.0, reward], attempt=number) for number, reward in enumerate((1.0, 0.0, 0.5))]
    values = [_spread(row, [0.2, 0.4]) for row in rows]
    whole, half = (_gae(rows, values, weight_of=lambda role, w=weight: w) for weight in (1.0, 0.5))
    for mine, theirs in zip(half, whole, strict=True):
        assert mine.advantages_T == pytest.approx(theirs.advantages_T / 2)
        assert mine.returns_T is not None
        assert (mine.returns_T == theirs.returns_T).all()


def test_a_critic_that_knows_everything_explains_all_and_one_that_knows_the_mean_nothing() -> None:
    rows = [_row("p1o2", [0.0, reward], attempt=number) for number, reward in enumerate((1.0, 0.0, 0.5))]
    knows = _gae(
        rows, [_spread(row, [reward] * 2) for row, reward in zip(rows, (1.0, 0.0, 0.5), strict=True)]
    )
    assert explained_variance(knows) == pytest.approx(1.0)
    guesses = _gae(rows, [_spread(row, [0.5, 0.5]) for row in rows])
    assert explained_variance(guesses) == pytest.approx(0.0)
    assert explained_variance([]) == 0.0


# ---- one step, from episodes that were played once -------------------------------------------------------


@pytest.fixture(scope="module")
def played(
    letters: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Episode], list[Episode]]:
    """Six attempts at each of two tasks, and one greedy attempt, of a model that was warmed up a little."""
    run = tmp_path_factory.mktemp("runs") / "run"
    changes = {
        "steps": 1,
        "warm_start": {"steps": 2},
        "rollout": {"group_size": 6, "tasks_per_step": 2},
        "algorithm": {"estimator": "remax"},
    }
    letters.make_trainer(run, changes).train()
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        return list(store.episodes("train", 0)), list(store.episodes(GREEDY_PHASE, 0))


@pytest.fixture
def learner(letters: ModuleType, tiny_directory: Path, tmp_path: Path) -> Callable[..., Learner]:
    """A learner of the letter game, always from the same weights."""

    def make(**changes: Any) -> Learner:
        return letters.make_trainer(tmp_path, changes).run.make_learner(
            {"policy": load_model(tiny_directory)}
        )

    return make


def _parameters(learner: Learner, *, of_critic: bool = False) -> Parameters:
    model: Any = learner.critics["policy"] if of_critic else learner.policies["policy"].loaded_model
    return [each.detach().clone() for each in model.model.parameters()]


def _same(mine: Parameters, theirs: Parameters) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def _advantage_of(batch: TrainingBatch) -> dict[tuple[str, int], float]:
    """(task, attempt) -> advantage of its first sampled token."""
    return {each.order_key[:2]: float(each.advantages_T[each.trainable_T][0]) for each in batch.samples}


def test_remax_compares_with_the_greedy_attempt_and_counts_its_tokens(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    episodes, greedy = played
    assert {each.task_id for each in greedy} == {each.task_id for each in episodes}
    batch, metrics = learn(learner(algorithm={"estimator": "remax"}), episodes, 0, greedy)
    baseline = {each.task_id: each.reward for each in greedy}
    expected = {(each.task_id, each.rollout_idx): each.reward - baseline[each.task_id] for each in episodes}
    assert _advantage_of(batch) == pytest.approx(expected)
    counts = dict(batch.token_counts)
    num_greedy = sum(len(step.response_ids) for each in greedy for step in each.trajectories[0].steps)
    assert counts["dropped.greedy"] == metrics["tokens.dropped.greedy"] == num_greedy > 0
    assert counts.pop("sampled") == sum(counts.values())


def test_a_greedy_attempt_that_failed_is_no_baseline_of_zero(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    episodes, greedy = played
    failed = Episode(task_id=greedy[0].task_id, outcome=Outcome.INFRASTRUCTURE_FAILURE)
    batch, metrics = learn(learner(algorithm={"estimator": "remax"}), episodes, 0, [failed, *greedy[1:]])
    assert {each.group_key[0] for each in batch.samples} <= {greedy[1].task_id}
    assert metrics["groups_without_baseline"] == 1
    assert metrics["tokens.dropped.no_baseline"] > 0


def test_groups_without_signal_are_rejected_and_counted(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    episodes, _ = played
    batch, metrics = learn(learner(filters={"min_reward_std": 100.0}), episodes, 0)
    assert batch.samples == []
    assert (metrics["groups_rejected"], metrics["groups"]) == (2, 0)
    assert metrics["tokens.dropped.no_signal"] == metrics["tokens.sampled"] > 0
    assert "loss" not in metrics


def _paid(episodes: list[Episode], rewards: Sequence[Sequence[float]]) -> list[Episode]:
    """As many attempts at each task as there are rewards of it, paid so."""
    by_task: dict[str, list[Episode]] = {}
    for episode in deepcopy(episodes):
        by_task.setdefault(episode.task_id, []).append(episode)
    paid_episodes = list[Episode]()
    for group, group_rewards in zip(by_task.values(), rewards, strict=True):
        for episode, reward in zip(group, group_rewards, strict=False):
            episode.trajectories[0].reward, episode.is_correct = reward, reward == 1.0
            paid_episodes.append(episode)
    return paid_episodes


FIRST_TWO: dict[str, Any] = {
    "filters": {"first_attempts": 2},
    "rollout": {"group_size": 6, "tasks_per_step": 2},
}


def test_a_group_that_went_on_stands_for_those_that_its_first_attempts_would_have_stopped(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    episodes = _paid(played[0], [[1.0, 1.0], [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    batch, metrics = learn(learner(**FIRST_TWO, algorithm={"estimator": "dr_grpo"}), episodes, 0)
    # Two of five right ones come first in 10 of 15 orders: the group counts three times.
    assert _advantage_of(batch) == pytest.approx(
        {
            (each.task_id, each.rollout_idx): 0.0 if number < 2 else 3.0 * (each.reward - 5 / 6)
            for number, each in enumerate(episodes)
        }
    )
    assert (metrics["tasks_solved_first"], metrics["attempts_not_played"], metrics["episodes"]) == (1, 4, 8)
    assert (metrics["groups"], metrics["groups_tied"]) == (2, 1)
    assert metrics["success"] == metrics["reward_mean"] == 0.75, "of the first two attempts at each task"


def test_a_group_that_no_order_of_its_attempts_would_have_played_on_is_a_miscount(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    with pytest.raises(CountError, match=r"6 attempts .*first 2"):
        learn(learner(**FIRST_TWO), _paid(played[0], [[1.0, 1.0], [1.0] * 6]), 0)


def test_an_estimator_that_learns_from_ties_is_refused_where_the_rest_of_them_is_not_played(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def rewards(rewards_G):\n    return rewards_G\n")
    mine = learner(**FIRST_TWO, algorithm={"estimator": f"{tmp_path}/own.py:rewards"})
    with pytest.raises(ConfigError, match=r"all paid alike.*first_attempts"):
        learn(mine, _paid(played[0], [[1.0, 1.0], [0.0] * 6]), 0)


def test_a_divergence_that_is_paid_for_is_subtracted_token_by_token_from_the_reward(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner], tiny_directory: Path
) -> None:
    episodes, _ = played
    paying = {"kl_coef": 0.125, "kl_in": "reward", "kl_kind": "k1"}
    batch, metrics = learn(learner(algorithm={"estimator": "reinforce", **paying}), episodes, 0)
    free, _ = learn(learner(algorithm={"estimator": "reinforce"}), episodes, 0)
    reference = learner().policies["policy"].backend
    assert reference is not None
    reference_logprobs = reference.score(batch.samples)
    gaps = [
        float((each.logprobs_T - theirs_T)[each.trainable_T].sum())
        for each, theirs_T in zip(batch.samples, reference_logprobs, strict=True)
    ]
    rewards = {(each.task_id, each.rollout_idx): each.reward for each in episodes}
    expected = {
        each.order_key[:2]: rewards[each.order_key[0], each.order_key[1]] - 0.125 * gap
        for each, gap in zip(batch.samples, gaps, strict=True)
    }
    assert _advantage_of(batch) == pytest.approx(expected, abs=1e-5)
    num_tokens = sum(each.num_trainable for each in batch.samples)
    assert metrics["divergence"] == pytest.approx(sum(gaps) / num_tokens, abs=1e-5)
    assert rewards == pytest.approx(_advantage_of(free))


def test_a_divergence_in_the_loss_pulls_on_rows_that_no_advantage_pulls_on(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    tied = deepcopy([each for each in played[0] if each.task_id == played[0][0].task_id])
    for episode in tied:
        episode.trajectories[0].reward = 1.0
    free, held = learner(), learner(algorithm={"kl_coef": 0.5})
    for each in (free, held):  # at the reference itself nothing pulls
        with torch.no_grad():
            for parameter in each.policies["policy"].loaded_model.model.parameters():
                parameter.mul_(1.25)
    before = _parameters(free)
    learn(free, tied, 0)
    assert _same(_parameters(free), before)
    _, metrics = learn(held, tied, 0)
    assert not _same(_parameters(held), before)
    assert metrics["kl_coef"] == 0.5


def test_without_a_warm_start_the_reference_is_the_policy_as_it_began(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    made = learner(algorithm={"kl_coef": 0.1}, warm_start={"steps": 0})
    learn(made, played[0], 0)  # the policy moves, and its reference does not
    batch, _ = learn(made, played[0], 1)
    backend = learner().policies["policy"].backend
    assert backend is not None
    for row, scores in zip(batch.samples, backend.score(batch.samples), strict=True):
        assert row.ref_logprobs_T is not None
        sampled_T = row.trainable_T
        assert row.ref_logprobs_T[sampled_T] == pytest.approx(scores[sampled_T], abs=1e-5)


def test_entropy_counts_less_with_every_step_and_nothing_in_the_last(learner: Callable[..., Learner]) -> None:
    made = learner(steps=5, algorithm={"entropy_coef": 0.1})
    coefs = [made.loss("policy", step).entropy_coef for step in range(5)]
    assert coefs == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])


def test_an_algorithm_of_ones_own_is_told_where_in_the_run_it_is_applied(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner], tmp_path: Path
) -> None:
    own = tmp_path / "told.py"
    own.write_text(
        "def number_of(context):\n    return context.step + 10 * context.total_steps + 100 * context.seed\n"
        "def estimator(rewards_G, context):\n    return 0 * rewards_G + number_of(context)\n"
        "def loss(tokens, context):\n"
        "    return 0 * tokens.new_M + number_of(context) + 1e5 * context.config.entropy_coef\n"
    )
    algorithm = {"estimator": f"{own}:estimator", "loss": f"{own}:loss", "entropy_coef": 1e-3}
    batch, metrics = learn(learner(steps=5, seed=7, algorithm=algorithm), played[0], 2)
    number = 2 + 10 * 5 + 100 * 7
    assert set(_advantage_of(batch).values()) == {number}
    # Of the coefficient half is left at the third of five steps; entropy itself counts for less than 0.01.
    assert metrics["loss"] == pytest.approx(number + 1e5 * 1e-3 / 2, abs=0.01)


def test_a_group_with_attempts_of_a_middling_reward_does_not_tie(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    """Those have advantage 0 each; a group ties where all of its attempts have."""
    episodes = deepcopy(played[0])
    tied_id, other_id = sorted({each.task_id for each in episodes})
    for each in episodes:
        each.trajectories[0].reward = {0: 0.0, 1: 1.0}.get(each.rollout_idx, 0.5)
        if each.task_id == tied_id:
            each.trajectories[0].reward = 0.5
    batch, metrics = learn(learner(algorithm={"ties": "drop", "estimator": "dr_grpo"}), episodes, 0)
    assert _advantage_of(batch) == {(other_id, each): [-0.5, 0.5, 0, 0, 0, 0][each] for each in range(6)}
    assert metrics["groups_tied"] == 1


def test_an_adaptive_coefficient_rises_while_the_divergence_is_above_its_target(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    far = learner(algorithm={"kl_coef": 0.5, "kl_target": 1e-6, "kl_horizon": 2})
    coefs = [learn(far, played[0], step)[1]["kl_coef"] for step in range(3)]
    assert coefs == pytest.approx([0.5, 0.55, 0.605])
    assert far.kl_coefs == {"policy": pytest.approx(0.6655)}
    near = learner(algorithm={"kl_coef": 0.5, "kl_target": 1e6})
    learn(near, played[0], 0)
    assert near.kl_coefs == {"policy": pytest.approx(0.5 * 0.98)}


def test_tokens_that_the_sampler_saw_otherwise_are_corrected_and_counted(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    episodes, _ = played
    masking = {"old_logprobs": "trainer", "correction": "mask", "correction_low": 0.9, "correction_high": 1.1}
    same, corrected = learner(algorithm={"old_logprobs": "trainer"}), learner(algorithm=masking)
    _, plain = learn(same, episodes, 0)
    _, metrics = learn(corrected, episodes, 0)
    # The tiny model of the fixture is another than the one that sampled, so the two disagree.
    assert metrics["logprob_gap_sampler"] > 0.2
    assert 0.0 < metrics["corrected_frac"] <= 1.0
    assert "corrected_frac" not in plain
    assert not _same(_parameters(same), _parameters(corrected))


def test_while_the_critic_warms_up_the_policy_stays(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    ppo = learner(algorithm={"estimator": "gae"}, critic={"trunk": "separate", "warmup_steps": 1}, steps=4)
    policy, critic = _parameters(ppo), _parameters(ppo, of_critic=True)
    _, metrics = learn(ppo, played[0], 0)
    assert _same(policy, _parameters(ppo))
    assert not _same(critic, _parameters(ppo, of_critic=True))
    assert "loss" not in metrics
    assert metrics["critic.loss"] > 0.0
    _, metrics = learn(ppo, played[0], 1)
    assert not _same(policy, _parameters(ppo))
    assert metrics["loss"] != 0.0


def test_a_critic_begins_with_what_its_policy_has_learned_by_imitation(
    learner: Callable[..., Learner],
) -> None:
    ppo = learner(algorithm={"estimator": "gae"}, critic={"trunk": "separate"})
    assert _same(_parameters(ppo), _parameters(ppo, of_critic=True))
    imitate(ppo, 0)
    assert not _same(_parameters(ppo), _parameters(ppo, of_critic=True))
    ppo.begin_reinforcement()
    assert _same(_parameters(ppo), _parameters(ppo, of_critic=True))


def test_a_critic_learns_what_is_paid(
    played: tuple[list[Episode], list[Episode]], learner: Callable[..., Learner]
) -> None:
    settings: dict[str, Any] = {"trunk": "separate", "warmup_steps": 7, "clip": 0.0, "learning_rate": 3e-3}
    ppo = learner(algorithm={"estimator": "gae", "gae_lambda": 1.0}, critic=settings, steps=8)
    errors = [learn(ppo, played[0], 0)[1]["critic.value_error"] for _ in range(6)]
    assert errors[-1] < errors[0] / 2


def test_each_of_several_policies_has_its_own_reference_and_critic(
    letters: ModuleType, tiny_directory: Path, tmp_path: Path
) -> None:
    settings = {
        "algorithm": {"estimator": "gae", "kl_coef": 0.1},
        "critic": {"trunk": "separate"},
        "roles": {"judge": {"estimator": "rloo"}},
    }
    models = {name: load_model(tiny_directory) for name in ("solver", "judge")}
    pair = letters.make_pair_trainer(tmp_path, settings).run.make_learner(models)
    assert set(pair.backends()) == {"solver", "judge", "solver/critic", "judge/critic"}
    assert set(pair.references) == {"solver", "judge"}
    frozen = letters.make_pair_trainer(
        tmp_path, letters.merged(settings, {"policies": {"judge": {"trainable": False}}})
    ).run.make_learner({name: load_model(tiny_directory) for name in ("solver", "judge")})
    assert set(frozen.backends()) == {"solver", "solver/critic"}
    assert set(frozen.references) == {"solver"}


# ---- whole runs ------------------------------------------------------------------------------------------

LEARNING: dict[str, Any] = {
    "steps": 10,
    "warm_start": {"steps": 6},
    "rollout": {"tasks_per_step": 4, "group_size": 8, "num_parallel": 32},
    "inference": {"num_slots": 32},
    "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    "evaluation": {"num_tasks": 1, "every_steps": 0},
    "checkpoint": {"every_steps": 100},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"estimator": "gae"}, "critic": {"trunk": "separate"}},
        {"algorithm": {"estimator": "remax"}},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"algorithm": {"estimator": "gae"}, "critic": {"trunk": "shared"}},
                {"algorithm": {"estimator": "rloo"}},
                {"algorithm": {"estimator": "reinforce_plus_plus"}},
                {"algorithm": {"loss": "gspo", "aggregation": "sequence_mean"}},
            )
        ),
    ],
    ids=["ppo", "remax", "ppo, one trunk", "rloo", "reinforce++", "gspo"],
)
def test_rewards_rise(letters: ModuleType, tmp_path: Path, changes: dict[str, Any]) -> None:
    letters.make_trainer(tmp_path / "run", letters.merged(LEARNING, changes)).train()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rewards = [line["reward_mean"] for line in lines if line["phase"] == "train"]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.03
