"""A student that learns from its teacher's whole distribution, token by token.

    micro-batch ──┬─► student ─► states ─┐ chunk by chunk
                  └─► teacher ─► states ─┴─► logits of both ─► divergence, log-probabilities ─► [M]

Logits of a chunk are dropped and computed again for the gradient, so memory grows with the chunk, not with
vocabulary × length, also that of the teacher's; see `rllm.trainer.backends.logprobs`.
"""

from typing import Any

import torch

from rllm.algorithms.losses import Loss, PolicyLoss, TokenInputs
from rllm.algorithms.surrogates import WholeVocabulary
from rllm.models.batching import PackedBatch
from rllm.models.decoder import Decoder
from rllm.trainer.backends.logprobs import Entropy, TeacherComparison, compared_logprobs, tokens_at_once
from rllm.trainer.backends.packed import sizes_of, trained_tokens
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.flops import forward_rates


class DistillingBackend(TorchBackend):
    """A `TorchBackend` that asks `teacher`, a frozen `CausalModel` of the same vocabulary, where a loss wants
    it to; for all other losses it is like any."""

    def __init__(self, model: Any, *, teacher: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.teacher = teacher
        self._teacher_rates = forward_rates(teacher.shape) if isinstance(teacher, Decoder) else None
        if self._teacher_rates is None:
            self._flop_rates = None  # what is known of one of the two says nothing of both

    def _inputs(self, batch: PackedBatch, loss: Loss) -> TokenInputs:
        comparison = _comparison(loss)
        if comparison is None:
            return super()._inputs(batch, loss)
        # The teacher has logits as well.
        chunk = tokens_at_once(self.model, self.config.logits_mb / 2)
        entropy = self._entropy_of(loss)
        student_U_D = batch.states(self.model)
        with torch.no_grad():
            teacher_U_D = batch.states(self.teacher)
        *columns_U, entropy_U = compared_logprobs(
            self.model,
            student_U_D,
            batch.targets_U,
            batch.temperature_U,
            TeacherComparison(
                teacher=self.teacher, states_M_D=teacher_U_D, kind=comparison.divergence, beta=comparison.beta
            ),
            chunk=chunk,
            entropy=entropy,
        )
        new_M, teacher_M, divergence_M = (batch.of_tokens(column_U) for column_U in columns_U)
        entropy_M = None if entropy_U is None else batch.of_tokens(entropy_U)
        return TokenInputs(
            new_M=new_M,
            teacher_M=teacher_M,
            divergence_M=divergence_M,
            entropy_M=entropy_M if entropy is Entropy.WITH_GRADIENT else None,
            measured_entropy_M=entropy_M if entropy is Entropy.VALUE else None,
            **trained_tokens(batch),
        )

    def _flops_of(self, batch: PackedBatch, loss: Loss) -> int:
        own = super()._flops_of(batch, loss)
        if self._teacher_rates is None or _comparison(loss) is None:
            return own
        return own + self._teacher_rates.of(sizes_of(batch))


def _comparison(loss: Loss) -> WholeVocabulary | None:
    """The comparison of whole distributions that a loss wants; None for all other losses."""
    surrogate = loss.surrogate if isinstance(loss, PolicyLoss) else None
    return surrogate if isinstance(surrogate, WholeVocabulary) else None
