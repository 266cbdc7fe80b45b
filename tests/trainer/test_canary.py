"""One learner, one sampler with a model of its own: what broken publishes look like, and who sees it."""

import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rllm.algorithms.losses import ImitationLoss
from rllm.errors import CanaryError
from rllm.inference.local.client import LocalClient
from rllm.models.directory import LoadedModel, load_model
from rllm.rendering.images import IMAGES
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.canary import TOLERANCE, Canary, row_with_image
from rllm.types.images import ImageFile
from rllm.types.sample import NOT_SAMPLED, TrainingSample

Make = Callable[..., Any]


@pytest.fixture
async def sampler(tiny_directory: Path) -> AsyncIterator[LocalClient]:
    """Serves a copy of the weights, as a sampler in another process does."""
    client = LocalClient(load_model(tiny_directory), num_slots=4, max_context=128)
    yield client
    await client.close()


def _deliver(learner: TorchBackend, sampler: LocalClient) -> None:
    with torch.no_grad():
        for mine, theirs in zip(
            learner.model.parameters(), sampler.loaded_model.model.parameters(), strict=True
        ):
            theirs.copy_(mine)


def _learner(
    tiny: LoadedModel, sampler: LocalClient, publish: Callable[[TorchBackend, int], None]
) -> TorchBackend:
    learner = TorchBackend(tiny.model, publish=lambda version: publish(learner, version))
    return learner


@pytest.fixture
def row(sample: Make) -> TrainingSample:
    return sample("p" * 40 + "soos", seed=3)


@pytest.mark.parametrize("learning_rate", [3e-3, 1e-6])
async def test_a_healthy_publish_passes_and_is_seen_to_move_the_sampler(
    tiny: LoadedModel, sampler: LocalClient, row: TrainingSample, learning_rate: float
) -> None:
    def publish(learner: TorchBackend, version: int) -> None:
        _deliver(learner, sampler)
        sampler.publish(version)

    learner, canary = _learner(tiny, sampler, publish), Canary()
    for step in range(3):
        learner.update([row], ImitationLoss(), learning_rate)
        learner.publish_weights()
        seen = await canary.check(learner, sampler, [row])
        assert seen["canary_gap"] < TOLERANCE / 10
        assert (seen["canary_moved"] > 0.0) == (step > 0)


async def test_learner_and_sampler_on_the_same_weights_agree_without_a_copy(
    tiny: LoadedModel, row: TrainingSample
) -> None:
    client = LocalClient(tiny, num_slots=4, max_context=128)
    learner, canary = TorchBackend(tiny.model, publish=client.publish), Canary()
    try:
        for _ in range(3):
            learner.update([row], ImitationLoss(), 3e-3)
            learner.publish_weights()
            assert (await canary.check(learner, client, [row]))["canary_gap"] < TOLERANCE / 10
        assert client.policy_version == 3
    finally:
        await client.close()


async def test_a_publish_that_delivers_nothing_is_caught_at_the_next_check(
    tiny: LoadedModel, sampler: LocalClient, row: TrainingSample
) -> None:
    learner, canary = _learner(tiny, sampler, lambda _, version: sampler.publish(version)), Canary()
    await canary.check(learner, sampler, [row])
    learner.update([row], ImitationLoss(), 3e-3)
    learner.publish_weights()
    with pytest.raises(CanaryError, match="policy version 1"):
        await canary.check(learner, sampler, [row])


async def test_it_is_caught_even_when_the_update_was_too_small_for_a_gap(
    tiny: LoadedModel, sampler: LocalClient, row: TrainingSample
) -> None:
    learner, canary = _learner(tiny, sampler, lambda _, version: sampler.publish(version)), Canary()
    await canary.check(learner, sampler, [row])
    learner.update([row], ImitationLoss(), 1e-7)
    learner.publish_weights()
    with pytest.raises(CanaryError, match="sampler's did not"):
        await canary.check(learner, sampler, [row])


async def test_the_first_publish_after_a_resume_is_checked_like_any_other(
    tiny: LoadedModel, sampler: LocalClient, row: TrainingSample, sample: Make
) -> None:
    learner, canary = _learner(tiny, sampler, lambda _, version: sampler.publish(version)), Canary()
    assert canary.state() == {}
    await canary.check(learner, sampler, [row])
    resumed = Canary()
    resumed.restore(json.loads(json.dumps(canary.state())))
    assert resumed.state() == canary.state()
    learner.update([row], ImitationLoss(), 1e-7)
    learner.publish_weights()
    with pytest.raises(CanaryError, match="sampler's did not"):
        await resumed.check(learner, sampler, [sample("ppps", seed=5)])


async def test_a_prefix_cached_under_the_old_weights_is_caught_at_the_next_check(
    tiny: LoadedModel, sampler: LocalClient, row: TrainingSample
) -> None:
    def publish(learner: TorchBackend, version: int) -> None:
        cache = sampler.engine._cache
        remembered = [(list(slot.ids), list(slot.block_hashes)) for slot in cache.slots]
        index = {block: list(holders) for block, holders in cache._slots_of_block.items()}
        _deliver(learner, sampler)
        sampler.publish(version)
        for slot, (ids, hashes) in zip(
            cache.slots, remembered, strict=True
        ):  # as if nothing had been dropped
            slot.ids, slot.block_hashes = ids, hashes
        cache._slots_of_block.update(index)

    learner, canary = _learner(tiny, sampler, publish), Canary()
    await canary.check(learner, sampler, [row])
    assert any(slot.ids for slot in sampler.engine._cache.slots)
    learner.update([row], ImitationLoss(), 1e-2)
    learner.publish_weights()
    with pytest.raises(CanaryError):
        await canary.check(learner, sampler, [row])


@pytest.mark.parametrize("place", ["embed.weight", "blocks.0.qkv.weight", "blocks.1.down.weight", "norm"])
async def test_weights_corrupted_on_their_way_are_caught_at_the_next_check(
    tiny: LoadedModel, sampler: LocalClient, row: TrainingSample, place: str
) -> None:
    def publish(learner: TorchBackend, version: int) -> None:
        _deliver(learner, sampler)
        parameter = dict(sampler.loaded_model.model.named_parameters())[place]
        with torch.no_grad():
            parameter.mul_(
                1.0 + 0.1 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
        sampler.publish(version)

    learner = _learner(tiny, sampler, publish)
    learner.publish_weights()
    with pytest.raises(CanaryError, match=f"limit {TOLERANCE:g}"):
        await Canary().check(learner, sampler, [row])


async def test_weights_that_are_no_numbers_are_caught(
    tiny: LoadedModel, sampler: LocalClient, row: TrainingSample
) -> None:
    def publish(learner: TorchBackend, version: int) -> None:
        with torch.no_grad():
            sampler.loaded_model.model.norm.fill_(float("nan"))
        sampler.publish(version)

    learner = _learner(tiny, sampler, publish)
    learner.publish_weights()
    with pytest.raises(CanaryError):
        await Canary().check(learner, sampler, [row])


async def test_the_row_stays_the_first_one_so_that_its_movement_can_be_seen(
    tiny: LoadedModel, sampler: LocalClient, row: TrainingSample, sample: Make
) -> None:
    learner, canary = _learner(tiny, sampler, lambda _, version: sampler.publish(version)), Canary()
    await canary.check(learner, sampler, [row])
    seen = await canary.check(learner, sampler, [sample("ppps", seed=5)])
    assert seen["canary_moved"] < 1e-5, "rounding: the second time the row's start is in the cache"


async def test_a_row_that_nobody_sampled_is_passed_over(
    tiny: LoadedModel, sampler: LocalClient, row: TrainingSample, sample: Make
) -> None:
    """A grammar may have forced every token of the first row."""
    learner, canary = _learner(tiny, sampler, lambda _, version: None), Canary()
    assert await canary.check(learner, sampler, [sample("pppp", seed=1)]) == {}
    assert canary.state() == {}
    seen = await canary.check(learner, sampler, [sample("pppp", seed=1), row])
    assert seen["canary_gap"] < TOLERANCE / 10
    assert canary.state()["token_ids"] == row.token_ids_T.tolist()


def test_a_picture_is_scored_behind_its_own_ids_and_has_all_shades() -> None:
    pictures: list[ImageFile] = []

    def ids_of(picture: ImageFile) -> list[int]:
        pictures.append(picture)
        return [7, 8, 9]

    reader: Any = SimpleNamespace(ids=ids_of)
    row = row_with_image(reader, [1, 2])
    assert row.token_ids_T.tolist() == [7, 8, 9, 1, 2]
    assert row.policy_versions_T.tolist() == [NOT_SAMPLED] * 3 + [0, 0]
    assert IMAGES.get(pictures[0].number) is pictures[0]
    with Image.open(io.BytesIO(pictures[0].data)) as image:
        pixels = np.array(image).astype(int)
    assert pixels.shape == (56, 80, 3)
    assert pixels.min() < 5
    assert pixels.max() > 250
    for axis in (0, 1):  # smooth, so that any way of scaling it gives nearly the same
        assert np.abs(np.diff(pixels, axis=axis)).max() < 40
