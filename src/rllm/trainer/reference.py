"""What a policy is held against: the model that its run began with.

    KL, DPO ──► reference_of(policy) ──┬─ an adapter is trained ─► the same weights without the adapter
                                       └─ all weights are       ─► initial_model/, read once more and frozen

Whoever resumes a run asks again and gets the same: nothing here looks at the weights as they are now. A
teacher is a `Scorer` as well, and so is a training backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rllm.models.directory import load_model
from rllm.trainer.backends.scoring import score_rows
from rllm.trainer.policies import Policy
from rllm.types.sample import TrainingSample


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
    logprob_chunk: int = 2048
    """Tokens that have logits at the same time."""

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        return score_rows(
            self.model,
            samples,
            micro_batch_tokens=self.micro_batch_tokens,
            logprob_chunk=self.logprob_chunk,
        )


def reference_of(
    policy: Policy, *, micro_batch_tokens: int = 16_384, logprob_chunk: int = 2048
) -> ModelScorer:
    """The policy as its run began, before a warm start as well.

    Costs a second copy of the weights, unless an adapter is trained (then it is the model without it) or the
    policy is frozen (then it is the policy itself). Raises ModelDirectoryError when the initial model is
    gone.
    """
    return ModelScorer(
        model=_initial_model(policy), micro_batch_tokens=micro_batch_tokens, logprob_chunk=logprob_chunk
    )


def _initial_model(policy: Policy) -> Any:
    loaded = policy.loaded
    if loaded.base is not None:
        return loaded.base.model
    if policy.backend is None:
        return loaded.model
    parameter = next(loaded.model.parameters())
    initial = load_model(loaded.directory, device=str(parameter.device), dtype=parameter.dtype)
    return initial.model.requires_grad_(False)
