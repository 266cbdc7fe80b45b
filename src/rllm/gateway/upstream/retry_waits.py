"""Whether a call that failed is tried again, when, and where not.

Failed ──wait_before_next──► seconds, or the error that the client gets
"""

import random
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from rllm.errors import RequestRefused
from rllm.gateway.upstream.call import Failed
from rllm.gateway.upstream.pool import Upstream, UpstreamPool

_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0


@dataclass(kw_only=True, slots=True)
class RetryWaits:
    """The number of tries of a call, and the waits between them."""

    max_retries: int
    max_wait_s: float
    """A server whose Retry-After asks for a longer wait is not waited for: the client gets its error."""


@dataclass(kw_only=True, slots=True)
class Tries:
    """The tries of a call so far, and whether and when it is tried again."""

    retries: RetryWaits
    last: Upstream | None = None
    avoid: list[Upstream] = field(default_factory=list[Upstream])
    num_retries: int = 0
    stale_excused: bool = False

    def wait_before_next(self, failure: Failed, pool: UpstreamPool) -> float:
        """Seconds until the next try. Raises the error that the client gets when there is none."""
        # Not counted, but once: a server that hangs up on new connections too looks the same, and would be
        # asked without end.
        if failure.stale and not self.stale_excused:
            self.stale_excused = True
            return 0.0
        if not failure.is_reached and not pool.other_than(()):
            self._count(pool.none_in_service())
        else:
            self._count(failure.error)
        if self.last is not None:
            self.avoid.append(self.last)
        if pool.other_than(self.avoid):
            return 0.0
        # All were tried, so all may be tried again, after a wait.
        self.avoid.clear()
        asked_s = _seconds(failure.error.retry_after)
        return self._within_bounds(self._backoff_s() if asked_s is None else asked_s, failure.error)

    def wait_for_service(self, error: RequestRefused, pool: UpstreamPool) -> float:
        self._count(error)
        return self._within_bounds(pool.retry_after_s, error)

    def _count(self, error: RequestRefused) -> None:
        if self.num_retries >= self.retries.max_retries:
            raise error
        self.num_retries += 1

    def _backoff_s(self) -> float:
        return min(_FIRST_WAIT_S * 2 ** (self.num_retries - 1), _LONGEST_WAIT_S)

    def _within_bounds(self, wait_s: float, error: RequestRefused) -> float:
        if wait_s > self.retries.max_wait_s:
            raise error
        return wait_s * random.uniform(1.0, 1.25)  # so that those who failed together do not come together


def _seconds(retry_after: str | None) -> float | None:
    """The seconds of a Retry-After header: a number of seconds, or a date."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None
