"""The model client in front of the engine thread: messages in, ModelOutput out, all in one process."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

from rllm.errors import ContextLengthError, InferenceError
from rllm.inference.client import ModelClient, TokenPiece
from rllm.inference.local.engine import LocalEngine
from rllm.inference.local.grammar import Grammars, GrammarState
from rllm.inference.local.requests import Request
from rllm.inference.local.thoughts import ThoughtLimit
from rllm.inference.local.watch import Listener, Watch
from rllm.inference.token_session import TokenSession
from rllm.models.directory import LoadedModel
from rllm.rendering.chat import ChatRenderer, Conversation
from rllm.rendering.images import IMAGES, ImageReader
from rllm.types.images import PATCH_IDS_FROM, image_numbers, image_runs
from rllm.types.messages import FinishReason, ModelOutput, SamplingParams

OnPiece = Callable[[TokenPiece], None]


class LocalClient(ModelClient):
    """A `ModelClient` and a `TokenClient` on the built-in engine."""

    is_built_in: ClassVar[bool] = True
    """It answers in this process: no call is given up because others are before it."""

    def __init__(
        self,
        loaded_model: LoadedModel,
        *,
        num_slots: int = 128,
        max_context: int = 1024,
        max_prefill_tokens: int = 8192,
        cache_tokens: int = 0,
        num_drafts: int = 0,
        lockstep: bool = False,
    ) -> None:
        self.loaded_model = loaded_model
        self.renderer = ChatRenderer(loaded_model.tokenizer)
        self.end_token_ids = frozenset(loaded_model.end_token_ids)
        self.vocab_size: int = loaded_model.vocab_size
        self.engine = LocalEngine(
            loaded_model.model,
            num_layers=loaded_model.num_layers,
            num_kv_heads=loaded_model.num_kv_heads,
            head_dim=loaded_model.head_dim,
            max_positions=loaded_model.max_positions,
            num_slots=num_slots,
            max_context=max_context,
            max_prefill_tokens=max_prefill_tokens,
            cache_tokens=cache_tokens,
            num_drafts=num_drafts,
            lockstep=lockstep,
        )
        self._mailbox: _Mailbox | None = None
        self._grammars = Grammars(loaded_model.directory, self.vocab_size, loaded_model.end_token_ids)
        self._is_special: dict[int, bool] = {}

    def session(self, order: tuple[str, int]) -> "LocalSession":
        return LocalSession(self, order)

    async def generate_ids(
        self, prompt_ids: list[int], sampling: SamplingParams, *, on_piece: OnPiece | None = None
    ) -> ModelOutput:
        """See `TokenClient`. Raises ValueError for a grammar that does not compile."""
        async with LocalSession(self, ("", 0), one_shot=True) as session:
            return await session.respond_to_ids(prompt_ids, sampling, on_piece)

    async def can_follow(self, grammar: str) -> bool:
        """Whether answers can be sampled by this grammar."""
        try:
            await self._grammars.begin(grammar)
        except ValueError:
            return False
        return True

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

    def publish(self, policy_version: int, write: Callable[[], None] | None = None) -> None:
        self.engine.publish(policy_version, write)

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    @property
    def max_context(self) -> int:
        return self.engine.max_context

    async def watch(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, listener: Listener | None
    ) -> Watch | None:
        """A watch of an answer of which more than its ids is needed; None for others."""
        limit = self.loaded_model.max_thinking_tokens
        if listener is None and not (limit or sampling.stop or sampling.top_logprobs or sampling.grammar):
            return None
        grammar: GrammarState | ThoughtLimit | None = None
        if sampling.grammar:
            grammar = await self._grammars.begin(sampling.grammar, sampling.stop_token_ids)
        if limit:
            tokenizer = self.loaded_model.tokenizer
            grammar = ThoughtLimit(limit, tokenizer, prompt_ids, grammar, self.vocab_size)
        return Watch(
            sampling,
            decode=self.loaded_model.tokenizer.decode,
            is_special=self.is_special,
            listener=listener,
            grammar=grammar,
        )

    def is_special(self, token: int) -> bool:
        """Whether a token is left out of text, such as an end token."""
        cached_answer = self._is_special.get(token)
        if cached_answer is None:
            tokenizer = self.loaded_model.tokenizer
            cached_answer = self._is_special[token] = not tokenizer.decode([token]) and bool(
                tokenizer.token_text(token)
            )
        return cached_answer

    def require_readable(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raises ValueError for what would fail inside the engine, where it would fail its neighbours as
        well."""
        if (images := self.loaded_model.tokenizer.images) is not None:
            of_images = {
                each for number in image_numbers(prompt_ids) for each in images.ids(IMAGES.get(number))
            }
            unknown = (each for each in prompt_ids if each >= PATCH_IDS_FROM and each not in of_images)
            if (token := next(unknown, None)) is not None:
                raise ValueError(f"The prompt has the id {token}, which is no token of an image.")
            if self.loaded_model.model.sees_images_whole:
                _require_whole_images(prompt_ids, images)
            prompt_ids = [each for each in prompt_ids if each < PATCH_IDS_FROM]
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
        self._grammars.close()


def _require_whole_images(prompt_ids: Sequence[int], reader: ImageReader) -> None:
    for place, count in image_runs(prompt_ids):
        (number,) = image_numbers([prompt_ids[place]])
        patches = [each for each in reader.ids(IMAGES.get(number)) if each >= PATCH_IDS_FROM]
        if list(prompt_ids[place : place + count]) != patches:
            raise ValueError(
                f"The prompt has {count} of the {len(patches)} tokens of an image at token {place}; for this "
                "model they see each other, so send all of them in their order."
            )


class LocalSession(TokenSession):
    """One conversation: its token ids here, its keys and values in one slot of the engine."""

    def __init__(self, client: LocalClient, order: tuple[str, int], *, one_shot: bool = False) -> None:
        self.client = client
        self.order = order
        self.conversation = Conversation(renderer=client.renderer)
        # From here on lockstep waits for this session, also while its grammar is compiled.
        self._holder = client.engine.open(one_shot=one_shot)
        self._turn = 0

    async def respond_to_ids(
        self, prompt_ids: list[int], sampling: SamplingParams, on_piece: OnPiece | None = None
    ) -> ModelOutput:
        request = await self.run(prompt_ids, sampling, on_piece=on_piece)
        watch = request.watch
        text = watch.text if watch is not None else None
        if text is None:
            text = self.client.loaded_model.tokenizer.decode(request.said_ids)
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
            top_logprobs=watch.top_logprobs if watch is not None else [],
            stop_sequence=watch.stop_sequence if watch is not None else None,
            finish_reason=request.finish_reason,
            has_cut_thought=self._has_cut_thought(request),
            usage={
                "prompt_tokens": len(request.prompt_ids),
                "completion_tokens": len(request.completion_ids),
                "cached_tokens": request.cached_tokens,
            },
            latency_s=request.finished_at - request.submitted_at,
            queue_s=request.began_at - request.submitted_at,
        )

    def _has_cut_thought(self, request: Request) -> bool:
        """Whether the thought of an answer was closed for the model, or ended with the room for it."""
        limit = request.watch.grammar if request.watch is not None else None
        if isinstance(limit, ThoughtLimit) and limit.has_cut:
            return True
        is_cut = request.finish_reason is FinishReason.LENGTH
        tokenizer = self.client.loaded_model.tokenizer
        return is_cut and tokenizer.ends_in_thought([*request.prompt_ids, *request.completion_ids])

    async def run(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        score_from: int | None = None,
        on_piece: OnPiece | None = None,
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
        answer: asyncio.Future[None] = mailbox.loop.create_future()
        reader = _Reader(answer, on_piece)
        listener = Listener(partial(mailbox.put, reader), mailbox.wake) if on_piece else None
        is_answer = score_from is None
        watch = await self.client.watch(prompt_ids, sampling, listener) if is_answer else None
        request = Request(
            order=(*self.order, self._turn),
            prompt_ids=prompt_ids,
            sampling=sampling,
            end_token_ids=self.client.end_token_ids.union(sampling.stop_token_ids),
            deliver=partial(mailbox.deliver, reader),
            score_from=score_from,
            holder=self._holder,
            watch=watch,
        )
        self._turn += 1
        self.client.engine.submit(request)
        try:
            await answer
        except (asyncio.CancelledError, Exception):  # the latter from `on_piece`
            self.client.engine.cancel(request)
            raise
        if request.error is not None:
            raise InferenceError(str(request.error)) from request.error
        return request

    def close(self) -> None:
        self.client.engine.close_session(self._holder)


class _Reader:
    """The waiter for an answer, which may listen to its pieces."""

    __slots__ = ("_on_piece", "_piece", "answer")

    def __init__(self, answer: "asyncio.Future[None]", on_piece: OnPiece | None) -> None:
        self.answer = answer
        self._on_piece = on_piece
        self._piece: TokenPiece | None = None
        """The text and tokens since `tell`."""

    def hear(self, piece: TokenPiece) -> bool:
        """Add a piece to what is told next, and say whether it is the first."""
        last_piece = self._piece
        if last_piece is None:
            self._piece = piece
            return True
        last_piece.text += piece.text
        last_piece.token_ids += piece.token_ids
        last_piece.logprobs += piece.logprobs
        last_piece.top_logprobs += piece.top_logprobs
        return False

    def tell(self) -> None:
        piece, self._piece = self._piece, None
        if piece is None or self._on_piece is None or self.answer.done():
            return
        try:
            self._on_piece(piece)
        except Exception as error:  # noqa: BLE001  it is the caller's own and ends the caller's call
            self.answer.set_exception(error)


class _Mailbox:
    """Answers, and pieces of them, on their way from the engine's thread to an event loop: one wake-up for
    all that have arrived, and one piece for all that an answer gained meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrivals: deque[tuple[_Reader, Request | TokenPiece]] = deque()
        self._wake_up_sent = False

    def put(self, reader: _Reader, what: Request | TokenPiece) -> None:
        """Add what is fetched at the next wake-up."""
        self._arrivals.append((reader, what))

    def deliver(self, reader: _Reader, request: Request) -> None:
        self.put(reader, request)
        self.wake()

    def wake(self) -> None:
        if self._wake_up_sent or not self._arrivals:
            return
        # Before the call: the event loop may run `_empty`, which takes it back, at once.
        self._wake_up_sent = True
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._wake_up_sent = False  # first, so that what arrives from here on sends a wake-up of its own
        listening: list[_Reader] = []
        # What arrives meanwhile is fetched at its own wake-up, so that the event loop gets to others.
        for _ in range(len(self._arrivals)):
            reader, what = self._arrivals.popleft()
            if isinstance(what, TokenPiece):
                if reader.hear(what):
                    listening.append(reader)
                continue
            # The last pieces go first, because nobody hears them once the answer is there.
            reader.tell()
            if not reader.answer.done():
                # Not the request: it knows its reader, and such a circle, with the state of its grammar,
                # would wait for the garbage collector, which a server runs seldom.
                reader.answer.set_result(None)
        for reader in listening:
            reader.tell()
