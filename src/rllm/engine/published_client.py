"""A rollout engine of the published kind, one method and no sessions, as a model client.

await engine.get_model_response(messages, temperature=…, max_tokens=…, seed=…) ──► ModelOutput
"""

import inspect
from collections.abc import Sequence
from typing import Any

from rllm.errors import AgentError
from rllm.inference.client import StatelessSession, Tools
from rllm.types.messages import Message, ModelOutput, SamplingParams


class PublishedClient:
    """A `ModelClient` on whatever has `get_model_response(messages, **sampling)`."""

    def __init__(self, engine: Any) -> None:
        """Raises AgentError for what has no such method."""
        if not inspect.iscoroutinefunction(getattr(engine, "get_model_response", None)):
            raise AgentError(
                f"rollout_engine is {engine!r}; it must be a model client with `session`, or have "
                "`async def get_model_response(self, messages, **sampling)`."
            )
        self.engine = engine

    def session(self, order: tuple[str, int]) -> StatelessSession:
        return StatelessSession(self.get_model_response)

    async def get_model_response(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams = SamplingParams(),
        *,
        tools: Tools = (),
    ) -> ModelOutput:
        """One answer. Raises AgentError for anything but a ModelOutput."""
        settings: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
        }
        if sampling.top_k:
            settings["top_k"] = sampling.top_k
        if sampling.stop:
            settings["stop"] = list(sampling.stop)
        if tools:
            settings["tools"] = list(tools)
        output = await self.engine.get_model_response(list(messages), **settings)
        if not isinstance(output, ModelOutput):
            raise AgentError(
                f"{type(self.engine).__name__}.get_model_response returned {output!r}; it must return a "
                "rllm.types.messages.ModelOutput."
            )
        return output

    async def close(self) -> None:
        """Nothing to close: it belongs to whoever made it."""
