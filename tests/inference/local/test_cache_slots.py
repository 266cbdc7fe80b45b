"""Slots of the cache by themselves: who gets which, what moves where, and what is known of a prompt."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from rllm.errors import InferenceError
from rllm.inference.local import cache as cache_module
from rllm.inference.local.cache import BLOCK, GROWTH, KVCache, Slot, consecutive, tokens_at_once

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def small_shelves() -> object:
    """Shelves of slots with up to 32, 64 and 128 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "FIRST_SHELF", 32)
        yield


def cache_of(max_context: int = 128, num_slots: int = 4, **options: int) -> KVCache:
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4}
    return KVCache(
        num_slots=num_slots,
        max_context=max_context,
        device=CPU,
        dtype=torch.float32,
        **{**shape, **options},
    )


def taken(cache: KVCache, length: int, ids: Sequence[int] = ()) -> Slot:
    """A slot that holds `ids`, whose keys are their numbers."""
    slot = cache.allocate(length)
    assert slot is not None
    fill(cache, slot, ids)
    return slot


def fill(cache: KVCache, slot: Slot, ids: Sequence[int]) -> None:
    slot.ids = list(ids)
    shelf = slot.shelf
    for place, token in enumerate(ids):
        shelf.keys[:, slot.row, :, place] = token
        shelf.values[:, slot.row, :, place] = -token
    shelf.bias[slot.row, :, : len(ids)] = 0.0
    cache.register(slot)


def held(slot: Slot) -> list[int]:
    """What attention sees of it, by its keys, which its values agree with."""
    is_open = slot.shelf.bias[slot.row, 0] == 0.0
    keys = slot.shelf.keys[0, slot.row, 1][is_open][:, 0]
    assert torch.equal(keys, -slot.shelf.values[1, slot.row, 0][is_open][:, 0])
    return keys.int().tolist()


def test_shelves_double_and_the_last_holds_a_whole_context() -> None:
    cache = cache_of(max_context=128)
    assert [shelf.limit for shelf in cache.shelves] == [32, 64, 128]
    assert [shelf.first_index for shelf in cache.shelves] == [0, 4, 8]
    assert (cache.num_indices, cache.num_free, cache.num_tokens) == (12, 4, 0)
    for shelf in cache.shelves:
        assert shelf.keys.numel() == shelf.values.numel() == shelf.bias.numel() == 0, "not used, no memory"
    assert cache.max_tokens == 4 * 128
    assert cache_of(max_context=100).shelves[-1].limit == 128, "in multiples of GROWTH"
    assert [cache.shelf_for(length).limit for length in (1, 32, 33, 64, 65, 128)] == [
        32,
        32,
        64,
        64,
        128,
        128,
    ]
    for shelf in cache.shelves:
        rooms = [shelf.room_for(length) for length in range(1, shelf.limit + 1)]
        assert rooms == shelf.rooms_for(np.arange(1, shelf.limit + 1)).tolist()
        assert all(room >= length and room % GROWTH == 0 for length, room in enumerate(rooms, 1))


def test_rooms_are_about_an_eighth_apart() -> None:
    """So no row has much more room than it needs, and lengths that grow are of few rooms."""
    rooms = [room for shelf in cache_of(max_context=8000).shelves for room in shelf.rooms]
    assert (rooms[0], rooms[-1]) == (GROWTH, 8000)
    for less, more in pairwise(rooms[:-1]):
        assert less * 1.125 - 1 < more < less * 1.125 + GROWTH


def test_so_many_places_as_are_asked_for_and_no_more_than_all_slots_have() -> None:
    assert tokens_at_once(4, 100, 0) == 4 * 128
    assert tokens_at_once(4, 100, 200) == 200
    assert tokens_at_once(4, 100, 10_000) == 4 * 128


def test_the_lowest_free_slot_is_taken_and_one_that_is_given_back_again() -> None:
    cache = cache_of()
    slots = [taken(cache, 20) for _ in range(4)]
    assert [slot.row for slot in slots] == [0, 1, 2, 3]
    assert [slot.index for slot in slots] == [0, 1, 2, 3]
    assert (cache.num_free, cache.allocate(20)) == (0, None)
    for row in (2, 1):
        cache.release(slots[row])
    assert (cache.num_free, slots[2].release_number, slots[1].release_number) == (2, 1, 2)
    assert [taken(cache, 20).row for _ in range(2)] == [1, 2]


def test_a_slot_that_grows_beyond_its_shelf_moves_with_all_that_it_holds() -> None:
    cache = cache_of()
    slot, other = taken(cache, 20, range(1, 21)), taken(cache, 20, range(50, 60))
    keys = slot.shelf.keys
    assert cache.fit(slot, 32) is True
    assert (slot.shelf.limit, slot.index) == (32, 0)
    assert slot.shelf.keys is keys, "the room that is there is not copied"
    assert cache.fit(slot, 33) is True
    assert (slot.shelf.limit, slot.index, slot.is_free) == (64, 4, False)
    assert (slot.ids, held(slot)) == (list(range(1, 21)), list(range(1, 21)))
    assert held(other) == list(range(50, 60))
    (left,) = [each for each in cache.shelves[0].slots if each is not other][:1]
    assert (left.is_free, left.ids, held(left)) == (True, [], [])
    assert cache.fit(slot, 128) is True
    assert (slot.shelf.limit, held(slot)) == (128, list(range(1, 21)))


def test_where_there_is_no_room_nothing_changes() -> None:
    cache = cache_of(max_tokens=128)
    slots = [taken(cache, 32, [number]) for number in range(1, 5)]
    assert cache.num_tokens == 128
    assert cache.fit(slots[0], 64) is False
    assert cache.grow(cache.shelves[2], 128) is True, "a shelf without slots needs no place"
    assert cache.shelves[2].capacity == cache.shelves[2].rooms[0]
    assert [held(slot) for slot in slots] == [[1], [2], [3], [4]]
    with pytest.raises(InferenceError, match=r"128 .*`inference\.cache_tokens`"):
        cache.require(slots[:1], np.array([33]))
    cache.require(slots, np.array([32] * 4))
    for slot in slots[1:]:
        cache.release(slot)
    assert cache.fit(slots[0], 64) is True, "in the places of those that are gone"
    assert held(slots[0]) == [1]


def test_gaps_are_closed_from_behind_and_the_places_are_dropped() -> None:
    cache = cache_of()
    slots = [taken(cache, 20, [10 + number]) for number in range(4)]
    assert not cache.has_gaps
    cache.release(slots[3])
    assert not cache.has_gaps, "what is free is behind"
    cache.release(slots[0])
    assert cache.has_gaps
    cache.close_gaps()
    assert not cache.has_gaps
    assert [slots[2].row, slots[1].row] == [0, 1]
    assert [held(slots[2]), held(slots[1])] == [[12], [11]]
    assert len(cache.shelves[0].slots) == 2
    more = taken(cache, 20)
    assert more.row == 2, "behind them"
    for slot in (*slots[1:3], more):
        cache.release(slot)
    cache.close_gaps()
    assert cache.num_tokens == 0


def test_a_call_goes_on_where_its_prompt_was_read_or_else_where_nobody_was_for_longest() -> None:
    cache = cache_of()
    first, second, third = (taken(cache, 20, [number] * 8) for number in (1, 2, 3))
    for slot in (second, first, third):
        cache.release(slot)
    assert cache.allocate_for([1] * 9, 20) is first
    cache.release(first)
    longer = cache.allocate_for([1] * 9, 20)
    assert longer is not None
    assert longer is first
    fill(cache, longer, [1] * 12)
    cache.release(longer)
    new = cache.allocate_for([9] * 20, 20)
    assert new is not None
    assert new.row == 3, "one that was never used"
    assert cache.allocate_for([9] * 20, 20) is second, "the one that was left first"
    assert cache.allocate_for([3] * 8, 20) is not None
    assert cache.num_free == 1
    assert cache.allocate_for([7], 20) is not None
    assert cache.allocate_for([8], 20) is None


def used(cache: KVCache, length: int, *contents: Sequence[int]) -> list[Slot]:
    """Slots that hold these and are free."""
    slots = [taken(cache, length, ids) for ids in contents]
    for slot in slots:
        cache.release(slot)
    return slots


def test_a_call_goes_on_from_the_most_that_was_read_of_its_prompt() -> None:
    cache = cache_of()
    _, longer, _ = used(cache, 20, [1] * 4, [1] * 8, [1] * 6)
    assert cache.allocate_for([1] * 9, 20) is longer
    cache = cache_of(num_slots=2)
    same, other = used(cache, 20, [1] * 9, [2])
    assert cache.allocate_for([1] * 9, 20) is same, "the one that was left first: it is no turn before"
    cache.release(same)
    assert cache.allocate_for([1] * 9, 20) is other


def test_what_a_prompt_shares_with_a_slot_is_not_written_over_where_another_is_free() -> None:
    cache = cache_of(num_slots=2)
    oldest, newest = used(cache, 64, range(1, 41), range(101, 141))
    assert cache.allocate_for([*range(1, 20), 7], 40) is newest
    assert cache.allocate_for([*range(1, 20), 7], 40) is oldest, "no other is left"


def test_slots_for_calls_are_added_only_where_all_are_used_and_there_is_room() -> None:
    cache = cache_of(num_slots=8, max_tokens=4 * 32)
    first, second, third = (taken(cache, 20, [number]) for number in (1, 2, 3))
    for slot in (second, first, third):
        cache.release(slot)
    assert [len(shelf.slots) for shelf in cache.shelves] == [4, 0, 0]
    fourth = cache.allocate_for([9], 20)
    assert fourth is not None
    assert fourth.row == 3
    fill(cache, fourth, [9])
    assert cache.allocate_for([8], 20) is second, "there is no room for a further one"
    assert cache.allocate_for([8], 20) is first
    assert len(cache.shelves[0].slots) == 4
    cache = cache_of(num_slots=4, max_tokens=128)
    used(cache, 20, [1], [2], [3], [4])
    long = cache.allocate_for([5], 100)
    assert long is not None, "in the room of those that are free"
    assert long.shelf.limit == 128
    cache = cache_of(num_slots=8)
    (only,) = used(cache, 20, [1])
    another = cache.allocate_for([2], 20)
    assert another is not only
    assert [len(shelf.slots) for shelf in cache.shelves] == [2, 0, 0]
    assert third.is_free


def test_slots_are_added_by_doubling_up_to_the_last_place() -> None:
    for options, numbers in (
        ({"num_slots": 6}, [1, 2, 4, 4, 6, 6]),
        ({"num_slots": 6, "max_tokens": 5 * 32}, [1, 2, 4, 4, 5]),
    ):
        cache = cache_of(**options)
        assert [len(taken(cache, 20).shelf.slots) for _ in numbers] == numbers
        assert cache.allocate(20) is None


@pytest.mark.parametrize(("length", "is_whole"), [(5, True), (4, False)])
def test_states_of_a_row_are_handed_on_with_all_of_it_or_not_at_all(length: int, is_whole: bool) -> None:
    cache = cache_of(num_layers=0)
    source, target = taken(cache, 20), taken(cache, 20)
    source.ids, source.states = [1, 2, 3, 4, 5], ([1.0], 5)
    target.states = ([2.0], 1)
    cache.copy_prefix(source, [target], length)
    assert target.states == (([1.0], 5) if is_whole else None)
    cache.truncate(source, 5)
    assert source.states == ([1.0], 5), "nothing was dropped"
    if target.states is not None:
        target.states[0].append(6.0)
        assert source.states == ([1.0], 5), "each has its own"
    cache.truncate(source, 4)
    assert source.states is None


def test_of_a_prompt_all_but_its_last_token_may_be_known() -> None:
    cache = cache_of()
    slot = taken(cache, 64, range(1, 41))
    for prompt, known in (
        (list(range(1, 41)), 39),
        (list(range(1, 31)), 29),
        ([*range(1, 6), 99, 100], 5),
        ([99], 0),
    ):
        fill(cache, slot, range(1, 41))
        assert cache.begin(slot, prompt) == known
        assert (slot.ids, held(slot)) == (list(range(1, known + 1)), list(range(1, known + 1)))


def test_whole_blocks_of_another_slot_are_taken_over_where_they_are_more() -> None:
    cache = cache_of()
    donor = taken(cache, 64, range(1, 41))
    for own, exactly, is_free, known in (
        ([], False, False, 2 * BLOCK),
        ([], True, False, 2 * BLOCK),
        ([], True, True, 40),
        (range(1, 36), False, False, 35),
        (range(1, 3), False, False, 2 * BLOCK),
    ):
        asking = taken(cache, 64, own)
        donor.is_free = is_free
        assert cache.begin(asking, [*range(1, 41), 7, 7], exactly=exactly) == known
        assert held(asking) == list(range(1, known + 1))
        assert held(donor) == list(range(1, 41))
        donor.is_free = False
        cache.truncate(asking, 0)
        cache.release(asking)
    asking = taken(cache, 64)
    assert cache.begin(asking, list(range(1, BLOCK + 1))) == 0, (
        "the last token is computed, so no block is whole"
    )
    assert cache.begin(asking, list(range(1, BLOCK + 2))) == BLOCK


def test_new_weights_leave_nothing_known_and_a_failed_pass_no_numbers() -> None:
    cache = cache_of()
    slot = taken(cache, 64, range(1, 41))
    cache.forget_everything()
    assert (slot.ids, held(slot), cache.begin(taken(cache, 64), list(range(1, 41)))) == ([], [], 0)
    fill(cache, slot, range(1, 41))
    cache.wipe()
    assert held(slot) == []
    assert not any(tensor.any() for shelf in cache.shelves for tensor in (shelf.keys, shelf.values))


def test_what_is_over_is_forgotten_where_that_is_asked_for_and_nothing_else() -> None:
    cache = cache_of()
    stays, goes = taken(cache, 64, range(1, 21)), taken(cache, 64, range(31, 51))
    cache.release(goes)
    cache.forget_released()
    assert (held(stays), held(goes)) == (list(range(1, 21)), [])
    asking = taken(cache, 64)
    assert cache.begin(asking, list(range(31, 51))) == 0
    assert cache.begin(asking, list(range(1, 21))) == BLOCK


def test_a_token_more_is_seen_by_attention() -> None:
    cache = cache_of()
    slot = taken(cache, 32, [1, 2])
    slot.shelf.keys[:, slot.row, :, 2], slot.shelf.values[:, slot.row, :, 2] = 9, -9
    cache.extend(slot, 9)
    assert (slot.ids, held(slot)) == ([1, 2, 9], [1, 2, 9])


def test_tokens_of_several_shelves_are_stored_where_they_belong() -> None:
    cache = cache_of()
    short, long, other = taken(cache, 20), taken(cache, 50), taken(cache, 20)
    slots, lengths, positions = [short, long, other], np.array([2, 3, 1]), np.array([0, 1, 0, 1, 2, 0])
    places = cache.places(slots, lengths, positions)
    assert places.num_tokens == 6
    keys = torch.arange(1.0, 7.0)[:, None, None].expand(6, 2, 4)
    for layer in range(2):
        cache.store(layer, places, keys, -keys)
    assert [held(slot) for slot in slots] == [[], [], []], "not before they are shown"
    cache.show(places)
    assert [held(slot) for slot in slots] == [[1, 2], [3, 4, 5], [6]]
    one_more = cache.places([short], np.array([1]), np.array([2]))
    two_more = cache.places([long], np.array([2]), np.array([3, 4]))
    several = cache.places(slots, np.array([1, 1, 2]), np.array([3, 5, 1, 2]))
    all_of_them = one_more.before(two_more).before(several)
    assert all_of_them.num_tokens == 7
    keys = torch.arange(7.0, 14.0)[:, None, None].expand(7, 2, 4)
    for layer in range(2):
        cache.store(layer, all_of_them, keys, -keys)
    cache.show(all_of_them)
    assert [held(slot) for slot in slots] == [[1, 2, 7, 10], [3, 4, 5, 8, 9, 11], [6, 12, 13]]
    same_shelf = cache.places([short], np.array([1]), np.array([4])).before(
        cache.places([other], np.array([1]), np.array([3]))
    )
    assert [own for _, own, _ in same_shelf.parts] == [None], "written at once"
    keys = torch.tensor([14.0, 15.0])[:, None, None].expand(2, 2, 4)
    for layer in range(2):
        cache.store(layer, same_shelf, keys, -keys)
    cache.show(same_shelf)
    assert (same_shelf.num_tokens, held(short), held(other)) == (2, [1, 2, 7, 10, 14], [6, 12, 13, 15])


@pytest.mark.parametrize(
    ("places", "is_slice"), [([3], True), ([3, 4, 5], True), ([3, 5], False), ([3, 5, 4, 6], False)]
)
def test_places_in_a_row_are_a_slice(places: list[int], is_slice: bool) -> None:
    index = consecutive(np.array(places), CPU)
    assert isinstance(index, slice) is is_slice
    assert torch.arange(10)[index].tolist() == places


@pytest.mark.parametrize(("num_layers", "known"), [(0, []), (1, [1, 2, 3])])
def test_a_model_without_keys_keeps_no_prefix(num_layers: int, known: list[int]) -> None:
    cache = cache_of(num_layers=num_layers)
    slot = taken(cache, 32)
    slot.ids = [1, 2, 3]
    assert cache.begin(slot, [1, 2, 3, 4]) == len(known)
    assert slot.ids == known
