"""Model calls answered by a client that is given ids and gives ids, such as the built-in engine: no second "
"HTTP hop.

    CallRequest ──► conversation tree ──► prompt ids ──► TokenClient ──► ids, log-probabilities ──► Answer
                        ▲   the ids already seen, and what is new          │ text ──► tool format ──► pieces
                        └───────────────── record ◄────────────────────────┘

A session's next prompt is made by appending to the ids already seen. Whatever the request asks for is
enforced while
sampling or refused with a 400: nothing is taken and then ignored.
"""

import asyncio
import hashlib
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rllm.errors import (
    ConfigError,
    ContextLengthError,
    InferenceError,
    MissingExtraError,
    PartialAnswer,
    RequestRefused,
)
from rllm.gateway.dialects.openai_fields import shown
from rllm.gateway.wire import (
    Answer,
    CallRecord,
    CallRequest,
    CallStatus,
    Choice,
    Emit,
    Piece,
    PolicySession,
    TokenLogprob,
    ToolCallPiece,
    ToolMode,
    WireToolCall,
    completion_id,
    unix_time,
)
from rllm.inference.client import TokenClient, TokenPiece
from rllm.rendering.conversations import ConversationTree, Turn
from rllm.rendering.tools import AnswerStream, ParsedAnswer, PlainFormat, StreamEvent, ToolFormat
from rllm.types.draws import draw_seed
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams, TopLogprobs

MAX_CHOICES = 128
"""Upper limit of `n`, as in the OpenAI API."""
MAX_TOP_LOGPROBS = 20
_SESSION_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")
_STATE = "local"


@dataclass(slots=True)
class _SessionState:
    """What the policy remembers of a session."""

    tree: ConversationTree
    times_asked: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """By digest of the prompt: asked again, the same prompt is given other draws."""


class LocalPolicy:
    """Implements `rllm.gateway.wire.Policy`. "
    "
    Any model name is answered by the one model there is, so that programs with a name written into them run
    unchanged; the answer carries the name that was asked for.
    """

    def __init__(self, client: TokenClient, model: str) -> None:
        self.client = client
        self.model = model
        self._in_flight = 0

    async def start(self) -> None:
        """The client runs already."""

    async def close(self) -> None:
        """The client belongs to whoever made it."""

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
        return len(self._rendered(request))

    async def answer(self, request: CallRequest, session: PolicySession, emit: Emit | None = None) -> Answer:
        call = self._prepare(request, session)
        self._in_flight += 1
        try:
            outputs = await self._sample(call, emit)
        finally:
            self._in_flight -= 1
        for choice in call.answer.choices:
            if call.turn is not None:
                call.state.tree.record(call.turn, choice.completion_ids, choice.message())
        prompt_tokens = len(call.prompt_ids)
        call.answer.usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sum(len(output.completion_ids) for output in outputs),
            "cached_tokens": max(output.usage.get("cached_tokens", 0) for output in outputs),
        }
        return call.answer

    # ---- before sampling -----------------------------------------------------------------------------------

    def _prepare(self, request: CallRequest, session: PolicySession) -> "_Call":
        require_answerable(request)
        state = self._state_of(session)
        tool_format = self._tool_format_for(request)
        plain_format = self.client.renderer.plain_format
        try:
            grammar = _grammar(request, tool_format, plain_format)
        except ConfigError as error:
            raise RequestRefused(str(error), param="tools") from error
        turn: Turn | None = None
        try:
            if request.prompt is None:
                turn = state.tree.begin(request.messages, request.tools)
                prompt_ids = turn.prompt_ids
            else:
                prompt_ids = self._rendered(request)
        except ConfigError as error:  # the chat template refuses the conversation
            raise RequestRefused(str(error), param="messages") from error
        digest = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()
        times_asked = state.times_asked.get(digest, 0)
        state.times_asked[digest] = times_asked + 1
        sampling = self._sampling(request, session, prompt_ids, grammar)
        return _Call(
            request=request,
            state=state,
            turn=turn,
            prompt_ids=prompt_ids,
            samplings=[
                replace(sampling, seed=_seed(request, session.seed, digest, times_asked, index))
                for index in range(request.n)
            ],
            reader=_reader(request, tool_format, plain_format),
            tokenizer_text=self._token_text,
            answer=Answer(
                id=completion_id(request.dialect), model=request.model or self.model, created=unix_time()
            ),
        )

    def _state_of(self, session: PolicySession) -> _SessionState:
        state = session.state.get(_STATE)
        if state is None:
            state = session.state[_STATE] = _SessionState(ConversationTree(self.client.renderer))
            for record in session.history():
                _replay(state, record)
        return state

    def _rendered(self, request: CallRequest) -> list[int]:
        renderer = self.client.renderer
        if isinstance(request.prompt, list):
            return list(request.prompt)
        if request.prompt is not None:
            return renderer.tokenizer.encode(request.prompt)
        require_answerable(request)
        return renderer.render(request.messages, request.tools)

    def _tool_format_for(self, request: CallRequest) -> ToolFormat | None:
        if not request.tools:
            return None
        tool_format = self.client.renderer.tool_format
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
        asked = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "max_tokens": request.max_tokens,
        }
        asked |= {name: session.sampling[name] for name in _SESSION_SAMPLING if name in session.sampling}
        chosen = {name: value for name, value in asked.items() if value is not None}
        chosen["max_tokens"] = min(chosen.get("max_tokens", room), room)
        try:
            return SamplingParams(
                **chosen,
                stop=tuple(request.stop),
                top_logprobs=request.top_logprobs if request.logprobs else 0,
                grammar=grammar,
            )
        except ValueError as error:
            raise RequestRefused(str(error)) from error

    # ---- sampling ------------------------------------------------------------------------------------------

    async def _sample(self, call: "_Call", emit: Emit | None) -> list[ModelOutput]:
        """Every choice at the same time. When one fails, the others are stopped."""
        started = time.perf_counter()
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
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

        def arrived(piece: Piece) -> None:
            if call.answer.first_token_s is None:
                call.answer.first_token_s = time.perf_counter() - started
            pieces.put_nowait(piece)

        async def sample_all() -> list[ModelOutput]:
            try:
                return await _all_of([self._one(call, index, arrived) for index in range(call.request.n)])
            finally:
                pieces.put_nowait(None)

        sampling = asyncio.create_task(sample_all())
        try:
            while (piece := await pieces.get()) is not None:
                await emit(piece)
            return await sampling
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})

    async def _one(self, call: "_Call", index: int, arrived: Callable[[Piece], None] | None) -> ModelOutput:
        choice = call.answer.choices[index]
        stream = _ChoiceStream(call, choice, arrived) if arrived is not None else None
        if stream is not None and call.echoed:
            stream.say(call.echoed)
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


@dataclass(slots=True)
class _Call:
    """One request on its way."""

    request: CallRequest
    state: _SessionState
    turn: Turn | None
    """None for text completions, which belong to no conversation."""
    prompt_ids: list[int]
    samplings: list[SamplingParams]
    """One per choice."""
    reader: "_Reader | None"
    """Splits the text of chat answers; text completions are left as they are."""
    tokenizer_text: Callable[[int], str]
    answer: Answer

    @property
    def echoed(self) -> str:
        if not self.request.echo:
            return ""
        prompt = self.request.prompt
        return prompt if isinstance(prompt, str) else "".join(map(self.tokenizer_text, self.prompt_ids))

    def fill(self, choice: Choice, output: ModelOutput) -> None:
        """Everything that is known once the answer is whole."""
        parsed = (
            ParsedAnswer(content=output.text, reasoning="", calls=[], unparsed_markup=False)
            if self.reader is None
            else self.reader.parse(output.text)
        )
        choice.text = self.echoed + parsed.content
        choice.reasoning = parsed.reasoning
        choice.tool_calls = [
            WireToolCall(
                id=_call_id(self.answer.id, choice.index, number), name=call.name, arguments=call.arguments
            )
            for number, call in enumerate(parsed.calls)
        ]
        cut_off = parsed.unparsed_markup and output.finish_reason is FinishReason.LENGTH
        called = bool(choice.tool_calls) and not cut_off
        choice.finish_reason = FinishReason.TOOL_CALLS if called else output.finish_reason
        choice.stop_sequence = output.stop_sequence
        choice.unparsed_markup = parsed.unparsed_markup
        choice.completion_ids = output.completion_ids
        choice.logprobs = output.logprobs
        choice.logprob_meaning = output.logprob_meaning
        choice.temperature = output.temperature
        choice.seed = self.samplings[choice.index].seed
        choice.policy_versions = output.policy_versions
        if self.request.logprobs:
            choice.token_logprobs = self.token_logprobs(
                output.completion_ids, output.logprobs, output.top_logprobs
            )

    def token_logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs]
    ) -> list[TokenLogprob]:
        text = self.tokenizer_text
        return [
            TokenLogprob(
                token_id=token,
                text=text(token),
                logprob=logprob,
                top=[(each, text(each), value) for each, value in (top[place] if top else ())],
            )
            for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
        ]


class _ChoiceStream:
    """Text as it is sampled, turned into pieces of one choice."""

    def __init__(self, call: _Call, choice: Choice, arrived: Callable[[Piece], None]) -> None:
        self.any_sent = False
        self._call = call
        self._choice = choice
        self._arrived = arrived
        self._events = None if call.reader is None else call.reader.stream()

    def take(self, piece: TokenPiece) -> None:
        logprobs: list[TokenLogprob] = []
        if self._call.request.logprobs:
            logprobs = self._call.token_logprobs(piece.token_ids, piece.logprobs, piece.top_logprobs)
        if self._events is None:
            self.say(piece.text, logprobs)
            return
        events = self._events.feed(piece.text)
        if logprobs and not events:
            self._send(Piece(choice=self._choice.index, logprobs=logprobs))
        for event in events:
            self._send(self._piece(event, logprobs))
            logprobs = []

    def say(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if text or logprobs:
            self._choice.text += text
            self._send(Piece(choice=self._choice.index, text=text, logprobs=list(logprobs)))

    def finish(self, choice: Choice) -> None:
        """What was held back because it might have become markup."""
        if self._events is not None:
            for event in self._events.finish():
                self._send(self._piece(event, []))

    def _piece(self, event: StreamEvent, logprobs: list[TokenLogprob]) -> Piece:
        piece = Piece(choice=self._choice.index, logprobs=logprobs)
        if event.kind == "text":
            piece.text = event.text
        elif event.kind == "reasoning":
            piece.reasoning = event.text
        else:
            first = bool(event.name)
            piece.tool_call = ToolCallPiece(
                index=event.index,
                id=_call_id(self._call.answer.id, self._choice.index, event.index) if first else "",
                name=event.name,
                arguments=event.text,
            )
        return piece

    def _send(self, piece: Piece) -> None:
        self.any_sent = True
        self._arrived(piece)


def require_answerable(request: CallRequest) -> None:
    """Raises RequestRefused (400) for what the built-in engine cannot honour."""
    for name, value in request.penalties.items():
        raise RequestRefused(
            f"`{name}` is {shown(value)}; this engine samples from the model itself and does not know it. "
            "Leave it out.",
            param=name,
            code="unsupported_parameter",
        )
    if not 1 <= request.n <= MAX_CHOICES:
        raise RequestRefused(f"`n` is {request.n}; choose from 1 to {MAX_CHOICES}.", param="n")
    if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise RequestRefused(
            f"`top_logprobs` is {request.top_logprobs}; choose from 0 to {MAX_TOP_LOGPROBS}.",
            param="top_logprobs",
        )
    for place, message in enumerate(request.messages):
        if isinstance(message.get("content"), list):
            kinds = sorted({str(part.get("type")) for part in message["content"]} - {"text"})
            raise RequestRefused(
                f"`messages[{place}].content` has parts of type {', '.join(kinds)}; this model reads text "
                "alone.",
                param=f"messages[{place}].content",
                code="unsupported_content",
            )


@dataclass(slots=True, frozen=True)
class _Reader:
    """Reasoning, text and calls out of what the model wrote."""

    format: ToolFormat | PlainFormat
    tools: list[dict[str, Any]]

    def parse(self, text: str) -> ParsedAnswer:
        if isinstance(self.format, PlainFormat):
            return self.format.parse(text)
        return self.format.parse(text, self.tools)

    def stream(self) -> AnswerStream:
        if isinstance(self.format, PlainFormat):
            return self.format.stream()
        return self.format.stream(self.tools)


def _reader(
    request: CallRequest, tool_format: ToolFormat | None, plain_format: PlainFormat
) -> _Reader | None:
    if request.prompt is not None:
        return None
    if tool_format is None or request.tool_choice.mode is ToolMode.NONE:
        return _Reader(plain_format, [])  # nothing that may be called, so nothing is a call
    return _Reader(tool_format, request.tools)


def _grammar(request: CallRequest, tool_format: ToolFormat | None, plain_format: PlainFormat) -> str:
    """What the answer must follow so that `tool_choice`, `strict` and `response_format` hold; "" for "
    "nothing."""
    choice, schema = request.tool_choice, request.response_schema
    if choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
        names = [tool["function"]["name"] for tool in request.tools]
        if tool_format is None or (choice.mode is ToolMode.NAMED and choice.name not in names):
            raise RequestRefused(
                f"`tool_choice` asks for {choice.name or 'a tool'}, but `tools` offers "
                f"{', '.join(names) or 'none'}.",
                param="tool_choice",
            )
        return tool_format.grammar(
            request.tools, required=True, name=choice.name, parallel=request.parallel_tool_calls
        )
    if tool_format is None or choice.mode is ToolMode.NONE:
        return "" if schema is None else plain_format.schema_grammar(schema)
    strict = any(tool["function"].get("strict") for tool in request.tools)
    if not strict and request.parallel_tool_calls and schema is None:
        return ""
    return tool_format.grammar(
        request.tools, required=False, parallel=request.parallel_tool_calls, schema=schema
    )


def _replay(state: _SessionState, record: CallRecord) -> None:
    """A call from the ledger, as if it had just been answered."""
    if record.status is not CallStatus.OK or not record.prompt_ids:
        return
    digest = hashlib.blake2b(array("q", record.prompt_ids).tobytes(), digest_size=16).digest()
    if record.choice == 0:
        state.times_asked[digest] = state.times_asked.get(digest, 0) + 1
    if record.prompt is None:
        turn = state.tree.begin(record.messages, record.tools)
        said: Message = {key: value for key, value in record.response.items() if key != "reasoning_content"}
        state.tree.record(turn, record.completion_ids, said)


def _seed(request: CallRequest, session_seed: int, digest: bytes, times_asked: int, index: int) -> int:
    """Of one choice: the request's own, or derived from the session and the prompt, so that it does not "
    "depend on
    the order in which parallel calls arrive."""
    if request.seed is not None:
        return (request.seed + index) % 2**64
    return draw_seed(session_seed, digest.hex(), times_asked, index, "choice")


def _call_id(answer_id: str, choice: int, number: int) -> str:
    """Of a tool call: derived, so that a streamed and a captured call have the same."""
    return f"call_{hashlib.blake2b(f'{answer_id}/{choice}/{number}'.encode(), digest_size=12).hexdigest()}"


async def _all_of(works: Sequence[Awaitable[ModelOutput]]) -> list[ModelOutput]:
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
