"""One forward pass of the engine: rows of new tokens on top of what their slots hold.

    prefill: several new tokens a row     tokens_N flat ─► write K, V to slots ─► attention padded to the longest row
    decode:  exactly one new token a row  tokens_B      ─► write K, V to slots ─► one matrix-vector product per (slot, head)

Decode attends over the contiguous range of slots that holds all live rows: reading keys in place beats gathering them.
Where live rows are scattered over more than twice their number of slots, gathering is cheaper and is done instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rllm.inference.local.cache import KVCache, Slot

TIME_STEP = 32
"""Attention lengths are rounded up to a multiple of this, so that kernels see few shapes."""


@dataclass(slots=True)
class Row:
    """Tokens that a slot is to read."""

    slot: Slot
    new_ids: Sequence[int]


def prefill(model: Any, cache: KVCache, rows: Sequence[Row], *, all_logits: bool = False) -> Tensor:
    """Read the new tokens of every row. [R, V] logits after each row's last token; [N, V] for all with `all_logits`."""
    device = cache.keys.device
    starts = [len(row.slot.ids) for row in rows]
    lengths = [len(row.new_ids) for row in rows]
    longest, end = max(lengths), max(start + length for start, length in zip(starts, lengths, strict=True))
    span = min(-(-end // TIME_STEP) * TIME_STEP, cache.max_context)
    start_R = torch.tensor(starts, device=device)
    length_R = torch.tensor(lengths, device=device)
    slot_R = torch.tensor([row.slot.index for row in rows], device=device)

    row_N = torch.repeat_interleave(torch.arange(len(rows), device=device), length_R)
    first_N = torch.cumsum(length_R, 0)[row_N] - length_R[row_N]
    offset_N = torch.arange(len(row_N), device=device) - first_N
    position_N = start_R[row_N] + offset_N
    padded_N = row_N * longest + offset_N
    """Place of each token in the padded [R, longest] block."""
    write_N = _write_index(cache, slot_R[row_N], position_N)
    query_R_Q = start_R.unsqueeze(1) + torch.arange(longest, device=device)
    visible = torch.arange(span, device=device) <= query_R_Q.unsqueeze(-1)
    visible_R1QT = visible.unsqueeze(1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        _store(keys, write_N, k)
        _store(values, write_N, v)
        num_heads, head_dim = q.shape[1], q.shape[2]
        q_pad = q.new_zeros(len(rows) * longest, num_heads, head_dim)
        q_pad[padded_N] = q
        seen = F.scaled_dot_product_attention(
            q_pad.view(len(rows), longest, num_heads, head_dim).transpose(1, 2),
            keys[slot_R, :, :span],
            values[slot_R, :, :span],
            attn_mask=visible_R1QT,
            enable_gqa=num_heads != cache.num_kv_heads,
        )
        return seen.transpose(1, 2).reshape(-1, num_heads, head_dim)[padded_N]

    tokens_N = torch.tensor([token for row in rows for token in row.new_ids], device=device)
    hidden_N_D = model.hidden(tokens_N, position_N, attend)
    for row in rows:
        row.slot.ids.extend(row.new_ids)
    if all_logits:
        return model.logits(hidden_N_D)
    return model.logits(hidden_N_D[torch.cumsum(length_R, 0) - 1])


def decode(model: Any, cache: KVCache, slots: Sequence[Slot], tokens: Sequence[int]) -> Tensor:
    """Append one token to every slot (in ascending slot order) and return [B, V] logits after it."""
    device = cache.keys.device
    indices = [slot.index for slot in slots]
    positions = [len(slot.ids) for slot in slots]
    low, count = indices[0], indices[-1] + 1 - indices[0]
    span = min(-(-(max(positions) + 1) // TIME_STEP) * TIME_STEP, cache.max_context)
    position_B = torch.tensor(positions, device=device)
    slot_B = torch.tensor(indices, device=device)
    dense = count == len(indices)
    scattered = count > 2 * len(indices)
    heads = cache.num_kv_heads
    write = _write_index(cache, slot_B, position_B)

    if dense or scattered:
        limit_rows, num_rows = position_B, len(indices)
    else:
        limit_rows = position_B.new_zeros(count)
        limit_rows[slot_B - low] = position_B
        num_rows = count
    hidden_keys = torch.arange(span, device=device) > limit_rows.unsqueeze(1)
    bias = torch.zeros(num_rows, span, device=device, dtype=cache.keys.dtype).masked_fill_(
        hidden_keys, float("-inf")
    )
    bias = bias.repeat_interleave(heads, 0).unsqueeze(1) if heads > 1 else bias.unsqueeze(1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        _store(keys, write, k)
        _store(values, write, v)
        num_heads, head_dim = q.shape[1], q.shape[2]
        if scattered:
            keys_rows, values_rows = (
                keys[slot_B, :, :span].flatten(0, 1),
                values[slot_B, :, :span].flatten(0, 1),
            )
        else:
            flat = slice(low * heads, (low + count) * heads)
            keys_rows = keys.view(-1, cache.max_context, head_dim)[flat, :span]
            values_rows = values.view(-1, cache.max_context, head_dim)[flat, :span]
        if not dense and not scattered:
            spread = q.new_zeros(count, num_heads, head_dim)
            spread[slot_B - low] = q
            q = spread
        grouped = q.reshape(num_rows * heads, num_heads // heads, head_dim)
        scores = torch.baddbmm(bias, grouped, keys_rows.transpose(1, 2), alpha=head_dim**-0.5)
        seen = torch.bmm(torch.softmax(scores, dim=-1), values_rows).view(num_rows, num_heads, head_dim)
        return seen if dense or scattered else seen[slot_B - low]

    hidden_B_D = model.hidden(torch.tensor(tokens, device=device), position_B, attend)
    for slot, token in zip(slots, tokens, strict=True):
        slot.ids.append(token)
    return model.logits(hidden_B_D)


def _write_index(cache: KVCache, slot_N: Tensor, position_N: Tensor) -> Tensor:
    """[N·K] rows of the [S·K·T, d] view of a layer's cache that N tokens go to."""
    head_K = torch.arange(cache.num_kv_heads, device=slot_N.device)
    rows = (slot_N.unsqueeze(1) * cache.num_kv_heads + head_K) * cache.max_context + position_N.unsqueeze(1)
    return rows.flatten()


def _store(layer: Tensor, rows: Tensor, new_N_K_d: Tensor) -> None:
    layer.view(-1, layer.shape[-1]).index_copy_(0, rows, new_N_K_d.reshape(-1, layer.shape[-1]))
