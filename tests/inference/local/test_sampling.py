"""Top-k and top-p keep what sorting would keep, at any size of the vocabulary and with ties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rllm.inference.local.sampling import DRAW_BITS, SamplingRows, most_likely, sample, uniforms
from rllm.types.messages import SamplingParams


def _rows(params: list[SamplingParams], seed: int = 0) -> SamplingRows:
    return SamplingRows(
        seeds_B=np.arange(seed, seed + len(params), dtype=np.uint64),
        positions_B=np.zeros(len(params), dtype=np.uint64),
        temperatures_B=np.array([each.temperature for each in params]),
        truncated_B=np.array([bool(each.top_k or each.top_p < 1.0) for each in params]),
        params=params,
    )


def _kept(logits_B_V: Tensor, params: list[SamplingParams]) -> list[dict[int, float]]:
    """Tokens that may be drawn, with their log-probabilities."""
    return [dict(top) for top in most_likely(logits_B_V, _rows(params), logits_B_V.shape[1])]


def _expected(logits_V: Tensor, params: SamplingParams) -> list[float]:
    """Logits of the tokens that are kept, likeliest first: by sorting, in float64."""
    ordered = logits_V.double().sort(descending=True).values[: params.top_k or None]
    shares = torch.softmax(ordered, dim=0).numpy()
    before = np.cumsum(shares) - shares
    return ordered[torch.from_numpy(before < params.top_p - 1e-12)].tolist()


@pytest.mark.parametrize("vocab_size", [7, 600, 20_000])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("top_k", [0, 1, 40, 5_000])
def test_what_is_kept_is_what_sorting_would_keep(vocab_size: int, spread: float, top_k: int) -> None:
    draw = torch.Generator().manual_seed(vocab_size + top_k)
    logits_B_V = torch.randn(4, vocab_size, generator=draw) * spread
    params = [SamplingParams(top_k=top_k, top_p=top_p) for top_p in (0.05, 0.5, 0.9, 0.999)]
    for logits_V, each, kept in zip(logits_B_V, params, _kept(logits_B_V, params), strict=True):
        expected = _expected(logits_V, each)
        chosen = sorted((float(logits_V[token]) for token in kept), reverse=True)
        both = min(len(chosen), len(expected))
        assert chosen[:both] == pytest.approx(expected[:both])
        # A sum in float32 may see tokens at the border otherwise than one in float64: one, or some that
        # together have next to no weight.
        border = torch.tensor([*chosen[both:], *expected[both:]], dtype=torch.float64)
        weight = float((border - torch.logsumexp(logits_V.double(), 0)).exp().sum())
        assert len(border) <= 1 or weight < 1e-5
        total = torch.logsumexp(torch.tensor(chosen, dtype=torch.float64), 0)
        assert [kept[token] for token in kept] == pytest.approx(
            [float(logits_V[token]) - float(total) for token in kept], abs=1e-4
        )


@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.0, float("-inf")]), min_size=2, max_size=40),
    st.floats(min_value=0.01, max_value=0.99),
)
def test_ties_are_kept_by_the_lowest_ids_and_no_more_than_it_takes(values: list[float], top_p: float) -> None:
    logits_V = torch.tensor([3.0, *values])
    (kept,) = _kept(logits_V[None], [SamplingParams(top_p=top_p)])
    shares = torch.softmax(logits_V.double(), dim=0)
    ids = sorted(range(len(logits_V)), key=lambda token: (-float(logits_V[token]), token))
    count = len(kept)
    assert sorted(kept) == sorted(ids[:count])
    assert float(shares[ids[:count]].sum()) >= top_p - 1e-6
    assert float(shares[ids[: count - 1]].sum()) < top_p + 1e-6


def test_a_row_is_cut_as_if_it_were_alone() -> None:
    logits_B_V = torch.randn(6, 3_000, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    params = [SamplingParams(top_k=k, top_p=p) for k in (0, 20, 700) for p in (0.6, 0.95)]
    together = sample(logits_B_V, _rows(params))
    for row, each in enumerate(params):
        alone = sample(logits_B_V[row : row + 1], _rows([each], seed=row))
        assert (int(alone[0]), float(alone[1])) == (int(together[0][row]), float(together[1][row]))


def test_draws_are_the_bits_of_splitmix64() -> None:
    """Against whole numbers of Python; the first output for seed 0 is the published 0xE220A8397B1DCDAF."""

    def output(seed: int, position: int) -> int:
        number = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
        return number ^ number >> 31

    assert output(0, 0) == 0xE220A8397B1DCDAF
    seeds, positions = [0, 1, 2**63, 2**64 - 1, 12_345], [0, 0, 7, 2**20, 3]
    bits = [output(*each) for each in zip(seeds, positions, strict=True)]
    expected = [
        [(each >> 64 - part * DRAW_BITS) % 2**DRAW_BITS / 2**DRAW_BITS for each in bits] for part in (1, 2)
    ]
    draws_2_B = uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    assert draws_2_B.tolist() == expected
