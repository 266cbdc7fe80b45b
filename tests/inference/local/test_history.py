"""What a request computes is a function of the batch: a used engine answers as a new one does."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
import torch

from rllm.inference.local.client import LocalClient, LocalSession
from rllm.models.directory import LoadedModel
from rllm.types.messages import SamplingParams

Serve = Callable[..., LocalClient]
Answers = list[tuple[list[int], list[float]]]

PREAMBLE = [5 + number % 90 for number in range(40)]
"""What every prompt begins with, the chats of the past included."""


def _ids(length: int, seed: int) -> list[int]:
    return torch.randint(6, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def _turns(session: LocalSession, number: int) -> Answers:
    answers: Answers = []
    ids = PREAMBLE + _ids(4 + 5 * (number // 3), number // 3)
    async with session:
        for turn in range(3):
            sampling = SamplingParams(max_tokens=4 + (5 * number + turn) % 9, seed=100 * number + turn)
            output = await session.respond_to_ids(ids, sampling)
            answers.append((output.completion_ids, output.logprobs))
            ids = [*ids, *output.completion_ids, *_ids(3, turn)]
    return answers


async def _batch(client: LocalClient) -> list[Answers]:
    """Nine conversations at a time, more than there are slots; and the score of a row."""
    sessions = [client.session((f"task {number // 3}", number % 3)) for number in range(9)]
    answers = await asyncio.gather(*(_turns(session, number) for number, session in enumerate(sessions)))
    scores = await client.score(PREAMBLE + _ids(20, 3), 1)
    return [*answers, [([], scores)]]


async def _long_chat(client: LocalClient) -> None:
    async with client.session(("chat", 0)) as session:
        await session.respond_to_ids(PREAMBLE + _ids(100, 8), SamplingParams(max_tokens=90))


async def _single_calls(client: LocalClient) -> None:
    for seed in (4, 2, 3):
        await client.generate_ids(PREAMBLE + _ids(30 * seed, seed), SamplingParams(max_tokens=9, seed=seed))


async def _cancelled_chat(client: LocalClient) -> None:
    chat = asyncio.create_task(_long_chat(client))
    while client.engine.counts.sampled_tokens < 20:
        await asyncio.sleep(0)
    chat.cancel()
    await asyncio.gather(chat, return_exceptions=True)


async def _evaluation(client: LocalClient) -> None:
    await _batch(client)
    await _long_chat(client)


async def _new_weights(client: LocalClient) -> None:
    await _long_chat(client)
    client.publish(client.policy_version)


PASTS: Sequence[Callable[[LocalClient], Awaitable[None]]] = (
    _long_chat,
    _single_calls,
    _cancelled_chat,
    _evaluation,
    _new_weights,
)


@pytest.mark.parametrize("name", ["builtin", "gpt2"])
async def test_a_used_engine_computes_what_a_new_one_does_to_the_last_bit(
    name: str, models: dict[str, LoadedModel], serve: Serve
) -> None:
    """Of all architectures that the engine runs, one of our own code and one of transformers'."""
    num_slots = 7
    expected = await _batch(serve(models[name], num_slots=num_slots, lockstep=True, max_context=250))
    for past in PASTS:
        client = serve(models[name], num_slots=num_slots, lockstep=True, max_context=250)
        await past(client)
        assert await _batch(client) == expected, past.__name__


async def test_without_lockstep_a_publish_is_enough(tiny: LoadedModel, serve: Serve) -> None:
    """Single calls go on from each other until then, which moves the last bit."""
    prompts = [PREAMBLE + _ids(length, 1) for length in (9, 30, 80)]
    sampling = SamplingParams(max_tokens=20)

    async def call_one_by_one(client: LocalClient) -> Answers:
        outputs = [await client.generate_ids(prompt, sampling) for prompt in prompts]
        return [(output.completion_ids, output.logprobs) for output in outputs]

    expected = await call_one_by_one(serve(tiny, max_context=250))
    for past in PASTS:
        client = serve(tiny, max_context=250)
        await past(client)
        client.publish(0)
        assert await call_one_by_one(client) == expected, past.__name__
