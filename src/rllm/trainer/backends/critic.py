"""A critic with a trunk of its own: the same family of model, a linear head on its states, its own optimizer.

    rows ─► trunk ─► the state that predicts each trained token ─► head ─► value before the token

With a shared trunk there is no critic of its own: `TorchBackend(..., value_head=True)` has `values` as well,
and its losses see `new_values_M` beside the log-probabilities.
"""

from typing import Any

import torch

from rllm.algorithms.losses import Loss, TokenInputs
from rllm.config.optimizer import OptimizerConfig
from rllm.distributed import ALONE, RankGroup
from rllm.models.batching import PackedBatch
from rllm.trainer.backends.packed import PackedUpdates, ValueHead, trained_tokens


class CriticBackend(PackedUpdates):
    """`values` and `update` of a critic.

    `model` is a second copy of the policy's initial model; its output layer is never computed.
    `policy_version` counts the critic's updates.
    """

    value_head: ValueHead
    has_logits = False

    def __init__(
        self,
        model: Any,
        *,
        config: OptimizerConfig,
        share_prefixes: bool = True,
        ranks: RankGroup = ALONE,
    ) -> None:
        super().__init__(
            model,
            config=config,
            share_prefixes=share_prefixes,
            value_head=ValueHead.on(model),
            ranks=ranks,
        )

    def begin_with(self, model: Any) -> None:
        """Take over the weights of a model of the same kind; an adapter's are not among them."""
        theirs = dict(model.named_parameters())
        with torch.no_grad():
            for name in self._weights.by_name.keys() & theirs.keys():
                self._weights.take(name, theirs[name])
        self._weights.copy_to_parameters()

    def _inputs(self, batch: PackedBatch, loss: Loss) -> TokenInputs:
        """No log-probabilities are computed: `new_M` is `old_M`, without a gradient."""
        return TokenInputs(
            new_M=batch.old_logprobs_M,
            new_values_M=batch.of_tokens(self.value_head(batch.states(self.model))),
            **trained_tokens(batch),
        )
