"""The numbers that the gateway counts, and a check that accepted = recorded + errored + in flight."""

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

from rllm.errors import CountError
from rllm.types.wire import CallStatus

BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_RECENT_S = 60
_MAX_CODES = 100
"""Upstreams make up codes of their own, and each is a time series for whoever collects them."""


@dataclass(slots=True)
class Histogram:
    """The number of values in each bucket; the last one has no upper end."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS_S, value)] += 1
        self.total += value


@dataclass(slots=True)
class Counts:
    """The counts of one gateway since it was started. A retry that gets an earlier call's answer is no
    call."""

    num_accepted: int = 0
    recorded_by_status: Counter[str] = field(default_factory=Counter[str])
    """By status: ok, partial. On disk, all of them."""
    errors_by_code: Counter[str] = field(default_factory=Counter[str])
    """By error code, or by HTTP status where an error has none."""
    num_retries: int = 0
    num_undelivered: int = 0
    """Recorded answers whose clients were gone."""
    tokens: Counter[str] = field(default_factory=Counter[str])
    responses: Counter[int] = field(default_factory=Counter[int])
    """By HTTP status, whatever was asked for."""
    latency: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    _recent: deque[list[int]] = field(default_factory=deque[list[int]])
    """[second, ended, errored] of the last seconds in which calls ended."""

    def ended_ok(
        self, now: float, usage: dict[str, int], latency_s: float, first_token_s: float | None
    ) -> None:
        self.recorded_by_status[CallStatus.OK] += 1
        for kind, num_tokens in usage.items():
            self.tokens[kind] += num_tokens
        self.latency.add(latency_s)
        if first_token_s is not None:
            self.first_token.add(first_token_s)
        self._note_end(now, 0)

    def ended_partial(self, now: float) -> None:
        self.recorded_by_status[CallStatus.PARTIAL] += 1
        self._note_end(now, 0)

    def ended_in_error(self, now: float, code: str) -> None:
        has_room = code in self.errors_by_code or len(self.errors_by_code) < _MAX_CODES
        self.errors_by_code[code if has_room else "other"] += 1
        self._note_end(now, 1)

    def recent(self, now: float) -> tuple[int, int]:
        """(ended, errored) within the last minute."""
        while self._recent and self._recent[0][0] <= now - _RECENT_S:
            self._recent.popleft()
        return sum(each[1] for each in self._recent), sum(each[2] for each in self._recent)

    def require_conserved(self, in_flight: int) -> None:
        """Raises CountError when a call was lost or counted twice."""
        num_recorded, num_errored = self.recorded_by_status.total(), self.errors_by_code.total()
        if self.num_accepted != num_recorded + num_errored + in_flight:
            raise CountError(
                f"The gateway accepted {self.num_accepted} calls, but {num_recorded} recorded + "
                f"{num_errored} errored + {in_flight} in flight "
                f"make {num_recorded + num_errored + in_flight}."
            )

    def _note_end(self, now: float, num_errors: int) -> None:
        second = int(now)
        if not self._recent or self._recent[-1][0] != second:
            self._recent.append([second, 0, 0])
            if len(self._recent) > _RECENT_S:
                self._recent.popleft()
        self._recent[-1][1] += 1
        self._recent[-1][2] += num_errors
