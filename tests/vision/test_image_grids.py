"""Models that place an image's tokens by line and column: positions are transformers' own, wherever a row is
cut."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLModel, Qwen2VLModel, Qwen3VLModel

from rllm.inference.local.client import LocalClient
from rllm.models.directory import load_model
from rllm.models.vision.grids import ImageGrids
from rllm.types import SamplingParams
from rllm.types.images import PATCH_IDS_FROM, patch_ids

Make = Callable[..., Any]
SIDES = {number: (1 + number % 3, 1 + number // 3) for number in range(12)}
"""Lines and columns of an image's tokens, by its number."""


class _VisionSizes:
    spatial_merge_size, tokens_per_second = 2, 4


class _Model:
    """What `get_rope_index` asks of a model."""

    class config:  # noqa: N801  a namespace
        vision_config = _VisionSizes

    def __init__(self, family: Any) -> None:
        self.get_vision_position_ids = family.get_vision_position_ids.__get__(self)


@given(
    row=st.lists(st.integers(0, 11) | st.none(), min_size=1, max_size=12),
    cut=st.integers(0, 200),
    family=st.sampled_from([Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel]),
)
def test_positions_are_those_of_transformers_wherever_a_row_is_cut(
    row: list[int | None], cut: int, family: Any
) -> None:
    """Two images always have a word between them, as templates have it."""
    ids: list[int] = []
    for each in row:
        ids.append(7)
        ids += [] if each is None else patch_ids(each, SIDES[each][0] * SIDES[each][1])
    tokens_N = torch.tensor(ids)
    kinds_1_N = (tokens_N >= PATCH_IDS_FROM).int().unsqueeze(0)
    images = [SIDES[each] for each in row if each is not None]
    grid = torch.tensor([[1, 2 * lines, 2 * columns] for lines, columns in images]) if images else None
    theirs, _ = family.get_rope_index(
        _Model(family), tokens_N.unsqueeze(0), mm_token_type_ids=kinds_1_N, image_grid_thw=grid
    )
    grids = ImageGrids(SIDES.__getitem__)
    ours = grids.positions(tokens_N, torch.arange(len(ids)) + torch.from_numpy(grids.shifts(np.array(ids))))
    assert torch.equal(ours, theirs)
    begun = np.array(ids[: 1 + cut % len(ids)])
    assert np.array_equal(grids.shifts(begun), grids.shifts(np.array(ids))[: len(begun)])


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
async def test_what_two_prompts_have_in_common_may_end_within_an_image(
    vision_model: Make, picture: Make, shows: Make, family: str
) -> None:
    model = load_model(vision_model(family).directory)
    client = LocalClient(model, num_slots=4, max_context=400)
    anew = LocalClient(model, num_slots=4, max_context=400)
    prompt = client.renderer.render([shows("Which?", picture(1, 64, 48), picture(2, 24, 90))])
    first = next(place for place, each in enumerate(prompt) if each >= PATCH_IDS_FROM)
    sampling = SamplingParams(max_tokens=5, seed=3)
    try:
        await client.generate_ids(prompt, sampling)
        goes_on = await client.generate_ids(prompt[: first + 20], sampling)
        expected = await anew.generate_ids(prompt[: first + 20], sampling)
    finally:
        await client.close()
        await anew.close()
    assert goes_on.usage["cached_tokens"] > first
    assert goes_on.completion_ids == expected.completion_ids
    assert goes_on.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
