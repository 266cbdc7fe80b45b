"""A reference is the model that the run began with, whatever has been learned since, and whoever asks."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from rllm.algorithms.losses import ImitationLoss
from rllm.models.directory import load_model
from rllm.trainer.policies import Policies, create_initial_models, load_initial_models
from rllm.trainer.reference import ModelScorer, reference_of
from rllm.types.sample import TrainingSample

ADAPTER = {"lora": {"rank": 4}}


@pytest.mark.parametrize("sizes", [(16_384, 2048), (40, 3)])
def test_a_scorer_says_what_one_pass_over_each_row_says(
    decoder: Callable[..., Any],
    batch: list[TrainingSample],
    plain_logprobs: Callable[[Any, TrainingSample], Tensor],
    sizes: tuple[int, int],
) -> None:
    model = decoder(2)
    scorer = ModelScorer(model=model, micro_batch_tokens=sizes[0], logprob_chunk=sizes[1])
    for sample, scores_T in zip(batch, scorer.score(batch), strict=True):
        expected_T = plain_logprobs(model, sample).detach().numpy() * sample.trainable_T
        np.testing.assert_allclose(scores_T, expected_T, atol=1e-5)
        assert scores_T.dtype == np.float32


@pytest.fixture
def policies(letters: ModuleType, tmp_path: Path) -> Callable[..., Policies]:
    """The policies of a run as a process that starts, or resumes, makes them."""

    def make(changes: dict[str, Any], game: str = "make_trainer") -> Policies:
        trainer = getattr(letters, game)(tmp_path / "run", changes)
        if not (tmp_path / "run").exists():
            create_initial_models(trainer.config, tmp_path / "run")
        return trainer.make_learner(load_initial_models(trainer.config, tmp_path / "run")).policies

    return make


def _num_bytes(models: Iterable[Any]) -> int:
    """Of all parameters, those in the same memory counted once."""
    seen = {
        each.data_ptr(): each.numel() * each.element_size() for model in models for each in model.parameters()
    }
    return sum(seen.values())


@pytest.mark.parametrize("changes", [{}, ADAPTER], ids=["all weights", "an adapter"])
def test_it_stays_what_the_run_began_with_while_the_policy_learns_and_after_a_resume(
    policies: Callable[..., Policies], batch: list[TrainingSample], tmp_path: Path, changes: dict[str, Any]
) -> None:
    policy = policies(changes)["policy"]
    assert policy.backend is not None
    initial = ModelScorer(model=load_model(tmp_path / "run" / "initial_model").model).score(batch)
    reference = reference_of(policy)
    for _ in range(3):
        policy.backend.update(batch, ImitationLoss(), 0.01)
    for scores_T, initial_T, learned_T in zip(
        reference.score(batch), initial, policy.backend.score(batch), strict=True
    ):
        np.testing.assert_array_equal(scores_T, initial_T)
        assert not initial_T.any() or not np.allclose(learned_T, initial_T, atol=1e-3)
    policy.backend.save(tmp_path)
    again = policies(changes)["policy"]
    assert again.backend is not None
    again.backend.load(tmp_path)
    for scores_T, initial_T in zip(reference_of(again).score(batch), initial, strict=True):
        np.testing.assert_array_equal(scores_T, initial_T)


def test_beside_an_adapter_it_costs_no_memory_and_otherwise_one_copy(
    policies: Callable[..., Policies], tmp_path: Path
) -> None:
    policy = policies({})["policy"]
    alone = _num_bytes([policy.loaded.model])
    assert _num_bytes([policy.loaded.model, reference_of(policy).model]) == 2 * alone
    assert not any(each.requires_grad for each in reference_of(policy).model.parameters())
    policy = policies(ADAPTER)["policy"]
    both = _num_bytes([policy.loaded.model, reference_of(policy).model])
    adapter = [each for each in policy.loaded.model.parameters() if each.requires_grad]
    assert both == alone + sum(4 * each.numel() for each in adapter)
    assert sum(each.numel() for each in adapter) < alone / 4 / 5


def test_of_a_frozen_policy_it_is_the_policy(policies: Callable[..., Policies]) -> None:
    judge = policies({"policies": {"judge": {"trainable": False}}}, "make_pair_trainer")["judge"]
    assert reference_of(judge).model is judge.loaded.model
