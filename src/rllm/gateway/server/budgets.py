"""The part of its budget that a session has used: what may begin, and what it may still sample.

    call ──admit──► waits while calls on their way hold all that is left ──► 403 turns_budget_exhausted, or
                    CallShare(tokens, seconds) ──► sampled ──settle──► spent

A call reserves a turn and as many tokens as its answer may have, so calls side by side do not pass a limit
together either. What it costs is known once it is answered: the call that reaches the limit is the last one.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from rllm.errors import RequestRefused
from rllm.types.call_budget import CallBudget, exhausted_code
from rllm.types.wire import Answer, CallRecord, CallRequest, CallStatus


@dataclass(kw_only=True, slots=True, frozen=True)
class CallShare:
    """The share of a budget that one call may take; None is no limit."""

    tokens: int | None = None
    """The tokens of all its choices together."""
    seconds: float | None = None


class SessionBudget:
    """The budget of one session, from its opening on."""

    def __init__(self, limits: CallBudget, history: Iterable[CallRecord] = ()) -> None:
        """`history`: what the ledger has of the session, where it was open before."""
        self.limits = limits
        self.turns = 0
        self.tokens = 0
        self.cost = 0.0
        self._reserved_turns = 0
        self._reserved_tokens = 0
        self._is_settled = asyncio.Condition()
        began_at = time.time()
        calls: dict[str, list[CallRecord]] = {}
        for record in history:
            began_at = min(began_at, record.started_at or began_at)
            if record.status is not CallStatus.ERROR:
                calls.setdefault(record.id, []).append(record)
        for records in calls.values():
            self._spend(records[0].usage, [len(each.completion_ids) for each in records])
        # Records have unix times. From here on the monotonic clock counts, which nobody sets.
        self._began_s = time.monotonic() - (time.time() - began_at)

    async def admit(self, request: CallRequest, max_tokens: int | None) -> CallShare:
        """Reserve the share that the call may take, until `settle`. `max_tokens`: the call's own limit for
        one answer.

        Raises RequestRefused (403) when a limit is reached.
        """
        async with self._is_settled:
            while True:
                self._require_something_left()
                turns_left, tokens_left = self._free()
                # Every choice needs a token, or it would be asked for an answer of none.
                enough_tokens = tokens_left is None or tokens_left >= request.n
                if (turns_left is None or turns_left > 0) and enough_tokens:
                    break
                await self._is_settled.wait()  # somebody holds the rest, and may give some of it back
            request_tokens = None if max_tokens is None else max_tokens * request.n
            tokens = (
                tokens_left
                if request_tokens is None or tokens_left is None
                else min(request_tokens, tokens_left)
            )
            self._reserved_turns += 1
            self._reserved_tokens += tokens or 0
        return CallShare(tokens=tokens, seconds=self._seconds_left())

    async def settle(self, share: CallShare, answer: Answer | None) -> None:
        """The call has ended: with an answer, whole or in part, or with none."""
        async with self._is_settled:
            self._reserved_turns -= 1
            self._reserved_tokens -= share.tokens or 0
            if answer is not None:
                self._spend(answer.usage, [len(each.completion_ids) for each in answer.choices])
            self._is_settled.notify_all()

    def refusal(self, limit: str) -> RequestRefused:
        use = time.monotonic() - self._began_s if limit == "seconds" else getattr(self, limit)
        amount = f"{use:.6g} of {getattr(self.limits, limit):g}"
        return RequestRefused(
            f"The budget of this session is used up ({limit}: {amount}); no call is answered any more.",
            status=403,
            kind="permission_error",
            code=exhausted_code(limit),
        )

    def _require_something_left(self) -> None:
        limits = self.limits
        for limit in ("turns", "tokens", "cost"):
            if 0 < getattr(limits, limit) <= getattr(self, limit):
                raise self.refusal(limit)
        if (seconds := self._seconds_left()) is not None and seconds <= 0:
            raise self.refusal("seconds")

    def _free(self) -> tuple[int | None, int | None]:
        """(turns, tokens) that nobody has used or reserved."""
        limits = self.limits
        turns = limits.turns - self.turns - self._reserved_turns if limits.turns else None
        tokens = limits.tokens - self.tokens - self._reserved_tokens if limits.tokens else None
        return turns, tokens

    def _seconds_left(self) -> float | None:
        return self._began_s + self.limits.seconds - time.monotonic() if self.limits.seconds else None

    def _spend(self, usage: dict[str, int], choice_tokens: Iterable[int]) -> None:
        # Some servers give no ids, some no usage, and an answer that broke off has at most its ids.
        num_sampled = max(usage.get("completion_tokens", 0), sum(choice_tokens))
        self.turns += 1
        self.tokens += num_sampled
        self.cost += self.limits.cost_of(usage.get("prompt_tokens", 0), num_sampled)
