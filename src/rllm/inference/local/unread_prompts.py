"""The prompts of admitted requests that the engine has not read to their end.

requests ──► add: equal prompts once, without what the cache holds ──► next_rows: as many tokens as a step
may read, the first prompts first ──► forward pass ──► advance: whole prompts leave, with their requests
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rllm.inference.local.cache import KVCache
from rllm.inference.local.forward import PromptRow
from rllm.inference.local.requests import Request
from rllm.types.images import image_runs
from rllm.types.messages import FinishReason


@dataclass(kw_only=True, slots=True)
class UnreadPrompt:
    """A prompt that is being read into the slot of its first request; the others get a copy of it."""

    rest: list[int]
    """The tokens that have not been read yet."""
    requests: list[Request] = field(default_factory=list[Request])


class UnreadPrompts:
    """The unread prompts of one engine, in the order in which they are read."""

    def __init__(self, cache: KVCache, max_prefill_tokens: int, *, whole_images: bool) -> None:
        """`whole_images`: the model sees all tokens of an image at once, so an image is never cut."""
        self.prompts: list[UnreadPrompt] = []
        self._cache = cache
        self._max_prefill_tokens = max_prefill_tokens
        self._whole_images = whole_images
        self._new_prompts: dict[tuple[int, ...], UnreadPrompt] = {}
        """Prompts of this step by their tokens: nothing of them has been read, so they can be shared."""

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt.rest) for prompt in self.prompts)

    @property
    def requests(self) -> list[Request]:
        return [request for prompt in self.prompts for request in prompt.requests]

    def add(self, request: Request) -> int:
        """Read the context of a request, which has a slot; how many tokens of it need not be read, because
        the cache holds them or another request of this step reads the same."""
        context_ids = request.context_ids
        key = tuple(context_ids)
        prompt = self._new_prompts.get(key)
        num_known = len(context_ids)
        if prompt is None:
            num_known = self._cache.begin(request.slot, context_ids, exactly=request.holder.one_shot)
            prompt = self._new_prompts[key] = UnreadPrompt(rest=context_ids[num_known:])
            self.prompts.append(prompt)
        prompt.requests.append(request)
        return num_known

    def next_rows(self) -> list[PromptRow]:
        """Parts of the prompts that this step reads: prompts that are longer than the budget of a step are
        cut, so that nobody who is being answered waits for all of one."""
        self._new_prompts.clear()
        rows: list[PromptRow] = []
        budget = self._max_prefill_tokens
        for prompt in self.prompts:
            if budget <= 0:
                break
            rows.append(PromptRow(prompt.requests[0].slot, prompt.rest[: self._piece(prompt.rest)]))
            budget -= len(rows[-1].new_ids)
        return rows

    def _piece(self, rest: list[int]) -> int:
        """The number of tokens of a prompt that a step reads.

        An image that the model sees whole is read at once, however long it is. What a slot knows of a prompt
        may end within one all the same: those tokens had seen the others of it when they were read.
        """
        limit = self._max_prefill_tokens
        if self._whole_images and limit < len(rest):
            for first, count in image_runs(rest):
                if first < limit < first + count:
                    return first or count
        return limit

    def advance(self, rows: Sequence[PromptRow]) -> list[tuple[int, list[Request]]]:
        """`rows`, of `next_rows`, have been read. Of each prompt that has no rest: (number of its row, its
        requests, all of which have the keys and values in their slots)."""
        whole_prompts: list[tuple[int, list[Request]]] = []
        # `next_rows` gave a row for each of the first prompts, in their order.
        for number, (row, prompt) in enumerate(zip(rows, self.prompts, strict=False)):
            del prompt.rest[: len(row.new_ids)]
            if prompt.rest:
                continue
            # After the pass that read them: whoever finds blocks in the index copies their keys at once.
            self._cache.register(row.slot)
            twins = [request.slot for request in prompt.requests if request.slot is not row.slot]
            if twins:
                self._cache.copy_prefix(row.slot, twins, len(row.slot.ids))
            whole_prompts.append((number, prompt.requests))
        return whole_prompts

    def drop_whole(self) -> None:
        """Take out the prompts that have been read to their end."""
        self.prompts = [prompt for prompt in self.prompts if prompt.rest]

    def drop_all(self) -> None:
        self.prompts = []
        self._new_prompts.clear()

    def restart(self) -> None:
        """Read all prompts from their beginning: the cache was emptied."""
        for prompt in self.prompts:
            prompt.rest = list(prompt.requests[0].context_ids)

    def drop_cancelled(self) -> list[Request]:
        """Take out the requests that were cancelled."""
        # A prompt that was cut has one request: the budget was used up before it could be shared.
        cancelled_prompts = [prompt for prompt in self.prompts if _is_cancelled(prompt.requests[0])]
        self.prompts = [prompt for prompt in self.prompts if not _is_cancelled(prompt.requests[0])]
        return [request for prompt in cancelled_prompts for request in prompt.requests]


def _is_cancelled(request: Request) -> bool:
    return request.finish_reason is FinishReason.CANCELLED
