import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.errors import InferenceError
from rllm.inference.local.client import LocalClient, LocalSession
from rllm.inference.local.engine import Request
from rllm.models.directory import LoadedModel
from rllm.types.messages import FinishReason, SamplingParams

Serve = Callable[..., LocalClient]
Until = Callable[..., Any]


class _Fragile(torch.nn.Module):
    """A model whose forward pass raises when it is told to."""

    by_row = ""
    image_grids = None
    sees_images_whole = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = model.vocab_size
        self.fails_when: Callable[[Tensor, Tensor], bool] = lambda tokens, positions: False

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, *given: Any) -> Tensor:
        if self.fails_when(tokens_N, positions_N):
            raise RuntimeError("out of memory")
        return self.model.hidden(tokens_N, positions_N, *given)

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        return self.model.logits(hidden_N_D)


@pytest.fixture
def fragile(endless: LoadedModel) -> LoadedModel:
    return dataclasses.replace(endless, model=_Fragile(endless.model))


@pytest.mark.parametrize("place", ["prompt", "answer"])
@pytest.mark.parametrize("lockstep", [False, True])
async def test_an_exception_in_the_model_reaches_every_waiting_request_and_the_engine_lives_on(
    place: str, lockstep: bool, fragile: LoadedModel, serve: Serve
) -> None:
    client = serve(fragile, num_slots=2, lockstep=lockstep)
    expected = await client.generate_ids([5, 6, 7], SamplingParams(max_tokens=4))
    client.publish(0)
    first_position = 0 if place == "prompt" else 10
    fragile.model.fails_when = lambda tokens, positions: bool((positions >= first_position).any())
    requests = [client.generate_ids([5, 6, number], SamplingParams(max_tokens=40)) for number in range(3, 8)]
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(result, InferenceError) for result in results)
    assert all("out of memory" in str(result) for result in results)
    fragile.model.fails_when = lambda tokens, positions: False
    output = await client.generate_ids([5, 6, 7], SamplingParams(max_tokens=4))
    assert output.completion_ids == expected.completion_ids
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    counts = client.engine.counts
    assert (counts.accepted, counts.finished, counts.failed, client.engine.num_in_flight) == (7, 2, 5, 0)


async def test_a_score_that_fails_is_told_so(fragile: LoadedModel, serve: Serve) -> None:
    client = serve(fragile)
    fragile.model.fails_when = lambda tokens, positions: True
    with pytest.raises(InferenceError, match="out of memory"):
        await client.score([5, 6, 7], 1)
    fragile.model.fails_when = lambda tokens, positions: False
    assert len(await client.score([5, 6, 7], 1)) == 2


async def test_no_later_request_shares_a_prompt_with_one_whose_step_failed(
    fragile: LoadedModel, serve: Serve
) -> None:
    client = serve(fragile, lockstep=True)
    fragile.model.fails_when = lambda tokens, positions: True
    async with LocalSession(client, ("task", 0), one_shot=True) as session:  # lockstep waits for it
        score = asyncio.create_task(client.score([8, 9], 1))  # fails before any prompt is read
        await asyncio.sleep(0.05)
        with pytest.raises(InferenceError, match="out of memory"):
            await session.respond_to_ids([5, 6, 7], SamplingParams(max_tokens=2), None)
        with pytest.raises(InferenceError, match="out of memory"):
            await score
    fragile.model.fails_when = lambda tokens, positions: False
    output = await asyncio.wait_for(client.generate_ids([5, 6, 7], SamplingParams(max_tokens=2)), 20.0)
    assert len(output.completion_ids) == 2


async def test_the_cause_of_a_failure_is_kept(fragile: LoadedModel, serve: Serve) -> None:
    fragile.model.fails_when = lambda tokens, positions: True
    with pytest.raises(InferenceError) as caught:
        await serve(fragile).generate_ids([5], SamplingParams())
    causes: list[BaseException | None] = [caught.value]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
    assert any(isinstance(cause, RuntimeError) for cause in causes)


async def test_a_cancelled_request_gives_its_slot_to_the_next_and_is_counted(
    endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless, num_slots=1)
    long = asyncio.create_task(client.generate_ids([5, 6], SamplingParams(max_tokens=180)))
    waiting = asyncio.create_task(client.generate_ids([7, 8], SamplingParams(max_tokens=180)))
    await until(lambda: client.engine.counts.sampled_tokens >= 3)
    long.cancel()
    waiting.cancel()
    results = await asyncio.gather(long, waiting, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    output = await client.generate_ids([9], SamplingParams(max_tokens=2))
    assert len(output.completion_ids) == 2
    counts = client.engine.counts
    assert (counts.accepted, counts.finished, counts.cancelled, counts.failed) == (3, 1, 2, 0)


class _Gated(_Fragile):
    """A model whose forward pass waits at a gate."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.entered, self.gate = threading.Event(), threading.Event()

    def hidden(self, *given: Any) -> Tensor:
        self.entered.set()
        assert self.gate.wait(10)
        return self.model.hidden(*given)


async def test_a_cancellation_that_comes_too_late_does_not_hit_the_next_question(
    endless: LoadedModel, serve: Serve
) -> None:
    model = _Gated(endless.model)
    engine = serve(dataclasses.replace(endless, model=model)).engine
    holder, answered = engine.open(one_shot=False), threading.Event()

    def ask(deliver: Callable[[Request], None]) -> Request:
        request = Request(
            order=("task", 0),
            prompt_ids=[5, 6],
            sampling=SamplingParams(max_tokens=1),
            end_token_ids=frozenset(),
            deliver=deliver,
            holder=holder,
        )
        engine.submit(request)
        return request

    questions: list[Request] = []
    first = ask(lambda _: questions.append(ask(lambda _: answered.set())))
    await asyncio.to_thread(model.entered.wait, 10)
    engine.cancel(first)  # while the step that finishes it is running
    model.gate.set()
    await asyncio.to_thread(answered.wait, 10)
    assert first.finish_reason is FinishReason.LENGTH
    assert questions[0].finish_reason is FinishReason.LENGTH


async def test_a_session_that_gave_up_on_an_answer_can_ask_again(
    endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless)
    async with client.session(("task", 0)) as session:
        for seed in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await session.respond_to_ids([5, 6], SamplingParams(max_tokens=150, seed=seed))
            await until(lambda: client.engine.num_in_flight == 0)
        output = await session.respond_to_ids([5, 6], SamplingParams(max_tokens=3))
    assert (
        output.completion_ids
        == (await client.generate_ids([5, 6], SamplingParams(max_tokens=3))).completion_ids
    )


async def test_one_question_at_a_time_and_none_after_closing(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless)
    session = client.session(("task", 0))
    first = asyncio.create_task(session.respond_to_ids([5], SamplingParams(max_tokens=100)))
    await asyncio.sleep(0)
    with pytest.raises(InferenceError, match="one request"):
        await session.respond_to_ids([6], SamplingParams(max_tokens=1))
    assert len((await first).completion_ids) == 100
    session.close()
    session.close()
    with pytest.raises(InferenceError, match="closed"):
        await session.respond_to_ids([6], SamplingParams(max_tokens=1))
    assert client.engine.counts.accepted == 1


@pytest.mark.parametrize("lockstep", [False, True])
async def test_closing_the_engine_fails_what_is_in_flight_and_everything_after(
    lockstep: bool, endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless, num_slots=1, lockstep=lockstep)
    sessions = [client.session(("task", number)) for number in range(3)]
    requests = [
        asyncio.create_task(session.respond_to_ids([5, number], SamplingParams(max_tokens=180)))
        for number, session in enumerate(sessions)
    ]
    await until(lambda: client.engine.counts.sampled_tokens >= 2)
    await client.close()
    for request in requests:
        with pytest.raises(InferenceError, match=r"closed .*in flight"):
            await request
    with pytest.raises(InferenceError, match="closed"):
        client.session(("late", 0))
    with pytest.raises(InferenceError, match="closed"):
        await sessions[0].respond_to_ids([5], SamplingParams())
    for session in sessions:
        session.close()
    await client.close()
    counts = client.engine.counts
    assert (counts.accepted, counts.failed, client.engine.num_in_flight) == (3, 3, 0)


async def test_every_request_is_counted_once_whatever_becomes_of_it(
    fragile: LoadedModel, serve: Serve
) -> None:
    client = serve(fragile, num_slots=3)
    poison = 500
    fragile.model.fails_when = lambda tokens, positions: bool(((tokens == poison) & (positions == 1)).any())
    ends = {"finished": 0, "cancelled": 0, "failed": 0}

    async def ask(number: int) -> None:
        prompt = [3 + number, poison if number % 7 == 3 else 4]
        for _ in range(number * 3):
            await asyncio.sleep(0)
        request = asyncio.create_task(client.generate_ids(prompt, SamplingParams(max_tokens=1 + number % 9)))
        if number % 5 == 4:
            for _ in range(number):
                await asyncio.sleep(0)
            request.cancel()
        try:
            await request
        except asyncio.CancelledError:
            ends["cancelled"] += 1
        except InferenceError:
            ends["failed"] += 1
        else:
            ends["finished"] += 1

    asking = [asyncio.create_task(ask(number)) for number in range(40)]
    while not all(task.done() for task in asking):
        counts = client.engine.counts
        assert 0 <= client.engine.num_in_flight <= 40
        assert counts.finished + counts.cancelled + counts.failed <= counts.accepted <= 40
        await asyncio.sleep(0)
    await asyncio.gather(*asking)
    while client.engine.num_in_flight:
        await asyncio.sleep(0)
    counts = client.engine.counts
    assert sum(ends.values()) == 40
    assert counts.accepted == counts.finished + counts.cancelled + counts.failed
    assert counts.cancelled <= ends["cancelled"]  # who cancels may be too late: it had finished, or failed
    assert counts.failed >= ends["failed"] >= 1
    assert counts.finished >= ends["finished"] >= 1


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([], id="no token"),
        pytest.param([5, 604], id="a token beyond the vocabulary"),
        pytest.param([5, -1], id="a negative token"),
    ],
)
async def test_a_prompt_that_no_model_can_read_is_refused_and_harms_nobody_else(
    prompt: list[int], endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless)
    refused, other = await _beside_a_healthy_one(client, until, prompt, SamplingParams(max_tokens=1))
    assert isinstance(refused, ValueError)
    assert len(other.completion_ids) == 150
    assert client.engine.counts.accepted == 1


@pytest.mark.parametrize("seed", [-1, 2**64])
async def test_a_seed_that_is_no_seed_is_refused_and_harms_nobody_else(
    seed: int, endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless)
    refused, other = await _beside_a_healthy_one(client, until, [5], SamplingParams(max_tokens=1, seed=seed))
    assert isinstance(refused, ValueError)
    assert len(other.completion_ids) == 150


async def _beside_a_healthy_one(
    client: LocalClient, until: Until, prompt: list[int], sampling: SamplingParams
) -> tuple[Any, Any]:
    """What becomes of a request, and of one that was being answered when it came."""
    other = asyncio.create_task(client.generate_ids([5, 6], SamplingParams(max_tokens=150)))
    await until(lambda: client.engine.counts.sampled_tokens >= 2)
    results = await asyncio.gather(client.generate_ids(prompt, sampling), other, return_exceptions=True)
    return results[0], results[1]


async def test_weights_that_were_not_numbers_for_a_while_leave_nothing_behind(
    own: LoadedModel, serve: Serve
) -> None:
    client = serve(own, num_slots=2)
    sampling = SamplingParams(max_tokens=4)
    prompts = [[5, 6, 7] * length for length in (20, 1, 8, 13, 20)]
    expected = [await client.generate_ids(prompt, sampling) for prompt in prompts]
    kept = own.model.embed.weight.detach().clone()
    with torch.no_grad():
        own.model.embed.weight.fill_(float("nan"))
    client.publish(1)
    with pytest.raises(InferenceError):
        await client.generate_ids(prompts[0], sampling)
    with torch.no_grad():
        own.model.embed.weight.copy_(kept)
    client.publish(2)
    for prompt, wanted in zip(prompts[1:], expected[1:], strict=True):
        output = await client.generate_ids(prompt, sampling)
        assert output.completion_ids == wanted.completion_ids
        assert output.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


async def test_a_program_whose_event_loop_is_gone_does_not_take_others_down(
    endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless, num_slots=2)

    def leave_without_waiting() -> None:
        loop = asyncio.new_event_loop()
        session = client.session(("gone", 0))
        task = loop.create_task(session.respond_to_ids([5, 6], SamplingParams(max_tokens=30)))
        loop.run_until_complete(asyncio.sleep(0))
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()

    other = asyncio.create_task(client.generate_ids([7, 8], SamplingParams(max_tokens=150)))
    await until(lambda: client.engine.counts.sampled_tokens >= 2)
    thread = threading.Thread(target=leave_without_waiting)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len((await other).completion_ids) == 150
    assert len((await client.generate_ids([9], SamplingParams(max_tokens=2))).completion_ids) == 2


async def test_an_engine_that_fails_between_two_steps_answers_who_waits_and_refuses_who_comes(
    endless: LoadedModel, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(endless)

    def fail() -> None:
        raise MemoryError("no room for the queue")

    monkeypatch.setattr(client.engine, "_take_in", fail)
    with pytest.raises(InferenceError, match="no room for the queue"):
        await client.generate_ids([5, 6], SamplingParams(max_tokens=2))
    with pytest.raises(InferenceError, match="closed"):
        await client.generate_ids([5, 6], SamplingParams(max_tokens=2))
