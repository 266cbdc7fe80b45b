"""The model client in front of the engine thread: messages in, ModelOutput out, all in one process."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

from rllm.errors import ContextLengthError, InferenceError
from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.requests import Request
from rllm.models.directory import LoadedModel
from rllm.rendering.chat import ChatRenderer, Conversation
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams


class LocalClient:
    """A `ModelClient` on the built-in engine."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_slots: int = 128,
        max_context: int = 1024,
        max_prefill_tokens: int = 8192,
        lockstep: bool = False,
    ) -> None:
        self.loaded = loaded
        self.renderer = ChatRenderer(loaded.tokenizer)
        self.end_token_ids = frozenset(loaded.end_token_ids)
        self.vocab_size: int = loaded.config["vocab_size"]
        self.engine = LocalEngine(
            loaded.model,
            num_layers=loaded.num_layers,
            num_kv_heads=loaded.num_kv_heads,
            head_dim=loaded.head_dim,
            max_positions=loaded.max_positions,
            num_slots=num_slots,
            max_context=max_context,
            max_prefill_tokens=max_prefill_tokens,
            lockstep=lockstep,
        )
        self._mailbox: _Mailbox | None = None

    def session(self, order: tuple[str, int]) -> "LocalSession":
        return LocalSession(self, order)

    async def get_model_response(
        self, messages: Sequence[Message], sampling: SamplingParams = SamplingParams()
    ) -> ModelOutput:
        async with self.session(("", 0)) as session:
            return await session.respond(messages, sampling)

    async def generate_ids(self, prompt_ids: list[int], sampling: SamplingParams) -> ModelOutput:
        """Sample after a prompt given as ids."""
        async with self.session(("", 0)) as session:
            return await session.respond_to_ids(prompt_ids, sampling)

    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        """Log-probabilities of `ids[start:]` under the sampler's weights, through its cache.

        `start` is at least 1, because nothing predicts the first token, and less than the number of ids.
        """
        if not 1 <= start < len(ids):
            raise ValueError(
                f"`start` is {start}; of {len(ids)} ids, those from 1 to {len(ids) - 1} can be scored."
            )
        async with self.session(("", 0)) as session:
            request = await session.run(ids, SamplingParams(temperature=temperature), score_from=start)
        return request.logprobs

    def publish(self, policy_version: int) -> None:
        self.engine.publish(policy_version)

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    def require_readable(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raises ValueError for what would fail inside the engine, where it would fail its neighbours as
        well."""
        if not prompt_ids or not 0 <= min(prompt_ids) <= max(prompt_ids) < self.vocab_size:
            raise ValueError(
                f"The prompt has {len(prompt_ids)} ids"
                f"{f' from {min(prompt_ids)} to {max(prompt_ids)}' if prompt_ids else ''}; "
                f"it needs at least one, and each from 0 to {self.vocab_size - 1}."
            )
        if not 0 <= sampling.seed < 2**64:
            raise ValueError(f"`seed` is {sampling.seed}; it must be from 0 to 2**64 - 1.")

    def mailbox(self) -> "_Mailbox":
        """Where answers for the running event loop arrive."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailbox
        if mailbox is None or mailbox.loop is not loop:
            mailbox = self._mailbox = _Mailbox(loop)
        return mailbox  # not `self._mailbox`: another thread's loop may have come in between

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)


class LocalSession:
    """One conversation: its token ids here, its keys and values in one slot of the engine."""

    def __init__(self, client: LocalClient, order: tuple[str, int]) -> None:
        self.client = client
        self.order = order
        self.conversation = Conversation(renderer=client.renderer)
        self._holder = client.engine.open()
        self._turn = 0

    async def respond(self, messages: Sequence[Message], sampling: SamplingParams) -> ModelOutput:
        output = await self.respond_to_ids(self.conversation.prompt(messages), sampling)
        self.conversation.record(output.completion_ids, output.text)
        return output

    async def respond_to_ids(self, prompt_ids: list[int], sampling: SamplingParams) -> ModelOutput:
        request = await self.run(prompt_ids, sampling)
        text = self.client.loaded.tokenizer.decode(_without_end(request, self.client.end_token_ids))
        assert request.finish_reason is not None, "a delivered request has a finish reason"
        return ModelOutput(
            text=text,
            content=text,
            prompt_ids=request.prompt_ids,
            completion_ids=request.completion_ids,
            logprobs=request.logprobs,
            logprob_meaning=sampling.logprob_meaning,
            temperature=sampling.temperature,
            policy_versions=request.policy_versions,
            finish_reason=request.finish_reason,
            usage={
                "prompt_tokens": len(request.prompt_ids),
                "completion_tokens": len(request.completion_ids),
                "cached_tokens": request.cached_tokens,
            },
            latency_s=request.finished_at - request.submitted_at,
        )

    async def run(
        self, prompt_ids: list[int], sampling: SamplingParams, score_from: int | None = None
    ) -> Request:
        """Send one request and wait for it. Cancelling the waiting task cancels the request."""
        self.client.require_readable(prompt_ids, sampling)
        limit = self.client.engine.max_context
        if len(prompt_ids) + (score_from is None) > limit:
            raise ContextLengthError(
                f"The prompt has {len(prompt_ids)} tokens and the context holds {limit}, so no token fits "
                "behind it; raise `inference.max_context` or end the conversation earlier."
            )
        mailbox = self.client.mailbox()
        answered: asyncio.Future[Request] = mailbox.loop.create_future()
        request = Request(
            order=(*self.order, self._turn),
            prompt_ids=prompt_ids,
            sampling=sampling,
            end_token_ids=self.client.end_token_ids.union(sampling.stop_token_ids),
            deliver=partial(mailbox.put, answered),
            score_from=score_from,
            holder=self._holder,
        )
        self._turn += 1
        self.client.engine.submit(request)
        try:
            await answered
        except asyncio.CancelledError:
            self.client.engine.cancel(request)
            raise
        if request.error is not None:
            raise InferenceError(str(request.error)) from request.error
        return request

    def close(self) -> None:
        self.client.engine.close_session(self._holder)

    async def __aenter__(self) -> "LocalSession":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Mailbox:
    """Answers on their way from the engine's thread to an event loop: one wake-up for all that have
    arrived."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._answers: deque[tuple[asyncio.Future[Request], Request]] = deque()
        self._wake_up_sent = False

    def put(self, answered: "asyncio.Future[Request]", request: Request) -> None:
        self._answers.append((answered, request))
        if self._wake_up_sent:
            return
        self._wake_up_sent = True
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._wake_up_sent = False  # first, so that what arrives from here on sends a wake-up of its own
        while self._answers:
            answered, request = self._answers.popleft()
            if not answered.done():
                answered.set_result(request)


def _without_end(request: Request, end_token_ids: frozenset[int]) -> list[int]:
    if request.finish_reason is FinishReason.STOP and request.completion_ids[-1] in end_token_ids:
        return request.completion_ids[:-1]
    return request.completion_ids
