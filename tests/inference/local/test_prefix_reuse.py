import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rllm.inference.local.client import LocalClient
from rllm.models.directory import LoadedModel
from rllm.types.messages import Message, ModelOutput, SamplingParams

Serve = Callable[..., LocalClient]


def _ids(length: int, seed: int) -> list[int]:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _same(outputs: list[ModelOutput], expected: list[ModelOutput]) -> None:
    assert [each.completion_ids for each in outputs] == [each.completion_ids for each in expected]
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


async def _without_reuse(
    client: LocalClient, outputs: list[ModelOutput], sampling: SamplingParams
) -> list[ModelOutput]:
    fresh: list[ModelOutput] = []
    for output in outputs:
        client.publish(0)
        fresh.append(await client.generate_ids(output.prompt_ids, sampling))
        assert fresh[-1].usage["cached_tokens"] == 0
    return fresh


async def test_a_later_turn_computes_only_what_is_new(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless)
    sampling = SamplingParams(max_tokens=6, seed=2)
    messages: list[Message] = [
        {"role": "system", "content": "Reach the goal."},
        {"role": "user", "content": "SFF"},
    ]
    outputs: list[ModelOutput] = []
    async with client.session(("task", 0)) as session:
        for turn in range(4):
            output = await session.respond(messages, sampling)
            known = len(outputs[-1].prompt_ids) + len(outputs[-1].completion_ids) if outputs else 0
            # The last token of an answer was sampled and never read.
            assert output.usage["cached_tokens"] == max(0, known - 1)
            outputs.append(output)
            messages = [
                *messages,
                {"role": "assistant", "content": output.text},
                {"role": "user", "content": f"turn {turn}"},
            ]
    _same(outputs, await _without_reuse(serve(endless), outputs, sampling))


async def test_attempts_at_one_prompt_compute_it_once(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless, num_slots=8, lockstep=True)
    prompt = _ids(50, 1)
    sessions = [client.session(("task", attempt)) for attempt in range(8)]

    async def attempt(session: Any, seed: int) -> ModelOutput:
        async with session:
            return await session.respond_to_ids(prompt, SamplingParams(max_tokens=6, seed=seed))

    outputs = await asyncio.gather(*(attempt(session, seed) for seed, session in enumerate(sessions)))

    assert [output.usage["cached_tokens"] for output in outputs] == [0] + [50] * 7
    counts = client.engine.counts
    assert (counts.prompt_tokens, counts.cached_tokens) == (400, 350)
    assert len({tuple(output.completion_ids) for output in outputs}) > 4
    alone = serve(endless, num_slots=1)
    for seed, output in enumerate(outputs):
        alone.publish(0)
        _same([output], [await alone.generate_ids(prompt, SamplingParams(max_tokens=6, seed=seed))])


@pytest.mark.parametrize("shared", [0, 15, 16, 17, 40, 64])
async def test_a_prompt_that_begins_like_another_one_takes_over_what_they_share(
    shared: int, endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless)
    sampling = SamplingParams(max_tokens=5, seed=3)
    first, second = _ids(64, 1), _ids(64, 1)[:shared] + _ids(64 - shared + 6, 2)
    async with client.session(("first", 0)) as session:
        await session.respond_to_ids(first, sampling)
        output = await client.generate_ids(second, sampling)
    assert shared - 16 < output.usage["cached_tokens"] <= shared
    assert output.usage["cached_tokens"] % 16 == 0
    _same([output], await _without_reuse(serve(endless), [output], sampling))


async def test_what_a_closed_conversation_left_behind_still_serves(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, num_slots=2)
    sampling = SamplingParams(max_tokens=5, seed=3)
    prompt = _ids(40, 1)
    first = await client.generate_ids(prompt, sampling)
    again = await client.generate_ids(prompt, sampling)
    longer = await client.generate_ids(prompt + _ids(9, 5), sampling)
    assert again.usage["cached_tokens"] == 39, "all but the last token, whose logits are wanted"
    assert longer.usage["cached_tokens"] >= 32
    assert again.completion_ids == first.completion_ids
    _same([again, longer], await _without_reuse(serve(endless), [again, longer], sampling))


async def test_a_conversation_that_was_rewritten_uses_only_what_is_still_true(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless)
    sampling = SamplingParams(max_tokens=5, seed=3)
    prompt = _ids(40, 1)
    async with client.session(("task", 0)) as session:
        outputs = [
            await session.respond_to_ids(ids, sampling)
            for ids in (prompt, prompt[:23] + _ids(30, 7), prompt[:23], _ids(20, 8), prompt)
        ]
    assert [output.usage["cached_tokens"] for output in outputs[:4]] == [0, 23, 22, 0]
    _same(outputs, await _without_reuse(serve(endless), outputs, sampling))


async def test_slots_that_change_hands_many_times_never_mix_conversations(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, num_slots=3)
    sampling = SamplingParams(max_tokens=4, seed=6)
    stems = [_ids(48, seed) for seed in range(3)]
    prompts = [
        stems[number % 3][: 16 * (1 + number % 3)] + _ids(1 + number % 5, 100 + number)
        for number in range(30)
    ]
    outputs = await asyncio.gather(*(client.generate_ids(prompt, sampling) for prompt in prompts))
    assert sum(output.usage["cached_tokens"] for output in outputs) > 0
    _same(outputs, await _without_reuse(serve(endless), outputs, sampling))
