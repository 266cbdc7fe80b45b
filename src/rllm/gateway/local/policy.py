"""Model calls answered by a client that is given ids and gives ids, such as the built-in engine.

    CallRequest ──► conversation tree ──► prompt ids ──► TokenClient ──► ids, log-probabilities ──► Answer
                        ▲   the ids already seen, and what is new          │ text ──► tool format ──► pieces
                        └───────────────── record ◄────────────────────────┘

A session's next prompt is made by appending to the ids already seen. Whatever the request asks for is
enforced while sampling or refused with a 400: nothing is taken and then ignored.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rllm.errors import (
    ConfigError,
    ContextLengthError,
    InferenceError,
    MissingExtraError,
    PartialAnswer,
    RequestRefused,
)
from rllm.gateway.dialects.openai_fields import require_no_seed
from rllm.gateway.local.call import ChoiceStream, LocalCall, SessionState, digest_of
from rllm.gateway.local.token_requests import (
    TEMPLATE_VARIABLES,
    grammar_of,
    num_chars,
    reader_of,
    require_answerable,
    require_may_fit,
    template_variables,
)
from rllm.gateway.offload import OffLoop
from rllm.inference.client import TokenClient, max_prompt_chars
from rllm.rendering.chat import ChatRenderer
from rllm.rendering.conversations import Turn
from rllm.rendering.images import MAX_REQUEST_BYTES
from rllm.rendering.tools import ToolFormat
from rllm.types.content import source_of
from rllm.types.draws import draw_seed
from rllm.types.messages import Message, ModelOutput, SamplingParams
from rllm.types.wire import (
    Answer,
    CallRequest,
    Choice,
    Emit,
    Piece,
    PolicySession,
    completion_id,
    unix_time,
)

_SESSION_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")
_STATE = "local"
_SHORT_CHARS = 8 << 10
"""The length of a conversation that is rendered and encoded in a few milliseconds."""
_MAX_RENDERERS = 16
_ESCAPED_CHAR_BYTES = 6
_OTHER_FIELDS_BYTES = 1 << 20
_HISTORY = _SHORT_CHARS + 1
"""Stands for the size of a session that may have calls in the ledger, however short its next one is."""


class RemoteImages(Protocol):
    """Puts images in the place of their addresses, as `rllm.models.vision.fetch.ImageFetcher` does."""

    async def inline_soon(self, messages: Sequence[Message], scope: str) -> list[Message]:
        """Raises ConfigError for an image that is refused, or cannot be had."""
        ...

    def close(self) -> None: ...


class LocalPolicy:
    """Implements `rllm.types.wire.Policy`.

    Any model name is answered by the one model there is, so that programs with a name written into them run
    unchanged; the answer carries the name that was asked for. `sends_seeds=False` is for a client whose
    server chooses its draws itself: a request that names a seed is refused, and no trace tells one. Images at
    addresses are refused, unless there is a `fetcher`, which the policy closes: then a request has the images
    themselves from there on, also on record.
    """

    def __init__(
        self,
        client: TokenClient,
        model: str,
        *,
        sends_seeds: bool = True,
        fetcher: RemoteImages | None = None,
    ) -> None:
        self.client = client
        self.model = model
        self._sends_seeds = sends_seeds
        self._fetcher = fetcher
        self._in_flight = 0
        self._renderers: dict[str, ChatRenderer] = {}
        """By the variables for the chat template, as JSON."""
        # A chat template is rendered in another process, which is waited for: not by the event loop.
        self._small, self._large = OffLoop("prompts"), OffLoop("large-prompts")

    @property
    def max_chars(self) -> int:
        """The greatest length of a conversation in characters: more would not fit into the context."""
        return max_prompt_chars(self.client.renderer, self.client.max_context)

    @property
    def max_body_bytes(self) -> int:
        """A longer body holds more text than the context, however its JSON spells it; images have room
        beside it."""
        text_bytes = _ESCAPED_CHAR_BYTES * self.max_chars + _OTHER_FIELDS_BYTES
        return text_bytes + (MAX_REQUEST_BYTES if self._reads_images else 0)

    @property
    def _reads_images(self) -> bool:
        return self.client.renderer.tokenizer.images is not None

    async def start(self) -> None:
        """The client runs already."""

    async def close(self) -> None:
        """The client stays open: it belongs to whoever made it."""
        self._small.close()
        self._large.close()
        if self._fetcher is not None:
            self._fetcher.close()

    def models(self) -> list[str]:
        return [self.model]

    def health(self) -> dict[str, Any]:
        return {
            "healthy": True,
            "in_flight": self._in_flight,
            "queued": 0,
            "policy_versions": [self.client.policy_version],
        }

    async def count_tokens(self, request: CallRequest) -> int:
        await self._fetch_images(request, "")
        return len(await self._thread_for(self._size_of(request)).run(self._render, request))

    async def answer(self, request: CallRequest, session: PolicySession, emit: Emit | None = None) -> Answer:
        chars = self._size_of(request)
        await self._fetch_images(request, session.id)
        state = self._state_of(session)
        async with state.lock:
            thread = self._thread_for(chars if state.is_restored else _HISTORY)
            call = await thread.run(self._prepare, request, session, state)
        number = state.draw_numbers.take(call.digest)
        call.samplings = [
            replace(sampling, seed=_seed(request, session.seed, call.digest, number, index))
            for index, sampling in enumerate(call.samplings)
        ]
        self._in_flight += 1
        try:
            return await self._answer(call, state, emit)
        except BaseException:
            state.draw_numbers.give_back(call.digest, number)
            raise
        finally:
            self._in_flight -= 1

    async def _answer(self, call: LocalCall, state: SessionState, emit: Emit | None) -> Answer:
        # Without the lock: calls of one session sample side by side. Only reading and changing its
        # conversations goes one after the other.
        outputs = await self._sample(call, emit)
        if call.turn is not None:
            async with state.lock:
                # Recorded once all of it is whole: a call that failed leaves no answer that a later prompt
                # could go on from.
                for choice in call.answer.choices:
                    call.tree.record(call.turn, choice.completion_ids, choice.message())
        prompt_tokens = len(call.prompt_ids)
        call.answer.usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sum(len(output.completion_ids) for output in outputs),
            "cached_tokens": max(output.usage.get("cached_tokens", 0) for output in outputs),
        }
        return call.answer

    # ---- before sampling -----------------------------------------------------------------------------------

    def _size_of(self, request: CallRequest) -> int:
        """Characters. Raises RequestRefused for more than any context could hold."""
        chars = num_chars(request)
        require_may_fit(chars, self.max_chars, self.client.max_context)
        return chars

    async def _fetch_images(self, request: CallRequest, scope: str) -> None:
        """Have the images themselves in the request, so that whoever reads its record fetches nothing."""
        if self._fetcher is None:
            return
        try:
            messages = await self._fetcher.inline_soon(request.messages, scope)
        except ConfigError as error:
            raise RequestRefused(str(error), param="messages", code="invalid_image_url") from error
        if messages != request.messages:  # what is large is worked on off the event loop from here on
            request.messages, request.num_bytes = messages, request.num_bytes + _num_image_bytes(messages)

    def _thread_for(self, chars: int) -> OffLoop:
        """Short prompts do not wait for long ones."""
        return self._small if chars <= _SHORT_CHARS else self._large

    def _prepare(self, request: CallRequest, session: PolicySession, state: SessionState) -> LocalCall:
        """In a thread, while `state.lock` is held."""
        require_answerable(request, reads_images=self._reads_images)
        if not self._sends_seeds:
            require_no_seed(request)
        if not state.is_restored:
            for record in session.history():
                state.replay(record, self._renderer_for)
            state.is_restored = True
        variables = template_variables(request)
        try:
            renderer = self._renderer_for(variables)
        except ConfigError as error:
            raise RequestRefused(str(error), param=TEMPLATE_VARIABLES) from error
        tree = state.tree_for(renderer, variables)
        tool_format = self._tool_format_for(request, renderer)
        plain_format = renderer.plain_format
        try:
            grammar = grammar_of(request, tool_format, plain_format)
        except ConfigError as error:
            raise RequestRefused(str(error), param="tools") from error
        turn: Turn | None = None
        try:
            if request.prompt is None:
                turn = tree.begin(request.messages, request.tools)
                prompt_ids = turn.prompt_ids
            else:
                prompt_ids = self._render(request)
        except ConfigError as error:  # the chat template refuses the conversation
            raise RequestRefused(str(error), param="messages") from error
        sampling = self._sampling(request, session, prompt_ids, grammar)
        return LocalCall(
            request=request,
            tree=tree,
            turn=turn,
            prompt_ids=prompt_ids,
            digest=digest_of(prompt_ids),
            samplings=[sampling] * request.n,
            sends_seeds=self._sends_seeds,
            reader=reader_of(request, tool_format, plain_format),
            tokenizer_text=self._token_text,
            answer=Answer(
                id=completion_id(request.dialect), model=request.model or self.model, created=unix_time()
            ),
        )

    def _state_of(self, session: PolicySession) -> SessionState:
        state = session.state.get(_STATE)
        if state is None:
            state = session.state[_STATE] = SessionState()
        return state

    def _render(self, request: CallRequest) -> list[int]:
        if isinstance(request.prompt, list):
            return list(request.prompt)
        renderer = self._renderer_for(template_variables(request))
        if request.prompt is not None:
            return renderer.completion_ids(request.prompt)
        require_answerable(request, reads_images=self._reads_images)
        return renderer.render(request.messages, request.tools)

    def _renderer_for(self, variables: Mapping[str, Any]) -> ChatRenderer:
        """Raises ConfigError for variables that the template cannot be given."""
        if not variables:
            return self.client.renderer
        key = json.dumps(variables, sort_keys=True)
        renderer = self._renderers.get(key)
        if renderer is None:
            tokenizer = self.client.renderer.tokenizer.with_template_variables(variables)
            renderer = self._renderers[key] = ChatRenderer(tokenizer)
            while len(self._renderers) > _MAX_RENDERERS:
                self._renderers.pop(next(iter(self._renderers)), None)
        return renderer

    def _tool_format_for(self, request: CallRequest, renderer: ChatRenderer) -> ToolFormat | None:
        if not request.tools:
            return None
        tool_format = renderer.tool_format
        if tool_format is None:
            raise RequestRefused(
                f"`tools` has {len(request.tools)} tools, but the chat template of {self.model} does not "
                "know tools; send none, or serve a model whose template does.",
                param="tools",
                code="tools_not_supported",
            )
        return tool_format

    def _sampling(
        self, request: CallRequest, session: PolicySession, prompt_ids: Sequence[int], grammar: str
    ) -> SamplingParams:
        room = self.client.max_context - len(prompt_ids)
        if room < 1:
            raise RequestRefused(
                f"The prompt has {len(prompt_ids)} tokens and the context of {self.model} holds "
                f"{self.client.max_context}, so no token fits behind it; send a shorter conversation.",
                param="messages" if request.prompt is None else "prompt",
                code="context_length_exceeded",
            )
        settings = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "max_tokens": request.max_tokens,
        }
        settings |= {name: session.sampling[name] for name in _SESSION_SAMPLING if name in session.sampling}
        params = {name: value for name, value in settings.items() if value is not None}
        if request.tokens_left is not None:
            # Even shares, since all choices are sampled at the same time and none knows how long the others
            # get.
            room = min(room, request.tokens_left // request.n)
        params["max_tokens"] = min(params.get("max_tokens", room), room)
        try:
            sampling = SamplingParams(
                **params,
                stop=tuple(request.stop),
                top_logprobs=request.top_logprobs if request.logprobs else 0,
                grammar=grammar,
            )
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        return sampling if request.prompt is not None else self.client.renderer.with_stops(sampling)

    # ---- sampling ------------------------------------------------------------------------------------------

    async def _sample(self, call: LocalCall, emit: Emit | None) -> list[ModelOutput]:
        """Every choice at the same time. When one fails, the others are stopped."""
        start_s = time.perf_counter()
        call.answer.choices = [
            Choice(index=index, prompt_ids=call.prompt_ids) for index in range(call.request.n)
        ]
        if call.turn is not None:
            for choice in call.answer.choices:
                choice.conversation = call.turn.conversation
                choice.segment = call.turn.segment
                choice.segment_reason = str(call.turn.reason)
        if emit is None:
            return await _all_of([self._one(call, index, None) for index in range(call.request.n)])
        # The engine never waits for a client: what a slow reader has not taken yet stands in this queue.
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

        def on_arrival(piece: Piece) -> None:
            if call.answer.first_token_s is None:
                call.answer.first_token_s = time.perf_counter() - start_s
            pieces.put_nowait(piece)

        async def sample_all() -> list[ModelOutput]:
            try:
                return await _all_of([self._one(call, index, on_arrival) for index in range(call.request.n)])
            finally:
                pieces.put_nowait(None)

        sampling = asyncio.create_task(sample_all())
        try:
            while (piece := await pieces.get()) is not None:
                await emit(piece)
            return await sampling
        finally:
            # The engine has let go of the requests before the call ends, whether its client left or a piece
            # could not be sent.
            sampling.cancel()
            await asyncio.wait({sampling})

    async def _one(
        self, call: LocalCall, index: int, on_arrival: Callable[[Piece], None] | None
    ) -> ModelOutput:
        choice = call.answer.choices[index]
        stream = ChoiceStream(call, choice, on_arrival) if on_arrival is not None else None
        if stream is not None and call.echo_text:
            stream.say(call.echo_text)
        try:
            output = await self.client.generate_ids(
                call.prompt_ids,
                call.samplings[index],
                on_piece=None if stream is None else stream.take,
            )
        except ContextLengthError as error:
            raise RequestRefused(str(error), code="context_length_exceeded") from error
        except MissingExtraError as error:
            raise RequestRefused(str(error), status=501, kind="server_error") from error
        except ValueError as error:  # ids outside of the vocabulary, a grammar that does not compile
            raise RequestRefused(str(error)) from error
        except InferenceError as error:
            if stream is not None and stream.any_sent:
                raise PartialAnswer(f"The engine failed on the way: {error}", call.answer) from error
            raise RequestRefused(
                f"The engine failed: {error}", status=503, kind="server_error", code="engine_failed"
            ) from error
        call.fill(choice, output)
        if stream is not None:
            stream.finish(choice)
        return output

    def _token_text(self, token_id: int) -> str:
        return self.client.renderer.tokenizer.token_text(token_id)


def _num_image_bytes(messages: Sequence[Message]) -> int:
    parts = (part for each in messages if isinstance(each.get("content"), list) for part in each["content"])
    return sum(len(source_of(part)) for part in parts)


def _seed(request: CallRequest, session_seed: int, digest: bytes, number: int, index: int) -> int:
    """The seed of one choice: the request's own, or derived from the session and the prompt, so that it does
    not depend on the order in which parallel calls arrive."""
    if request.seed is not None:
        return (request.seed + index) % 2**64
    return draw_seed(session_seed, digest.hex(), number, index, "choice")


async def _all_of(works: Sequence[Awaitable[ModelOutput]]) -> list[ModelOutput]:
    if len(works) == 1:
        return [await works[0]]
    # `gather` hands on the first error and leaves the others running, so they are ended here.
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
