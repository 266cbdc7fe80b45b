"""A student that learns from its teacher's whole distribution, token by token.

    micro-batch ──┬─► student ─► states ─┐ chunk by chunk
                  └─► teacher ─► states ─┴─► logits of both ─► divergence, log-probabilities ─► [M]

Logits of a chunk are dropped and computed again for the gradient, so memory grows with the chunk, not with
vocabulary × length, also that of the teacher's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rllm.algorithms.kl_distributions import divergence_terms
from rllm.algorithms.losses import Loss, PolicyLoss, TokenInputs
from rllm.algorithms.surrogates import WholeVocabulary
from rllm.models.batching import PackedBatch
from rllm.trainer.backends.logprobs import Entropy, tokens_at_once
from rllm.trainer.backends.packed import trained_tokens
from rllm.trainer.backends.torch import TorchBackend


class DistillingBackend(TorchBackend):
    """A `TorchBackend` that asks `teacher`, a frozen `CausalModel` of the same vocabulary, where a loss wants
    it to; for all other losses it is like any."""

    def __init__(self, model: Any, *, teacher: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.teacher = teacher

    def _inputs(self, batch: PackedBatch, loss: Loss) -> TokenInputs:
        if not isinstance(loss, PolicyLoss) or not isinstance(loss.surrogate, WholeVocabulary):
            return super()._inputs(batch, loss)
        # The teacher has logits as well.
        chunk = tokens_at_once(self.model, self.config.logits_mb / 2)
        entropy = self._entropy_of(loss)
        surrogate, student_U_D = loss.surrogate, batch.states(self.model)
        with torch.no_grad():
            teacher_U_D = batch.states(self.teacher)
        parts = [
            checkpoint(
                self._distribution_terms,
                surrogate,
                *columns,
                entropy is not Entropy.NONE,
                use_reentrant=False,
            )
            for columns in zip(
                *(
                    each.split(chunk)
                    for each in (student_U_D, teacher_U_D, batch.targets_U, batch.temperature_U)
                ),
                strict=True,
            )
        ]
        new_M, teacher_M, divergence_M, entropy_M = (
            batch.of_tokens(torch.cat(column)) for column in zip(*parts, strict=True)
        )
        return TokenInputs(
            new_M=new_M,
            teacher_M=teacher_M,
            divergence_M=divergence_M,
            entropy_M=entropy_M if entropy is Entropy.WITH_GRADIENT else None,
            measured_entropy_M=entropy_M.detach() if entropy is Entropy.VALUE else None,
            **trained_tokens(batch),
        )

    def _distribution_terms(
        self,
        surrogate: WholeVocabulary,
        student_C_D: Tensor,
        teacher_C_D: Tensor,
        targets_C: Tensor,
        temperature_C: Tensor,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[C] both log-probabilities of the sampled tokens, divergences, and entropies (zeros without)."""
        student_C_V = _logprobs(self.model, student_C_D, temperature_C)
        with torch.no_grad():
            teacher_C_V = _logprobs(self.teacher, teacher_C_D, temperature_C)
        new_C, said_C = (
            each.gather(1, targets_C.unsqueeze(1)).squeeze(1) for each in (student_C_V, teacher_C_V)
        )
        divergence_C = divergence_terms(student_C_V, teacher_C_V, surrogate.divergence, surrogate.beta)
        entropy_C = (
            -(student_C_V.exp() * student_C_V).sum(dim=-1) if with_entropy else torch.zeros_like(new_C)
        )
        return new_C, said_C, divergence_C, entropy_C


def _logprobs(model: Any, hidden_C_D: Tensor, temperature_C: Tensor) -> Tensor:
    logits_C_V = model.logits(hidden_C_D)
    logits_C_V = logits_C_V.to(torch.promote_types(logits_C_V.dtype, torch.float32))
    return (logits_C_V / temperature_C.unsqueeze(1)).log_softmax(dim=-1)
