"""A prompt that is longer than a step reads is read over several, beside those that are being answered."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from rllm.inference.client import TokenPiece
from rllm.inference.local.client import LocalClient
from rllm.models.directory import LoadedModel
from rllm.types import SamplingParams
from rllm.types.messages import ModelOutput

Serve = Callable[..., LocalClient]
Until = Callable[..., Any]


def long_prompt(seed: int = 1) -> list[int]:
    draws = Random(seed)
    return [draws.randrange(3, 500) for _ in range(160)]


def same(output: ModelOutput, expected: ModelOutput) -> bool:
    return output.completion_ids == expected.completion_ids and output.logprobs == pytest.approx(
        expected.logprobs, abs=1e-5
    )


async def test_those_who_are_answered_get_a_token_with_every_part_of_a_long_prompt(
    endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless, max_prefill_tokens=8)
    pieces: list[TokenPiece] = []
    answering = asyncio.ensure_future(
        client.generate_ids([5, 6], SamplingParams(max_tokens=180, seed=1), on_piece=pieces.append)
    )
    await until(lambda: client.engine.counts.sampled_tokens > 2)
    before = client.engine.counts.steps
    first = await client.generate_ids(long_prompt(), SamplingParams(max_tokens=1, seed=2))
    num_steps = client.engine.counts.steps - before
    sampled = client.engine.counts.sampled_tokens
    answer = await answering
    assert num_steps >= len(long_prompt()) // 8
    assert sampled >= num_steps  # one a step for the other, all along
    assert len(answer.completion_ids) == 180
    assert first.usage["prompt_tokens"] == len(long_prompt())
    whole = serve(endless)
    assert same(first, await whole.generate_ids(long_prompt(), SamplingParams(max_tokens=1, seed=2)))
    assert same(answer, await whole.generate_ids([5, 6], SamplingParams(max_tokens=180, seed=1)))


@pytest.mark.parametrize("num_cancelled", [1, 2, 3])
async def test_who_goes_while_its_prompt_is_read_leaves_the_others_theirs(
    endless: LoadedModel, serve: Serve, until: Until, num_cancelled: int
) -> None:
    client = serve(endless, max_prefill_tokens=1, num_slots=4)
    busy = asyncio.ensure_future(client.generate_ids([9], SamplingParams(max_tokens=190, seed=9)))
    await until(lambda: client.engine.counts.sampled_tokens > 0)
    start = client.engine.counts.prompt_tokens
    calls = [
        asyncio.ensure_future(client.generate_ids(long_prompt(), SamplingParams(max_tokens=5, seed=seed)))
        for seed in range(3)
    ]
    await until(lambda: client.engine.counts.prompt_tokens > start)
    for call in calls[:num_cancelled]:
        call.cancel()
    outputs = await asyncio.gather(*calls, return_exceptions=True)
    await busy
    whole = serve(endless)
    for seed, output in enumerate(outputs):
        if seed < num_cancelled:
            assert isinstance(output, asyncio.CancelledError)
            continue
        assert isinstance(output, ModelOutput)
        expected = await whole.generate_ids(long_prompt(), SamplingParams(max_tokens=5, seed=seed))
        assert same(output, expected)
    await until(lambda: client.engine.num_in_flight == 0)
    assert client.engine.counts.cancelled == num_cancelled


async def test_weights_that_change_while_a_prompt_is_read_are_those_that_read_all_of_it(
    own: LoadedModel, serve: Serve, until: Until, logprobs_of: Callable[..., Any]
) -> None:
    client = serve(own, max_prefill_tokens=1)

    def changed() -> None:
        for parameter in own.model.parameters():
            parameter.data.mul_(1.5)

    call = asyncio.ensure_future(client.generate_ids(long_prompt(), SamplingParams(max_tokens=3, seed=1)))
    await until(lambda: client.engine.counts.steps > 40)
    assert client.engine.counts.sampled_tokens == 0
    client.publish(5, changed)
    output = await call
    assert output.policy_versions == [5, 5, 5]
    expected = logprobs_of(own, [*long_prompt(), *output.completion_ids])[len(long_prompt()) - 1 :]
    for place, token in enumerate(output.completion_ids):
        assert output.logprobs[place] == pytest.approx(float(expected[place, token]), abs=1e-5)
