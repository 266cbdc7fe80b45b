"""Continuous batching in one thread: requests join and leave at every step.

    submit ──► inbox ──► [ barrier? ] ──► admit: slot, known prefix ──► prefill ─┐
                                              ▲                                 ▼
                             next turn ───────┴──── finished ◄── decode, one token for every live row

Two schedules. `continuous` steps as soon as anything is there to do: best throughput when environments are slow.
`lockstep` steps only when every open session is waiting for the model: then the batches, and so the last bit of every
log-probability, are the same on every run, whatever the threads do. Training uses it to be reproducible.

Weights live in the model that is handed in. Whoever changes them calls `publish`: caches are dropped, the version is set,
and rows in flight read their context anew. A step that finds weights changed without a publish raises.
"""

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rllm.errors import ConfigError, InferenceError
from rllm.inference.local.cache import KVCache, Slot
from rllm.inference.local.forward import Row, decode, prefill
from rllm.inference.local.sampling import SamplingRows, sample
from rllm.types.messages import FinishReason, SamplingParams


@dataclass(kw_only=True, slots=True)
class Request:
    """One answer to be sampled, or (with `score_from`) one row of tokens to be scored."""

    order: tuple[str | int, ...]
    """Requests of one moment are admitted in this order."""
    prompt_ids: list[int]
    sampling: SamplingParams
    end_token_ids: frozenset[int]
    deliver: Callable[["Request"], None]
    """Called in the engine thread when the request is finished, cancelled or failed."""
    score_from: int | None = None
    """Score the prompt's tokens from this index on instead of sampling."""
    holder: "Holder"
    completion_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    policy_versions: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    cached_tokens: int = 0
    submitted_at: float = 0.0
    finished_at: float = 0.0


@dataclass(slots=True, eq=False)
class Holder:
    """A conversation's place in the engine: its slot, kept between turns, and whether the engine waits for it."""

    engine: "LocalEngine"
    slot: Slot | None = None
    request: Request | None = None
    closed: bool = False


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
        num_slots: int = 128,
        max_context: int = 1024,
        max_prefill_tokens: int = 8192,
        lockstep: bool = False,
    ) -> None:
        if max_context > max_positions:
            raise ConfigError(
                f"`inference.max_context` is {max_context} but the model has {max_positions} positions; "
                f"set it to {max_positions} or less."
            )
        parameter = next(model.parameters())
        self.model = model
        self.max_context = max_context
        self.max_prefill_tokens = max_prefill_tokens
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
        )
        self._parameters = list(model.parameters())
        self._published_state = self._weight_state()
        self._condition = threading.Condition()
        self._inbox: list[Request] = []
        self._releases: list[Holder] = []
        self._cancels: list[Holder] = []
        self._outside = 0
        """Open sessions that are not waiting for the model; the lockstep barrier waits until there are none."""
        self._waiting: list[tuple[tuple[str | int, ...], int, Request]] = []
        self._arrivals = 0
        self._live: list[Request] = []
        """Requests that are being decoded, in ascending slot order."""
        self._stepping = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rllm-local-engine", daemon=True)
        self._thread.start()

    # ---- called from outside -------------------------------------------------------------------------------------

    def open(self) -> Holder:
        """Begin a conversation. Under lockstep the engine now waits until it asks or closes."""
        with self._condition:
            self._require_running()
            self._outside += 1
        return Holder(self)

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
            self._condition.notify()

    def cancel(self, holder: Holder) -> None:
        """Stop the conversation's request, if it has one; it is delivered as cancelled with what was sampled so far."""
        with self._condition:
            if holder.request is not None:
                self._cancels.append(holder)
                self._condition.notify()

    def close_session(self, holder: Holder) -> None:
        """End a conversation and give its slot back. A request in flight is cancelled."""
        with self._condition:
            if holder.closed:
                return
            holder.closed = True
            if holder.request is not None:
                self._cancels.append(holder)
            else:
                self._outside -= 1
            self._releases.append(holder)
            self._condition.notify()

    def publish(self, policy_version: int) -> None:
        """The weights are now those of `policy_version`. Returns when no step with the old ones is running."""
        with self._stepping:
            self.policy_version = policy_version
            self._published_state = self._weight_state()
            self._cache.forget_everything()

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

    # ---- the engine thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closing and not self._has_work():
                    self._condition.wait()
                if self._closing:
                    break
                self._take_in()
            try:
                with self._stepping, torch.inference_mode():
                    started = time.perf_counter()
                    self._step()
                    self.counts.steps += 1
                    self.counts.busy_s += time.perf_counter() - started
            except Exception as error:  # noqa: BLE001  whatever it is, every waiting request must hear of it
                self._fail_all(error)
        self._fail_all(InferenceError("The engine was closed while requests were in flight."))

    def _has_work(self) -> bool:
        if self._cancels:
            return True
        if self.lockstep and self._outside > 0:
            return False
        return bool(self._inbox or self._live or self._waiting)

    def _take_in(self) -> None:
        """Apply cancellations and releases, then queue new requests in their order. Runs under the condition."""
        for holder in self._cancels:
            if holder.request is not None:
                holder.request.finish_reason = FinishReason.CANCELLED
        self._cancels.clear()
        for request in self._inbox:
            heapq.heappush(self._waiting, (request.order, self._arrivals, request))
            self._arrivals += 1
        self._inbox.clear()
        released = [holder for holder in self._releases if holder.request is None]
        self._releases = [holder for holder in self._releases if holder.request is not None]
        for holder in released:
            if holder.slot is not None:
                self._cache.release(holder.slot)
                holder.slot = None

    def _step(self) -> None:
        self._check_weights()
        self._drop_cancelled()
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
        if self._live:
            self._decode()

    def _check_weights(self) -> None:
        if self._weight_state() != self._published_state:
            raise InferenceError(
                "The model's weights changed without `publish`, so tokens would carry the wrong policy version; "
                "call publish_weights() after every update."
            )

    def _drop_cancelled(self) -> None:
        for request in self._live:
            if request.finish_reason is FinishReason.CANCELLED:
                self._deliver(request)
        self._live = [request for request in self._live if request.holder.request is request]
        if any(entry[2].finish_reason is FinishReason.CANCELLED for entry in self._waiting):
            for entry in self._waiting:
                if entry[2].finish_reason is FinishReason.CANCELLED:
                    self._deliver(entry[2])
            self._waiting = [entry for entry in self._waiting if entry[2].holder.request is entry[2]]
            heapq.heapify(self._waiting)

    def _admit(self) -> list[Request]:
        """Waiting requests that get to run now: those with a slot, and new ones as long as slots and budget last."""
        admitted: list[Request] = []
        postponed: list[tuple[tuple[str | int, ...], int, Request]] = []
        budget = self.max_prefill_tokens
        while self._waiting and budget > 0:
            entry = heapq.heappop(self._waiting)
            request = entry[2]
            if request.holder.slot is None:
                if self._cache.num_free == 0:
                    postponed.append(entry)
                    continue
                request.holder.slot = self._cache.allocate()
            admitted.append(request)
            budget -= max(1, len(request.prompt_ids) - len(request.holder.slot.ids))
        for entry in postponed:
            heapq.heappush(self._waiting, entry)
        return admitted

    def _prefill(self, admitted: Sequence[Request]) -> None:
        """Compute prompts, identical ones once, and sample each request's first token."""
        cache = self._cache
        leaders: dict[tuple[int, ...], Request] = {}
        followers: list[tuple[Request, Request]] = []
        rows: list[Row] = []
        row_of: dict[int, int] = {}
        scored: list[Request] = []
        for request in admitted:
            slot = _slot(request)
            leader = leaders.get(key) if (key := tuple(request.prompt_ids)) in leaders else None
            if leader is not None and request.score_from is None:
                followers.append((leader, request))
                continue
            request.cached_tokens = cache.begin(slot, request.prompt_ids)
            if request.score_from is not None:
                cache.truncate(slot, min(len(slot.ids), request.score_from - 1))
                scored.append(request)
                continue
            leaders[key] = request
            row_of[id(request)] = len(rows)
            rows.append(Row(slot, request.prompt_ids[len(slot.ids) :]))
        for request in scored:
            self._score(request)
        if not rows:
            return
        logits_R_V = prefill(self.model, cache, rows)
        for row in rows:
            cache.register(row.slot)
        copies: dict[int, tuple[Request, list[Slot]]] = {}
        for leader, request in followers:
            copies.setdefault(id(leader), (leader, []))[1].append(_slot(request))
            request.cached_tokens = len(request.prompt_ids)
            row_of[id(request)] = row_of[id(leader)]
        for leader, targets in copies.values():
            cache.copy_prefix(_slot(leader), targets, len(leader.prompt_ids))
        starting = [request for request in admitted if request.score_from is None]
        for request in starting:
            self.counts.prompt_tokens += len(request.prompt_ids)
            self.counts.cached_tokens += request.cached_tokens
        if followers:
            logits_R_V = logits_R_V[[row_of[id(request)] for request in starting]]
        self._append_samples(starting, logits_R_V)
        self._live.extend(request for request in starting if request.finish_reason is None)
        self._live.sort(key=lambda request: _slot(request).index)

    def _decode(self) -> None:
        stale = [request for request in self._live if len(_slot(request).ids) != _context_length(request) - 1]
        if stale:  # a publish emptied the cache under rows in flight: they read their context anew
            rows = [Row(_slot(each), (each.prompt_ids + each.completion_ids)[:-1]) for each in stale]
            prefill(self.model, self._cache, rows)
        slots = [_slot(request) for request in self._live]
        logits_B_V = decode(self.model, self._cache, slots, [each.completion_ids[-1] for each in self._live])
        self._append_samples(self._live, logits_B_V)
        self._live = [request for request in self._live if request.finish_reason is None]

    def _append_samples(self, requests: Sequence[Request], logits_B_V: Tensor) -> None:
        params = [request.sampling for request in requests]
        rows = SamplingRows(
            seeds_B=np.array([each.seed for each in params], dtype=np.uint64),
            positions_B=np.array([len(request.completion_ids) for request in requests], dtype=np.uint64),
            plain=all(each.temperature == 1.0 and each.top_p == 1.0 and each.top_k == 0 for each in params),
            params=params,
        )
        tokens_B, logprobs_B = sample(logits_B_V, rows)
        version = self.policy_version
        self.counts.sampled_tokens += len(requests)
        for request, token, logprob in zip(requests, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            request.completion_ids.append(token)
            request.logprobs.append(logprob)
            request.policy_versions.append(version)
            if token in request.end_token_ids:
                request.finish_reason = FinishReason.STOP
            elif len(request.completion_ids) >= request.sampling.max_tokens or (
                _context_length(request) >= self.max_context
            ):
                request.finish_reason = FinishReason.LENGTH
            if request.finish_reason is not None:
                self._deliver(request)

    def _score(self, request: Request) -> None:
        slot, start = _slot(request), request.score_from or 0
        known = len(slot.ids)
        logits = prefill(self.model, self._cache, [Row(slot, request.prompt_ids[known:])], all_logits=True)
        temperature = request.sampling.temperature or 1.0
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        targets = torch.tensor(request.prompt_ids[start:], device=logits.device)
        predicted_by = torch.arange(
            start - 1 - known, len(request.prompt_ids) - 1 - known, device=logits.device
        )
        request.logprobs = logprobs[predicted_by, targets].tolist()
        request.policy_versions = [self.policy_version] * len(targets)
        request.finish_reason = FinishReason.STOP
        self._deliver(request)

    def _deliver(self, request: Request) -> None:
        request.finished_at = time.perf_counter()
        with self._condition:
            request.holder.request = None
            if not request.holder.closed:
                self._outside += 1
            if request.error is not None:
                self.counts.failed += 1
            elif request.finish_reason is FinishReason.CANCELLED:
                self.counts.cancelled += 1
            else:
                self.counts.finished += 1
        request.deliver(request)

    def _fail_all(self, error: Exception) -> None:
        failure = (
            error if isinstance(error, InferenceError) else InferenceError(f"The engine failed: {error!r}")
        )
        if failure is not error:
            failure.__cause__ = error
        with self._condition:
            pending = [*self._live, *(entry[2] for entry in self._waiting), *self._inbox]
            self._live, self._waiting, self._inbox = [], [], []
        for request in pending:
            if request.holder.request is request:
                request.error = failure
                self._deliver(request)
        self._cache.forget_everything()

    def _weight_state(self) -> int:
        """Changes whenever a parameter is written in place (torch counts the writes)."""
        return sum(parameter._version for parameter in self._parameters)

    def _require_running(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise InferenceError("The engine is closed.")


def _slot(request: Request) -> Slot:
    slot = request.holder.slot
    assert slot is not None, "an admitted request has a slot"
    return slot


def _context_length(request: Request) -> int:
    return len(request.prompt_ids) + len(request.completion_ids)
