"""The learner whose weights a Tinker service holds, and how a run with one is put together.

samples ──weights of the update──► data ──forward_backward──► log-probabilities ──► metrics, guard
                                                                   └──optim_step──► one policy version more
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rllm.algorithms.losses import Loss, TokenInputs, has_gradient, token_weights
from rllm.config.lora import LoraConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.config.schema import TrainConfig
from rllm.errors import CheckpointError, ConfigError, InferenceError, ModelDirectoryError, NumericsError
from rllm.files.atomic import write_directory_atomic
from rllm.integrations.tinker.client import TinkerClient
from rllm.integrations.tinker.keys import is_published, translate
from rllm.integrations.tinker.requirements import SUPPORTS, require_supported
from rllm.integrations.tinker.service import Service, require_client
from rllm.integrations.tinker.tokenizers import require_same_tokenizer
from rllm.integrations.tinker.translation import scoring_arrays, service_loss, update_arrays
from rllm.models.directory import LoadedModel, describe_model, load_model, save_model
from rllm.models.lora import load_adapter, with_adapter
from rllm.types.draws import draw_seed
from rllm.types.sample import TrainingSample

STATE_FILE = "service.json"
"""The file of a checkpoint with the address in the service of the weights and the moments."""
log = logging.getLogger(__name__)


class TinkerBackend:
    """A `TrainingBackend` for an adapter in a service."""

    def __init__(
        self, service: Service, *, config: OptimizerConfig, is_half: bool, publish: Callable[[int], None]
    ) -> None:
        self.policy_version = 0
        self.service = service
        self.config = config
        self._is_half = is_half
        self._publish = publish
        self._published_version = -1

    @property
    def supports(self) -> frozenset[str]:
        return SUPPORTS

    @property
    def is_half(self) -> bool:
        return self._is_half

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        if not samples:
            return []
        logprobs = self.service.forward([(_inputs(each), scoring_arrays(each)) for each in samples])
        return [
            _at_trained_tokens(each, logprobs_T) for each, logprobs_T in zip(samples, logprobs, strict=True)
        ]

    def update(self, samples: Sequence[TrainingSample], loss: Loss, learning_rate: float) -> dict[str, float]:
        """See `TrainingBackend.update`. A gradient that is no number at the service is only seen in its
        log-probabilities; nothing says how long it was, unless the server does."""
        row_means = self.service.facts.row_means
        theirs = service_loss(loss, row_means=row_means)
        pairs = list(zip(samples, token_weights(samples, loss.aggregation), strict=True))
        candidates = [(sample, weights_T) for sample, weights_T in pairs if weights_T.any()]
        if not candidates:  # the weights stay, and so does the version
            return {"grad_norm": 0.0, "skipped_updates": 0.0, "loss": 0.0}
        # Rows without a gradient need not be sent. They count in the weights of all others; where there are
        # no others, one of them makes the step along a gradient of 0 that the update is, and its measures are
        # not those of the update.
        with_gradient = [each for each in candidates if has_gradient(each[0], loss)]
        rows = with_gradient or candidates[:1]
        arrays = update_arrays(rows, theirs, row_means=row_means)
        inputs = [(_inputs(sample), columns) for (sample, _), columns in zip(rows, arrays, strict=True)]
        logprobs = self.service.forward_backward(inputs, theirs)
        # Before the step: a loss that is no number raises here, and the weights stay.
        metrics = self._metrics(rows, logprobs, loss)
        if not with_gradient:
            metrics = {"loss": metrics["loss"]}
        answer = self.service.optim_step(learning_rate, self.config)
        self.policy_version += 1
        if norms := [value for name, value in answer.items() if name.endswith("/grad_norm")]:
            metrics["grad_norm"] = norms[0]
        return {"skipped_updates": 0.0, **metrics}

    def publish_weights(self) -> int:
        # Weights that are published already need no new sampler in the service; the client is told all the
        # same.
        if self._published_version != self.policy_version:
            self.service.publish()
            self._published_version = self.policy_version
        self._publish(self.policy_version)
        return self.policy_version

    def save(self, directory: Path) -> None:
        state = {
            "base_url": self.service.base_url,
            "base_model": self.service.base_model,
            "path": self.service.save_state(f"version-{self.policy_version}"),
            "policy_version": self.policy_version,
        }
        (directory / STATE_FILE).write_text(json.dumps(state, indent=2))

    def load(self, directory: Path) -> None:
        try:
            state = json.loads((directory / STATE_FILE).read_text())
            path, version, base_model = state["path"], state["policy_version"], state["base_model"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory / STATE_FILE} cannot be read: {error}; delete {directory} to use the one before."
            ) from error
        if base_model != self.service.base_model:
            raise CheckpointError(
                f"{directory} holds an adapter to `{base_model}`; the run has `{self.service.base_model}`."
            )
        try:
            self.service.load_state(path)
        except InferenceError as error:
            if error.is_final:  # nobody is there to say what is kept
                raise
            raise CheckpointError(
                f"{directory} is kept at {path} in the service, which cannot load it ({error}). Delete "
                f"{directory} to use the one before."
            ) from error
        # The sampler still has other weights, so the next publish has to make a new one.
        self.policy_version, self._published_version = version, -1

    def reset_optimizer(self) -> None:
        """Forget the moments: the next phase optimises another objective."""
        self.service.reset_optimizer()

    def _metrics(
        self,
        rows: Sequence[tuple[TrainingSample, NDArray[np.float64]]],
        logprobs: Sequence[NDArray[np.float64]],
        loss: Loss,
    ) -> dict[str, float]:
        """The loss and its measures under the weights before the update, as the other backends say them.
        Raises NumericsError where the loss is not finite."""
        tokens = _tokens(rows, logprobs)
        total = float((loss.terms(tokens) * tokens.weights_M).sum())
        if not np.isfinite(total):
            raise NumericsError(
                f"The loss is {total} at policy version {self.policy_version}; the weights were not changed. "
                "Lower `optimizer.learning_rate`, or look at the rewards of this step."
            )
        measures = {name: float(each.mean()) for name, each in loss.measures(tokens).items()}
        if measures:
            measures["logprob_gap_max"] = float((tokens.new_M - tokens.old_M).abs().max())
        return {"loss": total, **measures}


class TinkerKind:
    """The makers of the parts of a run in a service; see `rllm.trainer.backends.named`."""

    shards = False

    def translated(self, config: Any, num_tasks: int) -> Any:
        """See `BackendKind.translated`."""
        return translate(config, num_tasks) if is_published(config) else config

    def require(self, config: TrainConfig) -> None:
        """See `BackendKind.require`."""
        require_supported(config)
        require_client()
        for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
            if not os.environ.get(name):
                raise ConfigError(
                    f"`backend` is 'tinker' and {name} is not set; set TINKER_BASE_URL to the address of the "
                    "service and TINKER_API_KEY to your key."
                )

    def load(self, config: TrainConfig) -> LoadedModel:
        """The local facts about a model in the service, which is asked for a new adapter to it."""
        self.require(config)
        directory, seed = Path(config.model.path), draw_seed(config.seed, "adapter", "policy")
        service = Service(os.environ["TINKER_BASE_URL"])
        policy_model = describe_model(directory, model=service)
        try:
            base_model = service.choose_base_model(config.model.path)
            service.create_adapter(config.lora.rank, seed)
            theirs = service.tokenizer()
        except InferenceError as error:  # nothing has begun
            raise ConfigError(str(error)) from error
        require_same_tokenizer(policy_model.tokenizer, theirs, directory, base_model)
        return policy_model

    def client(self, config: TrainConfig, policy_model: LoadedModel) -> TinkerClient:
        """The client that samples from it."""
        return TinkerClient(policy_model, max_context=config.inference.max_context)

    def policy(
        self, config: TrainConfig, policy_model: LoadedModel, publish: Callable[[int], None]
    ) -> TinkerBackend:
        """See `BackendKind.policy`."""
        dtype = str(policy_model.config.get("dtype") or policy_model.config.get("torch_dtype") or "")
        return TinkerBackend(
            policy_model.model, config=config.optimizer, is_half=dtype != "float32", publish=publish
        )

    def critic(self, config: TrainConfig, policy_model: LoadedModel) -> Any:
        raise ConfigError("A Tinker service trains no critic; choose an estimator without, such as grpo.")

    def save(self, policy_model: LoadedModel, model: Path, adapter: Path) -> None:
        """The adapter, with where it is in the service, and the model with the adapter merged into it, where
        the weights that it belongs to are here."""
        service: Service = policy_model.model
        path = service.keep_sampler("model")
        where = {
            "base_url": service.base_url,
            "base_model": service.base_model,
            "sampler": path,
            "state": service.save_state("model"),
        }
        files = service.adapter_files(path) | {STATE_FILE: json.dumps(where, indent=2).encode()}

        def fill(directory: Path) -> None:
            for name, content in files.items():
                (directory / name).write_bytes(content)

        write_directory_atomic(adapter, fill)
        if any(policy_model.directory.glob("*.safetensors")):
            try:
                save_model(merge(policy_model.directory, adapter), model)
            except ModelDirectoryError as error:
                log.warning("%s is whole, but not merged into %s: %s", adapter, model, error)


def merge(directory: Path, adapter: Path) -> LoadedModel:
    """The model in `directory` with an adapter in peft's format."""
    rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    model = with_adapter(load_model(directory), LoraConfig(rank=rank), 0)
    load_adapter(model, adapter)
    return model


TINKER = TinkerKind()


def _inputs(sample: TrainingSample) -> list[int]:
    """The ids of a row that the service reads: all but the last, which nothing comes after."""
    return sample.token_ids_T[:-1].tolist()


def _at_trained_tokens(sample: TrainingSample, logprobs: NDArray[np.float64]) -> NDArray[np.float32]:
    """[T] of log-probabilities of what follows each token; 0 where nothing is trained."""
    row_T = np.zeros(sample.num_tokens, dtype=np.float32)
    row_T[1:] = np.where(sample.trainable_T[1:], logprobs, 0.0)
    return row_T


def _tokens(
    rows: Sequence[tuple[TrainingSample, NDArray[np.float64]]], logprobs: Sequence[NDArray[np.float64]]
) -> TokenInputs:
    """The trained tokens of an update as a loss sees them."""
    samples = [sample for sample, _ in rows]
    groups = {key: number for number, key in enumerate(dict.fromkeys(each.group_key for each in samples))}

    def column(values: Sequence[NDArray[Any]]) -> torch.Tensor:
        parts = [each[sample.trainable_T] for each, sample in zip(values, samples, strict=True)]
        return torch.from_numpy(np.concatenate(parts).astype(np.float64))

    rollout = [each.rollout_logprobs_T for each in samples if each.rollout_logprobs_T is not None]
    return TokenInputs(
        new_M=column([_at_trained_tokens(*each) for each in zip(samples, logprobs, strict=True)]),
        old_M=column([each.logprobs_T for each in samples]),
        advantages_M=column([each.advantages_T for each in samples]),
        weights_M=column([weights_T for _, weights_T in rows]),
        row_M=torch.from_numpy(np.repeat(np.arange(len(rows)), [each.num_trainable for each in samples])),
        group_R=torch.tensor([groups[each.group_key] for each in samples]),
        rollout_M=column(rollout) if rollout else None,
    )
