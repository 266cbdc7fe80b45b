"""Log-probabilities of the tokens that were sampled, without logits of all of them at the same time.

    hidden_M_D ─► chunk of C states ─► logits_C_V ─► log π(target), entropy, divergence ─► [M]
                                          │ logits are dropped
                                          │
    gradient of [M] ─────────────────► once more, chunk by chunk ─► gradient_C_V ─► hidden, output layer

A vocabulary of 150,000 makes the logits of 16,000 tokens 10 GB in float32, three times over with softmax and
gradient. Here memory grows with the chunk, in both directions; the price is that the output layer's forward
product is computed twice. Every loss goes through here: of rewards, of rows, of preferences, and of a
teacher's whole distribution. Tokens that fit into one chunk are computed in one go, once, unless they are
compared with a teacher's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rllm.algorithms.kl_distributions import divergence_slopes, divergence_terms
from rllm.trainer.backends.sharding import is_sharded
from rllm.trainer.backends.torch_optimizer import HALF

MAX_PROBABILITIES = 2**20
"""Probabilities that exist at the same time where entropies are looked at."""
LOGITS_MB = 512.0
COPIES = 4
"""The number of copies of the logits in float32 that may exist at the peak."""


class Entropy(Enum):
    """Whether the entropy of the distribution is wanted that a token was sampled from."""

    NONE = 0
    VALUE = 1
    """To be looked at; it carries no gradient."""
    WITH_GRADIENT = 2


def tokens_at_once(model: Any, megabytes: float) -> int:
    """The number of tokens that may have logits at the same time, at least one; `megabytes` is for all copies
    of them, 0 for LOGITS_MB."""
    return max(1, int((megabytes or LOGITS_MB) * 1e6 / (COPIES * 4 * model.vocab_size)))


def selected_logprobs(
    model: Any,
    hidden_M_D: Tensor,
    targets_M: Tensor,
    temperature_M: Tensor | None,
    *,
    chunk: int,
    entropy: Entropy = Entropy.NONE,
) -> tuple[Tensor, Tensor | None]:
    """[M] log-probability of each target at its temperature (None: 1), and [M] entropy there, both in nats
    and at least float32. `chunk` is how many tokens have logits at the same time."""
    terms = _Terms(targets_M=targets_M, temperature_M=temperature_M, entropy=entropy)
    if len(hidden_M_D) <= chunk:
        return _whole(model.logits(hidden_M_D), targets_M, temperature_M, entropy)
    logprobs_M, *others = _in_chunks(model, hidden_M_D, terms, chunk)
    return logprobs_M, others[0] if others else None


@dataclass(kw_only=True, slots=True, frozen=True)
class TeacherComparison:
    """A teacher, the states that it has for the same tokens, and how its distributions are compared with."""

    teacher: Any
    states_M_D: Tensor
    kind: str
    beta: float


def compared_logprobs(
    model: Any,
    hidden_M_D: Tensor,
    targets_M: Tensor,
    temperature_M: Tensor,
    comparison: TeacherComparison,
    *,
    chunk: int,
    entropy: Entropy = Entropy.NONE,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """[M] log-probability of each target, that of the teacher, the divergence of both distributions, and
    entropy, as in `selected_logprobs`."""
    terms = _Terms(targets_M=targets_M, temperature_M=temperature_M, entropy=entropy, comparison=comparison)
    logprobs_M, *others = _in_chunks(model, hidden_M_D, terms, chunk)
    *entropy_M, teacher_M, divergence_M = others
    return logprobs_M, teacher_M, divergence_M, entropy_M[0] if entropy_M else None


def _whole(
    logits_M_V: Tensor, targets_M: Tensor, temperature_M: Tensor | None, entropy: Entropy
) -> tuple[Tensor, Tensor | None]:
    logits_M_V = logits_M_V.to(torch.promote_types(logits_M_V.dtype, torch.float32))
    if temperature_M is not None:
        logits_M_V = logits_M_V / temperature_M.unsqueeze(1)
    logprobs_M_V = logits_M_V.log_softmax(dim=-1)
    logprobs_M = -F.nll_loss(logprobs_M_V, targets_M, reduction="none")
    if entropy is Entropy.NONE:
        return logprobs_M, None
    if entropy is Entropy.VALUE:
        return logprobs_M, _entropies(logprobs_M_V.detach())
    return logprobs_M, -(logprobs_M_V.exp() * logprobs_M_V).sum(dim=-1)


def _entropies(logprobs_M_V: Tensor) -> Tensor:
    """[M], with probabilities of a few tokens at a time: no more memory than without."""
    parts = logprobs_M_V.split(max(1, MAX_PROBABILITIES // logprobs_M_V.shape[1]))
    return torch.cat([part.exp().mul_(part).sum(dim=-1).neg_() for part in parts])


def _in_chunks(model: Any, hidden_M_D: Tensor, terms: "_Terms", chunk: int) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return _forward(model, hidden_M_D, terms, chunk)
    # A Function none of whose inputs needs a gradient has no backward pass, and weights get theirs there.
    if not hidden_M_D.requires_grad:  # only the output layer is trained
        hidden_M_D = hidden_M_D.detach().requires_grad_()
    return _Chunked.apply(hidden_M_D, model, terms, chunk)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Terms:
    """The numbers that are computed of the logits of each token, and their gradients."""

    targets_M: Tensor
    temperature_M: Tensor | None
    entropy: Entropy
    comparison: TeacherComparison | None = None

    def of(self, logits_C_V: Tensor, part: slice) -> list[Tensor]:
        """[C] each: log-probabilities, entropies, the teacher's log-probabilities, divergences; of these what
        is wanted. `logits_C_V` may be overwritten."""
        targets_C1 = self.targets_M[part].unsqueeze(1)
        logprobs_C_V = self._logprobs(logits_C_V, part)
        # Frees the logits before more tensors of their size are made.
        del logits_C_V
        terms = [logprobs_C_V.gather(1, targets_C1).squeeze(1)]
        if self.entropy is not Entropy.NONE:
            terms.append(_entropies(logprobs_C_V))
        if self.comparison is not None:
            teacher_C_V = self._teacher(self.comparison, part)
            terms.append(teacher_C_V.gather(1, targets_C1).squeeze(1))
            kind, beta = self.comparison.kind, self.comparison.beta
            terms.append(divergence_terms(logprobs_C_V, teacher_C_V, kind, beta))
        return terms

    def without_gradient(self, terms: Sequence[Tensor]) -> list[Tensor]:
        """Those of `of` that carry none."""
        entropies = [terms[1]] if self.entropy is Entropy.VALUE else []
        return [*entropies, *([terms[-2]] if self.comparison is not None else [])]

    def slopes(
        self, logits_C_V: Tensor, part: slice, terms_C: Sequence[Tensor], grads_C: Sequence[Tensor]
    ) -> Tensor:
        """[C, V] gradient of the logits, of the gradients of what `of` gave. With p the probabilities and H
        the entropy at temperature τ: d log p_t / d l_j = (1[j = t] - p_j) / τ and
        d H / d l_j = -p_j (log p_j + H) / τ. `logits_C_V` may be overwritten."""
        grad_C1 = grads_C[0].unsqueeze(1)
        logprobs_C_V = self._logprobs(logits_C_V, part)
        del logits_C_V
        of_divergence_C_V = None
        if self.comparison is not None:
            kind, beta = self.comparison.kind, self.comparison.beta
            of_divergence_C_V = divergence_slopes(
                logprobs_C_V, self._teacher(self.comparison, part), kind, beta
            ).mul_(grads_C[-1].unsqueeze(1))
        if self.entropy is Entropy.WITH_GRADIENT:
            probs_C_V = logprobs_C_V.exp()
            # In place from here on: the gradient takes over the memory of the log-probabilities.
            slopes_C_V = logprobs_C_V.add_(terms_C[1].unsqueeze(1)).mul_(grads_C[1].unsqueeze(1))
            slopes_C_V = slopes_C_V.add_(grad_C1).mul_(probs_C_V).neg_()
            del probs_C_V
        else:
            slopes_C_V = logprobs_C_V.exp_().mul_(-grad_C1)
        slopes_C_V.scatter_add_(1, self.targets_M[part].unsqueeze(1), grad_C1.to(slopes_C_V.dtype))
        if of_divergence_C_V is not None:
            slopes_C_V.add_(of_divergence_C_V)
        return _by_temperature(slopes_C_V, self.temperature_M, part)

    def _logprobs(self, logits_C_V: Tensor, part: slice) -> Tensor:
        logits_C_V = logits_C_V.to(torch.promote_types(logits_C_V.dtype, torch.float32))
        return _by_temperature(logits_C_V, self.temperature_M, part).log_softmax(dim=-1)

    def _teacher(self, comparison: TeacherComparison, part: slice) -> Tensor:
        return self._logprobs(comparison.teacher.logits(comparison.states_M_D[part]), part)


def _by_temperature(numbers_C_V: Tensor, temperature_M: Tensor | None, part: slice) -> Tensor:
    """In place, by the temperature of each row."""
    return numbers_C_V if temperature_M is None else numbers_C_V.div_(temperature_M[part].unsqueeze(1))


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


@torch.no_grad()
def _forward(model: Any, hidden_M_D: Tensor, terms: _Terms, chunk: int) -> tuple[Tensor, ...]:
    parts = [terms.of(model.logits(hidden_M_D[part]), part) for part in _chunks(len(hidden_M_D), chunk)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_M_D: Tensor, model: Any, terms: _Terms, chunk: int) -> tuple[Tensor, ...]:
        columns = _forward(model, hidden_M_D, terms, chunk)
        ctx.mark_non_differentiable(*terms.without_gradient(columns))
        ctx.save_for_backward(hidden_M_D, *columns)
        ctx.model, ctx.terms, ctx.chunk = model, terms, chunk
        return columns

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        hidden_M_D, *columns = ctx.saved_tensors
        # torch hands in zeros for outputs that carry no gradient, so all of `grads` can be cut into parts.
        grad_hidden_M_D = torch.empty_like(hidden_M_D)
        for part in _chunks(len(hidden_M_D), ctx.chunk):
            grad_hidden_M_D[part] = _gradient(
                ctx.model,
                hidden_M_D[part],
                ctx.terms,
                part,
                [column[part] for column in columns],
                [grad[part] for grad in grads],
            )
        return grad_hidden_M_D, None, None, None


def _gradient(
    model: Any,
    hidden_C_D: Tensor,
    terms: _Terms,
    part: slice,
    terms_C: Sequence[Tensor],
    grads_C: Sequence[Tensor],
) -> Tensor:
    """[C, D] gradient of the states of one chunk. Parameters of the output layer get theirs here.

    A function of its own, so that nothing of one chunk is there while the next one is computed.
    """
    weight = _weight_to_add_to(model)
    if weight is None:
        hidden_C_D = hidden_C_D.detach().requires_grad_()
        with torch.enable_grad():
            logits_C_V = model.logits(hidden_C_D)
        # A copy: `slopes` overwrites it, and the backward pass begins at the logits themselves.
        grad_C_V = terms.slopes(_copy(logits_C_V), part, terms_C, grads_C).to(logits_C_V.dtype)
        logits_C_V.backward(grad_C_V)
        assert hidden_C_D.grad is not None
        return hidden_C_D.grad
    grad_C_V = terms.slopes(model.logits(hidden_C_D), part, terms_C, grads_C).to(hidden_C_D.dtype)
    if weight.requires_grad:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.addmm_(grad_C_V.t(), hidden_C_D)
    return grad_C_V @ weight


def _copy(logits_C_V: Tensor) -> Tensor:
    return logits_C_V.detach().to(torch.promote_types(logits_C_V.dtype, torch.float32), copy=True)


def _weight_to_add_to(model: Any) -> Tensor | None:
    """The matrix that the output layer is, where its gradient can be added up in place: a gradient of each
    chunk's own would be as large as the matrix. None for layers that are more than a matrix, for shards, and
    for 16 bits, whose gradients add up in float32 elsewhere."""
    weight: Tensor | None = model.output_weight
    if weight is None or is_sharded(model) or (weight.dtype in HALF and weight.requires_grad):
        return None
    return weight
