"""The divergence of a student from its teacher where a token was sampled, over the whole vocabulary.

    p teacher, q student, both [M, V]
    forward_kl   KL(p, q)                                       asks for all of the teacher's ways
    reverse_kl   KL(q, p)                                       asks for one of them
    jsd          β KL(p, m) + (1 - β) KL(q, m), m = β p + (1 - β) q

Agarwal et al. 2023 (GKD, arXiv:2306.13649), section 3, equation 1: the generalised Jensen-Shannon divergence,
whose gradient tends to those of the two others, forward as β goes to 0 and reverse as it goes to 1. It is
less than ln 2 at β = 1/2, however impossible the teacher finds a token. TRL's `generalized_jsd_loss` is the
same, and calls the two others β = 0 and β = 1.
"""

import math

import torch
from torch import Tensor

from rllm.errors import ConfigError, choices_of

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def divergence_terms(student_M_V: Tensor, teacher_M_V: Tensor, kind: str, beta: float) -> Tensor:
    """[M] in nats, of log-probabilities; the gradient goes to the student's. `beta` is of `jsd` alone."""
    teacher_M_V = teacher_M_V.detach()
    if kind == "forward_kl":
        return _kl(teacher_M_V, student_M_V)
    if kind == "reverse_kl":
        return _kl(student_M_V, teacher_M_V)
    if kind == "jsd":
        mixed_M_V = torch.logaddexp(teacher_M_V + math.log(beta), student_M_V + math.log1p(-beta))
        return beta * _kl(teacher_M_V, mixed_M_V) + (1.0 - beta) * _kl(student_M_V, mixed_M_V)
    raise _unknown(kind)


def divergence_slopes(student_M_V: Tensor, teacher_M_V: Tensor, kind: str, beta: float) -> Tensor:
    """[M, V] derivative of `divergence_terms` by the logits z that the student's log-probabilities are of.

    With log q = z - log Σ exp z a sum Σ_j f(q_j), where g_j = f'(q_j), has the slope q_j (g_j - Σ_k q_k g_k):
    forward_kl  q_j - p_j;    reverse_kl  g = log q - log p;    jsd  g = (1 - β) (log q - log m)
    """
    probs_M_V = student_M_V.exp()
    if kind == "forward_kl":
        return probs_M_V.sub_(teacher_M_V.exp())
    if kind == "reverse_kl":
        scale, gaps_M_V = 1.0, student_M_V - teacher_M_V
    elif kind == "jsd":
        scale = 1.0 - beta
        gaps_M_V = torch.logaddexp(teacher_M_V + math.log(beta), student_M_V + math.log1p(-beta))
        torch.sub(student_M_V, gaps_M_V, out=gaps_M_V)
    else:
        raise _unknown(kind)
    # Where a probability is 0 its gap may be infinite, and 0 · ∞ would be NaN.
    gaps_M_V.masked_fill_(probs_M_V == 0.0, 0.0)
    gaps_M_V.sub_(torch.einsum("mv,mv->m", probs_M_V, gaps_M_V).unsqueeze(1))
    return probs_M_V.mul_(gaps_M_V).mul_(scale)


def _unknown(kind: str) -> ConfigError:
    return ConfigError(f"There is no divergence `{kind}`; {choices_of(kind, DIVERGENCES)}.")


def _kl(of_M_V: Tensor, from_M_V: Tensor) -> Tensor:
    """[M] KL of the first from the second, both log-probabilities; what the first never does counts 0."""
    probs_M_V = of_M_V.exp()
    gaps_M_V = torch.where(probs_M_V > 0.0, of_M_V - from_M_V, torch.zeros_like(of_M_V))
    return (probs_M_V * gaps_M_V).sum(dim=-1)
