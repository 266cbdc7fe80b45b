"""An address and a model or servers in, a gateway out: what `rllm serve` starts."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from rllm.build.models import local_client, model_directory, resolve_form
from rllm.build.providers import ModelPlace, Protocol
from rllm.config.schema import InferenceConfig
from rllm.errors import ConfigError, MissingExtraError
from rllm.models.foreign import json_object
from rllm.types.chat_forms import OWN_FORM, ChatForm

if TYPE_CHECKING:
    from rllm.gateway.server import Gateway
    from rllm.inference.vllm_process import ServerProcess
    from rllm.models.vision.fetch import ImageFetcher
    from rllm.types.wire import Policy

SERVED_PREFILL = 1024
"""Prompt tokens that a served model reads in one step: those who are being answered wait for no more."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Address:
    """Where a gateway listens, who may use it, and where it keeps what it captures."""

    ledger: Path
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = ""
    """Made anew when empty; None lets everybody in who can connect."""
    require_session: bool = False


def upstream_policy(place: ModelPlace, *, timeout_s: float = 600.0) -> "Policy":
    """A model on a server as what answers the gateway's calls. `timeout_s`: the longest wait for the next
    byte of an answer."""
    try:
        from rllm.gateway.upstream import UpstreamPolicy
        from rllm.types.wire import Dialect
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "gateway") from error
    dialect = Dialect.MESSAGES if place.protocol is Protocol.ANTHROPIC else Dialect.CHAT
    return UpstreamPolicy([place.base_url], dialect=dialect, api_key=place.api_key, timeout_s=timeout_s)


def build_gateway(
    address: Address,
    upstreams: Sequence[str],
    *,
    dialect: str = "chat",
    api_key: str | None = None,
    processed_logprobs: bool = False,
    sends_seeds: bool = True,
    capture: frozenset[str] | None = None,
    connect_timeout_s: float = 5.0,
    max_body_mib: int = 32,
) -> "Gateway":
    """A gateway in front of other servers: its address is taken, and nothing written yet.

    `capture` says what they can give (`logprobs`, `token_ids`, `usage`); None asks vLLM, SGLang
    and rLLM alone.

    `sends_seeds=False` leaves the draws to them, and refuses calls that name a seed.
    """
    try:
        from rllm.gateway.server import Gateway, listening_socket
        from rllm.gateway.upstream import UpstreamPolicy
        from rllm.types.wire import Dialect
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "gateway") from error
    policy = UpstreamPolicy(
        upstreams,
        dialect=Dialect(dialect),
        api_key=api_key,
        processed_logprobs=processed_logprobs,
        sends_seeds=sends_seeds,
        capture=capture,
        connect_timeout_s=connect_timeout_s,
    )
    return _gateway(
        Gateway, policy, address, listening_socket(address.host, address.port), max_body_mib << 20
    )


@asynccontextmanager
async def ids_gateway(
    address: Address,
    upstream: str,
    tokenizer: Path,
    *,
    trust_remote_code: bool = False,
    model: str = "",
    api_key: str | None = None,
    processed_logprobs: bool = False,
    sends_seeds: bool = True,
    connect_timeout_s: float = 5.0,
    max_body_mib: int = 32,
) -> AsyncIterator["Gateway"]:
    """A gateway that makes the prompts itself, of ids, and lets one vLLM or SGLang server sample.

    Not started yet; the connections to the server end with the context. `sends_seeds` as in `build_gateway`.
    Raises InferenceError when the server is not there, ModelDirectoryError for a `tokenizer` directory
    without one, and for one that needs Python of the directory's own without `trust_remote_code`.
    """
    try:
        from rllm.gateway.local import LocalPolicy
        from rllm.gateway.server import Gateway, listening_socket
        from rllm.gateway.server.auth import require_guarded
        from rllm.gateway.upstream.pool import base_url
        from rllm.inference.vllm import VLLMClient
        from rllm.models.tokenizer import HuggingFaceTokenizer
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "gateway") from error
    require_guarded(address.host, address.token)
    url = base_url(upstream)
    if not tokenizer.is_dir():
        raise ConfigError(
            f"The tokenizer {tokenizer} is no directory; give the one of the model that is served."
        )
    listening = listening_socket(address.host, address.port)
    try:
        client = await VLLMClient.connect(
            url,
            HuggingFaceTokenizer(tokenizer, trust_remote_code=trust_remote_code),
            model=model,
            api_key=api_key,
            processed_logprobs=processed_logprobs,
            sends_seeds=sends_seeds,
            connect_timeout_s=connect_timeout_s,
        )
    except BaseException:
        listening.close()
        raise
    try:
        policy = LocalPolicy(client, client.facts.model, sends_seeds=sends_seeds)
        max_body_bytes = min(max_body_mib << 20, policy.max_body_bytes)
        yield _gateway(Gateway, policy, address, listening, max_body_bytes)
    finally:
        await client.close()


@dataclass(kw_only=True, slots=True, frozen=True)
class FleetSettings:
    """Servers of one model: `servers` that run, or `replicas` that are started with vLLM."""

    servers: Sequence[str] = ()
    replicas: int = 0
    server_python: str = ""
    """The Python of an environment that has vLLM."""
    device: str = "cpu"
    dtype: str = "float32"
    num_slots: int = 64
    max_context: int = 0
    """Tokens of one conversation; 0 takes what the model was made for, up to 4,096."""
    api_key: str | None = None
    processed_logprobs: bool = False
    sends_seeds: bool = True
    connect_timeout_s: float = 5.0
    allowed_media_domains: Sequence[str] = ()
    """Hosts that images are fetched from; none are, where there is none."""


@asynccontextmanager
async def fleet_gateway(
    address: Address,
    model: Path,
    settings: FleetSettings,
    *,
    name: str = "",
    trust_remote_code: bool = False,
    max_body_mib: int = 32,
) -> AsyncIterator["Gateway"]:
    """A gateway in front of several servers of `model`, a run or a model directory, not started yet.

    Conversations stay where their prefix was read; a server that ends or hangs loses no call. What was
    started ends with the context. Raises InferenceError for a server that is not there, and ConfigError for
    one with another tokenizer.
    """
    try:
        from rllm.gateway.local.fleet import FleetPolicy
        from rllm.gateway.server import Gateway, listening_socket
        from rllm.gateway.server.auth import require_guarded
        from rllm.gateway.upstream.pool import base_url
        from rllm.inference.fleet import Fleet
        from rllm.inference.vllm import VLLMClient
        from rllm.models.tokenizer import HuggingFaceTokenizer
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "gateway") from error
    directory = model_directory(model)
    require_guarded(address.host, address.token)
    fetcher = _image_fetcher(settings.allowed_media_domains, directory)
    tokenizer = HuggingFaceTokenizer(directory, trust_remote_code=trust_remote_code)
    if _reads_images(config := _config_of(directory)):  # what follows needs torch
        from rllm.models.directory import image_processor, require_servers_read_images

        require_servers_read_images(directory, config)
        tokenizer.read_images(image_processor(directory, config, trust_remote_code=trust_remote_code))
    async with AsyncExitStack() as open_until_done:
        listening = listening_socket(address.host, address.port)
        open_until_done.callback(listening.close)
        processes = await _start_replicas(settings, directory, address.ledger / "servers", open_until_done)
        process_of_url = {each.url: each for each in processes}

        async def connect(url: str) -> VLLMClient:
            client = VLLMClient(
                base_url(url),
                tokenizer,
                api_key=settings.api_key,
                processed_logprobs=bool(processes) or settings.processed_logprobs,
                sends_seeds=settings.sends_seeds,
                connect_timeout_s=settings.connect_timeout_s,
            )
            try:
                await client.require_tokenizer()
            except BaseException:
                await client.close()
                raise
            return client

        async def end(url: str) -> None:
            if url in process_of_url:
                await process_of_url.pop(url).__aexit__()

        clients: list[VLLMClient] = []
        for url in list(process_of_url) or settings.servers:
            clients.append(await connect(url))
            open_until_done.push_async_callback(clients[-1].close)
        contexts = [each.max_context for each in clients]
        fleet = Fleet(
            clients, max_context=min(contexts + [settings.max_context] * (settings.max_context > 0))
        )
        open_until_done.push_async_callback(fleet.close)
        label = name or model.resolve().name
        policy = FleetPolicy(
            fleet, label, connect=connect, end=end, sends_seeds=settings.sends_seeds, fetcher=fetcher
        )
        max_body_bytes = min(max_body_mib << 20, policy.max_body_bytes)
        yield _gateway(Gateway, policy, address, listening, max_body_bytes)


async def _start_replicas(
    settings: FleetSettings, model: Path, logs: Path, open_until_done: AsyncExitStack
) -> "list[ServerProcess]":
    from rllm.inference.vllm_process import ServerSettings, require_vllm, start_replicas

    if not settings.replicas:
        return []
    require_vllm(settings.server_python, "--server-python")
    of_each = ServerSettings(
        python=settings.server_python,
        model=model,
        max_context=settings.max_context or min(_positions_of(model), 4096),
        max_requests=settings.num_slots,
        max_prefill_tokens=SERVED_PREFILL,
        dtype=settings.dtype,
        device=settings.device,
        reads_images=_reads_images(_config_of(model)),
    )
    return await start_replicas(of_each, settings.replicas, logs, open_until_done)


def _image_fetcher(hosts: Sequence[str], model: Path) -> "ImageFetcher | None":
    """Raises ConfigError for hosts that are none, or for a model that reads no images."""
    if not hosts:
        return None
    if not _reads_images(_config_of(model)):
        raise ConfigError(
            f"--allowed-media-domains is {','.join(hosts)}, and {model} reads text alone; leave it out."
        )
    from rllm.models.vision.fetch import ImageFetcher

    return ImageFetcher(hosts)


def _config_of(model: Path) -> dict[str, Any]:
    return json_object(model / "config.json")


def _reads_images(config: dict[str, Any]) -> bool:
    """See `rllm.models.directory.reads_images`, which needs torch."""
    return isinstance(config.get("vision_config"), dict)


def _positions_of(model: Path) -> int:
    """Tokens that the model was made for."""
    config = _config_of(model)
    text_config = config.get("text_config")
    fields: dict[str, Any] = text_config if isinstance(text_config, dict) else config
    positions = fields.get("max_position_embeddings")
    return positions if isinstance(positions, int) else 2048


@asynccontextmanager
async def model_gateway(
    address: Address,
    model: Path,
    *,
    name: str = "",
    device: str = "cpu",
    dtype: str = "auto",
    form: ChatForm = OWN_FORM,
    trust_remote_code: bool = False,
    threads: int = 0,
    num_slots: int = 64,
    max_context: int = 0,
    cache_tokens: int = 0,
    num_drafts: int = 0,
    allowed_media_domains: Sequence[str] = (),
) -> AsyncIterator["Gateway"]:
    """A gateway in front of the built-in engine, not started yet; the engine ends with the context.

    `model` is a run or a model directory. `max_context` 0 takes what the model was made for, up to 4,096;
    `cache_tokens` 0 what the machine has room for. `num_drafts`: tokens guessed ahead, see
    `rllm.inference.local.drafts`. `allowed_media_domains`: see `rllm.models.vision.fetch`.
    """
    try:
        from rllm.gateway.local import LocalPolicy
        from rllm.gateway.server import Gateway, listening_socket
        from rllm.gateway.server.auth import require_guarded
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "gateway") from error
    try:
        from rllm.models.devices import dtype_named, require_number_type, use_threads
        from rllm.models.directory import load_model
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    directory = model_directory(model)
    require_guarded(address.host, address.token)
    require_number_type(device, dtype)
    fetcher = _image_fetcher(allowed_media_domains, directory)
    listening = listening_socket(address.host, address.port)
    try:
        use_threads(threads)
        decoder = load_model(
            directory,
            device=device,
            dtype=dtype_named(dtype),
            form=resolve_form(model, form),
            trust_remote_code=trust_remote_code,
        )
        client = local_client(
            decoder,
            InferenceConfig(
                num_slots=num_slots,
                max_prefill_tokens=SERVED_PREFILL,
                cache_tokens=cache_tokens,
                lockstep=False,
            ),
            max_context=max_context or min(decoder.max_positions, 4096),
            num_drafts=num_drafts,
        )
    except BaseException:
        listening.close()
        raise
    try:
        policy = LocalPolicy(client, name or model.resolve().name, fetcher=fetcher)
        yield _gateway(Gateway, policy, address, listening, policy.max_body_bytes)
    finally:
        await client.close()


def _gateway(
    gateway_class: type["Gateway"], policy: "Policy", address: Address, listening: socket, max_body_bytes: int
) -> "Gateway":
    try:
        return gateway_class(
            policy,
            address.ledger,
            host=address.host,
            token=address.token,
            require_session=address.require_session,
            listening=listening,
            max_body_bytes=max_body_bytes,
        )
    except BaseException:
        listening.close()
        raise
