"""The reference of a policy: the policy as it was when it began to learn from rewards, or preferences.

    no warm start ──► reference_of(policy) ──┬─ an adapter is trained ─► the same weights without the adapter
                                             └─ all weights are       ─► initial_model/, read again and frozen
    warm start ──► copy_of(policy) ──begin_with──► its weights, or its adapter, at the end of the warm start
                                       └──save_references──► RUN/reference/ ──load_references──► a resumed run

Whoever resumes a run gets the same: nothing here looks at what the policy has learned since. A teacher is a
`Scorer` as well, and so is a training backend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rllm.config.lora import LoraConfig
from rllm.distributed import ALONE, RankGroup
from rllm.errors import CheckpointError
from rllm.files.atomic import verify_manifest, write_directory_atomic
from rllm.models.directory import load_model
from rllm.models.lora import with_adapter
from rllm.trainer.backends.scoring import score_rows
from rllm.trainer.policies import PolicyModel
from rllm.types.sample import TrainingSample

REFERENCES = "reference"
"""Where a run keeps what its warm start made."""


class Scorer(Protocol):
    """Anything that says how likely it finds the tokens of a row."""

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """One [T] array per sample: log-probability of each trainable token at the sample's temperature, in
        nats; 0 elsewhere."""
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelScorer:
    """A `Scorer` that asks a model in this process, and neither changes nor copies it."""

    model: Any
    """A `CausalModel`."""
    micro_batch_tokens: int = 16_384
    """Tokens that one forward pass holds."""
    logits_mb: float = 512.0
    """Megabytes that logits may take at the same time."""
    ranks: RankGroup = ALONE
    """The ranks that share the work."""

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        return score_rows(
            self.model,
            samples,
            micro_batch_tokens=self.micro_batch_tokens,
            logits_mb=self.logits_mb,
            ranks=self.ranks,
        )


def reference_of(
    policy: PolicyModel,
    *,
    micro_batch_tokens: int = 16_384,
    logits_mb: float = 512.0,
    ranks: RankGroup = ALONE,
) -> ModelScorer:
    """The policy as its run began, for a run without a warm start.

    Costs a second copy of the weights, unless an adapter is trained (then it is the model without it) or the
    policy is frozen (then it is the policy itself). Raises ModelDirectoryError when the initial model is
    gone.
    """
    return ModelScorer(
        model=_initial_model(policy),
        micro_batch_tokens=micro_batch_tokens,
        logits_mb=logits_mb,
        ranks=ranks,
    )


def copy_of(
    policy: PolicyModel,
    adapter: LoraConfig,
    *,
    micro_batch_tokens: int,
    logits_mb: float,
    ranks: RankGroup,
) -> ModelScorer:
    """A frozen model like the policy's, which `begin_with` gives the policy's weights.

    Costs a second copy of what is trained: of an adapter (`adapter` says of what shape) that alone.
    """
    base = policy.loaded_model.base
    # Any seed will do, because `begin_with` replaces what is drawn.
    model = _initial_model(policy) if base is None else with_adapter(base, adapter, 0).model
    return ModelScorer(
        model=model.requires_grad_(False),
        micro_batch_tokens=micro_batch_tokens,
        logits_mb=logits_mb,
        ranks=ranks,
    )


def begin_with(reference: ModelScorer, policy: PolicyModel) -> None:
    """Hold the policy against what it is now."""
    mine = dict(reference.model.named_parameters())
    for name, weight in _trained_weights(policy).items():
        mine[name].data.copy_(weight.data)


def save_references(
    run: Path, references: Mapping[str, ModelScorer], policies: Mapping[str, PolicyModel]
) -> None:
    """Keep in the run what `begin_with` took over, whole or not at all, in place of what was kept before."""

    def fill(directory: Path) -> None:
        for name, reference in references.items():
            weights = dict(reference.model.named_parameters())
            tensors = {
                each: weights[each].detach().cpu().contiguous() for each in _trained_weights(policies[name])
            }
            save_file(tensors, directory / _file_of(name))

    write_directory_atomic(run / REFERENCES, fill)


def load_references(
    run: Path, references: Mapping[str, ModelScorer], policies: Mapping[str, PolicyModel]
) -> None:
    """Hold each policy against what `save_references` kept. Raises CheckpointError where that is not
    there, or not as it was written: a run that goes on has the reference that it began with, or none."""
    root = run / REFERENCES
    try:
        verify_manifest(root)
        for name, reference in references.items():
            file_weights, own_weights = (
                load_file(root / _file_of(name)),
                dict(reference.model.named_parameters()),
            )
            for each in _trained_weights(policies[name]):
                own_weights[each].data.copy_(file_weights[each])
    # RuntimeError is torch's, for a weight of another shape.
    except (CheckpointError, SafetensorError, KeyError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{root} holds the policy as it was after its warm start, which `algorithm.kl_coef` compares "
            f"with, and it cannot be read ({error}); put it back, or start the run anew elsewhere."
        ) from error


def _file_of(policy: str) -> str:
    return f"{policy}.safetensors"


def _trained_weights(policy: PolicyModel) -> dict[str, Any]:
    """The parameters that learn, by name: of a policy with an adapter those of the adapter."""
    return {name: each for name, each in policy.loaded_model.model.named_parameters() if each.requires_grad}


def _initial_model(policy: PolicyModel) -> Any:
    model = policy.loaded_model
    if model.base is not None:
        return model.base.model
    if policy.backend is None:
        return model.model
    parameter = next(model.model.parameters())
    initial = load_model(
        model.directory,
        device=str(parameter.device),
        dtype=parameter.dtype,
        trust_remote_code=model.trust_remote_code,
    )
    return initial.model.requires_grad_(False)
