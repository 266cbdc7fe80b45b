"""Attention of padded rows, with what some architectures ask of it beyond softmax(q·k)·v.

A window (Mistral, Gemma, gpt-oss), scores that are capped (Gemma 2), and sinks (gpt-oss). Who hands attention
to a model gets such wishes with each call, as `Wishes`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Wishes:
    """A layer's wishes beyond softmax(q·k)·v."""

    window: int | None = None
    """Keys that a query sees at most, its own among them; None is all."""
    softcap: float | None = None
    """c of c · tanh(score / c), before the mask (Gemma Team 2024, arXiv:2408.00118)."""
    sinks: Tensor | None = None
    """[H] a further score of each head, which takes weight and gives nothing (OpenAI 2025,
    arXiv:2508.10925)."""

    def is_shorter(self, length: int) -> bool:
        """True where the window leaves out keys of a row that long."""
        return self.window is not None and self.window < length

    def weights(self, scores: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """[..., T] of scaled scores: `mask` is added to them, 0 or -inf; `sinks` [..., 1] are their own."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            scores = scores + mask
        if sinks is None:
            return torch.softmax(scores, dim=-1)
        with_sinks = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
        return torch.softmax(with_sinks, dim=-1)[..., :-1]


NONE = Wishes()


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, wishes: Wishes = NONE, *, is_causal: bool
) -> Tensor:
    """[R, H, Q, d] of q [R, H, Q, d], k and v [R, K, T, d], scaled by 1/sqrt(d).

    `visible` [R or 1, 1, Q, T] has the window in it already: true, or 0 among -inf. Without it a query sees
    all keys up to its own place, where `is_causal`.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    if wishes.softcap is None and wishes.sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=is_causal, enable_gqa=num_heads != num_kv_heads
        )
    if visible is None and is_causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    if visible is not None:
        if visible.dtype == torch.bool:
            visible = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
        visible = visible.unsqueeze(2)
    sinks = None if wishes.sinks is None else wishes.sinks.view(1, num_kv_heads, -1, 1, 1)
    grouped_q = q.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    scores = grouped_q @ k.unsqueeze(2).transpose(-1, -2) * q.shape[-1] ** -0.5
    return (wishes.weights(scores, visible, sinks) @ v.unsqueeze(2)).flatten(1, 2)
