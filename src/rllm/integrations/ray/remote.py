"""A worker's model clients where other actors have the models: prompts are made here, tokens there.

session ──ids──► server of its task ──ids, versions──► the worker's conversation
                    └ it ends: the same call goes to the next server, which draws the same tokens
"""

import asyncio
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rllm.errors import ContextLengthError, InferenceError
from rllm.inference.client import ModelClient, TokenPiece
from rllm.inference.token_session import TokenSession
from rllm.integrations.ray.answers import WorkerEnded, answer
from rllm.rendering.chat import ChatRenderer
from rllm.types.messages import ModelOutput, SamplingParams
from rllm.types.sample import NOT_SAMPLED

OnPiece = Callable[[TokenPiece], None]


@dataclass(kw_only=True, slots=True)
class Servers:
    """The model servers that are up, as one worker knows them."""

    timeout_s: float
    """For a call to wait while there is none."""
    policy_versions: Mapping[str, int] = field(default_factory=dict[str, int])
    """That every answer has to have, by policy."""
    follow: bool = False
    """Whether they get new weights while a lease is played: then answers may have later versions too."""
    _actors: dict[str, Any] = field(default_factory=dict[str, Any])
    _arrival: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, actors: Mapping[str, Any]) -> None:
        self._actors = dict(actors)
        if actors:
            self._arrival.set()

    def lose(self, name: str) -> None:
        """It has ended; the driver replaces it."""
        self._actors.pop(name, None)
        if not self._actors:
            self._arrival.clear()

    async def pick(self, preference: int) -> tuple[str, Any]:
        """(name, actor) of one; the same for the same preference while the same are up, for its caches.

        Raises InferenceError where none comes up in time.
        """
        try:
            await asyncio.wait_for(self._arrival.wait(), self.timeout_s)
        except TimeoutError as error:
            raise InferenceError(
                f"No model server has been up for {self.timeout_s:.0f} s (`cluster.timeout_s`)."
            ) from error
        names = sorted(self._actors)
        name = names[preference % len(names)]
        return name, self._actors[name]


@dataclass(kw_only=True, slots=True)
class RemoteClient(ModelClient):
    """A `ModelClient` and a `TokenClient` of one policy."""

    policy: str
    renderer: ChatRenderer
    max_context: int
    servers: Servers
    preference: int = 0
    """Which server comes first."""

    @property
    def policy_version(self) -> int:
        return self.servers.policy_versions.get(self.policy, 0)

    def session(self, order: tuple[str, int]) -> TokenSession:
        """All attempts at a task ask one server, which reads their common prompt once."""
        # A checksum, because `hash` of a text is another one in each process.
        return TokenSession(replace(self, preference=zlib.crc32(order[0].encode())))

    async def generate_ids(
        self, prompt_ids: list[int], sampling: SamplingParams, *, on_piece: OnPiece | None = None
    ) -> ModelOutput:
        """See `TokenClient`; `on_piece` gets the whole answer at once. Raises InferenceError for an answer by
        other weights than the lease may be played with."""
        if len(prompt_ids) >= self.max_context:
            raise ContextLengthError(
                f"The prompt has {len(prompt_ids)} tokens and the context holds {self.max_context}, so no "
                "token fits behind it; raise `inference.max_context` or end the conversation earlier."
            )
        expected = self.policy_version  # a lease of a later step may begin before the answer is here
        while True:
            name, actor = await self.servers.pick(self.preference)
            try:
                output: ModelOutput = await answer(
                    actor.generate_ids.remote(self.policy, list(prompt_ids), sampling)
                )
                break
            except WorkerEnded:
                self.servers.lose(name)
        versions = {*output.policy_versions} - {NOT_SAMPLED}
        if any(each < expected or (each > expected and not self.servers.follow) for each in versions):
            raise InferenceError(
                f"{name} answered with the versions {sorted(versions)} of {self.policy}, and the lease is "
                f"played with {expected}."
            )
        if on_piece is not None:
            on_piece(
                TokenPiece(
                    text=output.text,
                    token_ids=output.completion_ids,
                    logprobs=output.logprobs,
                    top_logprobs=output.top_logprobs,
                )
            )
        return output

    async def close(self) -> None:
        """The servers are the driver's."""
