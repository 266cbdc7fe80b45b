"""Continuous batching in one thread: requests join and leave at every step.

    submit ──► inbox ──► [ barrier? ] ──► admit: slot, known prefix ──► prefill ─┐
                                              ▲                                 ▼
                             next turn ───────┴──── finished ◄── decode, one token for every live row

Two schedules. `continuous` steps as soon as anything is there to do: best throughput when environments are
slow. `lockstep` steps only when every open session is waiting for the model: then the batches, and so the
last bit of every log-probability, are the same on every run, whatever the threads do. Training uses it to be
reproducible. For the same reason nothing outlives its conversation under lockstep: whoever comes later reads
a prompt anew, unless an open conversation begins with it. The continuous engine keeps what was read for calls
that go on from it, and their last bits may depend on that.

Weights live in the model that is handed in. Whoever changes them calls `publish`: caches are dropped, the
version is set, and rows in flight read their context anew. A step that finds weights changed without a
publish raises.
"""

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rllm.errors import ConfigError, InferenceError
from rllm.inference.local.cache import KVCache, Slot, tokens_at_once
from rllm.inference.local.drafts import lookup_drafts
from rllm.inference.local.forward import (
    PromptRow,
    PromptRows,
    forward,
    prefill,
    prefill_all,
    prefill_scored,
)
from rllm.inference.local.requests import Holder, LiveRequests, Request
from rllm.inference.local.unread_prompts import UnreadPrompts
from rllm.types.messages import FinishReason


@dataclass(slots=True)
class EngineCounts:
    """Totals since the start. accepted = finished + cancelled + failed + in flight."""

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    drafted_tokens: int = 0
    """Guesses that were read; see `rllm.inference.local.drafts`."""
    accepted_drafts: int = 0
    """Those of them that were sampled."""
    steps: int = 0
    busy_s: float = 0.0


class LocalEngine:
    """See the module docstring. All public methods may be called from any thread."""

    def __init__(
        self,
        model: Any,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_positions: int,
        num_slots: int,
        max_context: int,
        max_prefill_tokens: int,
        cache_tokens: int,
        num_drafts: int,
        lockstep: bool,
    ) -> None:
        """`cache_tokens`: keys and values that there is room for at the same time; who finds none waits, or
        gives its place to an earlier one and is read anew. 0: as many as all slots have at their longest.
        `num_drafts`: tokens that a step may guess ahead for an answer that is alone (several at once keep
        the machine busy as they are)."""
        if max_context > max_positions:
            raise ConfigError(
                f"`inference.max_context` is {max_context} but the model has {max_positions} positions; "
                f"set it to {max_positions} or less."
            )
        room = tokens_at_once(1, max_context, 0)
        if 0 < cache_tokens < room:
            raise ConfigError(
                f"`inference.cache_tokens` is {cache_tokens}, and one conversation of "
                f"`inference.max_context` {max_context} takes {room}; set it to {room} or more, or lower "
                "`inference.max_context`."
            )
        parameter = next(model.parameters())
        self.model = model
        self.max_context = max_context
        self.max_prefill_tokens = max_prefill_tokens
        self.num_drafts = num_drafts
        self.lockstep = lockstep
        self.policy_version = 0
        self.counts = EngineCounts()
        self._cache = KVCache(
            num_layers=num_layers,
            num_slots=num_slots,
            num_kv_heads=num_kv_heads,
            max_context=max_context,
            head_dim=head_dim,
            device=parameter.device,
            dtype=parameter.dtype,
            max_tokens=tokens_at_once(num_slots, max_context, cache_tokens),
        )
        self._parameters = list(model.parameters())
        self._published_state = self._weight_state()
        self._condition = threading.Condition()
        self._inbox: list[Request] = []
        self._releases: list[Holder] = []
        self._cancels: list[Request] = []
        self._outside = 0
        """Open sessions that are not waiting for the model; the lockstep barrier waits until there are
        none."""
        self._waiting: list[tuple[tuple[str | int, ...], int, Request]] = []
        self._arrivals = 0
        self._owner_of_slot: dict[Slot, Holder] = {}
        self._live = LiveRequests(self._cache)
        self._new_requests: list[Request] = []
        """Requests that got a slot in this step."""
        self._unread = UnreadPrompts(self._cache, max_prefill_tokens, whole_images=model.sees_images_whole)
        self._any_cancelled = False
        self._reread = False
        """Weights were published over rows in flight, whose context must be read anew."""
        self._stepping = threading.Lock()
        self._next_to_step = threading.Lock()
        """Held by a publisher from its call on: a thread that lets `_stepping` go and takes it again at once
        would otherwise be first nearly every time."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rllm-local-engine", daemon=True)
        self._thread.start()

    # ---- called from outside -------------------------------------------------------------------------------

    def open(self, *, one_shot: bool) -> Holder:
        """Begin a conversation, or a single call. Under lockstep the engine now waits until it asks or
        closes."""
        with self._condition:
            self._require_running()
            self._outside += 1
        return Holder(one_shot=one_shot)

    def submit(self, request: Request) -> None:
        """Queue a request of an open conversation, which may have one at a time."""
        with self._condition:
            self._require_running()
            if request.holder.closed or request.holder.request is not None:
                raise InferenceError("A session takes one request at a time, and none after it was closed.")
            request.holder.request = request
            request.submitted_at = time.perf_counter()
            self.counts.accepted += 1
            self._outside -= 1
            self._inbox.append(request)
            self._notify_if_due()

    def cancel(self, request: Request) -> None:
        """Stop a request that is still in flight; it is delivered as cancelled with what was sampled so
        far."""
        with self._condition:
            if request.holder.request is request:
                self._cancels.append(request)
                self._condition.notify()

    def close_session(self, holder: Holder) -> None:
        """End a conversation and give its slot back. A request in flight is cancelled."""
        with self._condition:
            if holder.closed:
                return
            holder.closed = True
            if holder.request is not None:
                self._cancels.append(holder.request)
            else:
                self._outside -= 1
            self._releases.append(holder)
            self._notify_if_due()

    def publish(self, policy_version: int, write: Callable[[], None] | None = None) -> None:
        """The weights are now those of `policy_version`, once `write` has written them.

        No step runs meanwhile; rows in flight go on with the new weights.
        """
        with self.between_steps():
            # Before the version changes: tokens sampled so far belong to the weights that sampled them.
            self._live.collect(self.policy_version)
            if write is not None:
                write()
            self._reread = True
            self.policy_version = policy_version
            # Not reached where `write` raises, so the next step refuses weights that were written in part.
            self._published_state = self._weight_state()
            self._cache.forget_everything()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """No step runs and nothing is published while the block does."""
        with self._next_to_step, self._stepping:
            yield

    def close(self) -> None:
        """Stop the thread; whatever is in flight fails with InferenceError."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    @property
    def num_in_flight(self) -> int:
        counts = self.counts
        return counts.accepted - counts.finished - counts.cancelled - counts.failed

    # ---- the engine thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        ending: Exception = InferenceError("The engine was closed while requests were in flight.")
        try:
            self._step_until_closed()
        except Exception as error:  # noqa: BLE001  between two steps, such as for want of memory
            ending = error
        with self._condition:
            self._closing = True
        self._fail_all(ending)

    def _step_until_closed(self) -> None:
        while True:
            with self._condition:
                while not self._closing and not self._has_work():
                    self._condition.wait()
                if self._closing:
                    return
                self._take_in()
                only_cancel = self.lockstep and self._outside > 0
            try:
                # Taken and let go at once: a publisher that waits has its turn, and the next may come during
                # the step.
                with self._next_to_step:
                    pass
                with self._stepping, torch.inference_mode():
                    start_s = time.perf_counter()
                    if only_cancel:  # somebody is still busy elsewhere: the others must not move
                        self._drop_cancelled()
                        continue
                    self.counts.steps += 1  # before anybody has an answer of it and looks
                    self._step()
                    self.counts.busy_s += time.perf_counter() - start_s
            except Exception as error:  # noqa: BLE001  whatever it is, every waiting request must hear of it
                self._fail_all(error)

    def _notify_if_due(self) -> None:
        """Wake the engine's thread where it finds something to do: under lockstep that is the last of many
        requests, and waking it for each would cost more than taking them in."""
        if self._has_work():
            self._condition.notify()

    def _has_work(self) -> bool:
        # Before the barrier: whoever cancels is answered even while other sessions are busy elsewhere.
        if self._cancels:
            return True
        if self.lockstep and self._outside > 0:
            return False
        return bool(self._inbox or self._live.requests or self._unread.prompts or self._waiting)

    def _take_in(self) -> None:
        """Apply cancellations and releases, then queue new requests in their order.

        Runs under the condition.
        """
        # A request may have been answered since it was cancelled, and its conversation may have asked anew.
        for request in self._cancels:
            if request.holder.request is request:
                request.finish_reason = FinishReason.CANCELLED
                self._any_cancelled = True
        self._cancels.clear()
        for request in self._inbox:
            heapq.heappush(self._waiting, (request.order, self._arrivals, request))
            self._arrivals += 1
        self._inbox.clear()
        # A session that was closed during its answer keeps its slot until that answer has left the batch.
        free_holders = [holder for holder in self._releases if holder.request is None]
        self._releases = [holder for holder in self._releases if holder.request is not None]
        for holder in free_holders:
            self._take_slot_of(holder)

    def _take_slot_of(self, holder: Holder) -> None:
        if holder.slot is not None:
            self._cache.release(holder.slot)
            del self._owner_of_slot[holder.slot]
            holder.slot = None

    def _step(self) -> None:
        """New prompts and one token of every live row go through the model together; then every row samples a
        token."""
        self._check_weights()
        if self._any_cancelled:
            self._drop_cancelled()
        if self._reread:
            self._read_contexts()
        # Rows in flight get their places first, so that new ones only take what is left.
        self._make_room()
        self._new_requests = self._admit()
        self._begin([request for request in self._new_requests if request.score_from is None])
        for request in self._new_requests:
            if request.score_from is not None:
                self._score(request)
        live, rows = self._live, self._unread.next_rows()
        if self.num_drafts and not rows and len(live.requests) == 1 and self._sample_drafted():
            return
        live.place()
        if not rows and live.decoding is None:
            return
        prompts = PromptRows(self.model, self._cache, rows) if rows else None
        logits_B_V = forward(self.model, self._cache, live.decoding, live.tokens_B, prompts)
        if rows:
            logits_B_V = self._join(rows, logits_B_V)
        if live.requests:
            self.counts.sampled_tokens += len(logits_B_V)
            self._deliver(live.sample(logits_B_V, self.policy_version))

    def _sample_drafted(self) -> bool:
        """Sample several tokens of the only answer in one pass, as far as they were guessed; False, and
        nothing has changed, where there is nothing to guess or no room for it."""
        live, cache, slot = self._live, self._cache, self._live.requests[0].slot
        context_ids = live.only_context()
        num_read = len(context_ids) - 1
        # The pass samples one token more than it guesses.
        drafts = lookup_drafts(context_ids, min(self.num_drafts, live.num_left - 1))
        length = num_read + 1 + len(drafts)
        # A slot stays on its shelf here: moving it changes the index by which its sampled tokens are kept.
        if not drafts or length > slot.shelf.limit or not cache.grow(slot.shelf, length):
            return False
        live.decoding = None
        # Decoding does not keep `ids` up to date, and a prompt row begins where they end.
        slot.ids = context_ids[:-1]
        logits_N_V = prefill_all(self.model, cache, PromptRow(slot, [context_ids[-1], *drafts]))
        # The keys of the guesses stay where they are, hidden until a guess is sampled.
        cache.truncate(slot, num_read + 1)
        leaving_requests: list[Request] = []
        for number, draft in enumerate([*drafts, None]):
            leaving_requests = live.sample(logits_N_V[number : number + 1], self.policy_version)
            self.counts.sampled_tokens += 1
            if leaving_requests or live.last_token != draft:
                break
            self.counts.accepted_drafts += 1
            assert draft is not None, "no token equals it"
            cache.extend(slot, draft)
        self.counts.drafted_tokens += len(drafts)
        self._deliver(leaving_requests)
        return True

    def _check_weights(self) -> None:
        if self._weight_state() != self._published_state:
            raise InferenceError(
                "The model's weights changed without `publish`, so tokens would carry the wrong policy "
                "version; call publish_weights() after every update."
            )

    def _drop_cancelled(self) -> None:
        self._any_cancelled = False
        dropped_requests = self._live.remove_cancelled(self.policy_version)
        if self._reread:  # a publish dropped the keys of what these rows had read and written
            for request in dropped_requests:
                self._cache.truncate(request.slot, 0)
        self._deliver(dropped_requests)
        self._deliver(self._unread.drop_cancelled())
        dropped_requests = [
            entry[2] for entry in self._waiting if entry[2].finish_reason is FinishReason.CANCELLED
        ]
        if dropped_requests:
            self._deliver(dropped_requests)
            self._waiting = [entry for entry in self._waiting if entry[2].finish_reason is None]
            heapq.heapify(self._waiting)

    def _read_contexts(self) -> None:
        """A publish emptied the cache under rows in flight: they read their context anew."""
        self._reread = False
        rows: list[PromptRow] = []
        num_tokens = 0
        for request in self._live.requests:
            # Complete, because `publish` collected; the last token is the one that the coming step reads.
            context = (request.prompt_ids + request.completion_ids)[:-1]
            if rows and num_tokens + len(context) > self.max_prefill_tokens:
                prefill(self.model, self._cache, rows)
                rows, num_tokens = [], 0
            rows.append(PromptRow(request.slot, context))
            num_tokens += len(context)
        if rows:
            prefill(self.model, self._cache, rows)
        self._unread.restart()

    def _make_room(self) -> None:
        """Give every live row a place for its next token, those that came first before the others. Where
        there is no room, the last of them goes back to those that wait."""
        live, cache = self._live, self._cache
        if all(length <= shelf.limit and cache.grow(shelf, length) for shelf, length in live.longest()):
            return
        # Sampled tokens are kept by the index of their slot, which another place changes.
        live.collect(self.policy_version)
        lengths = dict(zip(live.requests, live.lengths(), strict=True))
        for request in sorted(live.requests, key=_age):
            # `_send_back` may choose this very request, which then has no slot.
            while request.holder.slot is not None and not cache.fit(request.slot, lengths[request]):
                if cache.has_gaps:
                    cache.close_gaps()
                elif not self._take_unused_slot(request):
                    self._send_back(max(live.requests, key=_age))
        live.renew_places()

    def _send_back(self, request: Request) -> None:
        """Take the slot of a live request, which goes on when there is room again."""
        self._live.renew_places()
        self._live.give_back(request, self.policy_version)
        self._cache.truncate(request.slot, 0)
        self._take_slot_of(request.holder)
        heapq.heappush(self._waiting, (request.order, self._arrivals, request))
        self._arrivals += 1

    def _admit(self) -> list[Request]:
        """Waiting requests that get to run now: those with a slot, and new ones as long as slots, room and
        budget last."""
        new_requests: list[Request] = []
        later_requests: list[tuple[tuple[str | int, ...], int, Request]] = []
        budget = self.max_prefill_tokens - self._unread.num_tokens
        has_room = True
        if self.lockstep and self._waiting:
            self._cache.forget_released()
        while self._waiting and budget > 0:
            entry = heapq.heappop(self._waiting)
            request = entry[2]
            # No newcomer overtakes one that found no room: short prompts could keep a long one out for ever.
            if request.holder.slot is None and not has_room:
                later_requests.append(entry)
                continue
            is_alone = not (new_requests or self._unread.prompts or self._live.requests)
            if not self._seat(request, is_alone=is_alone):
                has_room = False
                later_requests.append(entry)
                continue
            request.began_at = request.began_at or time.perf_counter()
            new_requests.append(request)
            num_known = self._cache.num_kept(request.slot, request.context_ids)
            budget -= max(1, len(request.context_ids) - num_known)
        for entry in later_requests:
            heapq.heappush(self._waiting, entry)
        return new_requests

    def _seat(self, request: Request, *, is_alone: bool) -> bool:
        """Give a request a slot with room for its context and a token more.

        Idle conversations make room for it, and where nobody else is at work (`is_alone`) those that wait do,
        so that one of them always goes on.
        """
        holder, length = request.holder, len(request.context_ids) + 1
        length = min(length, self.max_context)  # of one that is scored, no token follows
        while not self._find_slot(holder, request.context_ids, length):
            if self._cache.has_gaps and (holder.slot is not None or self._cache.num_free):
                self._live.collect(self.policy_version)
                self._cache.close_gaps()
                self._live.renew_places()
            elif not self._take_unused_slot(request, also_waiting=is_alone):
                if not is_alone or holder.slot is None:
                    return False
                self._take_slot_of(holder)
        return True

    def _find_slot(self, holder: Holder, context_ids: list[int], length: int) -> bool:
        if holder.slot is not None:
            return self._cache.fit(holder.slot, length)
        if holder.one_shot:
            holder.slot = self._cache.allocate_for(context_ids, length)
        else:
            holder.slot = self._cache.allocate(length)
        if holder.slot is None:
            return False
        self._owner_of_slot[holder.slot] = holder
        return True

    def _take_unused_slot(self, request: Request, *, also_waiting: bool = True) -> bool:
        """Take the slot of a conversation that asks nothing at the moment, or of the last one that waits; it
        reads its context anew when it goes on.

        False when every slot is at work: then one will come free.
        """
        with self._condition:
            others = [holder for holder in self._owner_of_slot.values() if holder is not request.holder]
            idle = [holder for holder in others if holder.request is None]
            if idle:
                self._take_slot_of(min(idle, key=lambda holder: holder.idle_since))
                return True
            waiting = [each for _, _, each in self._waiting if also_waiting and each.holder in others]
            if waiting:
                self._take_slot_of(max(waiting, key=_age).holder)
            return bool(waiting)

    def _begin(self, requests: Sequence[Request]) -> None:
        """Choose the tokens to read for these requests, without the part that the cache holds."""
        for request in requests:
            num_known = self._unread.add(request)
            if not request.completion_ids:  # what is read once more counts once
                request.cached_tokens = num_known
                self.counts.prompt_tokens += len(request.context_ids)
                self.counts.cached_tokens += num_known

    def _join(self, rows: Sequence[PromptRow], logits_B_V: Tensor) -> Tensor:
        """The rows have been read: where a prompt has ended, its requests are live from here on. Logits of
        all live rows."""
        num_live = len(self._live.requests)
        whole_prompts = self._unread.advance(rows)
        live_rows = list(range(num_live))
        for number, requests in whole_prompts:
            live_rows += [num_live + number] * len(requests)
        self._live.join([request for _, requests in whole_prompts for request in requests])
        self._unread.drop_whole()  # not before: if joining fails, its requests must hear of it
        return logits_B_V if live_rows == list(range(len(logits_B_V))) else logits_B_V[live_rows]

    def _score(self, request: Request) -> None:
        slot, start = request.slot, request.score_from or 0
        # The token before the first scored one predicts it, so it is read here even where the cache holds it.
        num_known = min(self._cache.begin(slot, request.prompt_ids), start - 1)
        self._cache.truncate(slot, num_known)
        request.logprobs = prefill_scored(
            self.model,
            self._cache,
            PromptRow(slot, request.prompt_ids[num_known:]),
            len(request.prompt_ids) - start,
            request.sampling.temperature or 1.0,
        )
        request.policy_versions = [self.policy_version] * len(request.logprobs)
        request.finish_reason = FinishReason.STOP
        self._deliver([request])

    def _deliver(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        # All count as outside before the first is told: its owner may ask again at once, on another thread.
        now = time.perf_counter()
        with self._condition:
            for request in requests:
                request.finished_at = now
                request.holder.request = None
                request.holder.idle_since = now
                if not request.holder.closed:
                    self._outside += 1
                if request.error is not None:
                    self.counts.failed += 1
                elif request.finish_reason is FinishReason.CANCELLED:
                    self.counts.cancelled += 1
                else:
                    self.counts.finished += 1
        for request in requests:
            request.deliver(request)

    def _fail_all(self, error: Exception) -> None:
        failure = (
            error if isinstance(error, InferenceError) else InferenceError(f"The engine failed: {error!r}")
        )
        if failure is not error:
            failure.__cause__ = error
        with self._condition:
            queue = [*(entry[2] for entry in self._waiting), *self._inbox]
            reading = [*self._unread.requests, *self._new_requests]
            # Those that this step has already delivered are not told a second time.
            pending = [
                each for each in (*self._live.requests, *reading, *queue) if each.holder.request is each
            ]
            self._live = LiveRequests(self._cache)
            self._new_requests, self._waiting, self._inbox = [], [], []
            self._unread.drop_all()
        for request in pending:
            request.error = failure
        # One that has just joined stands in two of the lists.
        self._deliver(list({id(request): request for request in pending}.values()))
        self._cache.wipe()

    def _weight_state(self) -> int:
        """Changes whenever a parameter is written in place (torch counts the writes)."""
        return sum(parameter._version for parameter in self._parameters)

    def _require_running(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise InferenceError("The engine is closed.")


def _age(request: Request) -> tuple[tuple[str | int, ...], float]:
    """Those that came first are less; under lockstep nothing but their order tells requests apart."""
    return request.order, request.submitted_at
