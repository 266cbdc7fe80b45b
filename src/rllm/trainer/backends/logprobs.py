"""Log-probabilities of the tokens that were sampled, without logits of all of them at the same time.

    hidden_M_D ─► chunk of C states ─► logits_C_V ─► log π(target), entropy ─► [M]     logits are dropped
                                          │
    gradient of [M] ─────────────────► once more, chunk by chunk ─► gradient_C_V ─► hidden, output layer

A vocabulary of 150,000 makes the logits of 16,000 tokens 10 GB in float32, three times over with softmax and
gradient. Here memory grows with the chunk, in both directions; the price is that the output layer's forward
product is computed twice. Tokens that fit into one chunk are computed in one go, once.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

AT_ONCE = 2**20
"""Probabilities that exist at the same time where entropies are looked at."""
COPIES = 4
"""The number of copies of the logits in float32 that exist at the peak: themselves, log-probabilities,
probabilities, gradient."""


class Entropy(Enum):
    """Whether the entropy of the distribution is wanted that a token was sampled from."""

    NONE = 0
    VALUE = 1
    """To be looked at; it carries no gradient."""
    WITH_GRADIENT = 2


def tokens_at_once(model: Any, megabytes: float) -> int:
    """The number of tokens that may have logits at the same time, at least one; `megabytes` is for all copies
    of them."""
    return max(1, int(megabytes * 1e6 / (COPIES * 4 * model.vocab_size)))


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
    if len(hidden_M_D) <= chunk:
        return _whole(model.logits(hidden_M_D), targets_M, temperature_M, entropy)
    if not torch.is_grad_enabled():
        return _forward(model, hidden_M_D, targets_M, temperature_M, chunk, entropy)
    if not hidden_M_D.requires_grad:  # only the output layer is trained
        hidden_M_D = hidden_M_D.detach().requires_grad_()
    logprobs_M, entropy_M = _Chunked.apply(hidden_M_D, model, targets_M, temperature_M, chunk, entropy)
    return logprobs_M, entropy_M


def _whole(
    logits_M_V: Tensor, targets_M: Tensor, temperature_M: Tensor | None, entropy: Entropy
) -> tuple[Tensor, Tensor | None]:
    logprobs_M_V = _scaled(logits_M_V, temperature_M).log_softmax(dim=-1)
    logprobs_M = -F.nll_loss(logprobs_M_V, targets_M, reduction="none")
    if entropy is Entropy.NONE:
        return logprobs_M, None
    if entropy is Entropy.VALUE:
        return logprobs_M, _entropies(logprobs_M_V.detach())
    return logprobs_M, -(logprobs_M_V.exp() * logprobs_M_V).sum(dim=-1)


def _entropies(logprobs_M_V: Tensor) -> Tensor:
    """[M], with probabilities of a few tokens at a time: no more memory than without."""
    parts = logprobs_M_V.split(max(1, AT_ONCE // logprobs_M_V.shape[1]))
    return torch.cat([part.exp().mul_(part).sum(dim=-1).neg_() for part in parts])


def _scaled(logits_M_V: Tensor, temperature_M: Tensor | None) -> Tensor:
    logits_M_V = logits_M_V.to(torch.promote_types(logits_M_V.dtype, torch.float32))
    return logits_M_V if temperature_M is None else logits_M_V / temperature_M.unsqueeze(1)


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _forward(
    model: Any,
    hidden_M_D: Tensor,
    targets_M: Tensor,
    temperature_M: Tensor | None,
    chunk: int,
    entropy: Entropy,
) -> tuple[Tensor, Tensor | None]:
    parts = [
        _whole(
            model.logits(hidden_M_D[part]),
            targets_M[part],
            None if temperature_M is None else temperature_M[part],
            entropy,
        )
        for part in _chunks(len(hidden_M_D), chunk)
    ]
    entropies = [entropy_C for _, entropy_C in parts if entropy_C is not None]
    return torch.cat([logprobs_C for logprobs_C, _ in parts]), torch.cat(entropies) if entropies else None


class _Chunked(torch.autograd.Function):
    """With p the probabilities and H the entropy at temperature τ: d log p_t / d l_j = (1[j = t] - p_j) / τ
    and d H / d l_j = -p_j (log p_j + H) / τ."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_M_D: Tensor,
        model: Any,
        targets_M: Tensor,
        temperature_M: Tensor | None,
        chunk: int,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs_M, entropy_M = _forward(model, hidden_M_D, targets_M, temperature_M, chunk, entropy)
        if entropy is Entropy.VALUE and entropy_M is not None:
            ctx.mark_non_differentiable(entropy_M)
        with_gradient_M = entropy_M if entropy is Entropy.WITH_GRADIENT else None
        ctx.save_for_backward(hidden_M_D, targets_M, temperature_M, with_gradient_M)
        ctx.model, ctx.chunk = model, chunk
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        hidden_M_D, targets_M, temperature_M, entropy_M = ctx.saved_tensors
        grad_M, grad_entropy_M = grads
        grad_hidden_M_D = torch.empty_like(hidden_M_D)
        for part in _chunks(len(hidden_M_D), ctx.chunk):
            grad_hidden_M_D[part] = _gradient(
                ctx.model,
                hidden_M_D[part].detach().requires_grad_(),
                targets_M[part],
                None if temperature_M is None else temperature_M[part],
                grad_M[part],
                None if entropy_M is None else (entropy_M[part], grad_entropy_M[part]),
            )
        return grad_hidden_M_D, None, None, None, None, None


def _gradient(
    model: Any,
    hidden_C_D: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor | None,
    grad_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """[C, D] gradient of the states of one chunk; `entropy`: of its tokens, and the gradient of that.

    A function of its own, so that nothing of one chunk is there while the next one is computed.
    """
    with torch.enable_grad():
        logits_C_V = model.logits(hidden_C_D)
    logprobs_C_V = _scaled(logits_C_V.detach(), temperature_C).log_softmax(dim=-1)
    if entropy is None:
        grad_C_V = logprobs_C_V.exp_().mul_(-grad_C.unsqueeze(1))
    else:
        entropy_C, grad_entropy_C = entropy
        probs_C_V = logprobs_C_V.exp()
        slope_C_V = logprobs_C_V.add_(entropy_C.unsqueeze(1))
        slope_C_V.mul_(grad_entropy_C.unsqueeze(1)).add_(grad_C.unsqueeze(1))
        grad_C_V = slope_C_V.mul_(probs_C_V).neg_()
    grad_C_V.scatter_add_(1, targets_C.unsqueeze(1), grad_C.unsqueeze(1))
    if temperature_C is not None:
        grad_C_V.div_(temperature_C.unsqueeze(1))
    # Parameters of the output layer get their gradient here, chunk by chunk.
    logits_C_V.backward(grad_C_V.to(logits_C_V.dtype))
    assert hidden_C_D.grad is not None
    return hidden_C_D.grad
