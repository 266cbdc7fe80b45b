"""A fleet behind the gateway, whose servers come and go while it serves.

POST   /admin/workers {"url"} ──► the same tokenizer, context and weights? ──► one more replica
DELETE /admin/workers/ID      ──► no more calls ──► those under way end ──► gone
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rllm.errors import CanaryError, ConfigError, InferenceError, RequestRefused
from rllm.gateway.local.policy import LocalPolicy, RemoteImages
from rllm.inference.fleet import Fleet
from rllm.inference.vllm import PROBE_TEXT, VLLMClient

AGREEMENT = 0.25
"""Nats that two servers of one model may differ by, for any token: in bfloat16, on different processors,
they do by some hundredths. Another model differs by more."""


class FleetPolicy(LocalPolicy):
    """A `LocalPolicy`, and a `ServerPolicy` of the gateway's.

    `connect` makes a client of one more server and knows what it serves, or raises ConfigError or
    InferenceError; `end` ends a server that has left, where it was started here.
    """

    def __init__(
        self,
        fleet: Fleet,
        model: str,
        *,
        connect: Callable[[str], Awaitable[VLLMClient]],
        end: Callable[[str], Awaitable[None]],
        sends_seeds: bool = True,
        fetcher: RemoteImages | None = None,
    ) -> None:
        super().__init__(fleet, model, sends_seeds=sends_seeds, fetcher=fetcher)
        self._fleet = fleet
        self._connect, self._end = connect, end
        self._adding = asyncio.Lock()
        self._scores: tuple[str, list[float]] | None = None
        """The server that scored a fixed text first, and its scores."""

    async def start(self) -> None:
        """Raises CanaryError where two servers have different weights."""
        for replica in self._fleet.replicas:
            await self._require_same_weights(replica.client)

    def health(self) -> dict[str, Any]:
        rows = [
            {
                "url": each.url,
                "healthy": each.is_up,
                "in_flight": each.num_calls,
                "tokens_in_flight": each.num_tokens,
                "weight": 1.0,
                "leaving": each.is_leaving,
            }
            for each in self._fleet.replicas
        ]
        is_healthy = any(each.is_up for each in self._fleet.replicas)
        return {**super().health(), "healthy": is_healthy, "moved": self._fleet.num_moved, "upstreams": rows}

    async def add_server(self, url: str, weight: float) -> dict[str, Any]:
        """Send calls to one more server; its health, as `health` has it, and its `models`.

        Raises ConfigError for one that is there already, cannot be reached, or serves something else.
        """
        if weight != 1.0:
            raise ConfigError(
                f"`weight` is {weight:g}; a fleet gives new conversations to the server with the least "
                "to do, so leave it out."
            )
        # One at a time, or the same server could join twice while the first is still being looked at.
        async with self._adding:
            try:
                client = await self._connect(url)
            except InferenceError as error:
                raise ConfigError(str(error)) from error
            try:
                await self._require_joins(client)
            except BaseException:
                await client.close()
                raise
            await self._fleet.add(client)
        row = next(each for each in self.health()["upstreams"] if each["url"] == client.base_url)
        return {**row, "models": [client.facts.model]}

    async def _require_joins(self, client: VLLMClient) -> None:
        if any(each.url == client.base_url for each in self._fleet.replicas):
            raise ConfigError(f"The server {client.base_url} is there already; remove it first.")
        if client.max_context < self._fleet.max_context:
            raise ConfigError(
                f"The server {client.base_url} has a context of {client.max_context} tokens, and this fleet "
                f"promises {self._fleet.max_context}; start it with a longer one."
            )
        try:
            await self._require_same_weights(client)
        except (CanaryError, InferenceError) as error:
            raise ConfigError(str(error)) from error

    async def _require_same_weights(self, client: VLLMClient) -> None:
        """By how likely a fixed text is."""
        ids = client.tokenizer.encode(PROBE_TEXT)[: self._fleet.max_context - 1]
        scores = await client.score(ids, 1)
        if self._scores is None:
            self._scores = (client.base_url, scores)
            return
        first, expected = self._scores
        gap = max(abs(mine - theirs) for mine, theirs in zip(scores, expected, strict=True))
        # Not `>`, which is false for NaN.
        if not gap <= AGREEMENT:
            raise CanaryError(
                f"{client.base_url} and {first} differ by {gap:.2g} nats about the same text (limit "
                f"{AGREEMENT:g}), so they serve different weights; a fleet has one model."
            )

    async def remove_server(self, url: str) -> None:
        """Returns once the calls that the server has are answered. Raises ConfigError for the last one."""
        await self._fleet.remove(url)
        await self._end(url)

    async def look_again(self) -> None:
        await self._fleet.check()

    def set_policy_version(self, policy_version: int) -> None:
        raise RequestRefused(
            "This cannot be changed: the weights of a fleet that is served stay as they are.",
            status=409,
            code="not_changeable",
        )
