import asyncio
import random
import threading
from collections.abc import Callable

import pytest

from rllm.inference.local.client import LocalClient, LocalSession
from rllm.models.directory import LoadedModel
from rllm.types.messages import ModelOutput, SamplingParams

Serve = Callable[..., LocalClient]

NUM_TASKS, NUM_TURNS = 6, 3


async def _play(session: LocalSession, number: int, jitter: random.Random) -> list[ModelOutput]:
    """A conversation whose turns come after pauses of any length."""
    outputs: list[ModelOutput] = []
    ids = [5 + number // 2] * (3 + 4 * (number // 2))
    async with session:
        for turn in range(NUM_TURNS):
            for _ in range(jitter.randrange(60)):
                await asyncio.sleep(0)
            _spin(jitter)
            sampling = SamplingParams(max_tokens=2 + (number + turn) % 4, seed=100 * number + turn)
            outputs.append(await session.respond_to_ids(ids, sampling))
            ids = [*ids, *outputs[-1].completion_ids, 7, 8, turn]
    return outputs


def _spin(jitter: random.Random) -> None:
    for _ in range(jitter.randrange(20_000)):
        pass


async def _one_loop(client: LocalClient, jitter: random.Random) -> list[list[ModelOutput]]:
    sessions = [client.session((f"task {number // 2}", number % 2)) for number in range(NUM_TASKS)]
    numbers = list(range(NUM_TASKS))
    jitter.shuffle(numbers)  # who asks first
    answers = await asyncio.gather(*(_play(sessions[number], number, jitter) for number in numbers))
    return [answer for _, answer in sorted(zip(numbers, answers, strict=True), key=lambda pair: pair[0])]


async def _many_threads(client: LocalClient, jitter: random.Random) -> list[list[ModelOutput]]:
    sessions = [client.session((f"task {number // 2}", number % 2)) for number in range(NUM_TASKS)]
    answers: dict[int, list[ModelOutput]] = {}

    def work(number: int, seed: int) -> None:
        own_jitter = random.Random(seed)
        _spin(own_jitter)
        answers[number] = asyncio.run(_play(sessions[number], number, own_jitter))

    threads = [
        threading.Thread(target=work, args=(number, jitter.randrange(2**32))) for number in range(NUM_TASKS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
    return [answers[number] for number in range(NUM_TASKS)]


@pytest.mark.parametrize("way", [_one_loop, _many_threads])
@pytest.mark.parametrize("num_slots", [8, 3])
async def test_under_lockstep_log_probabilities_are_the_same_to_the_last_bit_whoever_comes_first(
    way: Callable[..., object], num_slots: int, endless: LoadedModel, serve: Serve
) -> None:
    runs: list[list[list[tuple[list[int], list[float]]]]] = []
    for seed in range(4):
        client = serve(endless, num_slots=num_slots, lockstep=True)
        answers: list[list[ModelOutput]] = await way(client, random.Random(seed))  # type: ignore[misc]
        runs.append([[(turn.completion_ids, turn.logprobs) for turn in answer] for answer in answers])
        assert client.engine.num_in_flight == 0
    assert all(run == runs[0] for run in runs[1:])


async def test_under_lockstep_nothing_is_sampled_while_a_session_is_busy_elsewhere(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, lockstep=True)
    busy, asking = client.session(("busy", 0)), client.session(("asking", 0))
    answer = asyncio.create_task(asking.respond_to_ids([5, 6], SamplingParams(max_tokens=2)))
    for _ in range(200):
        await asyncio.sleep(0)
    assert client.engine.counts.sampled_tokens == 0
    busy.close()
    assert len((await answer).completion_ids) == 2


async def test_under_lockstep_a_cancellation_does_not_make_the_others_move(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, lockstep=True)
    leaver, other = client.session(("leaver", 0)), client.session(("other", 0))
    leaving = asyncio.create_task(_ask_and_leave(leaver))
    answer = asyncio.create_task(other.respond_to_ids([5, 6], SamplingParams(max_tokens=100)))
    while client.engine.counts.sampled_tokens < 6:
        await asyncio.sleep(0)
    silent = client.session(("silent", 0))
    client.publish(0)  # returns when no step is running any more
    num_sampled = client.engine.counts.sampled_tokens
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    while not client.engine.counts.cancelled:
        await asyncio.sleep(0)
    client.publish(0)
    assert client.engine.counts.sampled_tokens == num_sampled
    silent.close()
    assert len((await answer).completion_ids) == 100
    other.close()


@pytest.mark.parametrize("way_out", ["close", "cancel", "error"])
async def test_a_session_that_gives_up_does_not_hold_the_others(
    way_out: str, endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, lockstep=True)
    others = [client.session(("other", number)) for number in range(2)]
    leaver = client.session(("leaver", 0))
    answers = [
        asyncio.create_task(other.respond_to_ids([5, 6], SamplingParams(max_tokens=30, seed=number)))
        for number, other in enumerate(others)
    ]
    if way_out == "close":
        leaver.close()
    elif way_out == "cancel":
        leaving = asyncio.create_task(_ask_and_leave(leaver))
        while not client.engine.counts.sampled_tokens:
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    else:
        with pytest.raises(ValueError, match="the agent broke"):
            async with leaver:
                raise ValueError("the agent broke")
    for answer, other in zip(answers, others, strict=True):
        assert len((await answer).completion_ids) == 30
        other.close()


async def _ask_and_leave(session: LocalSession) -> None:
    async with session:
        await session.respond_to_ids([9, 9], SamplingParams(max_tokens=150))
