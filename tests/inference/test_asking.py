"""One layer asks again: how often, how long it waits, and whose cancellation is whose."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.inference.call_retries import CallPatience, answer_of
from rllm.types.messages import FinishReason, ModelOutput

QUICK = CallPatience(retries=2, first_wait_s=0.0)


def _asker(*answers: Any) -> tuple[Callable[[], Any], list[int]]:
    calls: list[int] = []

    async def ask() -> ModelOutput:
        calls.append(len(calls))
        answer = answers[min(len(calls), len(answers)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        assert isinstance(answer, ModelOutput)
        return answer

    return ask, calls


WHOLE = ModelOutput(text="go")


@pytest.mark.parametrize(
    "failure",
    [
        InferenceError("died"),
        ConnectionResetError("reset"),
        TimeoutError("connect"),
        ModelOutput(finish_reason=FinishReason.ERROR),
        ModelOutput(finish_reason=FinishReason.CANCELLED),
    ],
)
async def test_what_may_pass_is_asked_again_and_then_raised(failure: Any) -> None:
    ask, calls = _asker(failure, failure, WHOLE)
    told: list[float] = []
    assert await answer_of(ask, QUICK, on_retry=lambda wait_s, error: told.append(wait_s)) is WHOLE
    assert (len(calls), told) == (3, [0.0, 0.0])
    ask, calls = _asker(failure)
    with pytest.raises((InferenceError, OSError)):
        await answer_of(ask, QUICK)
    assert len(calls) == 3


@pytest.mark.parametrize("error", [ContextLengthError("long"), ConfigError("bad"), KeyError("bug")])
async def test_what_will_not_pass_is_raised_at_once(error: Exception) -> None:
    ask, calls = _asker(error)
    with pytest.raises(type(error)):
        await answer_of(ask, QUICK)
    assert len(calls) == 1


async def test_an_answer_that_does_not_come_is_asked_for_again() -> None:
    patience = CallPatience(retries=1, first_wait_s=0.0, call_timeout_s=0.02)
    ask, calls = _asker(None, WHOLE)
    assert await answer_of(ask, patience) is WHOLE
    ask, calls = _asker(None)
    with pytest.raises(InferenceError, match=r"0.02 s"):
        await answer_of(ask, patience)
    assert len(calls) == 2
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_calls_run_out_one_by_one_whoever_ends_before() -> None:
    patience = CallPatience(retries=0, call_timeout_s=0.05)
    quick, _ = _asker(WHOLE)
    stuck, _ = _asker(None)

    async def late(ask: Callable[[], Any], wait_s: float) -> Any:
        await asyncio.sleep(wait_s)
        return await answer_of(ask, patience)

    calls = [late(quick if number % 2 else stuck, 0.01 * number) for number in range(6)]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in ended] == [InferenceError, ModelOutput] * 3


async def test_whoever_is_cancelled_while_asking_is_cancelled() -> None:
    ask, calls = _asker(None)
    asking = asyncio.create_task(answer_of(ask, QUICK))
    while not calls:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await answer_of(ask, QUICK)


@given(retry=st.integers(0, 20), seed=st.floats(0, 0.999), wished=st.none() | st.floats(0, 200))
def test_waits_double_are_bounded_and_honour_what_the_server_asked(
    retry: int, seed: float, wished: float | None
) -> None:
    patience = CallPatience(retries=10, first_wait_s=0.5, longest_wait_s=60.0)
    wait_s = patience.wait_s(retry, InferenceError("busy", retry_after_s=wished), seed)
    if retry >= 10 or (wished or 0.0) > 60.0:
        assert wait_s is None
        return
    assert wait_s is not None
    own = min(60.0, 0.5 * 2**retry)
    assert max(wished or 0.0, own / 2) <= wait_s <= max(wished or 0.0, own)


async def test_what_would_be_refused_again_is_not_asked_again() -> None:
    ask, calls = _asker(InferenceError("refused", is_final=True), WHOLE)
    with pytest.raises(InferenceError, match="refused"):
        await answer_of(ask, QUICK)
    assert calls == [0]
