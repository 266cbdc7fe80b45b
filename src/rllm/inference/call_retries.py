"""The one layer that asks a model again: clients, gateways' clients and agents never do.

    ask() ──► whole answer                                      ──► returned
         ├──► a refusal in the protocol's own form (400)        ──► raised: it would be refused again
         └──► InferenceError, OSError, no answer in time, half an answer
                   └──► wait (twice as long each time, or what the server asked for) ──► ask() again

Every try is the same request with the same seed, so a retry changes nothing but the time it takes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rllm.errors import ConfigError, InferenceError
from rllm.inference.call_timer import call_timer
from rllm.types.messages import FinishReason, ModelOutput

RETRIED = (InferenceError, OSError)
"""The errors that may pass when the call is repeated; TimeoutError is an OSError."""

_NOT_WHOLE = (FinishReason.CANCELLED, FinishReason.ERROR)


@dataclass(kw_only=True, slots=True, frozen=True)
class CallPatience:
    """The number of times, and the seconds, that a model is asked for one answer."""

    retries: int = 3
    """Times that it is asked again; 0 asks once."""
    call_timeout_s: float = 600.0
    """The time of one try."""
    first_wait_s: float = 0.5
    """Before the first retry; it doubles with each."""
    longest_wait_s: float = 60.0
    """A server that asks for more than that is not asked again."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"`api_retries` is {self.retries}; it must be 0 or more.")
        if not self.call_timeout_s > 0.0:
            raise ConfigError(f"`call_timeout_s` is {self.call_timeout_s}; it must be above 0.")
        if self.first_wait_s < 0.0:
            raise ConfigError(f"`retry_wait_s` is {self.first_wait_s}; it must be 0 or more.")

    def wait_s(self, retry: int, error: BaseException, spread: float) -> float | None:
        """Seconds to wait before the retry of this number, counted from 0; None when there is none left, or
        none that could help.

        `spread`, in [0, 1), keeps thousands of rollouts that failed in one moment from coming back in one.
        """
        if retry >= self.retries or getattr(error, "is_final", False):
            return None
        wished_s = getattr(error, "retry_after_s", None) or 0.0
        if wished_s > self.longest_wait_s:
            return None
        return max(wished_s, self.doubled_wait_s(retry) * (1.0 + spread) / 2.0)

    def doubled_wait_s(self, retry: int) -> float:
        """The longest wait before the retry of this number, counted from 0."""
        return min(self.longest_wait_s, self.first_wait_s * 2.0**retry)


async def answer_of(
    ask: Callable[[], Awaitable[ModelOutput]],
    patience: CallPatience,
    *,
    seed: int = 0,
    on_retry: Callable[[float, BaseException], None] = lambda wait_s, error: None,
) -> ModelOutput:
    """A whole answer. Raises the InferenceError or OSError of the last try when there is none.

    `seed` is the request's: how long retries wait follows from it. `on_retry` hears how long the wait will
    be, and why.
    """
    timer = call_timer(patience.call_timeout_s)
    retry = 0
    while True:
        call = timer.begin()
        try:
            output = await ask()
            if output.finish_reason not in _NOT_WHOLE:
                return output
            error: BaseException = InferenceError(
                f"The model call ended as `{output.finish_reason}`, so its answer is not whole."
            )
        # The timer ends a call by cancelling its task, so it alone knows whether this one ran out of time.
        except asyncio.CancelledError as cancellation:
            if not timer.turns_into_timeout(call):
                raise
            error = InferenceError(f"The model did not answer within {patience.call_timeout_s:g} s.")
            error.__cause__ = cancellation
        except RETRIED as failure:
            error = failure
        finally:
            timer.end(call)
        wait_s = patience.wait_s(retry, error, (seed >> 8) % 1024 / 1024)
        if wait_s is None:
            raise error
        retry += 1
        on_retry(wait_s, error)
        await asyncio.sleep(wait_s)
