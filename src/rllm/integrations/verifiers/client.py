"""The client that environments of verifiers ask: its OpenAI client before a session of the gateway."""
# pyright: reportMissingImports=false

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import verifiers
from openai import AsyncOpenAI, PermissionDeniedError

from rllm.types.task import AgentConfig


class _SessionClient(verifiers.OpenAIChatCompletionsClient):
    """A call that the budget refuses ends the rollout, which is still scored; verifiers would drop it."""

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().get_response(*args, **kwargs)
        except PermissionDeniedError as error:
            raise verifiers.ModelError(str(error)) from error


@asynccontextmanager
async def session_client(config: AgentConfig) -> AsyncIterator[Any]:
    """One for each episode: connections belong to an event loop. The engine's time limit is the only one."""
    # Without certificates, which take longer to read than a call on this machine.
    connection = httpx.AsyncClient(verify=False, trust_env=False, timeout=None)
    async with AsyncOpenAI(
        base_url=config.base_url, api_key=config.api_key, max_retries=0, timeout=None, http_client=connection
    ) as openai:
        yield _SessionClient(openai)
