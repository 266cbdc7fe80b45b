"""The numbers of each token that an update computes: held to one forward pass over each row alone."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rllm.algorithms.losses import PolicyLoss
from rllm.models.directory import load_model
from rllm.store.episodes import TOKEN_COLUMNS, EpisodeStore
from rllm.trainer.token_trace import TokenTrace
from rllm.types.episode import Episode
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]
PATTERNS = ["ssoos", "ssss", "sosssso", "s"]


def entropies(model: Any, sample: TrainingSample, plain_logprobs: Make) -> np.ndarray:
    """[T] by definition, from the log-probabilities of every token of the vocabulary in every place."""
    vocabulary = []
    for token in range(model.vocab_size):
        shifted = sample.token_ids_T.copy()
        columns = []
        for place in range(1, len(shifted)):
            row = shifted.copy()
            row[place] = token
            columns.append(plain_logprobs(model, _with_ids(sample, row))[place])
        vocabulary.append(torch.stack(columns))
    logprobs_V_T = torch.stack(vocabulary).double()
    assert torch.allclose(logprobs_V_T.exp().sum(0), torch.ones(len(sample.token_ids_T) - 1).double())
    entropies_T = -(logprobs_V_T.exp() * logprobs_V_T).sum(0).numpy()
    return np.concatenate(([np.nan], entropies_T))


def _with_ids(sample: TrainingSample, ids: np.ndarray) -> TrainingSample:
    return TrainingSample(
        token_ids_T=ids,
        policy_versions_T=sample.policy_versions_T,
        logprobs_T=sample.logprobs_T,
        advantages_T=sample.advantages_T,
        group_key=sample.group_key,
        order_key=sample.order_key,
        temperature=sample.temperature,
    )


@pytest.mark.parametrize(
    "loss", [PolicyLoss(), PolicyLoss(entropy_coef=0.1)], ids=["looked at", "in the loss"]
)
@pytest.mark.parametrize("logits_mb", [64, 0.001], ids=["at once", "in chunks"])
def test_ratios_and_entropies_are_those_of_each_row_alone(
    loss: PolicyLoss,
    logits_mb: float,
    decoder: Make,
    backend: Make,
    group: Make,
    sample: Make,
    plain_logprobs: Make,
) -> None:
    samples = [
        *group("a", 4, PATTERNS),
        *group("b", 2, PATTERNS[:2], seed=1),
        sample("pps", task="c", temperature=0.7),
    ]
    tied = sample("ppss", task="d", advantage=0.0)
    model = decoder()
    learner = backend(model, micro_batch_tokens=16, logits_mb=logits_mb)
    learner.trace = TokenTrace()
    with torch.no_grad():
        plain = [plain_logprobs(model, each).numpy() for each in samples]
        by_definition = [entropies(model, each, plain_logprobs) for each in samples]
    untraced = backend(decoder(), micro_batch_tokens=16, logits_mb=logits_mb)
    metrics = learner.update([*samples, tied], loss, 0.1)
    assert metrics.items() >= untraced.update([*samples, tied], loss, 0.1).items(), "looking changes nothing"
    for one, other in zip(learner.model.parameters(), untraced.model.parameters(), strict=True):
        assert torch.equal(one, other)
    ratios = []
    for each, plain_T, entropies_T in zip(samples, plain, by_definition, strict=True):
        ratio_T, entropy_T = learner.trace.rows[each.order_key]
        is_trained_T = each.trainable_T
        assert np.isnan(ratio_T[~is_trained_T]).all()
        assert np.isnan(entropy_T[~is_trained_T]).all()
        expected_T = np.exp(plain_T - each.logprobs_T)
        assert ratio_T[is_trained_T] == pytest.approx(expected_T[is_trained_T], abs=1e-5, rel=1e-5)
        assert entropy_T[is_trained_T] == pytest.approx(entropies_T[is_trained_T], abs=1e-5)
        ratios.extend(ratio_T[is_trained_T])
    assert (tied.order_key in learner.trace.rows) == (loss.entropy_coef > 0), "nobody computed it"
    if not loss.entropy_coef:
        assert metrics["ratio_mean"] == pytest.approx(float(np.mean(ratios)), rel=1e-5)


def test_a_run_keeps_the_numbers_of_what_it_trained_on(letters: ModuleType, tmp_path: Path) -> None:
    changes = {"steps": 2, "warm_start": {"steps": 0}, "rollout": {"group_size": 6, "tasks_per_step": 3}}
    changes["algorithm"] = {"updates_per_step": 1}
    letters.make_trainer(tmp_path / "run", changes).train()
    model = load_model(tmp_path / "run" / "initial_model").model
    num_trained = 0
    with EpisodeStore.open(tmp_path / "run" / "store.sqlite", read_only=True) as store:
        rows = {row_id: store.episode(row_id) for row_id in store.row_ids("train", 0)}
        groups: dict[str, list[Episode]] = {}
        for episode in rows.values():
            groups.setdefault(episode.task_id, []).append(episode)
        for row_id, episode in rows.items():
            numbers = store.token_numbers(row_id)
            assert tuple(numbers) == TOKEN_COLUMNS
            rewards = np.array([each.trajectories[0].reward for each in groups[episode.task_id]])
            advantage = (episode.trajectories[0].reward - rewards.mean()) / (rewards.std() + 1e-6)
            first = 0
            for step in episode.trajectories[0].steps:
                here = slice(first, first := first + len(step.response_ids))
                assert numbers["advantage"][here] == pytest.approx(
                    [advantage] * len(step.response_ids), abs=1e-4
                )
                if not rewards.std():
                    assert np.isnan(numbers["ratio"][here]).all()
                    continue
                num_trained += len(step.response_ids)
                assert numbers["ratio"][here] == pytest.approx([1.0] * len(step.response_ids), abs=1e-4)
                assert numbers["entropy"][here] == pytest.approx(_entropies_of(model, step), abs=1e-4)
            assert first == len(numbers["ratio"])
        assert num_trained > 20
        assert store.token_numbers(store.row_ids("after")[0]) == {}, "nothing was learned from a report"


@torch.no_grad()
def _entropies_of(model: Any, step: Any) -> list[float]:
    """Entropies of the distributions that the answer of a step was sampled from."""
    ids = torch.tensor([*step.prompt_ids, *step.response_ids])

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    logprobs = model.logits(model.hidden(ids, torch.arange(len(ids)), attend)).double().log_softmax(-1)
    entropies_T = -(logprobs.exp() * logprobs).sum(-1)
    return entropies_T[len(step.prompt_ids) - 1 : -1].tolist()


def test_saving_a_step_again_forgets_its_numbers(tmp_path: Path) -> None:
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        store.save_episodes("train", 0, [Episode(task_id="a"), Episode(task_id="b")])
        three = np.array([[1.0], [2.0], [np.nan]], dtype="<f4").tobytes()
        store.save_token_numbers("train", 0, [("a", 0, three), ("none", 0, three)])
        first, second = store.row_ids("train", 0)
        assert store.token_numbers(first)["ratio"] == [2.0]
        assert store.token_numbers(second) == {}
        store.save_episodes("train", 0, [Episode(task_id="a")])
        assert [store.token_numbers(row_id) for row_id in store.row_ids()] == [{}]
