"""How long a failed call waits before it is asked again, and when it is not."""

import asyncio
from typing import Any

import pytest

from rllm.errors import ConfigError, InferenceError
from rllm.inference.call_retries import CallPatience, answer_of
from rllm.inference.call_timer import CallTimer, call_timer
from rllm.types.messages import FinishReason, ModelOutput

BUSY = InferenceError("busy")


@pytest.mark.parametrize(
    ("retry", "error", "spread", "wait_s"),
    [
        (0, BUSY, 0.0, 0.25),
        (0, BUSY, 0.5, 0.375),
        (1, BUSY, 0.0, 0.5),
        (2, OSError(), 0.0, 1.0),
        (3, BUSY, 0.0, None),
        (0, InferenceError("no", is_final=True), 0.0, None),
        (0, InferenceError("later", retry_after_s=7.0), 0.0, 7.0),
        (0, InferenceError("later", retry_after_s=0.1), 0.0, 0.25),
        (0, InferenceError("later", retry_after_s=60.0), 0.0, 60.0),
        (0, InferenceError("much later", retry_after_s=60.5), 0.0, None),
    ],
)
def test_each_retry_waits_twice_as_long_or_as_the_server_says(
    retry: int, error: Exception, spread: float, wait_s: float | None
) -> None:
    assert CallPatience().wait_s(retry, error, spread) == wait_s


def test_a_wait_never_grows_beyond_the_longest() -> None:
    patience = CallPatience(retries=100)
    assert [patience.doubled_wait_s(retry) for retry in (0, 1, 6, 7, 90)] == [0.5, 1.0, 32.0, 60.0, 60.0]


def test_limits_that_cannot_be_honoured_are_refused_by_name() -> None:
    CallPatience(retries=0, call_timeout_s=0.1, first_wait_s=0.0)
    bad: dict[str, Any]
    for bad, name in (
        ({"retries": -1}, "api_retries"),
        ({"call_timeout_s": 0.0}, "call_timeout_s"),
        ({"call_timeout_s": float("nan")}, "call_timeout_s"),
        ({"first_wait_s": -0.1}, "retry_wait_s"),
    ):
        with pytest.raises(ConfigError, match=f"`{name}`"):
            CallPatience(**bad)


async def test_a_call_is_asked_again_as_often_as_it_may_be_and_its_seed_spreads_the_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    outcomes: list[Any] = []

    async def ask() -> ModelOutput:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    causes: list[tuple[float, str]] = []

    def hear(wait_s: float, error: BaseException) -> None:
        causes.append((wait_s, str(error)))

    whole, half = ModelOutput(text="a"), ModelOutput(finish_reason=FinishReason.CANCELLED)
    for seed, waits in ((0, [0.25, 0.5]), (512 << 8, [0.375, 0.75]), ((1024 << 8) + 255, [0.25, 0.5])):
        outcomes[:] = [BUSY, half, whole]
        output = await answer_of(ask, CallPatience(), seed=seed, on_retry=hear)
        assert output is whole
        assert slept_s == [wait_s for wait_s, _ in causes] == waits
        assert (causes[0][1], "not whole" in causes[1][1]) == ("busy", True)
        slept_s.clear()
        causes.clear()
    outcomes[:] = [BUSY, BUSY, BUSY, InferenceError("the last"), whole]
    with pytest.raises(InferenceError, match="the last"):
        await answer_of(ask, CallPatience())
    assert (len(slept_s), outcomes) == (3, [whole])
    outcomes[:] = [ValueError("a defect"), whole]
    with pytest.raises(ValueError, match="a defect"):
        await answer_of(ask, CallPatience())
    outcomes[:] = [half]
    with pytest.raises(InferenceError, match="not whole"):
        await answer_of(ask, CallPatience(retries=0))


async def test_calls_run_out_in_their_order_and_one_timer_serves_all_of_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    rings: list[tuple[float, Any]] = []

    class Clock:
        """A loop's, which the test moves on."""

        def time(self) -> float:
            return now[0]

        def call_at(self, when: float, ring: Any) -> Any:
            rings.append((when, ring))
            return object()

    current_task = asyncio.current_task
    monkeypatch.setattr(asyncio, "current_task", lambda loop=None: current_task())
    timer = CallTimer(Clock(), 10.0)  # type: ignore[arg-type]
    ends: list[str] = []

    async def call(name: str, is_over: asyncio.Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        timed = timer.begin()
        try:
            await is_over.wait()
            ends.append(f"{name} answered")
        except asyncio.CancelledError:
            ends.append(f"{name} {'ran out' if timer.turns_into_timeout(timed) else 'was cancelled'}")
        finally:
            timer.end(timed)
        assert task.cancelling() == (name in ("third", "fifth"))

    tasks: list[asyncio.Task[None]] = []
    events = [asyncio.Event() for _ in range(5)]
    for number, name in enumerate(("first", "second", "third", "fourth", "fifth")):
        now[0] = float(number)
        tasks.append(asyncio.create_task(call(name, events[number])))
        await asyncio.sleep(0)
    assert [when for when, _ in rings] == [10.0], "for the first alone"
    tasks[2].cancel()
    await tasks[2]
    events[0].set()
    await tasks[0]
    now[0] = 11.0
    rings.pop()[1]()
    async with asyncio.timeout(5):
        await tasks[1]
    assert [when for when, _ in rings] == [13.0], "for the first that is left"
    events[3].set()
    await tasks[3]
    now[0] = 14.0
    rings.pop()[1]()
    tasks[4].cancel()  # by somebody else, in the same moment
    async with asyncio.timeout(5):
        await tasks[4]
    assert rings == []
    assert ends == [
        "third was cancelled",
        "first answered",
        "second ran out",
        "fourth answered",
        "fifth was cancelled",
    ]


async def test_an_answer_in_time_ends_its_limit() -> None:
    async def ask() -> ModelOutput:
        return ModelOutput(text="a")

    await answer_of(ask, CallPatience(call_timeout_s=0.02))
    await asyncio.sleep(0.04)  # which would be cancelled


async def test_a_loop_has_one_timer_for_each_limit() -> None:
    assert call_timer(3.0) is call_timer(3.0)
    assert call_timer(3.0) is not call_timer(4.0)
    assert call_timer(4.0).limit_s == 4.0
