"""A model that says what it is told: for testing agents, environments and everything around a model call.

    client = ScriptedClient(["Right", "Down"])             # the answers of each conversation, in order
    client = ScriptedClient(lambda messages: "Right")       # or computed from what was asked
    client = ScriptedClient(["Right", InferenceError("the server died")])

It is a full `ModelClient` and `TokenClient`: answers carry token ids, log-probabilities and policy versions,
and come in pieces where those are asked for. By default the ids come from `CodepointTokenizer`; a real
tokenizer can be given instead. Calls by ids (`generate_ids`) take the script's answers in the order in which
they are made, whatever conversations they belong to; a function is told the prompt's text as one message.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rllm.errors import ContextLengthError, InferenceError
from rllm.inference.client import ModelClient, ModelSession, TokenPiece, Tools
from rllm.inference.local.text import StopTexts
from rllm.inference.reading import as_it_may_come_back, parsed_text, read_into
from rllm.rendering.chat import ChatRenderer, Conversation, TextTokenizer
from rllm.rendering.images import ImageReader
from rllm.types.images import PATCH_IDS_FROM, ImageFile, patch_ids
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams, TopLogprobs

Script = (
    Sequence["str | ScriptedAnswer | Exception"]
    | Callable[[Sequence[Message]], "str | ScriptedAnswer | Exception"]
)

END_ID = 0
_IMAGE = "\udbc7"
"""Stands for an image: half of a surrogate pair, as no text has it."""
PIECE_LENGTH = 4
"""Characters in one piece of a streamed answer."""


class OneTokenImages:
    """Reads any image as one token: which image it is, and nothing of what it shows."""

    mark_id = patch_mark_id = ord(_IMAGE) + 1

    def with_frames(self, text: str) -> str:
        return text

    def ids(self, image: ImageFile) -> list[int]:
        return patch_ids(image.number, 1)


class CodepointTokenizer:
    """One token per character (its code point, plus one), one per image, and `\\0` as the end of a turn.

    Encodes any text. Calls of tools are written as Hermes and Qwen write them:
    `<tool_call>`, a JSON object with `name` and `arguments`, `</tool_call>`, on a line each.
    """

    max_token_chars = 1
    images: ImageReader | None = OneTokenImages()

    def encode(self, text: str) -> list[int]:
        return [END_ID if character == "\0" else ord(character) + 1 for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token - 1) for token in ids if END_ID < token < PATCH_IDS_FROM)

    def token_text(self, token_id: int) -> str:
        return "\0" if token_id == END_ID else chr(token_id - 1)

    def apply_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        tools_text = f"tools:{json.dumps(list(tools))}\0\n" if tools else ""
        messages_text = "".join(f"{message['role']}:{message_text(message)}\0\n" for message in messages)
        return tools_text + messages_text + ("assistant:" if add_generation_prompt else "")

    def with_template_variables(self, variables: Mapping[str, Any]) -> Self:
        """Ignores them: there is no template."""
        return self


def message_text(message: Message) -> str:
    """The content of a message, with its calls behind it, as the tokenizer here writes them."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_IMAGE if each["type"] == "image" else each["text"] for each in content)
    parts = [content] if content else []
    for call in message.get("tool_calls") or ():
        function = {name: call["function"][name] for name in ("name", "arguments")}
        parts.append(f"<tool_call>\n{json.dumps(function)}\n</tool_call>")
    return "\n".join(map(str, parts))


@dataclass(kw_only=True, slots=True)
class ScriptedAnswer:
    """An answer with everything about it set by hand."""

    text: str
    token_ids: list[int] | None = None
    """Ids that the engine says it sampled; None encodes `text` and adds the end token."""
    logprobs: list[float] | None = None
    finish_reason: FinishReason = FinishReason.STOP
    wait_for: Callable[[], Awaitable[object]] | None = None
    """Awaited before the answer is given: an event, a sleep, or something that never comes."""
    pause: Callable[[], Awaitable[object]] | None = None
    """Awaited after every piece of an answer to `generate_ids`."""
    fail_after: int | None = None
    """Raise InferenceError after this many pieces, or after the last one: the engine died in mid-answer."""


@dataclass(slots=True)
class ScriptedClient(ModelClient):
    """See the module docstring. `requests` records what was asked: one list of messages per call."""

    script: Script
    tokenizer: TextTokenizer = field(default_factory=CodepointTokenizer)
    max_context: int = 1_000_000
    policy_version: int = 0
    requests: list[list[Message]] = field(default_factory=list[list[Message]])
    offered: list[list[Mapping[str, Any]]] = field(default_factory=list[list[Mapping[str, Any]]])
    """Tools that came with each call."""
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    """Prompts of `generate_ids`, one per call."""
    samplings: list[SamplingParams] = field(default_factory=list[SamplingParams])
    open_sessions: int = 0
    in_flight: int = 0
    """Calls of `generate_ids` that are being answered."""
    renderer: ChatRenderer = field(init=False)
    _num_taken: int = field(default=0, init=False)
    """Answers of the script that `generate_ids` has given."""

    def __post_init__(self) -> None:
        self.renderer = ChatRenderer(self.tokenizer)

    def session(self, order: tuple[str, int]) -> "ScriptedSession":
        self.open_sessions += 1
        return ScriptedSession(self)

    async def generate_ids(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        on_piece: Callable[[TokenPiece], None] | None = None,
    ) -> ModelOutput:
        """See `TokenClient`. `stop` and `max_tokens` cut the scripted answer; a grammar changes nothing."""
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        self.in_flight += 1
        try:
            turn, self._num_taken = self._num_taken, self._num_taken + 1
            answer = self.answer_to([{"role": "user", "content": self.tokenizer.decode(prompt_ids)}], turn)
            await _wait(answer.wait_for)
            script = _Said.of(answer, self, sampling)
            output = script.output(prompt_ids, self, sampling)
            for number, piece in enumerate(script.pieces):
                if answer.fail_after == number:
                    break
                if on_piece is not None:
                    on_piece(piece)
                await _wait(answer.pause)
            if answer.fail_after is not None:
                raise InferenceError(f"The script fails after {answer.fail_after} pieces.")
            return output
        finally:
            self.in_flight -= 1

    def answer_to(self, messages: Sequence[Message], turn: int) -> ScriptedAnswer:
        """The script's answer in this turn. Raises the exception that the script holds there."""
        if callable(self.script):
            answer = self.script(messages)
        elif turn < len(self.script):
            answer = self.script[turn]
        else:
            raise InferenceError(
                f"The script has {len(self.script)} answers and turn {turn + 1} asks for another one."
            )
        if isinstance(answer, Exception):
            raise answer
        return ScriptedAnswer(text=answer) if isinstance(answer, str) else answer

    async def close(self) -> None:
        """Nothing to close."""


@dataclass(kw_only=True, slots=True)
class _Said:
    """The part of a scripted answer that the request's limits leave, whole and in pieces."""

    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    text: str
    finish_reason: FinishReason
    stop_sequence: str | None
    pieces: list[TokenPiece]

    @classmethod
    def of(
        cls,
        answer: ScriptedAnswer,
        client: ScriptedClient,
        sampling: SamplingParams,
    ) -> "_Said":
        ids = answer.token_ids
        if ids is None:
            ids = [*client.tokenizer.encode(answer.text), END_ID]
        text, finish_reason = answer.text, answer.finish_reason
        # The text is spread evenly over the tokens before the end: one a character by default.
        per_character = max(1, len(ids) - (ids[-1:] == [END_ID])) / max(1, len(text))
        max_tokens = sampling.max_tokens
        if max_tokens < len(ids):
            text, ids = text[: int(max_tokens / per_character)], ids[:max_tokens]
            finish_reason = FinishReason.LENGTH
        characters, stop = _visible_characters(text, sampling.stop)
        if stop is not None:
            ids, finish_reason = ids[: math.ceil(characters[-1][1] * per_character)], FinishReason.STOP
        logprobs = [0.0] * len(ids) if answer.logprobs is None else answer.logprobs[: len(ids)]
        top: list[TopLogprobs] = []
        if sampling.top_logprobs:  # a script knows no other token than the one it says
            top = [[(token, logprob)] for token, logprob in zip(ids, logprobs, strict=True)]
        ends = [*(int(end * per_character) for _, end in characters[:-1]), len(ids)]
        starts = [0, *ends[:-1]]
        return cls(
            ids=list(ids),
            logprobs=logprobs,
            top_logprobs=top,
            text="".join(each for each, _ in characters),
            finish_reason=finish_reason,
            stop_sequence=stop,
            pieces=[
                TokenPiece(
                    text=each,
                    token_ids=list(ids[start:end]),
                    logprobs=logprobs[start:end],
                    top_logprobs=top[start:end],
                )
                for (each, _), start, end in zip(characters, starts, ends, strict=True)
            ],
        )

    def output(self, prompt_ids: list[int], client: ScriptedClient, sampling: SamplingParams) -> ModelOutput:
        """Raises ContextLengthError for a prompt that is too long for the client."""
        if len(prompt_ids) >= client.max_context:
            raise ContextLengthError(
                f"The prompt has {len(prompt_ids)} tokens and the scripted context holds "
                f"{client.max_context}."
            )
        return ModelOutput(
            text=self.text,
            content=self.text,
            prompt_ids=prompt_ids,
            completion_ids=self.ids,
            logprobs=self.logprobs,
            logprob_meaning=sampling.logprob_meaning,
            temperature=sampling.temperature,
            policy_versions=[client.policy_version] * len(self.ids),
            top_logprobs=self.top_logprobs,
            stop_sequence=self.stop_sequence,
            finish_reason=self.finish_reason,
            usage={
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(self.ids),
                "cached_tokens": 0,
            },
        )


def _visible_characters(text: str, stop: Sequence[str]) -> tuple[list[tuple[str, int]], str | None]:
    """The text of each piece, with how far the script has been said by then; and the stop text that ended
    it."""
    stops = StopTexts(stop)
    characters: list[tuple[str, int]] = []
    length = 0
    for start in range(0, len(text), PIECE_LENGTH):
        end = min(start + PIECE_LENGTH, len(text))
        new = stops.feed(text[start:end])
        length += len(new)
        if stops.match is not None:
            return [*characters, (new, length + len(stops.match))], stops.match
        if new:
            characters.append((new, end))
    return [*characters, (stops.rest(), len(text))], None


async def _wait(wait_for: Callable[[], Awaitable[object]] | None) -> None:
    if wait_for is not None:
        await wait_for()
    else:
        await asyncio.sleep(0)


class ScriptedSession(ModelSession):
    """One conversation: takes the script's answers from the first to the last."""

    def __init__(self, client: ScriptedClient) -> None:
        self.client = client
        self.conversation = Conversation(renderer=client.renderer)
        self._turn = 0
        self._closed = False

    async def respond(
        self, messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()
    ) -> ModelOutput:
        client = self.client
        client.requests.append(list(messages))
        client.offered.append(list(tools))
        client.samplings.append(sampling)
        turn, self._turn = self._turn, self._turn + 1
        answer = client.answer_to(messages, turn)
        await _wait(answer.wait_for)
        script = _Said.of(answer, client, sampling)
        output = script.output(self.conversation.prompt(messages, tools), client, sampling)
        if tools:
            read_into(output, parsed_text(output.text, client.renderer, tools))
        self.conversation.record(output.completion_ids, *as_it_may_come_back(output))
        return output

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        return self.conversation.prompt_tokens(messages, tools)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.client.open_sessions -= 1
