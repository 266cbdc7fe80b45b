"""Logits and seeds in, tokens and exact log-probabilities out.

Every draw is a function of (request seed, position in the answer) and of nothing else: not of the batch, the slot, the
process or the order of arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.types.messages import SamplingParams


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """[B] numbers in [0, 1): splitmix64 (Steele, Lea, Flood 2014) of seed and position, used as a counter-based generator."""
    with np.errstate(over="ignore"):
        x = seeds_B + (positions_B + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(slots=True)
class SamplingRows:
    """The sampling parameters of the rows of one batch, as columns."""

    seeds_B: NDArray[np.uint64]
    positions_B: NDArray[np.uint64]
    """Index of the token to be drawn within each answer."""
    plain: bool
    """All rows sample at temperature 1 from the whole vocabulary."""
    params: Sequence[SamplingParams]


def sample(logits_B_V: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """([B] token ids, [B] log-probabilities under the distribution that `SamplingParams.logprob_meaning` names).

    Inverse-CDF sampling in float32; the last token with positive probability catches rounding at the upper end.
    """
    logprobs_B_V = torch.log_softmax(logits_B_V.float(), dim=-1)
    if not rows.plain:
        logprobs_B_V = _shaped(logits_B_V.float(), logprobs_B_V, rows.params)
    cdf_B_V = logprobs_B_V.exp().cumsum_(dim=-1)
    draws_B1 = torch.from_numpy(uniforms(rows.seeds_B, rows.positions_B)).to(cdf_B_V).unsqueeze(1)
    tokens_B1 = torch.searchsorted(cdf_B_V, draws_B1 * cdf_B_V[:, -1:], right=True)
    # A draw that rounds up to the total would run past the end: step back to the last token with any probability.
    last_B1 = torch.searchsorted(cdf_B_V, cdf_B_V[:, -1:].contiguous())
    tokens_B1 = torch.minimum(tokens_B1, last_B1)
    if not rows.plain:
        greedy = [index for index, params in enumerate(rows.params) if params.temperature == 0.0]
        if greedy:
            tokens_B1[greedy, 0] = logits_B_V[greedy].argmax(dim=-1)
    return tokens_B1.squeeze(1), logprobs_B_V.gather(1, tokens_B1).squeeze(1)


def _shaped(logits_B_V: Tensor, raw_B_V: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities after temperature, then top-k, then top-p. Greedy rows stay raw: their token is set by argmax."""
    temperatures = [each.temperature or 1.0 for each in params]
    shaped_B_V = raw_B_V
    if any(temperature != 1.0 for temperature in temperatures):
        temperature_B1 = logits_B_V.new_tensor(temperatures).unsqueeze(1)
        shaped_B_V = torch.log_softmax(logits_B_V / temperature_B1, dim=-1)
    for row, each in enumerate(params):
        if each.temperature == 0.0 or (each.top_k == 0 and each.top_p == 1.0):
            continue
        ordered, order = shaped_B_V[row].sort(descending=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if each.top_k:
            keep[each.top_k :] = False
        if each.top_p < 1.0:
            kept_probability = torch.where(keep, ordered.exp(), 0.0)
            share = kept_probability / kept_probability.sum()
            keep &= (share.cumsum(0) - share) < each.top_p  # the token that crosses the threshold stays
        truncated = torch.full_like(ordered, float("-inf"))
        truncated[order[keep]] = torch.log_softmax(ordered[keep], dim=0)
        shaped_B_V = shaped_B_V.index_copy(
            0, torch.tensor([row], device=ordered.device), truncated.unsqueeze(0)
        )
    return shaped_B_V
