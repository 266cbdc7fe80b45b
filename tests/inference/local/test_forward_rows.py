"""Attention of mixed rows against a plain sum over keys, with windows, caps, sinks and images."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.inference.local import cache as cache_module
from rllm.inference.local import forward as forward_module
from rllm.inference.local.cache import KVCache, Slot
from rllm.inference.local.forward import DecodeRows, PromptRow, PromptRows, forward, prefill, prefill_all
from rllm.models.attention import Wishes
from rllm.types.images import PATCH_IDS_FROM, later_of_image, patch_ids

HEADS, KV_HEADS, SIZE, LAYERS = 4, 2, 3, 2
MAX_CONTEXT = 128
WISHES = {
    "plain": Wishes(),
    "window": Wishes(window=7),
    "one": Wishes(window=1),
    "cap": Wishes(softcap=0.5),
    "sinks": Wishes(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": Wishes(window=20, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


class Shifts:
    """Every token of an image moves the words behind it one position back."""

    def shifts(self, ids_T: NDArray[np.int64]) -> NDArray[np.int64]:
        is_patch_T = (ids_T >= PATCH_IDS_FROM).astype(np.int64)
        return is_patch_T - is_patch_T.cumsum()


@dataclass
class Model:
    """Two layers of nothing but attention, whose queries, keys and values are drawn by token and position."""

    wishes: tuple[Wishes, ...]
    sees_images_whole: bool
    image_grids: Any
    by_row: bool = False

    def __post_init__(self) -> None:
        draws = torch.Generator().manual_seed(1)
        shape = (LAYERS, 97, HEADS + 2 * KV_HEADS, SIZE)
        self.of_token = torch.randn(shape, generator=draws)
        self.of_position = torch.randn((LAYERS, MAX_CONTEXT + 1, *shape[2:]), generator=draws)

    def parts(self, layer: int, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        drawn = self.of_token[layer][tokens % 97] + self.of_position[layer][positions]
        return drawn.split((HEADS, KV_HEADS, KV_HEADS), dim=1)

    def hidden(
        self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor], keep_M: Tensor | None = None
    ) -> Tensor:
        states: list[Tensor] = []
        is_cut = False
        for layer in range(LAYERS):
            q, k, v = self.parts(layer, tokens, positions)
            if layer == LAYERS - 1 and keep_M is not None and self.wishes[layer] is WISHES["plain"]:
                q, states, is_cut = q[keep_M], [each[keep_M] for each in states], True
            states.append(attend(layer, q, k, v, self.wishes[layer]))
        outputs = torch.cat(states, dim=1)
        return outputs if is_cut or keep_M is None else outputs[keep_M]

    def logits(self, states: Tensor) -> Tensor:
        return states

    def expected(self, ids: list[int]) -> Tensor:
        """[T, ...] what comes of each token of a row that is alone."""
        row = np.array(ids)
        places = np.arange(len(ids))
        positions = places + (self.image_grids.shifts(row) if self.image_grids else 0)
        last_seen = places + (later_of_image(ids) if self.sees_images_whole else 0)
        outputs = torch.zeros(len(ids), LAYERS * HEADS, SIZE, dtype=torch.float64)
        for layer, wishes in enumerate(self.wishes):
            q, k, v = (
                part.double() for part in self.parts(layer, torch.tensor(ids), torch.from_numpy(positions))
            )
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
            for place in places.tolist():
                first = 0 if wishes.window is None else max(0, place - wishes.window + 1)
                window = slice(first, int(last_seen[place]) + 1)
                scores_T_H = (k[window] * q[place]).sum(-1) / SIZE**0.5
                if wishes.softcap is not None:
                    scores_T_H = wishes.softcap * torch.tanh(scores_T_H / wishes.softcap)
                weights_T_H = scores_T_H.exp()
                total_H = weights_T_H.sum(0)
                if wishes.sinks is not None:
                    total_H = total_H + wishes.sinks.double().exp()
                mixed_H_d = ((weights_T_H / total_H)[..., None] * v[window]).sum(0)
                outputs[place, layer * HEADS : (layer + 1) * HEADS] = mixed_H_d
        return outputs


def _ids(draws: Random, length: int) -> list[int]:
    ids = [draws.randrange(3, 97) for _ in range(length)]
    if length > 8 and draws.random() < 0.6:
        count = draws.randint(1, 5)
        first = draws.choice([draws.randrange(length - count), length - count])
        ids[first : first + count] = patch_ids(draws.randrange(9), count)
    return ids


def _slots(cache: KVCache, draws: Random, lengths: list[int]) -> list[Slot]:
    """Taken slots with room for so many, with free ones in between."""
    slots: list[Slot] = []
    others: list[Slot | None] = []
    for length in lengths:
        others += [cache.allocate(length) for _ in range(draws.choice([0, 0, 1, 2]))]
        slot = cache.allocate(length)
        assert slot is not None
        slots.append(slot)
    for other in filter(None, others):
        cache.release(other)
    return slots


def _require_close(outputs: Tensor, expected: Tensor) -> None:
    assert outputs.shape == expected.shape
    assert (outputs.double() - expected).abs().max() < 1e-4


def _cache(num_slots: int = 24) -> KVCache:
    return KVCache(
        num_layers=LAYERS,
        num_slots=num_slots,
        num_kv_heads=KV_HEADS,
        max_context=MAX_CONTEXT,
        head_dim=SIZE,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.fixture(autouse=True)
def small_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shelves of slots with up to 32, 64 and 128 tokens."""
    monkeypatch.setattr(cache_module, "FIRST_SHELF", 32)


@pytest.mark.parametrize("names", [("plain", "plain"), ("window", "plain"), ("one", "cap"), ("all", "sinks")])
@pytest.mark.parametrize(("padding", "first_shelf"), [(0, 32), (500, 512), (2**18, 32), (2**18, 512)])
@pytest.mark.parametrize("images", ["word by word", "whole", "on grids"])
def test_a_row_among_others_gets_what_it_gets_alone(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], padding: int, first_shelf: int, images: str
) -> None:
    """Some rows have read a part before, others all of theirs and are decoded, and all are decoded then."""
    monkeypatch.setattr(forward_module, "MOST_PADDED_PAIRS", 4 * padding)
    monkeypatch.setattr(forward_module, "MOST_PADDED_PLACES", padding)
    monkeypatch.setattr(cache_module, "FIRST_SHELF", first_shelf)
    draws = Random(f"{names}{padding}{first_shelf}{images}")
    grids = Shifts() if images == "on grids" else None
    model = Model(tuple(WISHES[name] for name in names), images == "whole", grids)
    cache = _cache()
    rows = [_ids(draws, draws.choice([1, 2, 9, 12, 30, 31, 45, 64, 95, 96, 110])) for _ in range(7)]
    slots = _slots(cache, draws, [min(len(row) + 3, 80) for row in rows])  # who reads makes the rest of it
    expected = [model.expected([*row, 5, 6]) for row in rows]
    known = [draws.randrange(len(row)) for row in rows]
    if model.sees_images_whole:  # an image is not cut
        known = [0 if later_of_image(rows[row])[: at + 1].any() else at for row, at in enumerate(known)]
    decoded = sorted(draws.sample(range(7), 3), key=lambda row: slots[row].index)
    early = [PromptRow(slots[row], rows[row][: known[row]]) for row in range(7) if known[row]]
    with torch.inference_mode():
        for row in decoded:
            prefill_all(model, cache, PromptRow(slots[row], rows[row]))
        if early := [each for each in early if not each.slot.ids]:
            prefill(model, cache, early)
        read = [row for row in range(7) if row not in decoded]
        draws.shuffle(read)
        cache.require([slots[row] for row in decoded], np.array([len(rows[row]) + 1 for row in decoded]))
        positions = np.array([len(rows[row]) for row in decoded])
        decoding = DecodeRows(cache, [slots[row] for row in decoded], positions)
        prompts = PromptRows(model, cache, [PromptRow(slots[row], rows[row][known[row] :]) for row in read])
        outputs = forward(model, cache, decoding, torch.full((3,), 5), prompts)
        ends = [*((row, len(rows[row])) for row in decoded), *((row, len(rows[row]) - 1) for row in read)]
        _require_close(outputs, torch.stack([expected[row][place] for row, place in ends]))
        for row in read:
            assert slots[row].ids == rows[row]

        order = sorted(range(7), key=lambda row: slots[row].index)
        next_places = np.array([len(rows[row]) + (row in decoded) for row in order])
        for row in decoded:
            cache.extend(slots[row], 5)
        cache.require([slots[row] for row in order], next_places + 2)
        decoding = DecodeRows(cache, [slots[row] for row in order], next_places)
        for step in range(2):
            if step:
                decoding.advance()
            tokens = torch.tensor([6 if row in decoded and not step else 5 + step for row in order])
            outputs = forward(model, cache, decoding, tokens, None)
            if not step:
                next_rows = [expected[row][place] for row, place in zip(order, next_places, strict=True)]
                _require_close(outputs, torch.stack(next_rows))
                continue
            again = [
                model.expected([*rows[row], *([5, 6, 6] if row in decoded else [5, 6])])[-1] for row in order
            ]
            _require_close(outputs, torch.stack(again))


@pytest.mark.parametrize("sees_images_whole", [False, True])
@pytest.mark.parametrize("num_known", [0, 10])
def test_every_token_of_a_prompt_is_told_where_all_are_asked_for(
    sees_images_whole: bool, num_known: int
) -> None:
    model = Model((WISHES["window"], WISHES["plain"]), sees_images_whole, image_grids=None)
    cache = _cache()
    slot = cache.allocate(40)
    assert slot is not None
    ids = [*range(3, 15), *patch_ids(5, 6), *range(40, 52)]
    with torch.inference_mode():
        if num_known:
            prefill(model, cache, [PromptRow(slot, ids[:num_known])])
        states = prefill_all(model, cache, PromptRow(slot, ids[num_known:]))
    _require_close(states, model.expected(ids)[num_known:])


def test_a_context_is_decoded_to_its_last_place() -> None:
    model = Model((WISHES["window"], WISHES["plain"]), sees_images_whole=False, image_grids=None)
    cache = _cache()
    slot = cache.allocate(MAX_CONTEXT)
    assert slot is not None
    ids = [3 + place % 90 for place in range(MAX_CONTEXT)]
    expected = model.expected(ids)
    with torch.inference_mode():
        prefill(model, cache, [PromptRow(slot, ids[:-4])])
        decoding = DecodeRows(cache, [slot], np.array([MAX_CONTEXT - 4]))
        for place in range(MAX_CONTEXT - 4, MAX_CONTEXT - 1):
            outputs = forward(model, cache, decoding, torch.tensor([ids[place]]), None)
            _require_close(outputs, expected[place : place + 1])
            decoding.advance()
        slot.ids += ids[-4:-1]
        last = prefill(model, cache, [PromptRow(slot, ids[-1:])])
        _require_close(last, expected[-1:])
        cache.truncate(slot, MAX_CONTEXT - 1)
        decoding = DecodeRows(cache, [slot], np.array([MAX_CONTEXT - 1]))
        _require_close(forward(model, cache, decoding, torch.tensor(ids[-1:]), None), expected[-1:])


@pytest.mark.parametrize(("padding", "num_groups"), [(18, 1), (17, 2)])
def test_padding_of_prompts_counts_for_each_head(
    monkeypatch: pytest.MonkeyPatch, padding: int, num_groups: int
) -> None:
    """Three rows of 4, 4 and 2 tokens before 4 keys each: a block has 8 pairs more than there are, where
    40 // 8 are padded in any case."""
    monkeypatch.setattr(forward_module, "MOST_PADDED_PAIRS", padding)
    model = Model((WISHES["plain"],) * 2, sees_images_whole=False, image_grids=None)
    cache = _cache()
    slots = [slot for slot in (cache.allocate(8) for _ in range(3)) if slot is not None]
    with torch.inference_mode():
        prefill(model, cache, [PromptRow(slots[2], [3, 4])])
        rows = [PromptRow(slot, [5, 6, 7, 8][: 4 - len(slot.ids)]) for slot in slots]
        assert len(PromptRows(model, cache, rows)._groups) == num_groups


@pytest.mark.parametrize(
    ("rows", "positions", "padding", "num_groups"),
    [
        pytest.param([0, 1], [95, 96], 24, 1, id="rooms of 96 and 128 places, and 32 of padding less 28"),
        pytest.param([0, 1], [95, 96], 23, 2, id="one too many for each of 6"),
        pytest.param([0, 1], [94, 95], 0, 1, id="the same room"),
        pytest.param([0, 2], [20, 20], 6 * 32, 1, id="a slot of others between"),
        pytest.param([0, 2], [20, 20], 6 * 32 - 1, 2, id="which would cost too much"),
        pytest.param([0, 2], [95, 96], 6 * 128, 1, id="of the larger room"),
        pytest.param([0, 2], [95, 96], 6 * 128 - 1, 2, id="which is more"),
    ],
)
def test_padding_of_decoding_counts_for_each_head(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], positions: list[int], padding: int, num_groups: int
) -> None:
    monkeypatch.setattr(forward_module, "MOST_PADDED_PLACES", padding)
    monkeypatch.setattr(cache_module, "FIRST_SHELF", 512)
    cache = _cache()
    slots = [slot for slot in (cache.allocate(MAX_CONTEXT) for _ in range(3)) if slot is not None]
    decoding = DecodeRows(cache, [slots[row] for row in rows], np.array(positions))
    assert len(decoding._groups) == num_groups
