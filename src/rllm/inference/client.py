"""What every model client offers: sessions that answer messages, with token ids and log-probabilities.

    async with client.session("lake-3", order=("lake-3", 0)) as session:
        output = await session.respond(messages, sampling)

A session is one conversation. It keeps the token ids of what was said, so the next prompt only appends, and
clients with a KV cache keep the cache with it.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rllm.types.messages import Message, ModelOutput, SamplingParams


class ModelSession(Protocol):
    """One conversation with a model."""

    async def respond(self, messages: Sequence[Message], sampling: SamplingParams) -> ModelOutput:
        """The answer to `messages`, the whole conversation so far.

        Raises ContextLengthError before anything is sent when the prompt leaves no room for one token, and
        InferenceError when the engine failed.
        """
        ...

    def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


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
        ...

    async def close(self) -> None: ...
