"""Training on torch, in the process of the sampler: publishing copies nothing, because both use
the same parameters.

samples ─► weights of the update ─► micro-batches ─► forward, Σ weight · term, backward ─► guard ─► optimizer
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rllm.algorithms.losses import Loss, TokenInputs, token_weights
from rllm.errors import CheckpointError, NumericsError
from rllm.trainer.backends.torch_optimizer import Optimizers
from rllm.trainer.batching import PackedBatch, WeightedRow, micro_batches
from rllm.types.sample import TrainingSample

OPTIMIZER_FILE = "optimizer.safetensors"
WEIGHTS_FILE = "weights.safetensors"


class TorchBackend:
    """A `TrainingBackend` for a model in this process.

    `publish` tells the sampler that the weights have changed.
    """

    def __init__(
        self,
        model: Any,
        *,
        publish: Callable[[int], None],
        optimizer: str = "adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 16_384,
        share_prefixes: bool = True,
    ) -> None:
        self.model = model
        self.policy_version = 0
        self._publish = publish
        self._optimizer_name = optimizer
        self._betas = betas
        self._weight_decay = weight_decay
        self._max_grad_norm = max_grad_norm
        self._micro_batch_tokens = micro_batch_tokens
        self._share_prefixes = share_prefixes
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._device = next(iter(self._parameters.values())).device
        self._optimizer = self._new_optimizer()

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        scores = [np.zeros(sample.num_tokens, dtype=np.float32) for sample in samples]
        rows = self._rows(samples, [sample.trainable_T.astype(np.float64) for sample in samples])
        with torch.no_grad():
            for batch in self._micro_batches(rows):
                logprobs_M = self._logprobs(batch)[0].float().cpu().numpy()
                for row, place, logprob in zip(batch.row_M, batch.place_M, logprobs_M, strict=True):
                    scores[row][place] = logprob
        return scores

    def update(self, samples: Sequence[TrainingSample], loss: Loss, learning_rate: float) -> dict[str, float]:
        weights = token_weights(samples, loss.aggregation)
        rows = self._rows(samples, weights)
        if not loss.needs_every_row:  # their weight stays in the denominator
            rows = [row for row in rows if row.sample.advantages_T.any()]
        self._optimizer.zero_grad()
        metrics = _UpdateMetrics()
        for batch in self._micro_batches(rows):
            tokens = self._inputs(batch, with_entropy=loss.needs_entropy)
            terms_M = loss.terms(tokens)
            total = (terms_M * batch.weights_M).sum()
            if not torch.isfinite(total):
                raise NumericsError(_name_tokens(batch, samples, terms_M))
            total.backward()
            metrics.add(loss, tokens, total)
        return {**self._step(learning_rate), **metrics.means()}

    def publish_weights(self) -> int:
        self._publish(self.policy_version)
        return self.policy_version

    def save(self, directory: Path) -> None:
        weights = {name: each.detach().cpu().contiguous() for name, each in self._parameters.items()}
        save_file(weights, directory / WEIGHTS_FILE)
        save_file(
            {"policy_version": torch.tensor(self.policy_version), **self._optimizer.tensors()},
            directory / OPTIMIZER_FILE,
            metadata={"version": str(self.policy_version)},
        )

    def load(self, directory: Path) -> None:
        try:
            weights = load_file(directory / WEIGHTS_FILE)
            state = load_file(directory / OPTIMIZER_FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{directory} cannot be read: {error}; delete it to use the one before."
            ) from error
        shapes = {name: each.shape for name, each in self._parameters.items()}
        if shapes != {name: each.shape for name, each in weights.items()}:
            raise CheckpointError(f"{directory} holds the weights of another model than this run's.")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self._optimizer = self._new_optimizer()
        self.policy_version = int(state.pop("policy_version"))
        self._optimizer.load(state)

    def reset_optimizer(self) -> None:
        """Forget the moments: the next phase optimises another objective."""
        self._optimizer = self._new_optimizer()

    def _new_optimizer(self) -> Optimizers:
        return Optimizers(
            self.model,
            self._parameters,
            name=self._optimizer_name,
            betas=self._betas,
            weight_decay=self._weight_decay,
        )

    def _rows(
        self, samples: Sequence[TrainingSample], weights: Sequence[NDArray[np.float64]]
    ) -> list[WeightedRow]:
        return [
            WeightedRow(index=index, sample=sample, weights_T=weights_T)
            for index, (sample, weights_T) in enumerate(zip(samples, weights, strict=True))
        ]

    def _micro_batches(self, rows: Sequence[WeightedRow]) -> Any:
        return micro_batches(
            rows, self._micro_batch_tokens, self._device, share_prefixes=self._share_prefixes
        )

    def _inputs(self, batch: PackedBatch, *, with_entropy: bool) -> TokenInputs:
        logprobs_M, entropy_M = self._logprobs(batch, with_entropy=with_entropy)
        return TokenInputs(
            new_M=logprobs_M,
            old_M=batch.old_logprobs_M,
            advantages_M=batch.advantages_M,
            weights_M=batch.weights_M,
            row_M=batch.rank_M,
            group_R=batch.group_R,
            entropy_M=entropy_M,
            rollout_M=batch.optional.get("rollout_logprobs"),
            ref_M=batch.optional.get("ref_logprobs"),
            values_M=batch.optional.get("values"),
            returns_M=batch.optional.get("returns"),
        )

    def _logprobs(self, batch: PackedBatch, *, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """[M] log-probability of every trained token at its sampling temperature, and [M] entropy there."""
        hidden_M_D = self.model.hidden(
            batch.tokens_N, batch.positions_N, batch.attention, batch.predicted_by_M
        )
        logits_M_V = self.model.logits(hidden_M_D)
        logits_M_V = logits_M_V.to(torch.promote_types(logits_M_V.dtype, torch.float32))
        if not batch.plain:
            logits_M_V = logits_M_V / batch.temperature_M.unsqueeze(1)
        if not with_entropy:
            return -F.cross_entropy(logits_M_V, batch.targets_M, reduction="none"), None
        logprobs_M_V = logits_M_V.log_softmax(dim=-1)
        entropy_M = -(logprobs_M_V.exp() * logprobs_M_V).sum(dim=-1)
        return logprobs_M_V.gather(1, batch.targets_M.unsqueeze(1)).squeeze(1), entropy_M

    def _step(self, learning_rate: float) -> dict[str, float]:
        parameters = [each for each in self._parameters.values() if each.grad is not None]
        if not parameters:
            return {"grad_norm": 0.0}  # nothing was trained on: the weights stay, and so does the version
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm))
        if not math.isfinite(norm):
            raise NumericsError(
                f"The gradient's norm is {norm} at policy version {self.policy_version}; the weights were "
                "not changed. Lower `optimizer.learning_rate`, or look at the rewards of this step."
            )
        self._optimizer.step(learning_rate)
        self.policy_version += 1
        return {"grad_norm": norm}


class _UpdateMetrics:
    """Token means over the micro-batches of one update."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.num_tokens = 0
        self.largest_gap = 0.0

    def add(self, loss: Loss, tokens: TokenInputs, total: Tensor) -> None:
        self.loss += float(total.detach())
        with torch.no_grad():
            if not (measures := loss.measures(tokens)):
                return
            for name, values_M in measures.items():
                self.sums[name] = self.sums.get(name, 0.0) + float(values_M.sum())
            self.num_tokens += len(tokens.new_M)
            self.largest_gap = max(self.largest_gap, float((tokens.new_M - tokens.old_M).abs().max()))

    def means(self) -> dict[str, float]:
        if not self.sums:
            return {"loss": self.loss}
        means = {name: value / self.num_tokens for name, value in self.sums.items()}
        return {"loss": self.loss, **means, "logprob_gap_max": self.largest_gap}


def _name_tokens(batch: PackedBatch, samples: Sequence[TrainingSample], terms_M: Tensor) -> str:
    bad = torch.nonzero(~torch.isfinite(terms_M.detach())).flatten().tolist()[:3]
    named = [
        f"token {place} (id {int(batch.targets_M[index])}) of {samples[int(batch.row_M[index])].order_key}"
        for index in bad
        for place in [int(batch.place_M[index])]
    ]
    where = "; ".join(named) if named else "no single token: the weighted sum overflowed"
    return f"The loss is not finite ({where}); the weights were not changed. Lower `optimizer.learning_rate`."
