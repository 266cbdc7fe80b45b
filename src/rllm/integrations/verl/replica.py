# verl has an environment of its own.
# pyright: reportMissingImports=false
"""The built-in engine as a rollout replica of verl, for a run that verl drives on the CPU:

    actor_rollout_ref.rollout.name=rllm
    actor_rollout_ref.model.external_lib=rllm.integrations.verl.replica     registers it, and verl's engines

    verl's trainer ──► LLMServerManager ──► EngineReplica ──► EngineServer, a Ray actor ──► LocalClient
    agent loops ──ids──► LLMServerClient ────generate───────────────┘        ▲
    each training worker ──► EngineAdapter.update_weights ──whole tensors────┘

One replica for each training rank, on the CPU.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ray
from torch import Tensor
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from rllm.errors import ConfigError
from rllm.inference.local.client import LocalClient
from rllm.integrations.verl import engines  # noqa: F401  # registers them
from rllm.models.directory import load_model
from rllm.types.draws import draw_seed
from rllm.types.messages import FinishReason, SamplingParams

NAME = "rllm"
"""In `actor_rollout_ref.rollout.name`."""
BUCKET_BYTES = 256 << 20
"""The size of weights that travel to the server together."""


def server_name(replica_rank: int) -> str:
    """The name of the Ray actor."""
    return f"rllm_server_{replica_rank}"


class EngineServer:
    """The engine of one replica, in a process of its own; verl's names for what it does."""

    def __init__(self, directory: str, *, max_prompt: int, max_answer: int, seed: int) -> None:
        self._model = load_model(Path(directory))
        self._client = LocalClient(self._model, max_context=max_prompt + max_answer)
        self._max_answer, self._seed = max_answer, seed
        self._global_steps: int | None = None
        self._num_calls = 0
        self._next_weights: dict[str, Tensor] = {}

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> TokenOutput:
        """Raises ConfigError for sampling that the engine has not, and ContextLengthError."""
        if names := [name for name, each in media.items() if each]:
            raise ConfigError(f"`{names[0]}` is given, and the built-in engine reads text alone.")
        self._num_calls += 1
        output = await self._client.generate_ids(
            list(prompt_ids),
            SamplingParams(
                temperature=float(sampling_params.get("temperature", 1.0)),
                top_p=float(sampling_params.get("top_p", 1.0)),
                top_k=max(0, int(sampling_params.get("top_k", 0))),
                max_tokens=int(sampling_params.get("max_tokens", self._max_answer)),
                stop_token_ids=tuple(sampling_params.get("stop_token_ids", ())),
                seed=draw_seed(self._seed, "verl", self._num_calls),
            ),
        )
        return TokenOutput(
            token_ids=output.completion_ids,
            log_probs=output.logprobs,
            stop_reason="length" if output.finish_reason is FinishReason.LENGTH else "completed",
            extra_fields={"global_steps": self._global_steps},
        )

    async def receive(self, weights: dict[str, Tensor]) -> None:
        """Whole tensors by their Hugging Face names, for the next `publish`."""
        self._next_weights |= {name: each.clone() for name, each in weights.items()}

    async def publish(self, global_steps: int | None) -> None:
        """Sample from the weights of the last `receive` calls."""
        weights, self._next_weights = self._next_weights, {}
        self._model.model.load_hf(weights)
        self._global_steps = global_steps
        self._client.publish(self._client.policy_version + 1)

    async def wake_up(self) -> None:
        """Do nothing: on a CPU no other process waits for the memory of weights and cache."""

    sleep = release_kv_cache = resume_kv_cache = resume_generation = clear_kv_cache = wake_up


class EngineReplica(RolloutReplica):
    """Where verl asks for answers: one server for each training rank."""

    async def launch_servers(self) -> None:
        config = self.config
        if self.world_size != 1:
            raise ConfigError(
                f"`actor_rollout_ref.rollout.name` is {NAME!r}, whose servers are of one rank each, and here "
                f"one has {self.world_size}; set `tensor_model_parallel_size` and its like to 1."
            )
        server = (
            ray.remote(EngineServer)
            .options(name=server_name(self.replica_rank), num_cpus=0)
            .remote(
                str(self.model_config.path),
                max_prompt=config.prompt_length,
                max_answer=config.response_length,
                seed=config.seed + self.replica_rank,
            )
        )
        await server.wake_up.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = server_name(self.replica_rank)

    def rollout_worker_use_gpu(self) -> bool:
        return False


class EngineAdapter(BaseRollout):
    """A training rank's side of its replica: sends new weights to the server."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: weights and cache stay in the server."""

    async def release(self) -> None:
        """Do nothing: weights and cache stay in the server."""

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "named_tensors", **options: Any
    ) -> None:
        """Raises ConfigError for weights in another form."""
        if wire_format != "named_tensors" or options.get("peft_config") is not None:
            raise ConfigError("The built-in engine takes whole weights: no adapters, no `delta_flush`.")
        server = ray.get_actor(server_name(int(os.environ["RANK"])))
        for bucket in _buckets(weights):
            await server.receive.remote(bucket)
        await server.publish.remote(options.get("global_steps"))


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The weights in parts of about BUCKET_BYTES."""
    bucket, size = dict[str, Tensor](), 0
    for name, each in weights:
        bucket[name] = each.detach().cpu().float()
        size += bucket[name].nbytes
        if size > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
    yield bucket


RolloutReplicaRegistry.register(NAME, lambda: EngineReplica)
_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{EngineAdapter.__name__}"
