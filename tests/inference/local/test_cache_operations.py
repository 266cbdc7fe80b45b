"""The cache against a plain record of what each slot holds, through a long row of operations by chance."""

from random import Random

import numpy as np
import pytest
import torch

from rllm.inference.local import cache as cache_module
from rllm.inference.local.cache import BLOCK, GROWTH, KVCache, Slot

MAX_CONTEXT = 128


@pytest.fixture(autouse=True)
def small_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shelves of slots with up to 32, 64 and 128 tokens."""
    monkeypatch.setattr(cache_module, "FIRST_SHELF", 32)


def _num_shared(ids: list[int], prompt_ids: list[int]) -> int:
    """Tokens of a prompt, all but its last at most, that another row begins with."""
    end = min(len(ids), len(prompt_ids) - 1)
    return next((place for place in range(end) if ids[place] != prompt_ids[place]), end)


class Player:
    """Does to a cache what an engine does, and keeps its own record."""

    def __init__(self, seed: int) -> None:
        self.draws = Random(seed)
        self.num_slots = self.draws.choice([3, 6, 9])
        self.cache = KVCache(
            num_layers=2,
            num_slots=self.num_slots,
            num_kv_heads=2,
            max_context=MAX_CONTEXT,
            head_dim=2,
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_tokens=self.draws.choice([0, MAX_CONTEXT, 256, 416]),
        )
        self.held: dict[Slot, list[int]] = {}
        """Slots that are taken, and their tokens."""
        self.blocks = [[self.draws.randint(1, 9) for _ in range(BLOCK)] for _ in range(2)]
        self.counts = dict.fromkeys(("begin", "refused", "moved", "fork", "closed"), 0)

    def prompt(self) -> list[int]:
        """Some blocks that others have too, and an end of its own."""
        blocks = [self.draws.choice(self.blocks) for _ in range(self.draws.randint(0, 6))]
        end = [self.draws.randint(1, 2) for _ in range(self.draws.randint(1, 20))]
        return [token for block in blocks for token in block] + end

    def write(self, slot: Slot, ids: list[int]) -> None:
        """Read these tokens on top of what the slot holds."""
        start = len(slot.ids)
        assert self.cache.fit(slot, start + len(ids)), "begun with room for it"
        places = self.cache.places([slot], np.array([len(ids)]), np.arange(start, start + len(ids)))
        numbers = torch.tensor(ids, dtype=torch.float32)[:, None, None].expand(len(ids), 2, 2)
        for layer in range(2):
            self.cache.store(layer, places, numbers, -numbers)
        self.cache.show(places)
        slot.ids.extend(ids)

    def begin(self) -> None:
        prompt_ids, is_call = self.prompt(), self.draws.random() < 0.5
        find = (lambda n: self.cache.allocate_for(prompt_ids, n)) if is_call else self.cache.allocate
        slot = find(len(prompt_ids) + 1)
        if slot is None:
            self.counts["refused"] += 1
            assert self.held, "an empty cache has room for one"
            return
        assert slot not in self.held
        self.held[slot] = []
        self.turn(slot, prompt_ids, exactly=is_call)

    def turn(self, slot: Slot, prompt_ids: list[int], *, exactly: bool) -> None:
        others = [each for each in self.cache.slots if each is not slot]
        most_blocks = max(
            (min(_num_shared(each.ids, prompt_ids) // BLOCK, len(each.block_hashes)) for each in others),
            default=0,
        )
        own = _num_shared(slot.ids, prompt_ids)
        num_known = self.cache.begin(slot, prompt_ids, exactly=exactly)
        assert num_known >= max(own, most_blocks * BLOCK)
        if not exactly:
            assert num_known == max(own, most_blocks * BLOCK)
        assert slot.ids == prompt_ids[:num_known]
        self.write(slot, prompt_ids[num_known:])
        self.cache.register(slot)
        self.held[slot] = list(prompt_ids)
        self.counts["begin"] += 1

    def grow(self) -> None:
        slot = self.draws.choice([*self.held])
        shelf, num_more = slot.shelf, min(self.draws.choice([1, 5, 40]), MAX_CONTEXT - len(self.held[slot]))
        if not num_more or not self.cache.fit(slot, len(slot.ids) + num_more):
            return
        self.counts["moved"] += slot.shelf is not shelf
        self.write(slot, [9] * num_more)
        self.held[slot] += [9] * num_more
        if self.draws.random() < 0.5:
            self.cache.register(slot)

    def next_turn(self) -> None:
        slot = self.draws.choice([*self.held])
        prompt_ids = [*self.held[slot][: self.draws.randint(0, 60)], *self.prompt()][: MAX_CONTEXT - 1]
        if self.cache.fit(slot, len(prompt_ids) + 1):
            self.turn(slot, prompt_ids, exactly=False)

    def fork(self) -> None:
        source, *targets = self.draws.sample([*self.held], min(3, len(self.held)))
        length = self.draws.randint(0, len(source.ids))
        targets = [each for each in targets if self.cache.fit(each, max(1, length))]
        self.cache.copy_prefix(source, targets, length)
        for target in targets:
            assert len(target.block_hashes) == length // BLOCK, "found by who shares it"
            self.held[target] = self.held[source][:length]
        self.counts["fork"] += len(targets)

    def truncate(self) -> None:
        slot = self.draws.choice([*self.held])
        length = self.draws.randint(0, len(slot.ids) + 3)
        self.cache.truncate(slot, length)
        del self.held[slot][length:]

    def release(self) -> None:
        slot = self.draws.choice([*self.held])
        del self.held[slot]
        self.cache.release(slot)

    def close_gaps(self) -> None:
        self.counts["closed"] += self.cache.has_gaps
        self.cache.close_gaps()
        assert not self.cache.has_gaps
        assert all(
            len(shelf.slots) == sum(s.shelf is shelf for s in self.held) for shelf in self.cache.shelves
        )

    def forget(self) -> None:
        if self.draws.random() < 0.5:
            self.cache.forget_released()
            return
        self.cache.forget_everything()
        self.held = {slot: [] for slot in self.held}

    def step(self) -> None:
        chances = {self.begin: 6}
        if self.held:
            chances |= {self.grow: 4, self.next_turn: 3, self.fork: 2, self.truncate: 2, self.release: 4}
            chances |= {self.close_gaps: 1, self.forget: 0.3}
        (action,) = self.draws.choices([*chances], weights=[*chances.values()])
        action()
        self.require_agreement()

    def require_agreement(self) -> None:
        cache = self.cache
        assert cache.num_tokens <= cache.max_tokens
        assert cache.num_free == self.num_slots - len(self.held)
        assert {slot for slot in cache.slots if not slot.is_free} == {*self.held}
        holders: dict[int, list[Slot]] = {}
        for shelf in cache.shelves:
            assert shelf.keys.shape == shelf.values.shape == (2, len(shelf.slots), 2, shelf.capacity, 2)
            assert (shelf.capacity % GROWTH, shelf.capacity <= shelf.limit) == (0, True)
            assert shelf.free_rows == [row for row, slot in enumerate(shelf.slots) if slot.is_free]
            for row, slot in enumerate(shelf.slots):
                assert (slot.shelf is shelf, slot.row) == (True, row)
                is_open = shelf.bias[row] == 0.0
                assert torch.equal(is_open, (torch.arange(shelf.capacity) < len(slot.ids)).expand(2, -1))
                keys, values = shelf.keys[:, row].transpose(1, 2), shelf.values[:, row].transpose(1, 2)
                numbers = torch.tensor(slot.ids, dtype=torch.float32)[:, None, None]
                assert (keys[:, : len(slot.ids)] == numbers).all()
                assert (values[:, : len(slot.ids)] == -numbers).all()
                assert len(slot.block_hashes) <= len(slot.ids) // BLOCK
                for block_hash in slot.block_hashes:
                    holders.setdefault(block_hash, []).append(slot)
        for slot, ids in self.held.items():
            assert slot.ids == ids
        index = {key: sorted(each.index for each in slots) for key, slots in cache._slots_of_block.items()}
        assert index == {key: sorted(each.index for each in slots) for key, slots in holders.items()}


@pytest.mark.parametrize("seed", range(6))
def test_each_slot_holds_what_was_read_into_it_whatever_else_is_done(seed: int) -> None:
    player = Player(seed)
    for _ in range(120):
        player.step()
    assert player.counts["begin"] > 10
