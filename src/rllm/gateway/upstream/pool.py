"""Several servers that answer for one policy: which are in service, and which of them takes the next call.

    session ──lease──► the server that has the session's KV cache, or the least loaded one
                           │ succeeded / failed / could not be reached
                           ▼
    in service ◄──a call or a check succeeds── out of service until its time is up, longer after each failure

A server that is out gets one call when its time is up: it comes back with that, or stays out for longer.
"""

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any
from urllib.parse import urlsplit

from rllm.errors import ConfigError, RequestRefused
from rllm.types.addresses import require_base_url

FAILURES_BEFORE_OUT = 3
"""Answers with a 5xx, or connections that were not made in time, in a row. A server that refuses its
connections is out at once."""
MAX_STICKY_SESSIONS = 100_000
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class Upstream:
    """One server, and how it has been doing."""

    url: str
    """Base URL of its API, without a slash at the end, such as `http://10.0.0.1:8000/v1`."""
    weight: float = 1.0
    """A server of weight 2 gets twice the calls of a server of weight 1."""
    in_flight: int = 0
    num_sessions: int = 0
    """Sessions whose next call goes here."""
    num_calls: int = 0
    num_errors: int = 0
    failures: int = 0
    """In a row, since it last answered."""
    out_until: float = 0.0
    """On the monotonic clock; 0 while in service."""
    last_error: str = ""
    is_on_trial: bool = False
    """Out of service, and asked all the same to see whether it is back."""

    @property
    def root(self) -> str:
        """Where servers have `/health`, `/version` and `/tokenize`."""
        return self.url.removesuffix("/v1")

    @property
    def in_service(self) -> bool:
        return self.out_until == 0.0

    @property
    def load(self) -> tuple[float, float]:
        """Calls under way; where those are equal, the sessions that will come with more."""
        return (self.in_flight + 1) / self.weight, (self.num_sessions + 1) / self.weight

    def note_success(self) -> None:
        self.failures = 0
        self.out_until = 0.0
        self.last_error = ""

    def failed(self, why: str, *, take_out: bool) -> None:
        self.num_errors += 1
        self.last_error = why
        if not self.in_service and not self.is_on_trial:
            return  # under way when it broke down, which counts once, however many calls that hit
        self.is_on_trial = False
        self.failures += 1
        if take_out:
            self.rest()

    def rest(self) -> None:
        """Out of service for as long as its failures suggest."""
        self.out_until = time.monotonic() + self.backoff_s()

    def backoff_s(self) -> float:
        # The power is bounded as well: after a thousand failures in a row it would no longer fit into a
        # float.
        longest = min(_FIRST_BACKOFF_S * 2 ** min(max(self.failures - 1, 0), 16), _LONGEST_BACKOFF_S)
        return longest * random.uniform(0.75, 1.25)


@dataclass(kw_only=True, slots=True)
class HealthChecks:
    """The times between checks of servers' health."""

    interval_s: float = 5.0
    """0 asks never: servers then go out and come back by their answers alone."""
    timeout_s: float = 5.0


@dataclass(slots=True, eq=False)
class UpstreamPool:
    """Chooses, counts, and checks."""

    upstreams: list[Upstream]
    checks: HealthChecks = field(default_factory=HealthChecks)
    max_sticky: int = MAX_STICKY_SESSIONS
    _homes: OrderedDict[str, Upstream] = field(default_factory=OrderedDict[str, Upstream], init=False)
    """Which server each session is at home on, the session that was idle longest first."""
    _check: Callable[[Upstream], Awaitable[None]] | None = field(default=None, init=False)
    """Once checks have begun."""
    _checking: dict[Upstream, asyncio.Task[None]] = field(
        default_factory=dict[Upstream, "asyncio.Task[None]"], init=False
    )

    @classmethod
    def of(
        cls,
        urls: Sequence[str],
        *,
        weights: Sequence[float] | None = None,
        checks: HealthChecks | None = None,
    ) -> "UpstreamPool":
        if not urls or isinstance(urls, str):
            raise ConfigError(f"`upstream` is {urls!r}; give a list of at least one URL.")
        if weights is None:
            weights = [1.0] * len(urls)
        if len(weights) != len(urls) or not all(0 < weight < float("inf") for weight in weights):
            raise ConfigError(
                f"`weights` is {list(weights)!r}; give one number above 0 for each of {len(urls)} upstreams."
            )
        bases = [base_url(url) for url in urls]
        twice = sorted({url for url in bases if bases.count(url) > 1})
        if twice:
            raise ConfigError(f"The upstream {twice[0]} is given twice; give it once, with twice the weight.")
        upstreams = [Upstream(url=url, weight=weight) for url, weight in zip(bases, weights, strict=True)]
        return cls(upstreams, checks or HealthChecks())

    # ---- who is in it --------------------------------------------------------------------------------------

    def add(self, url: str, weight: float = 1.0) -> Upstream:
        """One more server. Raises ConfigError for no URL, no weight, or a server that is in it already."""
        (upstream,) = self.of([url], weights=[weight]).upstreams
        if any(each.url == upstream.url for each in self.upstreams):
            raise ConfigError(f"The upstream {upstream.url} is there already; remove it first.")
        self.upstreams.append(upstream)
        if self._check is not None:
            self._checking[upstream] = asyncio.create_task(self._keep_checking(upstream, self._check))
        return upstream

    async def remove(self, url: str) -> None:
        """No further calls for a server; those under way end. Raises ConfigError for the last one."""
        if len(self.upstreams) == 1:
            raise ConfigError(f"The upstream {url} is the last one; add another first, then remove it.")
        upstream = next(each for each in self.upstreams if each.url == url)
        self.upstreams.remove(upstream)
        for session in [name for name, home in self._homes.items() if home is upstream]:
            self.forget(session)
        await self._stop_checking(upstream)

    # ---- choosing ------------------------------------------------------------------------------------------

    @contextmanager
    def lease(self, session: str, *, avoid: Collection[Upstream] = ()) -> Iterator[Upstream]:
        """The server for one call of a session, counted as under way until the block ends, however it ends.

        `avoid`: servers that this call was tried on; they are taken again only when no other is in service.
        Raises RequestRefused (503, with Retry-After) when none is.
        """
        upstream = self._choose(session, avoid)
        upstream.in_flight += 1
        upstream.num_calls += 1
        try:
            yield upstream
        finally:
            upstream.in_flight -= 1

    def other_than(self, avoid: Collection[Upstream]) -> bool:
        """Whether a server is in service that is not in `avoid`."""
        return any(each.in_service and each not in avoid for each in self.upstreams)

    def home_of(self, session: str) -> Upstream | None:
        return self._homes.get(session)

    def forget(self, session: str) -> None:
        home = self._homes.pop(session, None)
        if home is not None:
            home.num_sessions -= 1

    @property
    def retry_after_s(self) -> float:
        """Until a server may be tried; 0 when one is in service."""
        now = time.monotonic()
        return max(0.0, min(each.out_until for each in self.upstreams) - now)

    def _choose(self, session: str, avoid: Collection[Upstream]) -> Upstream:
        home = self._homes.get(session)
        if home is not None and home.in_service and home not in avoid:
            self._homes.move_to_end(session)
            return home
        usable = [each for each in self.upstreams if each.in_service]
        fresh = [each for each in usable if each not in avoid] or usable
        upstream = min(fresh, key=lambda each: each.load) if fresh else self._due()
        # Tried and found busy, a server keeps its sessions: their KV cache is still there.
        if home is None or not home.in_service:
            self._settle(session, upstream)
        return upstream

    def _due(self) -> Upstream:
        """The server whose time out is up. It gets one call: until that is answered, it stays out."""
        first = min(self.upstreams, key=lambda each: each.out_until)
        if first.out_until > time.monotonic():
            raise self.none_in_service()
        first.rest()
        first.is_on_trial = True
        return first

    def _settle(self, session: str, upstream: Upstream) -> None:
        self.forget(session)
        self._homes[session] = upstream
        upstream.num_sessions += 1
        if len(self._homes) > self.max_sticky:
            self.forget(next(iter(self._homes)))

    def none_in_service(self) -> RequestRefused:
        states = "; ".join(f"{each.url}: {each.last_error or 'not tried yet'}" for each in self.upstreams)
        return RequestRefused(
            f"No upstream is in service ({states}). Start one, or wait until one is back.",
            status=503,
            kind="server_error",
            code="no_upstream",
            retry_after=str(max(1, ceil(self.retry_after_s))),
        )

    # ---- what became of calls ------------------------------------------------------------------------------

    def unreachable(self, upstream: Upstream, why: str) -> None:
        upstream.failed(why, take_out=True)

    def note_trouble(self, upstream: Upstream, why: str) -> None:
        """It answered with a 5xx, or broke off. The last one in service stays: its errors say more."""
        bad = upstream.failures + 1 >= FAILURES_BEFORE_OUT
        upstream.failed(why, take_out=bad and self.other_than({upstream}))

    # ---- checking ------------------------------------------------------------------------------------------

    def start(self, check: Callable[[Upstream], Awaitable[None]]) -> None:
        """`check` raises an OSError or TimeoutError when a server is not well."""
        if self.checks.interval_s > 0:
            self._check = check
            for upstream in self.upstreams:
                self._checking[upstream] = asyncio.create_task(self._keep_checking(upstream, check))

    async def close(self) -> None:
        self._check = None
        for upstream in list(self._checking):
            await self._stop_checking(upstream)

    async def _stop_checking(self, upstream: Upstream) -> None:
        task = self._checking.pop(upstream, None)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _keep_checking(self, upstream: Upstream, check: Callable[[Upstream], Awaitable[None]]) -> None:
        while True:
            # Spread, so that many gateways do not ask one server at the same moment.
            await asyncio.sleep(self.checks.interval_s * random.uniform(0.5, 1.5))
            # Like a call on trial: a failed check of a server that is out counts as one more failure.
            upstream.is_on_trial = not upstream.in_service
            try:
                async with asyncio.timeout(self.checks.timeout_s):
                    await check(upstream)
            except TimeoutError as error:
                why = str(error) or f"its health check took more than {self.checks.timeout_s:g} s"
                self.note_trouble(upstream, why)
            except ConnectionError as error:
                self.unreachable(upstream, str(error))
            except OSError as error:
                self.note_trouble(upstream, str(error))
            else:
                upstream.note_success()

    # ---- for people ----------------------------------------------------------------------------------------

    def health(self, upstream: Upstream) -> dict[str, Any]:
        return {
            "url": upstream.url,
            "healthy": upstream.in_service,
            "in_flight": upstream.in_flight,
            "weight": upstream.weight,
            "sessions": upstream.num_sessions,
            "calls": upstream.num_calls,
            "errors": upstream.num_errors,
            "failures_in_a_row": upstream.failures,
            "last_error": upstream.last_error,
        }


def base_url(url: str) -> str:
    """A server's API URL: `/v1` is added where only a host is given. Raises ConfigError for no URL."""
    parts = urlsplit(require_base_url("The upstream", url))
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"
