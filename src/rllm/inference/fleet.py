"""Several servers of one model, as one client that follows a policy.

    call ──► the replica that has read what it begins with, or else the least busy one ──► answer
                 └─ it fails: out of service, the call goes to another one
    every few seconds ──► does it answer at all? ──► no: as if it had failed, also the calls under way
    publish ──► weights on disk, once ──► each replica: pause, load, forget what was read, version, resume
             or tensors over NCCL ──► one replica after another, in the same way
    out of service ──► asked every second ──► it answers again: the newest weights first, then calls

Each token carries the version of the weights that its replica had. No call is lost to a replica that ends:
its answer goes on elsewhere, behind what has arrived of it. One that follows a grammar begins anew there, or
fails where somebody has heard some of it.
"""

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rllm.errors import CanaryError, ConfigError, InferenceError
from rllm.inference.answer_parts import OnPiece
from rllm.inference.client import ModelClient
from rllm.inference.prefix_routes import PrefixRoutes
from rllm.inference.token_session import TokenSession
from rllm.inference.vllm import VLLMClient
from rllm.inference.weight_link import TensorSender
from rllm.types.messages import ModelOutput, SamplingParams

log = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
"""Between two questions to a replica that is out of service."""
CHECK_EVERY_S = 10.0
"""Between two questions to one that is in service: one that hangs takes calls and answers none."""
UNLOAD_S = 10.0
"""For a replica that leaves to drop its adapters, or our NCCL group."""
LOOK_EVERY_S = 0.005
"""Between two looks at whether somebody still changes or reads the weights."""
AGREEMENT = 1e-2
"""Nats that two replicas of the same weights may differ by; in float32 they do by 1e-5."""


class Replica:
    """One server, and what the fleet knows of it."""

    def __init__(self, client: VLLMClient, num_starts: Callable[[], int] = lambda: 1) -> None:
        """`num_starts`: how often it has been started so far, where somebody knows."""
        self.client = client
        self.num_starts = num_starts
        self.num_tokens = 0
        """The tokens of prompts and answers that it is at work on, at most."""
        self.last_call = 0
        """The number of the fleet's call that it was last given."""
        self._calls = set[asyncio.Timeout]()
        """That it is at work on."""
        self._busy_s, self._busy_since_s = 0.0, 0.0
        self.weights_number = -1
        """Which publish of the fleet it has."""
        self.start_with_weights = 0
        """Which of its starts got that."""
        self.updating = asyncio.Lock()
        self.is_up = True
        self.is_leaving = False
        self.probe: asyncio.Task[None] | None = None
        """Asks whether it is there again."""
        self.watch: asyncio.Task[None] | None = None
        """Asks whether it still is."""

    @property
    def url(self) -> str:
        return self.client.base_url

    @asynccontextmanager
    async def busy(self, num_tokens: int) -> AsyncIterator[None]:
        """While it is at work on a call. Raises InferenceError once it is given up."""
        limit = asyncio.timeout(None)
        self.num_tokens += num_tokens
        if not self._calls:
            self._busy_since_s = time.perf_counter()
        self._calls.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            # Not by `give_up`: something within the call took too long.
            if not limit.expired():
                raise
            raise InferenceError(
                f"The server at {self.url} hangs: it does not say what it serves."
            ) from error
        finally:
            self._calls.discard(limit)
            self.num_tokens -= num_tokens
            if not self._calls:
                self._busy_s += time.perf_counter() - self._busy_since_s

    @property
    def busy_s(self) -> float:
        """Seconds in which it had a call."""
        return self._busy_s + (time.perf_counter() - self._busy_since_s if self._calls else 0.0)

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def give_up(self) -> None:
        """End the calls under way."""
        for limit in self._calls:
            if not limit.expired():
                # A time that has passed: the block ends at the next turn of the event loop.
                limit.reschedule(0.0)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Weights:
    """A publish as it was written."""

    number: int
    policy_version: int
    directory: Path


@dataclass(slots=True, frozen=True)
class WeightFiles:
    """The way of weights by a directory that every replica can read."""

    write: Callable[[Path], None]
    """Writes the policy as it is into a directory that it makes."""
    directory: Path
    """Holds what was written last, and goes with the fleet."""
    is_adapter: bool = False
    """Whether it is an adapter in peft's format, on the model that the replicas serve."""


class Fleet(ModelClient):
    """A `TokenClient` and a `ModelClient` on replicas; see the module docstring.

    All replicas need the model's tokenizer, which `clients` have. Nothing is sampled before the first
    `publish` has reached a replica, by `weights`: files, or tensors over NCCL. Without, they keep the weights
    that they have.
    """

    def __init__(
        self,
        clients: Sequence[VLLMClient],
        *,
        max_context: int,
        weights: WeightFiles | TensorSender | None = None,
        patience_s: float = 600.0,
        num_starts: Sequence[Callable[[], int]] = (),
    ) -> None:
        """`patience_s`: how long a call waits while no replica is in service. `num_starts`: of each replica,
        how often it has been started so far; empty where nobody knows."""
        starts = num_starts or [lambda: 1] * len(clients)
        self.replicas = [Replica(*each) for each in zip(clients, starts, strict=True)]
        self.renderer = clients[0].renderer
        self._files = weights if isinstance(weights, WeightFiles) else None
        self._sender = None if isinstance(weights, WeightFiles) else weights
        self._routes = PrefixRoutes[Replica]()
        self._max_context = max_context
        self._patience_s = patience_s
        self._policy_version = 0
        self._num_publishes = 0
        self._on_disk: _Weights | None = None
        self._writing = asyncio.Lock()
        self._changing = threading.Lock()
        """Held while weights are changed, or read to be written: a replica may come back at any moment."""
        self._service = asyncio.Condition()
        self._num_calls = 0
        self.num_moved = 0
        """Calls that were asked again elsewhere, because their replica failed."""

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def _follows(self) -> bool:
        """Whether the replicas are given the weights of a policy."""
        return self._files is not None or self._sender is not None

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def busy_s(self) -> float:
        """Seconds in which a replica had a call, as their mean."""
        return sum(each.busy_s for each in self.replicas) / len(self.replicas)

    @property
    def num_in_service(self) -> int:
        return sum(each.is_up for each in self.replicas)

    def session(self, order: tuple[str, int]) -> "FleetSession":
        return FleetSession(self)

    def publish(self, policy_version: int, write: Callable[[], None] | None = None) -> None:
        """The weights are now those of `policy_version`, once `write` has written them. Replicas get them
        before they answer the next call.

        Waits while they are read. Raises RuntimeError on the event loop that reads them for NCCL, which could
        not go on.
        """
        if self._sender is not None and self._changing.locked() and _is_on_event_loop():
            raise RuntimeError("Weights are published by a thread of its own while replicas are given some.")
        with self._changing:
            self._take(policy_version, write)

    def _take(self, policy_version: int, write: Callable[[], None] | None) -> None:
        if write is not None:
            write()
        # A version that is published once more, unwritten, is nothing new: replicas keep what they have.
        if policy_version != self._policy_version or not self._num_publishes or write is not None:
            self._policy_version = policy_version
            self._num_publishes += 1

    async def generate_ids(
        self, prompt_ids: list[int], sampling: SamplingParams, *, on_piece: OnPiece | None = None
    ) -> ModelOutput:
        """See `TokenClient`."""
        output, _ = await self.ask(prompt_ids, sampling, on_piece=on_piece)
        return output

    async def ask(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        first_choice: Replica | None = None,
        on_piece: OnPiece | None = None,
    ) -> tuple[ModelOutput, Replica]:
        """The answer, and who gave it: `first_choice`, or who has read the prompt's beginning, if it is in
        service and not much busier than others. Raises InferenceError when no replica could."""
        begin = partial(self.replicas[0].client.begin, prompt_ids, sampling, on_piece)
        answer = begin()
        num_failures, num_tokens = 0, len(prompt_ids) + sampling.max_tokens
        while True:
            replica = await self._in_service(first_choice or self._routes.find(prompt_ids), num_tokens)
            replica.last_call = self._num_calls = self._num_calls + 1
            try:
                async with replica.busy(num_tokens):
                    await self.bring_up_to_date(replica)
                    output = await replica.client.go_on(answer)
                self._routes.note(prompt_ids + output.completion_ids, replica)
                return output, replica
            except InferenceError as error:
                self._out_of_service(replica, error)
                num_failures += 1
                # Pieces that somebody has heard cannot be taken back: where nothing can follow them the call
                # fails.
                if num_failures > len(self.replicas) or (not answer.can_go_on and on_piece is not None):
                    raise
                if not answer.can_go_on:
                    answer = begin()
                self.num_moved += 1
            finally:
                await self._tell_remover(replica)

    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        """As `LocalClient.score`, by every replica in service. Raises CanaryError where two of them
        disagree."""
        await self._in_service()
        replicas = [each for each in self.replicas if each.is_up and not each.is_leaving]
        rows = await asyncio.gather(
            *(self._score(each, ids, start, temperature) for each in replicas), return_exceptions=True
        )
        answers: list[tuple[Replica, list[float]]] = []
        for replica, row in zip(replicas, rows, strict=True):
            if not isinstance(row, BaseException):
                answers.append((replica, row))
            elif not isinstance(row, InferenceError):
                raise row
        if not answers:
            raise InferenceError("No replica could score: all of them are out of service.")
        (first, expected), *others = answers
        for replica, row in others:
            gap = float(np.abs(np.array(row) - np.array(expected)).max())
            # Written so that a gap that is not a number is a disagreement, too.
            if not gap <= AGREEMENT:
                raise CanaryError(
                    f"After publishing policy version {self._policy_version}, {replica.url} and {first.url} "
                    f"differ by {gap:.2g} nats (limit {AGREEMENT:g}): one does not serve the published "
                    "weights."
                )
        return expected

    async def _score(self, replica: Replica, ids: list[int], start: int, temperature: float) -> list[float]:
        try:
            async with replica.busy(len(ids)):
                await self.bring_up_to_date(replica)
                return await replica.client.score(ids, start, temperature)
        except InferenceError as error:
            # Here, not in `score`: whoever removes it ends its probe, and goes on before that does.
            self._out_of_service(replica, error)
            raise
        finally:
            await self._tell_remover(replica)

    async def add(self, client: VLLMClient) -> None:
        """One more replica, in service once it has the weights. Where it cannot have them the client is
        closed."""
        replica = Replica(client)
        if self._num_publishes:
            try:
                await self.bring_up_to_date(replica)
            except BaseException:
                await _end(replica)
                raise
        self.replicas.append(replica)
        await self._notify()

    async def remove(self, url: str) -> None:
        """Send a replica no more calls, and wait until it has answered those it has."""
        staying = {each.url: each for each in self.replicas if not each.is_leaving}
        replica = staying.get(url.rstrip("/"))
        if replica is None or len(staying) == 1:
            raise ConfigError(
                f"{url} cannot be removed from a fleet of {', '.join(staying)}; one has to stay."
            )
        replica.is_leaving = True
        try:
            async with self._service:
                await self._service.wait_for(lambda: replica.num_calls == 0)
        except asyncio.CancelledError:
            replica.is_leaving = False
            await self._notify()
            raise
        self.replicas.remove(replica)
        self._routes.forget(replica)
        await _end(replica)

    async def close(self) -> None:
        for replica in self.replicas:
            await _end(replica)
        if self._files is not None:
            shutil.rmtree(self._files.directory, ignore_errors=True)

    async def _in_service(self, first_choice: Replica | None = None, num_tokens: int = 0) -> Replica:
        """Choose who is asked next, for so many tokens."""
        if self._follows and not self._num_publishes:
            raise InferenceError("No weights were published yet, so the replicas have none to answer with.")

        def free() -> list[Replica]:
            return [each for each in self.replicas if each.is_up and not each.is_leaving]

        while not (ready := free()):  # who came back may be gone again before this call goes on
            async with self._service:
                try:
                    async with asyncio.timeout(self._patience_s):  # `wait_for` may lose a cancellation
                        await self._service.wait_for(lambda: bool(free()))
                except TimeoutError as error:
                    raise InferenceError(
                        f"None of {', '.join(each.url for each in self.replicas)} was in service for "
                        f"{self._patience_s:g} s."
                    ) from error
        # Where all are idle the longest idle one is next, so that calls one at a time are shared out, too.
        least = min(ready, key=lambda each: (each.num_tokens, each.last_call))
        if first_choice in ready and first_choice.num_tokens <= 2 * least.num_tokens + num_tokens:
            return first_choice
        return least

    async def bring_up_to_date(self, replica: Replica) -> None:
        """Give a replica the newest weights; others go on meanwhile. Calls of the same replica wait."""
        # Not in `__init__`, which may run where there is no event loop.
        if replica.watch is None:
            replica.watch = asyncio.create_task(self._watch(replica))
        if not self._follows:
            return
        async with replica.updating:
            # Before the weights are given: if it begins anew meanwhile, the number tells the next call so.
            start = replica.num_starts()
            if replica.start_with_weights != start:  # it may have begun anew while nobody asked it
                replica.weights_number = -1
                replica.client.forget_weights()
            if replica.weights_number == self._num_publishes:
                return
            if self._sender is not None:
                number = await self._give_tensors(replica, self._sender)
                replica.weights_number, replica.start_with_weights = number, start
                return
            assert self._files is not None, "weights go by one way or the other"
            weights = await self._weights_on_disk(self._files)
            if self._files.is_adapter:
                await replica.client.load_adapter(weights.directory, weights.policy_version)
            else:
                await replica.client.update_weights(weights.directory, weights.policy_version)
            replica.weights_number, replica.start_with_weights = weights.number, start

    async def _give_tensors(self, replica: Replica, sender: TensorSender) -> int:
        """Which publish the replica has now."""
        number = -1

        @asynccontextmanager
        async def hold_weights() -> AsyncIterator[int]:
            nonlocal number
            # Polled: waiting for a lock of threads would stop the event loop.
            while not self._changing.acquire(blocking=False):
                await asyncio.sleep(LOOK_EVERY_S)
            try:
                number = self._num_publishes
                yield self._policy_version
            finally:
                self._changing.release()

        await replica.client.receive_weights(sender, hold_weights)
        return number

    async def _weights_on_disk(self, files: WeightFiles) -> "_Weights":
        """The newest; those before them stay, because a replica may be reading them."""
        async with self._writing:
            last = self._on_disk
            if last is None or last.number != self._num_publishes:
                files.directory.mkdir(parents=True, exist_ok=True)
                newest = await asyncio.to_thread(self._write, files)
                for old in files.directory.iterdir():
                    if old != newest.directory and (last is None or old != last.directory):
                        shutil.rmtree(old, ignore_errors=True)
                return newest
            return last

    def _write(self, files: WeightFiles) -> "_Weights":
        with self._changing:
            number, policy_version = self._num_publishes, self._policy_version
            last = self._on_disk
            if last is not None and last.number == number:  # by a call that was cancelled meanwhile
                return last
            target = files.directory / f"publish-{number}"
            files.write(target)
            self._on_disk = _Weights(number=number, policy_version=policy_version, directory=target)
            return self._on_disk

    def _out_of_service(self, replica: Replica, error: InferenceError) -> None:
        replica.is_up = False
        # All calls of a replica fail at once, and one probe is enough.
        if replica.probe is None or replica.probe.done():
            num_others = self.num_in_service
            log.warning("%s is out of service, %d others are in it: %s", replica.url, num_others, error)
            replica.probe = asyncio.create_task(self._probe(replica))

    async def _watch(self, replica: Replica) -> None:
        """As long as it is of the fleet: the calls of one that hangs go to others."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await self._check(replica)

    async def check(self) -> None:
        """Ask every replica in service now whether it still answers."""
        await asyncio.gather(*map(self._check, self.replicas))

    async def _check(self, replica: Replica) -> None:
        if not replica.is_up:
            return
        try:
            await replica.client.check()
        except InferenceError as error:
            # It may have been removed meanwhile, and its client closed: nobody would end a probe of it.
            if replica in self.replicas:
                self._out_of_service(replica, error)
                replica.give_up()

    async def _probe(self, replica: Replica) -> None:
        """Until it answers again: whatever it was, it may have begun anew, with its first weights."""
        _forget_weights(replica)
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            try:
                await replica.client.check()
            except InferenceError:
                replica.give_up()  # what it began before it was out of service hangs with it
                continue
            _forget_weights(replica)  # a call under way may have brought it some before it began anew
            replica.is_up = True
            log.warning("%s is in service again.", replica.url)
            await self._notify()
            return

    async def _tell_remover(self, replica: Replica) -> None:
        """A call of the replica is over, and `remove` may wait for it."""
        if replica.is_leaving:
            await self._notify()

    async def _notify(self) -> None:
        async with self._service:
            self._service.notify_all()


class FleetSession(TokenSession):
    """One conversation: it stays with the replica whose cache has its prefix."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._fleet = fleet
        self.replica: Replica | None = None
        """That answered last."""

    async def respond_to_ids(self, prompt_ids: list[int], sampling: SamplingParams) -> ModelOutput:
        output, self.replica = await self._fleet.ask(prompt_ids, sampling, first_choice=self.replica)
        return output


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _forget_weights(replica: Replica) -> None:
    replica.weights_number = -1
    replica.client.forget_weights()


async def _end(replica: Replica) -> None:
    tasks = [each for each in (replica.probe, replica.watch) if each is not None]
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(UNLOAD_S):
            await replica.client.leave()
    await replica.client.close()
