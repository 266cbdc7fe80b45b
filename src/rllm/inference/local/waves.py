"""Lockstep for workflows: the model calls of many attempts go to the engines together.

    attempt ─► call ─► held ─┐ every attempt waits for the model, and the event loop has settled
    attempt ─► call ─► held ─┴──────► one wave: all calls, in a fixed order ──► engines of all policies
       ▲                                                                          │
       └──────────────── all answers at once, in the same order ◄─────────────────┘

A workflow asks several things at a time, perhaps of several policies, so an engine alone cannot know whether
another call of the same moment is on its way. Between two waves nothing comes from outside the event loop, so
what the next wave holds, and with it the last bit of every log-probability, is the same on every run,
whatever threads do. An attempt that waits for something else, such as a tool, is waited for; one that does so
while a call of its own is held is not, and may be in another wave on another day.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rllm.inference.local.client import LocalClient, LocalSession, OnPiece
from rllm.types.messages import ModelOutput, SamplingParams

_SETTLED = 16
"""Iterations of the event loop without a new call or attempt after which a wave leaves. Any number gives
repeatable waves; a larger one lets calls into them that workflows take more steps to come to."""


@dataclass(slots=True, eq=False)
class _Member:
    """One attempt."""

    number: int
    calls: "list[_Call]" = field(default_factory=list["_Call"])


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    client: LocalClient
    prompt_ids: list[int]
    sampling: SamplingParams
    on_piece: OnPiece | None
    answer: "asyncio.Future[ModelOutput]"


class Waves:
    """The calls of one engine's attempts."""

    def __init__(self, clients: Mapping[str, LocalClient]) -> None:
        self.clients = clients
        self._members: set[_Member] = set()
        self._num_members = 0
        self._flight: asyncio.Task[None] | None = None
        self._quiet = 0
        """Iterations of the event loop since anything happened."""
        self._watching = False

    @contextmanager
    def member(self) -> "Iterator[dict[str, WaveClient]]":
        """Clients, by policy, for one attempt; no wave leaves without it until the context ends."""
        member = _Member(self._num_members)
        self._num_members += 1
        self._members.add(member)
        try:
            yield {policy: WaveClient(client, self, member) for policy, client in self.clients.items()}
        finally:
            self._members.discard(member)
            self._stir()

    async def answer_of(self, call: _Call, member: _Member) -> ModelOutput:
        member.calls.append(call)
        self._stir()
        try:
            return await call.answer
        finally:
            if call in member.calls:  # cancelled before it left
                member.calls.remove(call)
                self._stir()

    def _stir(self) -> None:
        self._quiet = 0
        if not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_soon(self._watch)

    def _watch(self) -> None:
        """Once an iteration, until a wave leaves or somebody must be waited for."""
        ready = self._flight is None and self._members and all(each.calls for each in self._members)
        self._watching = bool(ready) and self._quiet < _SETTLED
        if self._watching:
            self._quiet += 1
            asyncio.get_running_loop().call_soon(self._watch)
        elif ready:
            # The order of a set may be another one in the next run.
            members = sorted(self._members, key=lambda each: each.number)
            calls = [call for member in members for call in member.calls]
            for member in members:
                member.calls.clear()
            self._flight = asyncio.create_task(self._fly(calls))

    async def _fly(self, calls: list[_Call]) -> None:
        try:
            outputs = await _answers(calls)
        except Exception as error:  # noqa: BLE001  an engine was closed, say: whoever waits hears of it
            outputs = [error] * len(calls)
        self._flight = None
        # In the order of the calls: so attempts go on in the same order on every run.
        for call, output in zip(calls, outputs, strict=True):
            if call.answer.done():
                continue
            if isinstance(output, ModelOutput):
                call.answer.set_result(output)
            else:
                call.answer.set_exception(output)
        self._stir()


async def _answers(calls: list[_Call]) -> list[ModelOutput | BaseException]:
    # All sessions are open before the first asks, so no engine begins without the last.
    sessions = [LocalSession(call.client, ("", number), one_shot=True) for number, call in enumerate(calls)]
    tasks = [
        asyncio.create_task(_answer(session, call)) for session, call in zip(sessions, calls, strict=True)
    ]
    for call, task in zip(calls, tasks, strict=True):
        call.answer.add_done_callback(lambda _, task=task: task.cancel())  # does nothing once it has ended
    return await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(session: LocalSession, call: _Call) -> ModelOutput:
    async with session:
        return await session.respond_to_ids(call.prompt_ids, call.sampling, call.on_piece)


class WaveClient:
    """A `TokenClient` for one attempt, whose calls leave in waves."""

    def __init__(self, client: LocalClient, waves: Waves, member: _Member) -> None:
        self.renderer = client.renderer
        self._client, self._waves, self._member = client, waves, member

    @property
    def policy_version(self) -> int:
        return self._client.policy_version

    @property
    def max_context(self) -> int:
        return self._client.max_context

    async def generate_ids(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        on_piece: OnPiece | None = None,
    ) -> ModelOutput:
        """See `TokenClient`."""
        call = _Call(
            client=self._client,
            prompt_ids=prompt_ids,
            sampling=sampling,
            on_piece=on_piece,
            answer=asyncio.get_running_loop().create_future(),
        )
        return await self._waves.answer_of(call, self._member)

    async def can_follow(self, grammar: str) -> bool:
        """Whether answers can be sampled by this grammar."""
        return await self._client.can_follow(grammar)

    async def close(self) -> None:
        """Nothing: the client is the engine's."""
