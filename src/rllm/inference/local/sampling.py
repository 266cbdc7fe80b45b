"""Logits and seeds in, tokens and exact log-probabilities out.

Every draw is a function of (request seed, position in the answer) and of nothing else: not of the batch, the
slot, the process or the order of arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rllm.types.messages import SamplingParams, TopLogprobs

BLOCK = 512
"""A larger vocabulary is drawn from in two steps, block then token: running sums do not vectorise and are
kept short."""
_FLOAT_BITS, LEADING_BITS = 32, 16
"""Sign, exponent and seven bits of the fraction: tokens of one count are within a hundredth of each other."""
DRAW_BITS = 23
"""A float32 total times a draw of this many bits is below the total, however it rounds; so no draw runs past
the end."""


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float32]:
    """[2, B] numbers in [0, 1), DRAW_BITS each: splitmix64 (Steele, Lea, Flood 2014) of seed and position."""
    x_B = seeds_B + (positions_B + _ONE) * _GAMMA  # arrays wrap around, as they should
    x_B = (x_B ^ (x_B >> _SHIFTS[0])) * _MIX[0]
    x_B = (x_B ^ (x_B >> _SHIFTS[1])) * _MIX[1]
    x_B = x_B ^ (x_B >> _SHIFTS[2])
    return ((x_B >> _PARTS) & _MASK).astype(np.float32) * np.float32(2.0**-DRAW_BITS)


_ONE, _GAMMA = np.uint64(1), np.uint64(0x9E3779B97F4A7C15)
_MIX = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
_SHIFTS = np.array([30, 27, 31], dtype=np.uint64)
_PARTS = np.array([[64 - DRAW_BITS], [64 - 2 * DRAW_BITS]], dtype=np.uint64)
_MASK = np.uint64(2**DRAW_BITS - 1)


@dataclass(slots=True)
class SamplingRows:
    """The sampling parameters of the rows of one batch, as columns.

    Serves many steps: only the positions move on.
    """

    seeds_B: NDArray[np.uint64]
    positions_B: NDArray[np.uint64]
    """Index of the token to be drawn within each answer."""
    temperatures_B: NDArray[np.float64]
    truncated_B: NDArray[np.bool_]
    """Whether `params` of the row has top-k or top-p."""
    params: Sequence[SamplingParams]
    temperature_B1: Tensor | None = field(init=False)
    """The divisor of the logits; None when that is 1 everywhere."""
    greedy: list[int] = field(init=False)
    """Rows that take the best token."""
    truncated: list[int] = field(init=False)
    """Rows whose distribution is cut: greedy ones are scored by the raw model."""

    def __post_init__(self) -> None:
        self.greedy = np.flatnonzero(self.temperatures_B == 0.0).tolist()
        self.temperature_B1 = None
        if (self.temperatures_B != 1.0).any():
            divisors_B = np.where(self.temperatures_B == 0.0, 1.0, self.temperatures_B).astype(np.float32)
            self.temperature_B1 = torch.from_numpy(divisors_B).unsqueeze(1)
        self.truncated = np.flatnonzero(self.truncated_B & (self.temperatures_B != 0.0)).tolist()

    def part(self, rows: Sequence[int]) -> "SamplingRows":
        """The columns of some of the rows, as they are now."""
        return SamplingRows(
            seeds_B=self.seeds_B[rows],
            positions_B=self.positions_B[rows],
            temperatures_B=self.temperatures_B[rows],
            truncated_B=self.truncated_B[rows],
            params=[self.params[row] for row in rows],
        )


def sample(logits_B_V: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """([B] token ids, [B] log-probabilities under the distribution that `SamplingParams.logprob_meaning`
    names)."""
    logits_B_V = logits_B_V.float()
    probabilities_B_V = torch.softmax(_reshape(logits_B_V, rows), dim=-1)
    if len(rows.greedy) == len(rows.params):
        tokens_B1 = logits_B_V.argmax(dim=-1, keepdim=True)
    else:
        tokens_B1 = _draw(probabilities_B_V, uniforms(rows.seeds_B, rows.positions_B))
        if rows.greedy:
            tokens_B1[rows.greedy] = logits_B_V[rows.greedy].argmax(dim=-1, keepdim=True)
    # A drawn or best token has a probability above 0, so its logarithm is finite.
    return tokens_B1.squeeze(1), probabilities_B_V.gather(1, tokens_B1).log_().squeeze(1)


def sample_among(logits_B_V: Tensor, allowed_B_V: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """As `sample`, among the allowed tokens of each row alone.

    Log-probabilities are those of the model without the restriction. Only where top-k or top-p cut the
    distribution (TRUNCATED) is it part of the cut: else a token outside of the top-k would have none.
    """
    logits_B_V = logits_B_V.float()
    tokens_B, logprobs_B = sample(logits_B_V.masked_fill(~allowed_B_V, float("-inf")), rows)
    # Not the log of a probability: what a grammar forces may be so unlikely that the latter is 0.
    model_B_V = torch.log_softmax(_with_temperature(logits_B_V, rows), dim=-1)
    free_B = model_B_V.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
    if rows.truncated:
        free_B[rows.truncated] = logprobs_B[rows.truncated]
    return tokens_B, free_B


def most_likely(logits_B_V: Tensor, rows: SamplingRows, count: int) -> list[TopLogprobs]:
    """The `count` best tokens of every row under the distribution that its log-probabilities belong to; fewer
    where it has fewer."""
    logprobs_B_V = torch.log_softmax(_reshape(logits_B_V.float(), rows), dim=-1)
    best = logprobs_B_V.topk(min(count, logprobs_B_V.shape[1]), dim=-1)
    return [
        [(token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob > float("-inf")]
        for ids, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _draw(probabilities_B_V: Tensor, uniforms_2_B: NDArray[np.float32]) -> Tensor:
    """[B, 1] tokens by inverse CDF: one number chooses the block, the other the token in it."""
    draws_2_B1 = torch.from_numpy(uniforms_2_B).to(probabilities_B_V.device).unsqueeze(2)
    num_rows, vocab_size = probabilities_B_V.shape
    if vocab_size <= BLOCK:
        return _first_above(probabilities_B_V, draws_2_B1[1])
    padded_probabilities = (
        F.pad(probabilities_B_V, (0, -vocab_size % BLOCK)) if vocab_size % BLOCK else probabilities_B_V
    )
    blocks_B_n_b = padded_probabilities.view(num_rows, -1, BLOCK)
    block_B1 = _first_above(blocks_B_n_b.sum(dim=-1), draws_2_B1[0])
    chosen_B_b = blocks_B_n_b.gather(1, block_B1.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1)
    return _first_above(chosen_B_b, draws_2_B1[1]).add_(block_B1, alpha=BLOCK)


def _first_above(weights_B_n: Tensor, draws_B1: Tensor) -> Tensor:
    """[B, 1] the first place where the running sum exceeds draw × total; its weight is positive."""
    sums_B_n = weights_B_n.cumsum(dim=-1)
    return torch.searchsorted(sums_B_n, sums_B_n[:, -1:] * draws_B1, right=True)


def _reshape(logits_B_V: Tensor, rows: SamplingRows) -> Tensor:
    """Logits after temperature, then top-k, then top-p.

    Greedy rows stay as they are: they are scored by the raw model.
    """
    logits_B_V = _with_temperature(logits_B_V, rows)
    if rows.truncated and rows.temperature_B1 is None:
        # Grammars and alternatives read the caller's logits after this.
        logits_B_V = logits_B_V.clone()
    for row in rows.truncated:
        logits_B_V[row] = _truncate(logits_B_V[row], rows.params[row])
    return logits_B_V


def _with_temperature(logits_B_V: Tensor, rows: SamplingRows) -> Tensor:
    if rows.temperature_B1 is None:
        return logits_B_V
    return logits_B_V / rows.temperature_B1.to(logits_B_V.device)


def _truncate(logits_V: Tensor, params: SamplingParams) -> Tensor:
    if not params.top_k:
        is_kept_V = _nucleus(torch.softmax(logits_V, dim=0), params.top_p)
        return logits_V.masked_fill(~is_kept_V, float("-inf"))
    best, order = logits_V.topk(min(params.top_k, len(logits_V)))
    share = torch.softmax(best, dim=0)
    keep = (share.cumsum(0) - share) < params.top_p  # the token that crosses the threshold stays
    truncated_V = torch.full_like(logits_V, float("-inf"))
    truncated_V[order[keep]] = best[keep]
    return truncated_V


def _nucleus(probabilities_V: Tensor, mass: float) -> Tensor:
    """[V] whether a token is among the fewest whose probabilities reach `mass` (Holtzman et al. 2020,
    arXiv:1904.09751); of equal ones at the border, those with the lowest ids.

    Sorting a large vocabulary takes twenty times as long as drawing from it. So tokens are counted by the
    leading bits of their probabilities, which order them, and only those at the border are sorted.
    """
    bins_V = probabilities_V.view(torch.int32) >> (_FLOAT_BITS - LEADING_BITS)
    masses_H = torch.bincount(bins_V, probabilities_V.double())
    reached_H = masses_H.flip(0).cumsum(
        0
    )  # from the likeliest on, in float64: a rounded sum moves the border
    # By rounding, all tokens together may have less than `mass`: then the lowest count has the border.
    behind = min(int((reached_H < mass).sum()), len(reached_H) - 1)
    border_bin = len(reached_H) - 1 - behind
    border = (bins_V == border_bin).nonzero().squeeze(1)
    sorted_probabilities, order = probabilities_V[border].double().sort(descending=True, stable=True)
    before = (
        sorted_probabilities.cumsum(0) - sorted_probabilities + (reached_H[behind - 1] if behind else 0.0)
    )
    is_kept_V = bins_V > border_bin
    is_kept_V[border[order[before < mass]]] = True
    return is_kept_V
