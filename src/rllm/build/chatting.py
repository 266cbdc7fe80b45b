"""A conversation of a person with a model, here or on a server, with tools.

said ──► messages ──► Policy (the built-in engine, or a server) ──pieces──► the screen
            ▲                     │ calls
            └── tool outputs ◄────┘
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.build.evaluation_engines import answering, program_client
from rllm.build.gateways import upstream_policy
from rllm.build.program_player import local_policy
from rllm.build.providers import ModelPlace, Protocol
from rllm.engine.event_loop import run
from rllm.environments.tool import ToolEnvironment
from rllm.errors import ConfigError
from rllm.types.chat_forms import AUTO, OWN_FORM, ChatForm
from rllm.types.messages import Message
from rllm.types.wire import CallRecord, CallRequest, Choice, Dialect, Piece

if TYPE_CHECKING:
    from rllm.types.wire import Policy

MAX_ROUNDS = 16
"""Rounds of calls in one answer, before the person is asked again."""

OnPiece = Callable[[Piece], Awaitable[None]]


@dataclass(kw_only=True, slots=True, frozen=True)
class ChatSettings:
    """The beginning of a conversation, and the sampling of its answers."""

    system: str = ""
    tools: tuple[str, ...] = ()
    """Names of tools, as `rllm.tools.named` knows them."""
    dtype: str = AUTO
    form: ChatForm = OWN_FORM
    trust_remote_code: bool = False
    threads: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1024
    seed: int | None = None
    top_logprobs: int = 0
    """Alternatives of each token that are asked for; 0 asks for no log-probabilities."""


@dataclass(kw_only=True, slots=True)
class ChatSession:
    """The `PolicySession` of a conversation that is kept nowhere."""

    id: str = "chat"
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    state: dict[str, Any] = field(default_factory=dict[str, Any])

    def history(self) -> list[CallRecord]:
        return []


class LiveChat:
    """One conversation. `say` answers, and calls tools until the model calls no more."""

    def __init__(self, policy: "Policy", dialect: Dialect, model: str, settings: ChatSettings) -> None:
        self._policy, self._dialect, self._model, self._settings = policy, dialect, model, settings
        self._tools = ToolEnvironment(tools=settings.tools).tools
        self._session = ChatSession(seed=settings.seed or 0)
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the system message alone."""
        system = self._settings.system
        self.messages = [{"role": "system", "content": system}] if system else []

    async def say(self, text: str, on_piece: OnPiece) -> AsyncGenerator[Choice | Message, None]:
        """The model's answers and the outputs of tools, in turn; the last one is an answer without calls.

        A failed or interrupted answer leaves the conversation as it was before `text`.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        is_whole = False
        try:
            for _ in range(MAX_ROUNDS):
                choice = await self._answer(on_piece)
                self.messages.append(choice.message())
                yield choice
                if not choice.tool_calls:
                    break
                for output in await self._tools.async_call_many(choice.message()["tool_calls"]):
                    self.messages.append(message := output.message())
                    yield message
            is_whole = True
        finally:
            if not is_whole:
                self.messages = before

    async def _answer(self, on_piece: OnPiece) -> Choice:
        settings = self._settings
        request = CallRequest(
            dialect=self._dialect,
            body={},
            model=self._model,
            messages=list(self.messages),
            tools=self._tools.json,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
            logprobs=settings.top_logprobs > 0,
            top_logprobs=settings.top_logprobs,
            stream=True,
        )
        answer = await self._policy.answer(request, self._session, on_piece)
        return answer.choices[0]


def hold_chat(
    place: ModelPlace, settings: ChatSettings, talk: "Callable[[LiveChat], Awaitable[None]]"
) -> None:
    """Let `talk` hold a conversation with the model at `place` to its end, for callers without an event loop.

    Raises what `opened_chat` does.
    """

    async def hold() -> None:
        async with opened_chat(place, settings) as chat:
            await talk(chat)

    run(hold())


@asynccontextmanager
async def opened_chat(place: ModelPlace, settings: ChatSettings) -> "AsyncIterator[LiveChat]":
    """A conversation with the model at `place`, which is loaded, or asked once, now.

    Raises ConfigError for settings that a server cannot honour.
    """
    if place.is_server:
        for flag, value in ({"dtype": settings.dtype} | settings.form.changes()).items():
            if value != AUTO:
                raise ConfigError(
                    f"--{flag} is {value}, and {place.title} answers as its server was started; leave it out."
                )
        policy = upstream_policy(await answering(place))
        # Pieces are passed on as they are between equal dialects, and taken apart between others.
        dialect = Dialect.CHAT if place.protocol is Protocol.ANTHROPIC else Dialect.RESPONSES
        await policy.start()
        try:
            yield LiveChat(policy, dialect, place.name, settings)
        finally:
            await policy.close()
        return
    client = await asyncio.to_thread(
        program_client,
        place,
        threads=settings.threads,
        dtype=settings.dtype,
        form=settings.form,
        trust_remote_code=settings.trust_remote_code,
    )
    client.loaded_model.tokenizer.require_chat_template()
    try:
        yield LiveChat(local_policy(client, Path(place.path).name), Dialect.CHAT, "", settings)
    finally:
        await client.close()
