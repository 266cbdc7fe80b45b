"""A reference is the policy as it was when reinforcement began, whatever has been learned since, and whoever
asks."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from rllm.algorithms.losses import ImitationLoss
from rllm.errors import CheckpointError
from rllm.models.directory import load_model
from rllm.trainer.learning import Learner, imitate
from rllm.trainer.policies import Policies, create_initial_models, load_initial_models
from rllm.trainer.reference import ModelScorer, load_references, reference_of, save_references
from rllm.types.sample import TrainingSample

ADAPTER = {"lora": {"rank": 4}}


@pytest.mark.parametrize("sizes", [(16_384, 512.0), (40, 0.002)])
def test_a_scorer_says_what_one_pass_over_each_row_says(
    decoder: Callable[..., Any],
    batch: list[TrainingSample],
    plain_logprobs: Callable[[Any, TrainingSample], Tensor],
    sizes: tuple[int, int],
) -> None:
    model = decoder(2)
    scorer = ModelScorer(model=model, micro_batch_tokens=sizes[0], logits_mb=sizes[1])
    for sample, scores_T in zip(batch, scorer.score(batch), strict=True):
        expected_T = plain_logprobs(model, sample).detach().numpy() * sample.trainable_T
        np.testing.assert_allclose(scores_T, expected_T, atol=1e-5)
        assert scores_T.dtype == np.float32


@pytest.fixture
def learner(letters: ModuleType, tmp_path: Path) -> Callable[..., Learner]:
    """What learns in a run, as a process that starts, or resumes, makes it."""

    def make(changes: dict[str, Any], game: str = "make_trainer") -> Learner:
        trainer = getattr(letters, game)(tmp_path / "run", changes)
        if not (tmp_path / "run").exists():
            create_initial_models(trainer.config, tmp_path / "run")
        return trainer.run.make_learner(load_initial_models(trainer.config, tmp_path / "run"))

    return make


@pytest.fixture
def policies(learner: Callable[..., Learner]) -> Callable[..., Policies]:
    """The policies of such a run."""
    return lambda changes, game="make_trainer": learner(changes, game).policies


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
    alone = _num_bytes([policy.loaded_model.model])
    assert _num_bytes([policy.loaded_model.model, reference_of(policy).model]) == 2 * alone
    assert not any(each.requires_grad for each in reference_of(policy).model.parameters())
    policy = policies(ADAPTER)["policy"]
    both = _num_bytes([policy.loaded_model.model, reference_of(policy).model])
    adapter = [each for each in policy.loaded_model.model.parameters() if each.requires_grad]
    assert both == alone + sum(4 * each.numel() for each in adapter)
    assert sum(each.numel() for each in adapter) < alone / 4 / 5


def test_of_a_frozen_policy_it_is_the_policy(policies: Callable[..., Policies]) -> None:
    judge = policies({"policies": {"judge": {"trainable": False}}}, "make_pair_trainer")["judge"]
    assert reference_of(judge).model is judge.loaded_model.model


# ---- after a warm start ------------------------------------------------------------------------------------

HELD = {"algorithm": {"kl_coef": 0.1}}
PAIR_OF_KINDS = {**HELD, "policies": {"solver": {"lora_rank": 4}}}


def _heard(learner: Learner, batch: list[TrainingSample]) -> dict[str, list[Any]]:
    return {name: each.score(batch) for name, each in learner.references.items()}


@pytest.mark.parametrize(
    ("changes", "game"),
    [
        (HELD, "make_trainer"),
        ({**HELD, **ADAPTER}, "make_trainer"),
        (PAIR_OF_KINDS, "make_pair_trainer"),
    ],
    ids=["all weights", "an adapter", "two policies, one with an adapter"],
)
def test_after_a_warm_start_it_is_what_that_has_made_also_for_a_run_that_goes_on(
    learner: Callable[..., Learner],
    batch: list[TrainingSample],
    tmp_path: Path,
    changes: dict[str, Any],
    game: str,
) -> None:
    first = learner(changes, game)
    initial = _heard(first, batch)
    for step in range(3):
        imitate(first, step)
    first.begin_reinforcement()
    imitated = {name: backend.score(batch) for name, backend in first.policies.trainable()}
    save_references(tmp_path, first.references, first.policies)
    for _, backend in first.policies.trainable():
        backend.update(batch, ImitationLoss(), 0.01)
    resumed = learner(changes, game)
    load_references(tmp_path, resumed.references, resumed.policies)
    for held in (_heard(first, batch), _heard(resumed, batch)):
        assert set(held) == set(imitated)
        for name, scores in held.items():
            np.testing.assert_array_equal(np.concatenate(scores), np.concatenate(imitated[name]))
            assert not np.allclose(np.concatenate(scores), np.concatenate(initial[name]), atol=1e-3)


def test_a_reference_that_is_gone_or_damaged_is_not_replaced_by_another(
    learner: Callable[..., Learner], tmp_path: Path
) -> None:
    held = learner(HELD)
    with pytest.raises(CheckpointError, match=r"reference.*algorithm\.kl_coef.*back"):
        load_references(tmp_path, held.references, held.policies)
    save_references(tmp_path, held.references, held.policies)
    kept = tmp_path / "reference" / "policy.safetensors"
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"sha256 differs.*back"):
        load_references(tmp_path, held.references, held.policies)


def test_after_a_warm_start_an_adapter_costs_a_second_adapter_and_nothing_else(
    learner: Callable[..., Learner],
) -> None:
    held = learner({**HELD, **ADAPTER})
    policy = held.policies["policy"].loaded_model.model
    both = _num_bytes([policy, held.references["policy"].model])
    adapter = sum(4 * each.numel() for each in policy.parameters() if each.requires_grad)
    assert both == _num_bytes([policy]) + adapter
