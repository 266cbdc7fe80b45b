"""One tiny request, to know that a model answers before anything depends on it."""

import asyncio
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rllm.build.providers import ModelPlace, Protocol
from rllm.errors import ConfigError, InferenceError, MissingExtraError
from rllm.types.messages import SamplingParams

QUESTION = "Say hi."
_MAX_TOKENS = 16
TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
_POLL_S = 0.1


@dataclass(kw_only=True, slots=True, frozen=True)
class Trial:
    """The result of the check."""

    latency_s: float
    reply: str
    """Empty where the model thought for longer than it was given."""
    prompt_tokens: int
    completion_tokens: int


async def try_model(place: ModelPlace) -> Trial:
    """Ask a model on a server once.

    Raises ConfigError for a key or a name that the server refuses, InferenceError when it cannot be reached
    or fails; both within TIMEOUT_S and say where the key came from.
    """
    client = place.client(timeout_s=TIMEOUT_S, connect_timeout_s=CONNECT_TIMEOUT_S)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output = await client.get_model_response(
                [{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=_MAX_TOKENS)
            )
    except TimeoutError as error:
        raise InferenceError(f"{place.title} did not answer within {TIMEOUT_S:g} s.") from error
    except MissingExtraError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{error}{_about_the_key(place)}") from error
    except InferenceError as error:
        raise InferenceError(f"{error}{_about_the_key(place)}") from error
    finally:
        await client.close()
    return Trial(
        latency_s=time.perf_counter() - began,
        reply=" ".join(output.content.split()),
        prompt_tokens=output.usage.get("prompt_tokens", 0),
        completion_tokens=output.usage.get("completion_tokens", 0),
    )


async def wait_for_server(base_url: str, timeout_s: float, on_wait: Callable[[], None]) -> None:
    """Wait until a server on this machine, which somebody has just started, accepts connections.

    Calls `on_wait` once where it does not do so yet. Returns after `timeout_s` also where none does: what is
    asked next says what is wrong. A server elsewhere is not waited for.
    """
    address = urlsplit(base_url)
    host = address.hostname or ""
    if not _is_here(host):
        return
    port = address.port or (443 if address.scheme == "https" else 80)
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            on_wait()
            on_wait = _nothing
            await asyncio.sleep(_POLL_S)
            continue
        writer.close()
        await writer.wait_closed()
        return


def _nothing() -> None:
    pass


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def served_models(place: ModelPlace) -> list[str]:
    """The models that the server lists; empty where it lists none. Raises InferenceError."""
    from rllm.inference.openai_http import ServerHttp

    if place.protocol is not Protocol.OPENAI:
        return []
    http = ServerHttp(
        place.base_url.rstrip("/"),
        api_key=place.api_key,
        timeout_s=TIMEOUT_S,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )
    try:
        listing: Any = await http.get(f"{place.base_url.rstrip('/')}/models")
    finally:
        await http.close()
    data = listing.get("data") if isinstance(listing, dict) else None
    return [str(each["id"]) for each in data or [] if isinstance(each, dict) and "id" in each]


def _about_the_key(place: ModelPlace) -> str:
    if place.api_key is None:
        return " It was asked without a key."
    return f" The key is the one in {place.key_from}." if place.key_from else ""
