"""The verbs of a training backend, and of a critic, over verl's engine worker.

samples ─► weights of the update ─► EngineWorker.step ─► the loss sees what the torch backend's loss would see
publish_weights ─► whole tensors ─► the model that the sampler reads
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.algorithms.losses import Loss, TokenInputs, has_gradient, token_weights
from rllm.config.schema import TrainConfig
from rllm.errors import CheckpointError, NumericsError
from rllm.integrations.verl.worker import EngineWorker
from rllm.models.batching import trained_columns
from rllm.models.directory import LoadedModel
from rllm.models.packing import WeightedRow
from rllm.trainer.backends.guard import NUM_NAMED, named_tokens
from rllm.types.sample import TrainingSample

_COLUMNS = {
    "old_M": "old_logprobs_M",
    "advantages_M": "advantages_M",
    "weights_M": "weights_M",
    "row_M": "rank_M",
    "group_R": "group_R",
}
_OPTIONAL = {
    "rollout_M": "rollout_logprobs",
    "ref_M": "ref_logprobs",
    "values_M": "values",
    "returns_M": "returns",
    "chosen_M": "chosen",
}


class _Updates:
    """The updates of a policy or a critic."""

    def __init__(self, config: TrainConfig, policy_model: LoadedModel, model_type: str) -> None:
        self.policy_version = 0
        self._skips = config.optimizer.on_bad_update == "skip"
        self._worker = EngineWorker(policy_model.directory, config, model_type)

    def update(self, samples: Sequence[TrainingSample], loss: Loss, learning_rate: float) -> dict[str, float]:
        """One optimizer step on all samples; see `TrainingBackend.update`."""
        weights = token_weights(samples, loss.aggregation)
        rows = _rows(samples, weights)
        if not rows:  # nothing is trained on: the weights stay, and so does the version
            return {"grad_norm": 0.0, "skipped_updates": 0.0, "loss": 0.0}
        # Rows without a gradient are not computed; where there are no others, one gives a gradient of 0, and
        # its measures are not those of the update.
        with_gradient = [row for row in rows if has_gradient(row.sample, loss)]
        total, norm, reports = self._worker.step(
            with_gradient or rows[:1],
            lambda *outputs: self._terms(loss, samples, *outputs),
            learning_rate,
            with_entropy=loss.needs_entropy,
        )
        metrics = _means(reports) if with_gradient else {}
        # `step` has left weights and optimizer as they were.
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._refuse(total, norm, [each for report in reports for each in report["bad"]])
            return {"grad_norm": 0.0, "skipped_updates": 1.0, "loss": 0.0}
        self.policy_version += 1
        return {"grad_norm": norm, "skipped_updates": 0.0, "loss": total, **metrics}

    def save(self, directory: Path) -> None:
        self._worker.save(directory, {"policy_version": self.policy_version})

    def load(self, directory: Path) -> None:
        """Raises CheckpointError where it is none of verl's, or of another model or number of ranks."""
        try:
            facts = self._worker.load(directory)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"{directory} cannot be read by the verl backend: {error}; go on with the backend and the "
                "number of ranks that wrote it, or delete it to use the one before."
            ) from error
        self.policy_version = int(facts["policy_version"])

    def reset_optimizer(self) -> None:
        """Forget the moments: the next phase optimises another objective."""
        self._worker.forget_moments()

    def _forward(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """[T] of each sample: the worker's outputs at trained tokens, 0 elsewhere."""
        scores = [np.zeros(sample.num_tokens, dtype=np.float32) for sample in samples]
        rows = _rows(samples, [sample.trainable_T.astype(np.float64) for sample in samples])
        if rows:
            for row, outputs in zip(rows, self._worker.forward(rows), strict=True):
                scores[row.index][row.places] = outputs[row.places - 1]
        return scores

    def _terms(
        self,
        loss: Loss,
        samples: Sequence[TrainingSample],
        outputs_N: Tensor,
        entropy_N: Tensor | None,
        rows: Sequence[WeightedRow],
        starts_R: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        columns = trained_columns(rows, outputs_N.device)
        # Rows stand one behind the other, and the output at a place is of the token behind it.
        starts_M = starts_R.numpy()[columns["rank_M"].cpu().numpy()]
        predicted_by_M = torch.from_numpy(starts_M + columns["place_M"] - 1).to(outputs_N.device)
        outputs_M = outputs_N[predicted_by_M]
        tokens = TokenInputs(
            **self._model_columns(outputs_M, columns["old_logprobs_M"]),
            entropy_M=None if entropy_N is None else entropy_N[predicted_by_M],
            **{name: columns[column] for name, column in _COLUMNS.items()},
            **{name: columns["optional"].get(column) for name, column in _OPTIONAL.items()},
        )
        terms_M = loss.terms(tokens)
        return (terms_M * tokens.weights_M).sum(), _report(loss, tokens, terms_M, samples, columns)

    def _model_columns(self, outputs_M: Tensor, old_M: Tensor) -> dict[str, Tensor]:
        """The model's outputs by their names in `TokenInputs`."""
        return {"new_M": outputs_M}

    def _refuse(self, total: float, norm: float, bad: Sequence[str]) -> None:
        """Raise NumericsError for a loss or norm that is no number, unless such updates are skipped."""
        if self._skips:
            return
        what = f"loss is not finite ({'; '.join(bad[:NUM_NAMED])})" if bad else f"gradient's norm is {norm}"
        raise NumericsError(
            f"The {what} at policy version {self.policy_version}; the weights were not changed. Lower "
            '`optimizer.learning_rate`, or set `optimizer.on_bad_update` to "skip".'
        )


class VerlBackend(_Updates):
    """A `TrainingBackend` whose weights verl holds; the sampler reads a copy of them."""

    is_half = False

    def __init__(
        self, config: TrainConfig, policy_model: LoadedModel, publish: Callable[[int], None]
    ) -> None:
        super().__init__(config, policy_model, "language_model")
        self._policy_model, self._publish = policy_model, publish

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        return self._forward(samples)

    def publish_weights(self) -> int:
        self._policy_model.model.load_hf(dict(self._worker.weights()))
        self._publish(self.policy_version)
        return self.policy_version


class VerlCritic(_Updates):
    """A `SeparateCritic` in verl's hands: its value model, a linear head on states of its own trunk."""

    def __init__(self, config: TrainConfig, policy_model: LoadedModel) -> None:
        super().__init__(config, policy_model, "value_model")

    def values(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        return self._forward(samples)

    def begin_with(self, model: Any) -> None:
        """Take over the trunk of a model of the same kind."""
        self._worker.take_over(
            {name: each for name, each in model.state_dict_hf().items() if not name.startswith("lm_head.")}
        )

    def _model_columns(self, outputs_M: Tensor, old_M: Tensor) -> dict[str, Tensor]:
        return {"new_M": old_M, "new_values_M": outputs_M}


def _rows(samples: Sequence[TrainingSample], weights: Sequence[NDArray[np.float64]]) -> list[WeightedRow]:
    """Those with a trained token."""
    rows = [
        WeightedRow(index=index, sample=sample, weights_T=weights_T)
        for index, (sample, weights_T) in enumerate(zip(samples, weights, strict=True))
    ]
    return [row for row in rows if row.last >= 0]


@torch.no_grad()
def _report(
    loss: Loss, tokens: TokenInputs, terms_M: Tensor, samples: Sequence[TrainingSample], columns: Any
) -> dict[str, Any]:
    """Sums over the tokens of a micro-batch, which ranks hand to each other."""
    bad = torch.nonzero(~torch.isfinite(terms_M)).flatten().numpy()[:NUM_NAMED]
    token_names = named_tokens(samples, columns["row_M"][bad], columns["place_M"][bad]) if len(bad) else ""
    return {
        "sums": {name: float(values_M.sum()) for name, values_M in loss.measures(tokens).items()},
        "count": len(terms_M),
        "gap": float((tokens.new_M - tokens.old_M).abs().max()),
        "bad": [token_names] if token_names else [],
    }


def _means(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Token means over all micro-batches, as the torch backend reports them."""
    count = sum(each["count"] for each in reports)
    names = dict.fromkeys(name for each in reports for name in each["sums"])
    if not names:
        return {}
    means = {name: sum(each["sums"].get(name, 0.0) for each in reports) / count for name in names}
    return {**means, "logprob_gap_max": max(each["gap"] for each in reports)}
