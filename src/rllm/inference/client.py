"""The interface of every model client: sessions that answer messages, with token ids and log-probabilities.

    async with client.session("lake-3", order=("lake-3", 0)) as session:
        output = await session.respond(messages, sampling)

A session is one conversation. It keeps the token ids of what was said, so the next prompt only appends, and
clients with a KV cache keep the cache with it.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Protocol, Self

from rllm.errors import ContextLengthError
from rllm.rendering.chat import ChatRenderer
from rllm.types.messages import Message, ModelOutput, SamplingParams, TopLogprobs

Tools = Sequence[Mapping[str, Any]]
"""{"type": "function", "function": {"name", "description", "parameters"}} each."""


class ModelSession(Protocol):
    """One conversation with a model."""

    async def respond(
        self, messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()
    ) -> ModelOutput:
        """The answer to `messages`, the whole conversation so far; `tools` may be called in it, and then
        `tool_calls` is filled.

        Raises ContextLengthError before anything is sent when the prompt leaves no room for one token,
        ConfigError for tools that the model cannot be offered, and InferenceError when the engine failed.
        """
        ...

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        """The number of tokens that the prompt for `messages` would have, were they sent now; -1 where only
        the server can know. Changes nothing: neither the conversation nor what is sent next.
        """
        ...

    def close(self) -> None:
        """Give back what is held for the conversation; nothing, unless a class says otherwise."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ModelClient(Protocol):
    """A model that can be talked to."""

    def session(self, order: tuple[str, int]) -> ModelSession:
        """A new conversation. `order` (task, attempt) puts requests of one moment in an order that does not
        depend on arrival."""
        ...

    async def get_model_response(
        self, messages: Sequence[Message], sampling: SamplingParams = SamplingParams()
    ) -> ModelOutput:
        """One answer outside of any conversation."""
        async with self.session(("", 0)) as session:
            return await session.respond(messages, sampling)

    async def close(self) -> None: ...


class StatelessSession(ModelSession):
    """A conversation of which the server keeps nothing, and whose prompts it alone can count."""

    def __init__(self, get_model_response: Callable[..., Awaitable[ModelOutput]]) -> None:
        """`get_model_response(messages, sampling, tools=tools)` asks the server."""
        self._get_model_response = get_model_response

    async def respond(
        self, messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()
    ) -> ModelOutput:
        return await self._get_model_response(messages, sampling, tools=tools)

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        return -1


_MAX_CHARS_PER_TOKEN = 16
"""Vocabularies have longer tokens, such as a hundred spaces, but no text is made of these: four are usual."""


def max_prompt_chars(renderer: ChatRenderer, max_context: int) -> int:
    """Limit of a conversation: more would not fit into the context. Encoding takes seconds for a few million
    characters, and 200 bytes of memory for each, so whoever encodes looks at the characters first."""
    return max_context * min(renderer.tokenizer.max_token_chars, _MAX_CHARS_PER_TOKEN)


def require_may_fit(messages: Sequence[Message], renderer: ChatRenderer, max_context: int) -> None:
    """Raises ContextLengthError for a message with more text than any prompt of the context has."""
    max_chars = max_prompt_chars(renderer, max_context)
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and len(content) > max_chars:
            raise ContextLengthError(
                f"A message has {len(content)} characters, and {max_chars} are the most that a context of "
                f"{max_context} tokens is given."
            )


@lru_cache(maxsize=64)
def takes_tools(session_class: type[Any]) -> bool:
    """Whether sessions of a class, maybe a user's own, can be offered tools."""
    return "tools" in inspect.signature(session_class.respond).parameters


@dataclass(kw_only=True, slots=True)
class TokenPiece:
    """The text that a model wrote since the last piece, in whole characters, and the tokens behind it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])


class TokenClient(Protocol):
    """A model that is given ids and gives ids: what the gateway renders, samples and captures with."""

    renderer: ChatRenderer

    @property
    def policy_version(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Tokens of one conversation, prompt and answer together."""
        ...

    async def generate_ids(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        on_piece: Callable[[TokenPiece], None] | None = None,
    ) -> ModelOutput:
        """Sample after a prompt given as ids; `on_piece` hears of the text as it is written.

        It is called in the event loop. What was read for an earlier prompt with the same beginning is not
        read again. Cancelling the task that waits stops the work. Raises ContextLengthError when no token
        fits behind the prompt.
        """
        ...

    async def close(self) -> None: ...
