"""A model that says what it is told: for testing agents, environments and everything around a model call.

    client = ScriptedClient(["Right", "Down"])             # the answers of each conversation, in order
    client = ScriptedClient(lambda messages: "Right")       # or computed from what was asked
    client = ScriptedClient(["Right", InferenceError("the server died")])

It is a full `ModelClient`: answers carry token ids, log-probabilities and policy versions. By default the ids
come from `CodepointTokenizer`; a real tokenizer can be given instead.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rllm.errors import ContextLengthError, InferenceError
from rllm.rendering.chat import ChatRenderer, Conversation, TextTokenizer
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams

Script = Sequence["str | ScriptedAnswer | Exception"] | Callable[[Sequence[Message]], str]

END_ID = 0


class CodepointTokenizer:
    """One token per character (its code point, plus one), and `\\0` as the end of a turn.

    Encodes any text.
    """

    def encode(self, text: str) -> list[int]:
        return [END_ID if character == "\0" else ord(character) + 1 for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token - 1) for token in ids if token != END_ID)

    def apply_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        said = "".join(f"{message['role']}:{message['content']}\0\n" for message in messages)
        return said + ("assistant:" if add_generation_prompt else "")


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


@dataclass(slots=True)
class ScriptedClient:
    """See the module docstring. `requests` records what was asked: one list of messages per call."""

    script: Script
    tokenizer: TextTokenizer = field(default_factory=CodepointTokenizer)
    max_context: int = 1_000_000
    policy_version: int = 0
    requests: list[list[Message]] = field(default_factory=list[list[Message]])
    samplings: list[SamplingParams] = field(default_factory=list[SamplingParams])
    open_sessions: int = 0
    renderer: ChatRenderer = field(init=False)

    def __post_init__(self) -> None:
        self.renderer = ChatRenderer(self.tokenizer)

    def session(self, order: tuple[str, int]) -> "ScriptedSession":
        self.open_sessions += 1
        return ScriptedSession(self)

    async def get_model_response(
        self, messages: Sequence[Message], sampling: SamplingParams = SamplingParams()
    ) -> ModelOutput:
        async with self.session(("", 0)) as session:
            return await session.respond(messages, sampling)

    async def close(self) -> None:
        """Nothing to close."""


class ScriptedSession:
    """One conversation: takes the script's answers from the first to the last."""

    def __init__(self, client: ScriptedClient) -> None:
        self.client = client
        self.conversation = Conversation(renderer=client.renderer)
        self._turn = 0
        self._closed = False

    async def respond(self, messages: Sequence[Message], sampling: SamplingParams) -> ModelOutput:
        client = self.client
        client.requests.append(list(messages))
        client.samplings.append(sampling)
        answer = self._next_answer(messages)
        if answer.wait_for is not None:
            await answer.wait_for()
        else:
            await asyncio.sleep(0)
        prompt_ids = self.conversation.prompt(messages)
        if len(prompt_ids) >= client.max_context:
            raise ContextLengthError(
                f"The prompt has {len(prompt_ids)} tokens and the scripted context holds "
                f"{client.max_context}."
            )
        ids = (
            answer.token_ids
            if answer.token_ids is not None
            else [*client.tokenizer.encode(answer.text), END_ID]
        )
        self.conversation.record(ids, answer.text)
        return ModelOutput(
            text=answer.text,
            content=answer.text,
            prompt_ids=prompt_ids,
            completion_ids=list(ids),
            logprobs=answer.logprobs if answer.logprobs is not None else [0.0] * len(ids),
            logprob_meaning=sampling.logprob_meaning,
            temperature=sampling.temperature,
            policy_versions=[client.policy_version] * len(ids),
            finish_reason=answer.finish_reason,
            usage={"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids), "cached_tokens": 0},
        )

    def _next_answer(self, messages: Sequence[Message]) -> ScriptedAnswer:
        script = self.client.script
        if callable(script):
            return ScriptedAnswer(text=script(messages))
        if self._turn >= len(script):
            raise InferenceError(
                f"The script has {len(script)} answers and turn {self._turn + 1} asks for another one."
            )
        answer = script[self._turn]
        self._turn += 1
        if isinstance(answer, Exception):
            raise answer
        return ScriptedAnswer(text=answer) if isinstance(answer, str) else answer

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.client.open_sessions -= 1

    async def __aenter__(self) -> "ScriptedSession":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
