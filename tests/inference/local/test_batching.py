import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.errors import ConfigError, ContextLengthError
from rllm.inference.local.client import LocalClient
from rllm.models.directory import LoadedModel
from rllm.types.messages import FinishReason, ModelOutput, SamplingParams

Serve = Callable[..., LocalClient]
Until = Callable[..., Any]

TOLERANCE = 1e-5
"""How far a log-probability may be from the one that a request gets alone, in nats. Tokens are the same."""


@dataclass(frozen=True)
class Ask:
    """One request and the engine step before which it does not arrive."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_k: int
    seed: int
    arrives_at: int

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, max_tokens=self.max_tokens, seed=self.seed
        )


@st.composite
def _asks(draw: st.DrawFn) -> list[Ask]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    shared = [rng.randrange(3, 512) for _ in range(80)]
    asks: list[Ask] = []
    for _ in range(draw(st.integers(2, 10))):
        length = draw(st.integers(1, 80))
        own = [rng.randrange(3, 512) for _ in range(80)]
        common = draw(st.sampled_from([0, length // 2, length]))  # part of a prompt that others have too
        asks.append(
            Ask(
                prompt=(*shared[:common], *own[common:length]),
                max_tokens=draw(st.integers(1, 14)),
                temperature=draw(st.sampled_from([1.0, 1.0, 0.0, 0.7, 1.3])),
                top_k=draw(st.sampled_from([0, 0, 6])),
                seed=rng.randrange(2**63),
                arrives_at=draw(st.integers(0, 20)),
            )
        )
    return asks


async def _alone(client: LocalClient, asks: list[Ask]) -> list[ModelOutput]:
    outputs: list[ModelOutput] = []
    for ask in asks:
        client.publish(0)  # nothing that was computed for another request is used again
        outputs.append(await client.generate_ids(list(ask.prompt), ask.sampling))
    return outputs


async def _together(client: LocalClient, asks: list[Ask]) -> list[ModelOutput]:
    began = client.engine.counts.steps

    async def arrive(ask: Ask) -> ModelOutput:
        engine = client.engine
        while engine.counts.steps < began + ask.arrives_at and engine.num_in_flight:
            await asyncio.sleep(0)
        return await client.generate_ids(list(ask.prompt), ask.sampling)

    return await asyncio.gather(*(arrive(ask) for ask in asks))


@pytest.fixture(scope="module")
def clients(endless: LoadedModel) -> Any:
    """One engine for requests that come alone; and engines with too few, some and enough slots."""
    alone = LocalClient(endless, num_slots=1, max_context=100)
    crowds = {slots: LocalClient(endless, num_slots=slots, max_context=100) for slots in (1, 3, 16)}
    thrifty = LocalClient(endless, num_slots=5, max_context=100, max_prefill_tokens=30)
    yield alone, [*crowds.values(), thrifty]
    for client in (alone, *crowds.values(), thrifty):
        client.engine.close()


@settings(max_examples=8)
@given(asks=_asks())
def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(clients: Any, asks: list[Ask]) -> None:
    alone, crowds = clients

    async def compare() -> None:
        async with asyncio.timeout(120):
            expected = await _alone(alone, asks)
            for crowd in crowds:
                for output, wanted in zip(await _together(crowd, asks), expected, strict=True):
                    assert output.completion_ids == wanted.completion_ids
                    assert output.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)
                    assert output.finish_reason is wanted.finish_reason

    asyncio.run(compare())


async def test_requests_join_and_leave_while_others_are_being_answered(
    endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless)
    long = asyncio.create_task(client.generate_ids([5, 6, 7], SamplingParams(max_tokens=180)))
    await until(lambda: client.engine.counts.sampled_tokens >= 2)
    short = asyncio.create_task(client.generate_ids([8, 9], SamplingParams(max_tokens=2)))
    order: list[asyncio.Task[Any]] = []
    for task in (long, short):
        task.add_done_callback(order.append)
    outputs = await asyncio.gather(short, long)
    assert [len(output.completion_ids) for output in outputs] == [2, 180]
    assert order == [short, long]


async def test_more_conversations_than_slots_are_all_answered_when_they_close_in_turn(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, num_slots=2)
    outputs = await asyncio.gather(
        *(client.generate_ids([3, seed], SamplingParams(max_tokens=3, seed=seed)) for seed in range(20))
    )
    assert [len(output.completion_ids) for output in outputs] == [3] * 20
    assert client.engine.num_in_flight == 0


async def test_an_answer_tells_how_long_it_took_and_which_part_of_that_it_waited(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, num_slots=1)
    asks = (client.generate_ids([5, 6, seed], SamplingParams(max_tokens=8)) for seed in (7, 8))
    for output in await asyncio.gather(*asks):
        assert 0.0 < output.queue_s < output.latency_s


async def test_a_conversation_that_says_nothing_does_not_keep_others_waiting(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, num_slots=1)
    async with client.session(("idle", 0)) as idle, asyncio.timeout(30):
        first = await idle.respond_to_ids([3, 4, 5], SamplingParams(max_tokens=2))
        await client.generate_ids([6, 7], SamplingParams(max_tokens=2))
        more = [*first.prompt_ids, *first.completion_ids, 8]
        again = await idle.respond_to_ids(more, SamplingParams(max_tokens=2))
    assert (
        again.completion_ids == (await client.generate_ids(more, SamplingParams(max_tokens=2))).completion_ids
    )


@pytest.mark.parametrize("prompt_length", [96, 98, 99])
async def test_an_answer_that_reaches_the_end_of_the_context_is_cut_off_there(
    prompt_length: int, endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, max_context=100)
    output = await client.generate_ids([7] * prompt_length, SamplingParams(max_tokens=50))
    assert len(output.completion_ids) == 100 - prompt_length
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt_length", [100, 101, 5000])
async def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_sent(
    prompt_length: int, endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, max_context=100)
    with pytest.raises(ContextLengthError, match=f"{prompt_length} tokens .* 100"):
        await client.generate_ids([7] * prompt_length, SamplingParams(max_tokens=1))
    with pytest.raises(ContextLengthError, match=r"inference\.max_context"):
        await client.get_model_response([{"role": "user", "content": "word " * 100}])
    assert client.engine.counts.accepted == 0


def test_a_context_longer_than_the_model_has_positions_is_refused(endless: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"`inference\.max_context` is 257 .* 256"):
        LocalClient(endless, max_context=257)


async def test_a_prompt_larger_than_a_step_may_read_is_read_all_the_same(
    endless: LoadedModel, serve: Serve
) -> None:
    small, large = serve(endless, max_prefill_tokens=8), serve(endless)
    sampling = SamplingParams(max_tokens=4)
    prompts = [[number] * 50 for number in (5, 6, 7)]
    answers = [
        await asyncio.gather(*(client.generate_ids(prompt, sampling) for prompt in prompts))
        for client in (small, large)
    ]
    assert [each.completion_ids for each in answers[0]] == [each.completion_ids for each in answers[1]]
