"""The models of a run in a process of the cluster, with weights of its own, and the actor that serves them.

begin(job, model files) ──► models, clients
load(versions, bytes)   ──► the clients serve these weights
generate_ids(prompt)    ──► an answer with the version of the weights that sampled it
"""

import asyncio
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllm.inference.local.client import LocalClient
from rllm.integrations.ray.job import Machine, WorkerJob, this_machine
from rllm.integrations.ray.scratch import scratch_directory
from rllm.integrations.ray.weights import split, unpack
from rllm.trainer.policies import load_initial_models, make_client
from rllm.types.messages import ModelOutput, SamplingParams

Files = Mapping[str, NDArray[np.uint8]]
"""place/name -> the file's bytes."""


def write_files(files: Files, directory: Path) -> None:
    for name, block in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(block.tobytes())


class HeldModels:
    """Models and their samplers, by policy."""

    def __init__(self, job: WorkerJob, files: Files, directory: Path) -> None:
        write_files(files, directory)
        models = load_initial_models(job.config_in(directory), directory)
        for path in directory.rglob("*.safetensors"):  # what is read later is the tokenizer
            path.unlink()
        self.clients: dict[str, LocalClient] = {
            name: make_client(job.config, model) for name, model in models.items()
        }
        policies = job.config.named_policies
        self._learning = {name: each.model for name, each in models.items() if policies[name].trainable}

    def load(self, policy_versions: Mapping[str, int], block_B: NDArray[np.uint8]) -> None:
        """Serve these weights from now on; conversations under way go on with them."""
        parts = split(block_B, self._learning)
        for name, policy_version in policy_versions.items():
            # Written by the engine between two of its steps: a step never sees half of the new weights.
            write = partial(unpack, parts[name], self._learning[name]) if name in parts else None
            self.clients[name].publish(policy_version, write)

    def drop_caches(self) -> None:
        """Drop the caches: the leftovers of another lease would change the batches, and with them the last
        bit."""
        for client in self.clients.values():
            client.publish(client.policy_version)


class ModelServer:
    """The actor, with an event loop: many calls at a time are one batch of the engine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._models: HeldModels | None = None

    def __repr__(self) -> str:
        return self._name  # which Ray puts before its lines

    async def machine(self) -> Machine:
        return this_machine()

    async def begin(self, pickled_job: bytes, files: Files) -> None:
        job: WorkerJob = pickle.loads(pickled_job)
        self._models = HeldModels(job, files, scratch_directory())

    @property
    def models(self) -> HeldModels:
        assert self._models is not None, "the pool lets a server begin before it is used"
        return self._models

    async def load(self, policy_versions: Mapping[str, int], block_B: NDArray[np.uint8]) -> None:
        await asyncio.to_thread(self.models.load, policy_versions, block_B)

    async def generate_ids(self, policy: str, prompt_ids: list[int], sampling: SamplingParams) -> ModelOutput:
        return await self.models.clients[policy].generate_ids(prompt_ids, sampling)

    async def score(self, policy: str, ids: list[int], start: int, temperature: float) -> list[float]:
        return await self.models.clients[policy].score(ids, start, temperature)

    async def live(self) -> Any:
        """Never returns: whoever waits is told when this process ends."""
        await asyncio.get_running_loop().create_future()
