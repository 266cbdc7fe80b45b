"""Calls by ids that go on from each other, as a gateway makes them: each opens and closes on its own."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rllm.inference.local.client import LocalClient
from rllm.models.directory import LoadedModel
from rllm.types.messages import ModelOutput, SamplingParams

Serve = Callable[..., LocalClient]
Until = Callable[..., Any]

SAMPLING = SamplingParams(max_tokens=6, seed=2)


def _ids(length: int, seed: int) -> list[int]:
    return torch.randint(6, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _next_prompt(output: ModelOutput, seed: int) -> list[int]:
    return output.prompt_ids + output.completion_ids + _ids(3, seed)


def _known(output: ModelOutput) -> int:
    """Everything but the last token of the answer, which was sampled and never read."""
    return len(output.prompt_ids) + len(output.completion_ids) - 1


async def _same_as_fresh(client: LocalClient, output: ModelOutput) -> None:
    client.publish(client.policy_version)
    fresh = await client.generate_ids(output.prompt_ids, SAMPLING)
    assert fresh.usage["cached_tokens"] == 0
    assert fresh.completion_ids == output.completion_ids
    assert fresh.logprobs == pytest.approx(output.logprobs, abs=1e-5)


@pytest.mark.parametrize("length", [3, 16, 45])
async def test_a_prompt_that_begins_with_an_earlier_prompt_and_answer_reads_only_what_is_new(
    length: int, endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless)
    outputs = [await client.generate_ids(_ids(length, 1), SAMPLING)]
    for turn in range(4):
        outputs.append(await client.generate_ids(_next_prompt(outputs[-1], turn), SAMPLING))
        assert outputs[-1].usage["cached_tokens"] == _known(outputs[-2])
    for output in outputs:
        await _same_as_fresh(serve(endless), output)


async def test_interleaved_conversations_each_find_what_they_left(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless, num_slots=8)
    shared = _ids(20, 99)
    last = [await client.generate_ids(shared + _ids(9, seed), SAMPLING) for seed in range(6)]
    for turn in range(3):
        for seed in (3, 0, 5, 1, 4, 2):
            output = await client.generate_ids(_next_prompt(last[seed], turn), SAMPLING)
            assert output.usage["cached_tokens"] == _known(last[seed])
            last[seed] = output
    for output in last:
        await _same_as_fresh(serve(endless), output)


async def test_calls_at_the_same_time_find_what_they_left_as_well(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless, num_slots=16)
    last = await asyncio.gather(*(client.generate_ids(_ids(20, seed), SAMPLING) for seed in range(12)))
    for turn in range(3):
        following = await asyncio.gather(
            *(client.generate_ids(_next_prompt(output, turn), SAMPLING) for output in last)
        )
        assert [each.usage["cached_tokens"] for each in following] == [_known(each) for each in last]
        last = following
    for output in last[::5]:
        await _same_as_fresh(serve(endless), output)


async def test_a_second_answer_to_a_prompt_does_not_cost_the_first_its_place(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless)
    prompt = _ids(40, 1)
    first = await client.generate_ids(prompt, SAMPLING)
    second = await client.generate_ids(prompt, SamplingParams(max_tokens=6, seed=9))
    assert second.usage["cached_tokens"] == 39
    for output in (second, first):
        following = await client.generate_ids(_next_prompt(output, 4), SAMPLING)
        assert following.usage["cached_tokens"] == _known(output)
        await _same_as_fresh(serve(endless), following)


async def test_what_was_left_longest_ago_makes_room_when_all_rows_are_used(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, num_slots=3)
    first, second, third, _ = [await client.generate_ids(_ids(30, seed), SAMPLING) for seed in range(4)]
    assert (await client.generate_ids(_next_prompt(second, 1), SAMPLING)).usage["cached_tokens"] == _known(
        second
    )
    assert (await client.generate_ids(_next_prompt(third, 1), SAMPLING)).usage["cached_tokens"] == _known(
        third
    )
    assert (await client.generate_ids(_next_prompt(first, 1), SAMPLING)).usage["cached_tokens"] == 0


async def test_nothing_is_reused_across_new_weights(own: LoadedModel, serve: Serve) -> None:
    client = serve(own)
    output = await client.generate_ids(_ids(40, 1), SAMPLING)
    with torch.no_grad():
        own.model.embed.weight.mul_(1.5)
    client.publish(1)
    following = await client.generate_ids(_next_prompt(output, 1), SAMPLING)
    assert following.usage["cached_tokens"] == 0
    assert set(following.policy_versions) == {1}
    await _same_as_fresh(client, following)


@pytest.mark.parametrize("lockstep", [False, True])
async def test_what_was_cancelled_around_new_weights_is_not_taken_for_known(
    lockstep: bool, own: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(own, num_slots=4, lockstep=lockstep)
    for round in range(5):
        prompt = _ids(40, round)
        before = client.engine.counts.sampled_tokens
        task = asyncio.create_task(client.generate_ids(prompt, SamplingParams(max_tokens=140)))
        await until(lambda before=before: client.engine.counts.sampled_tokens > before + 5)
        with client.engine._stepping:  # the next step has not begun when the weights change
            task.cancel()
            with torch.no_grad():
                own.model.embed.weight.mul_(1.01)
            client.engine._published_state = client.engine._weight_state()
        client.publish(round + 1)
        with pytest.raises(asyncio.CancelledError):
            await task
        output = await client.generate_ids(prompt + _ids(5, 50), SAMPLING)
        await _same_as_fresh(client, output)


async def test_a_cancelled_call_leaves_what_it_had_read(
    endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless)
    prompt = _ids(40, 1)
    task = asyncio.create_task(client.generate_ids(prompt, SamplingParams(max_tokens=140)))
    await until(lambda: client.engine.counts.sampled_tokens > 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    output = await client.generate_ids(prompt + _ids(3, 2), SAMPLING)
    assert output.usage["cached_tokens"] >= 32
    await _same_as_fresh(serve(endless), output)


async def test_conversations_and_single_calls_share_the_rows_without_mixing(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, num_slots=4)
    outputs: list[ModelOutput] = []

    async def talk(seed: int) -> None:
        async with client.session(("task", seed)) as session:
            prompt = _ids(20, seed % 3)
            for turn in range(3):
                outputs.append(await session.respond_to_ids(prompt, SAMPLING))
                prompt = _next_prompt(outputs[-1], seed + turn)

    async def call(seed: int) -> None:
        prompt = _ids(20, seed % 3)
        for turn in range(3):
            output = await client.generate_ids(prompt, SAMPLING)
            outputs.append(output)
            prompt = _next_prompt(output, seed + turn)

    await asyncio.gather(*(talk(seed) if seed % 2 else call(seed) for seed in range(12)))
    assert client.engine.num_in_flight == 0
    fresh = serve(endless)
    for output in outputs[::4]:
        await _same_as_fresh(fresh, output)
