"""Requests on their way through the engine, and the table of those that are being decoded.

    joining ──► [ column per request: slot, position, seed, tokens left ] ──► one step for all ──► leaving
                                    │
                                    └─► sampled tokens and log-probabilities, by slot; lists only on leaving

Between two steps nothing is built anew as long as nobody joins or leaves: every column moves on by one. Only
requests with a `Watch` are looked at one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.inference.local.cache import KVCache, Shelf, Slot
from rllm.inference.local.forward import DecodeRows
from rllm.inference.local.sampling import SamplingRows, sample
from rllm.inference.local.watch import Watch, WatchedRows
from rllm.types.messages import FinishReason, SamplingParams
from rllm.types.sample import NOT_SAMPLED

_COLUMNS = np.dtype(
    [
        ("slot", np.int64),
        ("position", np.int64),  # where the token that was sampled last goes in the cache
        ("token", np.int64),  # that token
        ("count", np.uint64),  # tokens sampled so far
        ("left", np.int64),  # tokens that may still be sampled
        ("seed", np.uint64),
        ("temperature", np.float64),
        ("truncated", np.bool_),  # sampled with top-k or top-p
    ],
    align=True,
)


@dataclass(kw_only=True, slots=True, eq=False)
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
    watch: Watch | None = None
    """Follows the answer token by token, for requests that want more than its ids."""
    completion_ids: list[int] = field(default_factory=list[int])
    """Filled, like the two below, when the request leaves the engine."""
    logprobs: list[float] = field(default_factory=list[float])
    policy_versions: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    cached_tokens: int = 0
    submitted_at: float = field(init=False)
    began_at: float = 0.0
    """When its prompt was first read."""
    finished_at: float = field(init=False)

    @property
    def context_ids(self) -> list[int]:
        """Tokens to be read before the next one is sampled: the prompt, and what was sampled before the
        request had to give its slot away."""
        return self.prompt_ids + self.completion_ids if self.completion_ids else self.prompt_ids

    @property
    def said_ids(self) -> list[int]:
        """The answer without its end token."""
        ids = self.completion_ids
        return ids[:-1] if ids and ids[-1] in self.end_token_ids else ids

    @property
    def slot(self) -> Slot:
        slot = self.holder.slot
        assert slot is not None, "an admitted request has a slot"
        return slot


@dataclass(slots=True, eq=False)
class Holder:
    """A conversation's place in the engine: its slot, kept between turns, and whether the engine waits for
    it."""

    slot: Slot | None = None
    request: Request | None = None
    one_shot: bool = False
    """A single call: its slot is chosen by what the slot holds, and what the call leaves there is looked for
    by later ones."""
    closed: bool = False
    idle_since: float = 0.0
    """When its last request left the engine, by `time.perf_counter`."""


class LiveRequests:
    """The requests that are being decoded, in ascending slot order, and what each step needs of them."""

    def __init__(self, cache: KVCache) -> None:
        self.requests: list[Request] = []
        self.decoding: DecodeRows | None = None
        """Where the next tokens go, once `place` has said so; None when nothing is decoded."""
        self._cache = cache
        self._rows = np.zeros(0, dtype=_COLUMNS)
        self._sampling = self._sampling_rows()
        self._watched_rows = WatchedRows([])
        self._tokens_S_T = np.zeros((cache.num_indices, cache.max_context), dtype=np.int64)
        self._logprobs_S_T = np.zeros((cache.num_indices, cache.max_context), dtype=np.float32)
        self._end_ids: set[int] = set()
        """End tokens of any request so far."""
        self._may_end_V: NDArray[np.bool_] | None = None

    @property
    def tokens_B(self) -> Tensor | None:
        """The tokens that are read next, one a row."""
        return torch.from_numpy(self._rows["token"]).to(self._cache.device) if self.requests else None

    def join(self, requests: Sequence[Request]) -> None:
        """Add requests whose prompts have been read; they stand at the end until their first token is
        sampled."""
        for end_token_ids in {request.end_token_ids for request in requests}:
            if not end_token_ids <= self._end_ids:
                self._end_ids |= end_token_ids
                self._may_end_V = None
        self.requests = [*self.requests, *requests]
        joining = [self._columns(request) for request in requests]
        self._rows = np.concatenate((self._rows, np.array(joining, dtype=_COLUMNS)))
        self._sampling = self._sampling_rows()
        if self._watched_rows or any(request.watch is not None for request in requests):
            self._watched_rows = WatchedRows([request.watch for request in self.requests])

    def sample(self, logits_B_V: Tensor, policy_version: int) -> list[Request]:
        """Append a token to every answer, and return the requests that are finished by it: they have left."""
        tokens_B, logprobs_B = (values.cpu().numpy() for values in sample(logits_B_V, self._sampling))
        rows = self._rows
        if self._watched_rows:
            self._watched_rows.resample(logits_B_V, tokens_B, logprobs_B, self._sampling)
        # By slot: rows change their places in the batch whenever somebody joins or leaves.
        self._tokens_S_T[rows["slot"], rows["count"]] = tokens_B
        self._logprobs_S_T[rows["slot"], rows["count"]] = logprobs_B
        ended_B = self._has_ended(tokens_B, logits_B_V.shape[1])
        if self._watched_rows:
            self._watched_rows.tell(logits_B_V, self._sampling, tokens_B, logprobs_B, ended_B)
        rows["token"] = tokens_B
        rows["position"] += 1
        rows["count"] += 1
        rows["left"] -= 1
        finished_rows = np.flatnonzero(ended_B | (rows["left"] == 0)).tolist()
        for row in finished_rows:
            self.requests[row].finish_reason = FinishReason.STOP if ended_B[row] else FinishReason.LENGTH
        # Rows that have just joined are put in the order of their slots also where nobody leaves.
        if finished_rows or self.decoding is None or len(rows) > self.decoding.num_rows:
            removed_requests = self._remove(finished_rows, policy_version)
            for request in removed_requests:
                _finish(request)
            return removed_requests
        self.decoding.advance()
        return []

    def only_context(self) -> list[int]:
        """The tokens of the one request that there is, with those sampled so far."""
        request, row = self.requests[0], self._rows[0]
        sampled_ids = self._tokens_S_T[row["slot"], : row["count"]].tolist()
        return request.prompt_ids + sampled_ids

    @property
    def last_token(self) -> int:
        """Sampled last for the first request."""
        return int(self._rows["token"][0])

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled for the first request."""
        return int(self._rows["left"][0])

    def remove_cancelled(self, policy_version: int) -> list[Request]:
        """Requests that were cancelled, with what was sampled for them so far."""
        cancelled_rows = [
            row
            for row, request in enumerate(self.requests)
            if request.finish_reason is FinishReason.CANCELLED
        ]
        return self._remove(cancelled_rows, policy_version) if cancelled_rows else []

    def _columns(self, request: Request) -> tuple[float, ...]:
        sampling, count = request.sampling, len(request.completion_ids)
        num_read = len(request.prompt_ids) + count
        left = max(1, min(sampling.max_tokens - count, self._cache.max_context - num_read))
        is_truncated = bool(sampling.top_k or sampling.top_p < 1.0)
        return (
            request.slot.index,
            num_read - 1,
            # No step reads this token: a row gets its first one from the logits of its prompt.
            0,
            count,
            left,
            sampling.seed,
            sampling.temperature,
            is_truncated,
        )

    def collect(self, policy_version: int) -> None:
        """Hand every request the tokens that were sampled since the last time, which `policy_version`
        wrote."""
        self._collect(range(len(self.requests)), policy_version)

    def _collect(self, rows: Sequence[int], policy_version: int) -> None:
        slots, counts = self._rows["slot"][rows].tolist(), self._rows["count"][rows].tolist()
        for row, slot, count in zip(rows, slots, counts, strict=True):
            request = self.requests[row]
            num_known = len(request.completion_ids)
            request.completion_ids += self._tokens_S_T[slot, num_known:count].tolist()
            request.logprobs += self._logprobs_S_T[slot, num_known:count].tolist()
            request.policy_versions += [policy_version] * (count - num_known)
            if request.watch is not None:
                # The policy did not choose these, so nobody may train on them.
                for place in request.watch.forced_places:
                    request.policy_versions[place] = NOT_SAMPLED

    def _remove(self, leaving: Sequence[int], policy_version: int) -> list[Request]:
        """Take rows out, their answers filled in, and put the others in order."""
        leaving_requests = [self.requests[row] for row in leaving]
        self._collect(leaving, policy_version)
        for request in leaving_requests:
            slot = request.slot
            # The last token was sampled and never read: the cache has no keys of it.
            slot.ids = (request.prompt_ids + request.completion_ids)[:-1]
            if request.holder.one_shot:
                self._cache.register(slot)
        staying_B = np.ones(len(self._rows), dtype=np.bool_)
        staying_B[leaving] = False
        self._keep(np.flatnonzero(staying_B))
        return leaving_requests

    def _keep(self, rows: NDArray[np.int64]) -> None:
        """Go on with these rows alone, in the order of their slots."""
        order = rows[np.argsort(self._rows["slot"][rows], kind="stable")]
        self._rows = self._rows[order]
        self.requests = [self.requests[row] for row in order.tolist()]
        self._sampling = self._sampling_rows()
        if self._watched_rows:
            self._watched_rows = WatchedRows([request.watch for request in self.requests])
        self.decoding = None

    def lengths(self) -> list[int]:
        """Places that the slot of each request needs for the next step."""
        return (self._rows["position"] + 1).tolist()

    def longest(self) -> list[tuple[Shelf, int]]:
        """The same, the most of each shelf."""
        shelves, lengths_B = self._cache.shelves, self._rows["position"] + 1
        if not self.requests:
            return []
        if len(shelves) == 1:
            return [(shelves[0], int(lengths_B.max()))]
        shelf_B = self._rows["slot"] // self._cache.num_slots
        return [(shelves[each], int(lengths_B[shelf_B == each].max())) for each in np.unique(shelf_B)]

    def place(self) -> None:
        """Begin to decode the rows as they are, after some have joined or left."""
        if self.decoding is None and self.requests:
            slots = [request.slot for request in self.requests]
            self.decoding = DecodeRows(self._cache, slots, self._rows["position"])

    def renew_places(self) -> None:
        """Slots have other places now; `collect` was called before."""
        self._rows["slot"] = [request.slot.index for request in self.requests]
        self._keep(np.arange(len(self._rows)))

    def give_back(self, request: Request, policy_version: int) -> None:
        """Take out a request that goes on later: it takes along what was sampled for it."""
        self._remove([self.requests.index(request)], policy_version)

    def _has_ended(self, tokens_B: NDArray[np.int64], vocab_size: int) -> NDArray[np.bool_]:
        """[B] whether the token ends its answer.

        Few tokens are anybody's end token, so only those are looked at closely.
        """
        if self._may_end_V is None:
            self._may_end_V = np.zeros(vocab_size, dtype=np.bool_)
            self._may_end_V[[token for token in self._end_ids if 0 <= token < vocab_size]] = True
        ended_B = self._may_end_V[tokens_B]
        for row in np.flatnonzero(ended_B).tolist():
            ended_B[row] = int(tokens_B[row]) in self.requests[row].end_token_ids
        return ended_B

    def _sampling_rows(self) -> SamplingRows:
        # Views of the table's columns, so that the positions move on with `count`.
        return SamplingRows(
            seeds_B=self._rows["seed"],
            positions_B=self._rows["count"],
            temperatures_B=self._rows["temperature"],
            truncated_B=self._rows["truncated"],
            params=[request.sampling for request in self.requests],
        )


def _finish(request: Request) -> None:
    """Record the end of a request's answer from its watch."""
    watch = request.watch
    if watch is None:
        return
    watch.finish(request.said_ids)
    if watch.error is not None:
        request.error, request.finish_reason = watch.error, FinishReason.ERROR
    elif watch.stop_sequence is not None:
        request.finish_reason = FinishReason.STOP
