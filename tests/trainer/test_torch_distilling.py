"""The update towards a teacher's whole distribution: its gradient, whatever the chunks, and nobody else's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rllm.algorithms.kl_distributions import divergence_terms
from rllm.algorithms.losses import ImitationLoss, PolicyLoss
from rllm.algorithms.surrogates import WholeVocabulary
from rllm.config.optimizer import OptimizerConfig
from rllm.models.batching import micro_batches
from rllm.models.packing import WeightedRow
from rllm.trainer.backends.torch_distilling import DistillingBackend
from rllm.trainer.token_trace import TokenTrace
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]


def _backend(student: Any, teacher: Any, **options: Any) -> DistillingBackend:
    config = OptimizerConfig(max_grad_norm=1e12, **options)
    return DistillingBackend(student, teacher=teacher, publish=lambda version: None, config=config)


def _gradient(model: Any) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def _taught(batch: list[TrainingSample]) -> list[TrainingSample]:
    return [replace(each, advantages_T=each.trainable_T.astype(np.float32)) for each in batch]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("sizes", [(16_384, 512.0), (60, 0.004)])
def test_its_gradient_is_that_of_all_logits_at_a_time(
    decoder: Make, batch: list[TrainingSample], kind: str, sizes: tuple[int, int]
) -> None:
    rows = _taught(batch)
    student, teacher = decoder(2).double(), decoder(4, seed=9).double()
    loss = PolicyLoss(surrogate=WholeVocabulary(divergence=kind, beta=0.3), entropy_coef=0.1)
    learner = _backend(student, teacher, micro_batch_tokens=sizes[0], logits_mb=sizes[1])
    metrics = learner.update(rows, loss, 0.0)
    found = _gradient(student)

    student.zero_grad()
    weighted = [
        WeightedRow(index=index, sample=row, weights_T=row.trainable_T.astype(np.float64))
        for index, row in enumerate(rows)
    ]
    (whole,) = micro_batches(weighted, 10**6, torch.device("cpu"))
    scale = whole.temperature_U.double().unsqueeze(1)
    student_M_V, teacher_M_V = (
        whole.of_tokens((model.logits(whole.states(model)) / scale).log_softmax(-1))
        for model in (student, teacher)
    )
    divergence = divergence_terms(student_M_V, teacher_M_V, kind, 0.3).mean()
    entropy = -(student_M_V.exp() * student_M_V).sum(-1).mean()
    (divergence - 0.1 * entropy).backward()
    torch.testing.assert_close(found, _gradient(student), atol=1e-10, rtol=1e-8)
    assert metrics["teacher_divergence"] == pytest.approx(divergence.item(), abs=1e-8)
    assert all(each.grad is None for each in teacher.parameters())


def test_entropies_are_looked_at_where_whole_distributions_are_compared(
    decoder: Make, batch: list[TrainingSample]
) -> None:
    rows, traces = _taught(batch), list[TokenTrace]()
    for entropy_coef in (0.0, 0.1):
        learner = _backend(decoder(2), decoder(4, seed=9))
        learner.trace = TokenTrace()
        surrogate = WholeVocabulary(divergence="jsd", beta=0.5)
        metrics = learner.update(rows, PolicyLoss(surrogate=surrogate, entropy_coef=entropy_coef), 0.0)
        assert metrics["entropy"] > 0.0
        traces.append(learner.trace)
    looked_at, in_the_loss = traces
    assert looked_at.rows.keys() == in_the_loss.rows.keys()
    assert len(looked_at.rows) > 10
    for key, (_, entropy_T) in looked_at.rows.items():
        assert entropy_T == pytest.approx(in_the_loss.rows[key][1], nan_ok=True)
        assert np.isfinite(entropy_T).any()


def test_for_other_losses_it_is_like_any_backend(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    models = decoder(2), decoder(2)
    _backend(models[0], decoder(4, seed=9)).update(batch, ImitationLoss(), 0.0)
    backend(models[1], max_grad_norm=1e12).update(batch, ImitationLoss(), 0.0)
    assert torch.equal(*map(_gradient, models))
