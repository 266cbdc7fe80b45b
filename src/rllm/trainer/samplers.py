"""The samplers of a run's policies: the built-in engine, or a fleet of model servers.

policy ──► LocalClient, in this process, the trainer's own parameters
      └──► Fleet ──► replicas that the run starts, or servers that run: weights by directory, or over NCCL
"""

import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import numpy as np

from rllm.config.schema import TrainConfig
from rllm.errors import CanaryError, ConfigError, InferenceError
from rllm.inference.client import ModelClient, TokenClient
from rllm.inference.local.client import LocalClient
from rllm.inference.vllm_process import ServerProcess, ServerSettings, require_vllm, start_replicas
from rllm.models.devices import cuda_devices, gpu_number
from rllm.models.directory import LoadedModel, save_model
from rllm.models.lora import save_adapter
from rllm.models.nccl import require_nccl
from rllm.models.weight_sending import WeightSender
from rllm.trainer.backends.torch_optimizer import HALF
from rllm.trainer.canary import HALF_TOLERANCE, TOLERANCE, Canary, CanaryTrainer, row_to_score, row_with_image
from rllm.trainer.policies import PolicyModel, make_client
from rllm.trainer.reference import ModelScorer
from rllm.types.addresses import require_base_url
from rllm.types.messages import SamplingParams

if TYPE_CHECKING:
    from rllm.inference.fleet import WeightFiles
    from rllm.inference.vllm import VLLMClient

NCCL = "nccl"
"""The `inference.weight_transfer` that leaves nothing on disk."""
WEIGHTS = "served_weights"
"""Where in a run's directory replicas find what was published last; it goes when the run ends."""
LOGS = "servers"
"""Where in a run's directory the servers of a run leave what they print."""
ROW = 32
"""Tokens that servers and trainer are compared by before a run begins."""


class PolicyClient(ModelClient, TokenClient, Protocol):
    """A sampler of a policy, which is told of its weights."""

    def publish(self, policy_version: int, write: Callable[[], None] | None = None) -> None: ...

    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]: ...


class FrozenScorer(ModelScorer):
    """A policy that nothing changes, as a canary asks the trainer."""

    policy_version = 0

    @property
    def is_half(self) -> bool:
        return next(self.model.parameters()).dtype in HALF


def busy_s(client: object) -> float | None:
    """Seconds in which a sampler had work, so far; None where nobody has measured it."""
    if isinstance(client, LocalClient):
        return client.engine.counts.busy_s
    return getattr(client, "busy_s", None)


@asynccontextmanager
async def open_client(
    config: TrainConfig, policy: str, model: LoadedModel, run: Path
) -> AsyncIterator[PolicyClient]:
    """A sampler of `model` while the block runs; `run` is the run's directory.

    Raises ConfigError for a server that is not there, or whose context is too short.
    """
    if config.inference.engine == "local":
        client = make_client(config, model)
        try:
            yield client
        finally:
            await client.close()
        return
    from rllm.inference.fleet import Fleet  # servers need the extra `gateway`, the built-in engine does not

    weights = run / WEIGHTS / policy
    async with AsyncExitStack() as open_until_done:
        # Callbacks run in reverse order: the servers have ended by the time their weights are removed.
        open_until_done.callback(_remove, weights)
        (_, urls), processes = config.servers_of(policy), list[ServerProcess]()
        if config.inference.replicas:
            processes = await _start(config, policy, model, run, open_until_done)
            urls = [each.url for each in processes]
        fleet = Fleet(
            [_client(config, url, model) for url in urls],
            weights=_weights_of(config, model, weights / "published"),
            max_context=config.inference.max_context,
            num_starts=[partial(getattr, each, "num_starts") for each in processes],
        )
        open_until_done.push_async_callback(fleet.close)
        for replica in fleet.replicas:
            with _refused_by_key(config, policy, replica.url):
                room = (await replica.client.check()).max_context
            if room < config.inference.max_context:
                raise ConfigError(
                    f"`inference.max_context` is {config.inference.max_context} and {replica.url} reads "
                    f"{room} tokens; start it with a longer --max-model-len, or set the key to what it reads."
                )
        yield fleet


@contextmanager
def _refused_by_key(config: TrainConfig, policy: str, url: str) -> Iterator[None]:
    """Name the key of a server that is refused before a run begins."""
    key, _ = config.servers_of(policy)
    try:
        yield
    except CanaryError as error:
        raise CanaryError(f"`{key}`: {url} cannot sample this policy. {error}") from error
    except (ConfigError, InferenceError, ValueError) as error:
        raise ConfigError(f"`{key}`: {url} cannot sample this policy. {error}") from error


async def require_same_model(config: TrainConfig, client: PolicyClient, policy: PolicyModel) -> None:
    """Give every server of a fleet the weights.

    Raises ConfigError for one that is of another model or does not speak vLLM's protocol, and CanaryError for
    one that does not compute what the trainer's model does, or says how likely its answers are at another
    temperature than they were sampled at.
    """
    if config.inference.engine == "local":
        return
    from rllm.inference.fleet import Fleet

    trainer: CanaryTrainer = policy.backend or FrozenScorer(model=policy.loaded_model.model)
    if policy.backend is None:  # nobody else publishes what nothing changes
        client.publish(trainer.policy_version)
    if isinstance(client, Fleet):
        for replica in client.replicas:
            with _refused_by_key(config, policy.name, replica.url):
                await replica.client.require_tokenizer()
                await client.bring_up_to_date(replica)
                await _require_same_model(
                    replica.client, trainer, policy.loaded_model, config.rollout.temperature
                )


async def _require_same_model(
    server: "VLLMClient", trainer: CanaryTrainer, model: LoadedModel, temperature: float
) -> None:
    vocab_size = model.vocab_size
    prompt = list(range(min(ROW, vocab_size)))
    await Canary(1.0).check(trainer, server, [row_to_score(prompt)])
    if (reader := model.tokenizer.images) is not None:
        await Canary(1.0).check(trainer, server, [row_with_image(reader, prompt)])
    output = await server.generate_ids(prompt, SamplingParams(temperature=temperature, max_tokens=ROW))
    if max(output.completion_ids) >= vocab_size:
        raise ConfigError(f"It sampled the id {max(output.completion_ids)} of a vocabulary of {vocab_size}.")
    row = row_to_score(prompt + output.completion_ids, temperature=temperature)
    (scores,) = trainer.score([row])
    gap = float(np.abs(scores[len(prompt) :] - np.array(output.logprobs)).max())
    # `not <=`, because NaN has to be refused as well.
    if not gap <= (HALF_TOLERANCE if trainer.is_half else TOLERANCE):
        raise CanaryError(
            f"Its log-probabilities of an answer that was sampled at temperature {temperature:g} "
            f"differ from the trainer's by {gap:.2g} nats, and those of a prompt do not: start it with "
            "`--logprobs-mode processed_logprobs`."
        )


async def _start(
    config: TrainConfig, policy: str, model: LoadedModel, run: Path, open_until_done: AsyncExitStack
) -> list[ServerProcess]:
    """The replicas of a policy, which are ready."""
    inference, initial = config.inference, run / WEIGHTS / policy / "initial"
    # Beside an adapter the base alone: servers get the adapter each time that it is published.
    _write(model.base or model, initial)
    settings = ServerSettings(
        python=inference.server_python,
        model=initial,
        max_context=inference.max_context,
        max_requests=inference.slots,
        max_prefill_tokens=inference.max_prefill_tokens,
        dtype=config.model.number_type,
        device=config.model.device,
        adapter_rank=config.adapter_of(policy).rank,
        takes_tensors=inference.weight_transfer == NCCL,
        reads_images=model.tokenizer.images is not None,
    )
    place = list(config.named_policies).index(policy)
    return await start_replicas(
        settings,
        inference.replicas,
        run / LOGS / policy,
        open_until_done,
        first_gpu=place * inference.replicas,
        spared_gpu=gpu_number(config.model.device) if inference.weight_transfer == NCCL else None,
    )


def _remove(weights: Path) -> None:
    """Delete the weights that servers read, and the directory around them with the last policy's."""
    shutil.rmtree(weights, ignore_errors=True)
    with suppress(OSError):
        weights.parent.rmdir()


def _client(config: TrainConfig, url: str, model: LoadedModel) -> "VLLMClient":
    from rllm.inference.vllm import FINISH, VLLMClient

    return VLLMClient(
        url,
        model.tokenizer,
        processed_logprobs=True,
        sends_seeds=config.inference.server_seeds,
        # Without steps ahead no answer is under way when weights are published.
        at_publish=config.inference.at_publish if config.schedule.steps_ahead else FINISH,
        max_connections=config.inference.slots,
    )


def _weights_of(config: TrainConfig, model: LoadedModel, directory: Path) -> "WeightFiles | WeightSender":
    """The way in which a fleet is given the weights of `model`."""
    from rllm.inference.fleet import WeightFiles

    if config.inference.weight_transfer == NCCL:
        return WeightSender(model)
    has_adapter = model.base is not None
    write = save_adapter if has_adapter else _write
    return WeightFiles(partial(write, model), directory, is_adapter=has_adapter)


def _write(model: LoadedModel, directory: Path) -> None:
    """Untied: of a model with tied embeddings vLLM keeps the old output layer when it reads new weights."""
    save_model(model, directory, with_output_layer=True)


def require_servers(config: TrainConfig) -> None:
    """Raises ConfigError, before any work, for servers that cannot be started."""
    num_replicas = config.inference.replicas
    if num_replicas:
        require_vllm(config.inference.server_python, "`inference.server_python`")
    if config.inference.weight_transfer == NCCL:
        require_nccl()
        num_servers, num_gpus = num_replicas * len(config.named_policies), len(cuda_devices())
        if num_servers >= num_gpus > 0:
            raise ConfigError(
                f"`inference.replicas` is {num_replicas}, for {len(config.named_policies)} policies, and "
                f"this machine has {num_gpus} GPUs: over NCCL each server needs one of its own, and the "
                "trainer another. Start fewer, or set `inference.weight_transfer` to files."
            )
    key_of: dict[str, str] = {}
    for key, urls in dict(map(config.servers_of, config.named_policies)).items():
        for url in urls:
            if not require_base_url(f"`{key}`", url).endswith("/v1"):
                raise ConfigError(f"`{key}` has {url!r}; write addresses such as http://10.0.0.7:8000/v1.")
            if (other := key_of.setdefault(_address(url), key)) != key:
                raise ConfigError(
                    f"`{other}` and `{key}` both name {url}; a server has the weights of one policy, so give "
                    "each its own."
                )
        if len(set(map(_address, urls))) < len(urls):
            raise ConfigError(f"`{key}` names a server twice: {', '.join(urls)}; leave one of the two out.")


def _address(url: str) -> str:
    """By which a server is the same, whatever its machine is called."""
    parts = urlsplit(url.rstrip("/"))
    host = parts.hostname or ""
    with suppress(OSError):  # a name that nobody knows is refused where it is connected to
        host = socket.gethostbyname(host)
    return f"{host}:{parts.port}{parts.path}"
