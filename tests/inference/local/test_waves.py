"""Calls of several attempts leave together, once every attempt waits for the model."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from rllm.errors import InferenceError
from rllm.inference.local.client import LocalClient
from rllm.inference.local.waves import Waves
from rllm.models.directory import LoadedModel
from rllm.types.messages import SamplingParams

Serve = Callable[..., LocalClient]
SHORT = SamplingParams(max_tokens=3)


async def settle() -> None:
    """More iterations of the loop than calls of one moment are apart."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_wave_leaves_when_every_attempt_waits_and_never_without_one(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless)
    waves = Waves({"p": client})
    with waves.member() as first:
        with waves.member() as second:
            one = asyncio.create_task(first["p"].generate_ids([5, 6], SHORT))
            await settle()
            assert client.engine.counts.accepted == 0
            others = [asyncio.create_task(second["p"].generate_ids([7, each], SHORT)) for each in (8, 9)]
            outputs = await asyncio.gather(one, *others)
            assert [len(each.completion_ids) for each in outputs] == [3, 3, 3]
            assert client.engine.counts.accepted == 3
            late = asyncio.create_task(first["p"].generate_ids([5], SHORT))
            await settle()
            assert client.engine.counts.accepted == 3, "the other attempt is at something else"
        assert len((await late).completion_ids) == 3, "nobody waits for one that is over"


async def test_pieces_and_answers_are_those_of_the_engine(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless)
    client.publish(4)
    streamed_ids: list[int] = []
    with Waves({"p": client}).member() as clients:
        mine = clients["p"]
        assert (mine.policy_version, mine.max_context) == (4, client.max_context)
        output = await mine.generate_ids(
            [5], SHORT, on_piece=lambda piece: streamed_ids.extend(piece.token_ids)
        )
        assert await mine.can_follow('start: "a"')
        await mine.close()
    assert streamed_ids == output.completion_ids
    assert output.policy_versions == [4] * 3
    assert len((await client.generate_ids([5], SHORT)).completion_ids) == 3, "the engine is open as before"


async def test_what_a_wave_holds_is_in_the_order_of_attempts_whoever_comes_first(
    endless: LoadedModel, serve: Serve
) -> None:
    prompts = {0: [5, 6, 7], 1: [8], 2: [9, 10, 11, 12]}
    logprobs: list[Any] = []
    for order in ([0, 1, 2], [2, 0, 1]):
        waves = Waves({"p": serve(endless)})
        with ExitStack() as stack:
            members = [stack.enter_context(waves.member()) for _ in prompts]
            calls = {each: members[each]["p"].generate_ids(prompts[each], SHORT) for each in prompts}
            tasks = {each: asyncio.create_task(calls[each]) for each in order}
            logprobs.append([(await tasks[each]).logprobs for each in prompts])
    assert logprobs[0] == logprobs[1], "to the last bit"


async def test_a_call_that_is_cancelled_before_it_leaves_is_not_asked(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless)
    waves = Waves({"p": client})
    with waves.member() as first, waves.member() as second:
        given_up = asyncio.create_task(first["p"].generate_ids([5], SHORT))
        await settle()
        given_up.cancel()
        waiting = asyncio.create_task(second["p"].generate_ids([6], SHORT))
        await settle()
        assert client.engine.counts.accepted == 0, "the first attempt may still ask"
        again = asyncio.create_task(first["p"].generate_ids([7], SHORT))
        await asyncio.gather(waiting, again)
        assert client.engine.counts.accepted == 2


async def test_whoever_waits_hears_of_an_engine_that_was_closed(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless)
    waves = Waves({"p": client})
    await client.close()
    with waves.member() as clients:
        for _ in range(2):
            with pytest.raises(InferenceError, match="closed"):
                await clients["p"].generate_ids([5], SHORT)
