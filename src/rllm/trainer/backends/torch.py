"""Training on torch, in the process of the sampler: publishing copies nothing, because both use
the same parameters. Of a sharded model the sampler has a whole twin, which publishing writes to; so it has
where it samples while the other learns.

samples ─► `PackedUpdates.update` ─► hidden states ─► log-probabilities in chunks, values ─► the loss
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rllm.algorithms.losses import Loss, TokenInputs
from rllm.config.optimizer import OptimizerConfig
from rllm.distributed import ALONE, RankGroup
from rllm.models.batching import PackedBatch
from rllm.trainer.backends.logprobs import Entropy, selected_logprobs, tokens_at_once
from rllm.trainer.backends.packed import PackedUpdates, ValueHead, trained_tokens
from rllm.trainer.backends.scoring import score_rows
from rllm.trainer.backends.sharding import gather_into, is_sharded
from rllm.trainer.backends.torch_optimizer import HALF
from rllm.trainer.backends.torch_splitting import SplitWeights
from rllm.types.sample import TrainingSample

SUPPORTS = frozenset(
    {
        "model.path",
        "model.device",
        "model.dtype",
        "model.trust_remote_code",
        "model.tool_form",
        "model.chat_template",
        "model.thinking",
        "model.max_thinking_tokens",
        "model.vision",
        "optimizer.name",
        "optimizer.muon_dtype",
        "optimizer.learning_rate",
        "optimizer.schedule",
        "optimizer.warmup_steps",
        "optimizer.final_lr_fraction",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.weight_decay",
        "optimizer.max_grad_norm",
        "optimizer.max_norm_factor",
        "optimizer.on_bad_update",
        "optimizer.micro_batch_tokens",
        "optimizer.gradient_checkpointing",
        "optimizer.logits_mb",
    }
)


class TorchBackend(PackedUpdates):
    """A `TrainingBackend` for a model in this process, or in each of several `ranks`.

    `publish` tells the sampler that the weights have changed. `value_head` puts a critic on the same trunk:
    see `rllm.trainer.backends.critic`. `sampled_model` is a copy of `model`, perhaps in another data type,
    that is sampled from in its place, also during updates; publishing writes the weights into it.
    """

    def __init__(
        self,
        model: Any,
        *,
        publish: Callable[..., None],
        config: OptimizerConfig | None = None,
        value_head: bool = False,
        sampled_model: Any = None,
        share_prefixes: bool = True,
        ranks: RankGroup = ALONE,
    ) -> None:
        super().__init__(
            model,
            config=config or OptimizerConfig(),
            share_prefixes=share_prefixes,
            ranks=ranks,
            value_head=ValueHead.on(model) if value_head else None,
        )
        self._publish = publish
        self._whole_model = model
        """The one that learns, or its whole twin."""
        self._sampled_model = model if sampled_model is None else sampled_model

    @property
    def supports(self) -> frozenset[str]:
        return SUPPORTS

    @property
    def is_half(self) -> bool:
        models = (self._whole_model, self._sampled_model)
        return any(next(model.parameters()).dtype in HALF for model in models)

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        return score_rows(
            self.model,
            samples,
            micro_batch_tokens=self.config.micro_batch_tokens,
            logits_mb=self.config.logits_mb,
            share_prefixes=self._share_prefixes,
            ranks=self._ranks,
        )

    def publish_weights(self) -> int:
        if is_sharded(self.model):
            with self._ranks.inside_torch():
                gather_into(self._whole_model, self.model)
        elif isinstance(self._weights, SplitWeights):
            self._weights.gather_into(self._whole_model, self.model)
        if self._sampled_model is not self._whole_model:
            self._publish(self.policy_version, self._write_to_sampler)
        else:
            self._publish(self.policy_version)
        return self.policy_version

    @torch.no_grad()
    def _write_to_sampler(self) -> None:
        targets = dict(self._sampled_model.named_parameters())
        for name, parameter in self._whole_model.named_parameters():
            # Frozen parameters are the same tensors in both models.
            if parameter.requires_grad:
                targets[name].copy_(parameter)

    def _entropy_of(self, loss: Loss) -> Entropy:
        if loss.needs_entropy:
            return Entropy.WITH_GRADIENT
        # An entropy goes through all probabilities, so it is computed where somebody looks at it.
        return Entropy.NONE if self.trace is None else Entropy.VALUE

    def _inputs(self, batch: PackedBatch, loss: Loss) -> TokenInputs:
        entropy = self._entropy_of(loss)
        hidden_U_D = batch.states(self.model)
        logprobs_U, entropy_U = selected_logprobs(
            self.model,
            hidden_U_D,
            batch.targets_U,
            None if batch.plain else batch.temperature_U,
            chunk=tokens_at_once(self.model, self.config.logits_mb),
            entropy=entropy,
        )
        entropy_M = None if entropy_U is None else batch.of_tokens(entropy_U)
        return TokenInputs(
            new_M=batch.of_tokens(logprobs_U),
            entropy_M=entropy_M if entropy is Entropy.WITH_GRADIENT else None,
            measured_entropy_M=entropy_M if entropy is Entropy.VALUE else None,
            new_values_M=None if self.value_head is None else batch.of_tokens(self.value_head(hidden_U_D)),
            **trained_tokens(batch),
        )
