import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rllm.inference.local.cache import BLOCK, KVCache, Slot

NUM_SLOTS, MAX_CONTEXT = 9, 96


def _filled_cache(lengths: list[int]) -> KVCache:
    """Every slot holds so many tokens of its own, all of them in the index."""
    cache = KVCache(
        num_layers=2,
        num_slots=NUM_SLOTS,
        num_kv_heads=2,
        max_context=MAX_CONTEXT,
        head_dim=4,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    slots = [cache.allocate(MAX_CONTEXT) for _ in lengths]
    (shelf,) = cache.shelves
    generator = torch.Generator().manual_seed(1)
    shelf.keys.normal_(generator=generator)
    shelf.values.normal_(generator=generator)
    for slot, length in zip(slots, lengths, strict=True):
        assert slot is not None
        slot.ids = [100 * slot.row + place for place in range(length)]
        shelf.bias[slot.row, :, :length] = 0.0
        cache.register(slot)
    return cache


def _seen(slot: Slot) -> tuple[Tensor, Tensor]:
    """What attention sees of a slot."""
    shelf, row = slot.shelf, slot.row
    shown = shelf.bias[row, 0] == 0.0
    assert torch.equal(shelf.bias[row, 0], shelf.bias[row, 1]), "all heads see the same tokens"
    return shelf.keys[:, row][:, :, shown], shelf.values[:, row][:, :, shown]


@given(data=st.data(), lengths=st.lists(st.integers(0, MAX_CONTEXT), min_size=NUM_SLOTS, max_size=NUM_SLOTS))
def test_slots_that_take_over_a_prefix_hold_it_and_nothing_else(
    data: st.DataObject, lengths: list[int]
) -> None:
    cache = _filled_cache(lengths)
    source, *others = data.draw(st.permutations(cache.slots))
    targets = others[: data.draw(st.integers(0, NUM_SLOTS - 1))]
    length = data.draw(st.integers(0, lengths[source.index]))
    bystanders = [slot for slot in cache.slots if slot not in targets]
    before = {slot.index: _seen(slot) for slot in cache.slots}

    cache.copy_prefix(source, targets, length)

    for target in targets:
        assert target.ids == source.ids[:length]
        for mine, theirs in zip(_seen(target), before[source.index], strict=True):
            assert torch.equal(mine, theirs[:, :, :length])
    for slot in bystanders:
        assert len(slot.ids) == lengths[slot.index]
        for now, then in zip(_seen(slot), before[slot.index], strict=True):
            assert torch.equal(now, then)


@given(data=st.data(), lengths=st.lists(st.integers(0, MAX_CONTEXT), min_size=NUM_SLOTS, max_size=NUM_SLOTS))
def test_a_prompt_finds_what_was_handed_on_also_when_its_first_holder_has_let_go(
    data: st.DataObject, lengths: list[int]
) -> None:
    cache = _filled_cache(lengths)
    source, target, asking = data.draw(st.permutations(cache.slots))[:3]
    length = data.draw(st.integers(0, lengths[source.index]))
    wanted = [*source.ids[:length], 7]
    cache.copy_prefix(source, [target], length)
    cache.truncate(source, 0)
    cache.truncate(asking, 0)
    cache.copy_prefix(target, [source], length)
    cache.truncate(target, 0)

    assert cache.begin(asking, wanted) == length // BLOCK * BLOCK
    assert asking.ids == wanted[: len(asking.ids)]


@given(data=st.data(), prompt_ids=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_CONTEXT))
def test_what_a_prompt_shares_is_found_alike_whether_its_own_slot_is_in_the_index_or_not(
    data: st.DataObject, prompt_ids: list[int]
) -> None:
    """Blocks that the slot has hashed before are not hashed again."""
    lengths = st.integers(0, len(prompt_ids))
    other_ids = prompt_ids[: data.draw(lengths)]
    own_ids = [*prompt_ids[: data.draw(lengths)], *data.draw(st.lists(st.just(2), max_size=BLOCK + 1))]
    found: list[tuple[int, list[int]]] = []
    for is_indexed in (True, False):
        cache = _filled_cache([])
        other, own = cache.allocate(MAX_CONTEXT), cache.allocate(MAX_CONTEXT)
        assert other is not None
        assert own is not None
        other.ids, own.ids = list(other_ids), own_ids[:MAX_CONTEXT]
        cache.register(other)
        if is_indexed:
            cache.register(own)
        found.append((cache.begin(own, prompt_ids), list(own.ids)))
    assert found[0] == found[1]
    assert found[0][1] == prompt_ids[: found[0][0]]
