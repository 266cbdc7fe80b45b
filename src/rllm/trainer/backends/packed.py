"""One optimizer step on any number of rows, whatever is computed of each micro-batch.

samples ─► weights of the update ─► micro-batches ─► forward, Σ weight · term, backward ─► guard ─► optimizer
                                 │                    └─ the subclass: what a loss sees  │
                                 └─ of several ranks: each its share of the rows ────────┴─ Σ of gradients

The weights are fixed before the rows are split, so ranks and micro-batches add up to the same update.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rllm.algorithms.losses import Loss, TokenInputs, has_gradient, token_weights
from rllm.config.optimizer import OptimizerConfig
from rllm.distributed import ALONE, RankGroup
from rllm.errors import CheckpointError, NumericsError
from rllm.models.batching import PackedBatch, micro_batches
from rllm.models.decoder import Attend, Decoder
from rllm.models.devices import give_back_memory, wait_for
from rllm.models.lora import is_of_adapter
from rllm.models.packing import WeightedRow, fewest, rank_shares
from rllm.trainer.backends.guard import Blame, RunningNorm, tokens_that_are_no_numbers
from rllm.trainer.backends.scoring import value_rows
from rllm.trainer.backends.sharded_weights import ShardedWeights
from rllm.trainer.backends.sharding import in_step, is_sharded, shard_model
from rllm.trainer.backends.tensor_files import (
    OPTIMIZER,
    WEIGHTS,
    LearnerTensors,
    read_tensors,
    stored_tensors,
)
from rllm.trainer.backends.torch_optimizer import MasterWeights, Optimizers, matrices_of_layers
from rllm.trainer.backends.torch_plans import split_by_plan
from rllm.trainer.backends.torch_splitting import SplitWeights, split_model
from rllm.trainer.flops import FlopRates, PassSizes, adapters_of, update_rates
from rllm.trainer.token_trace import TokenNumbers, TokenTrace
from rllm.types.sample import TrainingSample

log = logging.getLogger(__name__)
LARGE_MODEL = 10_000_000
"""Parameters of a model whose updates take far longer than it takes to get memory from the system anew."""


class PackedUpdates:
    """Parameters with their optimizer; `update`, `save` and `load` of every learner on torch."""

    has_logits = True
    """Whether a pass computes what follows each state."""

    def __init__(
        self,
        model: Any,
        *,
        config: OptimizerConfig,
        share_prefixes: bool = True,
        value_head: "ValueHead | None" = None,
        ranks: RankGroup = ALONE,
    ) -> None:
        """`model` is a `CausalModel`; those of its parameters that require a gradient are trained.

        `ranks`: processes that have the same model and are given the same samples.
        """
        self.policy_version = 0
        self.trace: TokenTrace | None = None
        self.work = UpdateWork()
        self.value_head = value_head
        self.config = config
        self._is_large = sum(each.numel() for each in model.parameters()) >= LARGE_MODEL
        self._share_prefixes = share_prefixes
        self._ranks = ranks
        self._device = next(model.parameters()).device
        self.model, split = model, None
        if ranks.shard_size > 1:
            self.model = shard_model(model, ranks)
        elif ranks.tensor_size > 1:
            split = (split_model if isinstance(model, Decoder) else split_by_plan)(model, ranks.in_layer())
            self.model = split.twin
        # A twin has the names of the whole model, so a checkpoint fits any number of ranks.
        parameters = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        if config.gradient_checkpointing:
            self.model.recompute_layers()
        if value_head is not None:
            value_head.to(self._device)
            parameters |= {f"value_head.{name}": each for name, each in value_head.named_parameters()}
        # Of `model`, not of its twin: ranks that split a layer count as one in `take_sum`, so operations are
        # those of whole layers.
        self._flop_rates = _flop_rates(model, has_logits=self.has_logits)
        self._matrices = matrices_of_layers(self.model, parameters)
        self._weights = (
            MasterWeights(parameters)
            if ranks.has_whole
            else (SplitWeights(parameters, split, ranks) if split else ShardedWeights(parameters, ranks))
        )
        self._shapes = self._weights.whole_shapes()
        self._optimizer = self._new_optimizer()
        self._running_norm = RunningNorm()

    def update(self, samples: Sequence[TrainingSample], loss: Loss, learning_rate: float) -> dict[str, float]:
        """One optimizer step on all samples; see `TrainingBackend.update`.

        `skipped_updates` is 1 where the update was bad and left out: weights and version stay.
        """
        started_s = time.perf_counter()
        try:
            return self._update(samples, loss, learning_rate)
        finally:
            # A GPU works on after the calls have returned; its time belongs to the update as well.
            wait_for(self._device)
            if self._is_large:
                give_back_memory()
            self.work.seconds += time.perf_counter() - started_s

    def _update(
        self, samples: Sequence[TrainingSample], loss: Loss, learning_rate: float
    ) -> dict[str, float]:
        weights = token_weights(samples, loss.aggregation)
        # Rows without a gradient need no forward pass. They count in the weights of all others, and an update
        # of such rows alone is a step along a gradient of 0: the same comes out as if they were computed.
        rows = [row for row in self._rows(samples, weights) if has_gradient(row.sample, loss)]
        is_empty = not any(weights_T.any() for weights_T in weights)
        # Here and not behind the step: an update that was skipped, or raised, has left its gradients.
        self._weights.zero_grad()
        metrics, blame = _UpdateMetrics(), Blame(samples)
        with self._ranks.inside_torch():
            trouble = self._accumulate(rows, loss, metrics, blame)
        trouble = self._join(metrics, trouble)
        self.work.flops += metrics.flops
        if self.trace is not None:
            self.trace.add(samples, metrics.tokens)
        # All ranks leave here or none: `is_empty` looks at the weights of the whole update.
        if is_empty:  # nothing was trained on: the weights stay, and so does the version
            return {"grad_norm": 0.0, "skipped_updates": 0.0, **metrics.means()}
        with self._ranks.inside_torch():  # Muon gathers directions of whole matrices
            step_metrics = self._step(learning_rate, blame, trouble)
        return {**step_metrics, **metrics.means()}

    def _accumulate(
        self, rows: list[WeightedRow], loss: Loss, metrics: "_UpdateMetrics", blame: Blame
    ) -> str:
        """Gradients of this rank's share of the rows; what is wrong with it, if anything.

        Ranks of a sharded model go on to the last micro-batch whatever comes: the others gather layers with
        them.
        """
        trouble, has_shards = "", is_sharded(self.model)
        for batch, counts in self._micro_batches(rows, loss):
            tokens = self._inputs(batch, loss)
            terms_M = loss.terms(tokens)
            total = (terms_M * batch.weights_M).sum()
            if counts and not trouble and not torch.isfinite(total):
                where = tokens_that_are_no_numbers(batch, blame.samples, terms_M)
                trouble = f"the loss is not finite ({where})"
                if self.config.on_bad_update == "stop" and not has_shards:
                    break
            outputs = (tokens.new_M, tokens.new_values_M)
            # A rank that stopped here would leave the others waiting for their all-gather.
            if has_shards or not trouble:
                # `Blame` reads their gradients, which autograd drops from tensors that are no leaves.
                for each in outputs:
                    if each is not None and each.requires_grad:
                        each.retain_grad()
                # One that only keeps step with other ranks runs the same collectives, and moves no weight.
                (total if counts else 0.0 * total).backward()
            if counts:
                metrics.flops += self._flops_of(batch, loss)
                if not trouble:
                    blame.add(batch, *outputs)
                metrics.add(loss, tokens, total, only_finite=bool(trouble))
                if self.trace is not None:
                    metrics.tokens.append(_numbers_of(batch, tokens))
            # A whole update may take longer than ranks wait for a sign of life.
            self._ranks.beat(f"the update of policy version {self.policy_version}")
        return trouble

    @property
    def has_8_bits(self) -> bool:
        """Whether any moment of the optimizer has 8 bits."""
        return bool(self._optimizer.in_8_bits)

    def _flops_of(self, batch: PackedBatch, loss: Loss) -> int:
        """Floating-point operations of a micro-batch; 0 where they are not known."""
        return 0 if self._flop_rates is None else self._flop_rates.of(sizes_of(batch))

    @property
    def optimizer_kernel(self) -> str:
        """Name of what moves the weights."""
        return self._optimizer.kernel

    def values(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """One [T] array per sample: what the value head expects before each trainable token, 0 elsewhere."""
        assert self.value_head is not None, "only a learner with a value head has values"
        return value_rows(
            self.model,
            self.value_head,
            samples,
            micro_batch_tokens=self.config.micro_batch_tokens,
            share_prefixes=self._share_prefixes,
            ranks=self._ranks,
        )

    def whole_weights(self) -> dict[str, Tensor]:
        """The trained weights, by name; of a sharded model as DTensors."""
        return {
            name: self._weights.checkpoint_form(name, each) for name, each in self._weights.by_name.items()
        }

    def save(self, directory: Path) -> None:
        """Write it; of a sharded model each rank its part."""
        self._tensors().save(directory)

    def snapshot(self, ranks: RankGroup) -> LearnerTensors:
        """The tensors that `save` would write now; see `Copyable`."""
        return self._tensors().snapshot(ranks)

    def _tensors(self) -> LearnerTensors:
        counters = {
            "policy_version": torch.tensor(self.policy_version),
            # With all of its digits, so that a run that goes on refuses the same updates.
            "running_norm": torch.tensor(self._running_norm.mean, dtype=torch.float64),
            "num_norms": torch.tensor(self._running_norm.count),
        }
        state = {
            full_name: self._weights.checkpoint_form(full_name.rpartition(".")[0], value)
            for full_name, value in self._optimizer.tensors().items()
        }
        return LearnerTensors(
            weights=self.whole_weights(), optimizer=counters | state, policy_version=self.policy_version
        )

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, on whatever ranks. Raises CheckpointError, and changes nothing, when it
        does not fit."""
        weights = self._read(directory / WEIGHTS)
        if {name: each.shape for name, each in weights.items()} != self._shapes:
            raise CheckpointError(f"{directory} holds the weights of another model than this run's.")
        state = self._read(directory / OPTIMIZER)
        with torch.no_grad():
            for name, weight in self._weights.by_name.items():
                weight.copy_(self._weights.own(name, weights[name]))
        self._weights.copy_to_parameters()
        # A new one: a checkpoint from before the first update holds no moments that would replace the old.
        self._optimizer = self._new_optimizer()
        self.policy_version = int(state.pop("policy_version"))
        self._running_norm = RunningNorm(float(state.pop("running_norm")), int(state.pop("num_norms")))
        self._optimizer.load(
            {name: self._weights.own(name.rpartition(".")[0], each) for name, each in state.items()}
        )

    def _read(self, stem: Path) -> dict[str, Tensor]:
        """The stored tensors, of a sharded model this rank's part of them."""
        tensors: dict[str, Tensor] = {}
        for name, (shape, dtype) in stored_tensors(stem).items():
            # A moment is called `WEIGHT.key` and spread as its weight is. A counter has no weight and is
            # whole.
            weight = name if name in self._shapes else name.rpartition(".")[0]
            tensors[name] = self._weights.empty(weight, shape, dtype)
        read_tensors(stem, tensors)
        return tensors

    def reset_optimizer(self) -> None:
        """Forget the moments: the next phase optimises another objective."""
        self._optimizer = self._new_optimizer()
        # Which norms are usual belongs to the objective as well.
        self._running_norm = RunningNorm()

    def _inputs(self, batch: PackedBatch, loss: Loss) -> TokenInputs:
        """The loss's inputs for a micro-batch."""
        raise NotImplementedError

    def _new_optimizer(self) -> Optimizers:
        return Optimizers(self._weights.by_name, self._matrices, self.config, self._weights.spread)

    def _rows(
        self, samples: Sequence[TrainingSample], weights: Sequence[NDArray[np.float64]]
    ) -> list[WeightedRow]:
        return [
            WeightedRow(index=index, sample=sample, weights_T=weights_T)
            for index, (sample, weights_T) in enumerate(zip(samples, weights, strict=True))
        ]

    def _share_of(self, rows: list[WeightedRow], loss: Loss) -> list[WeightedRow]:
        """The rows of this rank."""
        if self._ranks.size == 1:
            return rows
        # Each rank computes this division of all rows by itself and comes to the same, so nothing is sent.
        share = self._ranks.with_same_part()
        shares = rank_shares(
            rows,
            share.size,
            share_prefixes=self._share_prefixes,
            whole_groups=loss.needs_whole_groups,
        )
        return shares[share.rank]

    def _join(self, metrics: "_UpdateMetrics", trouble: str) -> str:
        """Make gradients and metrics those of all ranks; what is wrong on any of them."""
        if self._ranks.size == 1:
            return trouble
        of_ranks = self._ranks.gather((metrics, trouble))
        # Ranks of one split layer computed the same rows, so one of each such group is counted.
        metrics.take_sum([theirs for theirs, _ in of_ranks[:: self._ranks.tensor_size]])
        trouble = next((theirs for _, theirs in of_ranks if theirs), "")
        # `trouble` is that of all ranks by now, so either all of them go into the sum or none does.
        if not trouble:
            self._weights.join_gradients(self._ranks)
        return trouble

    def _micro_batches(self, rows: list[WeightedRow], loss: Loss) -> Iterator[tuple[PackedBatch, bool]]:
        """(micro-batch, whether it counts) of this rank's share; see `in_step`."""

        def batches(rows: Sequence[WeightedRow]) -> Iterator[PackedBatch]:
            return micro_batches(
                rows,
                self.config.micro_batch_tokens,
                self._device,
                share_prefixes=self._share_prefixes,
                whole_groups=loss.needs_whole_groups,
            )

        mine = batches(self._share_of(rows, loss))
        # Ranks that split layers need no spare batches: they have the same rows, so they are in step.
        if not is_sharded(self.model):
            return ((batch, True) for batch in mine)
        return in_step(mine, lambda: batches(fewest(rows, loss.needs_whole_groups)), self._ranks)

    def _stop_on(self, trouble: str) -> None:
        if self.config.on_bad_update == "stop":
            raise NumericsError(
                f"{trouble[0].upper()}{trouble[1:]}; the weights were not changed. Lower "
                "`optimizer.learning_rate`, look at the rewards of this step, or set "
                "`optimizer.on_bad_update` to skip to leave such updates out."
            )

    def _step(self, learning_rate: float, blame: Blame, trouble: str) -> dict[str, float]:
        config = self.config
        norm = 0.0
        if not trouble:
            norm = self._weights.clip(config.max_grad_norm)
            trouble = self._trouble_with(norm, blame)
        if trouble:
            self._stop_on(trouble)
            log.warning("Update after policy version %d was left out: %s.", self.policy_version, trouble)
            return {"grad_norm": norm if math.isfinite(norm) else 0.0, "skipped_updates": 1.0}
        if norm > 0.0:  # where everything ties, nothing is said of how large a gradient may be
            self._running_norm.add(norm, config.max_norm_factor)
        self._optimizer.step(learning_rate)
        self._weights.copy_to_parameters()
        self.policy_version += 1
        return {"grad_norm": norm, "skipped_updates": 0.0}

    def _trouble_with(self, norm: float, blame: Blame) -> str:
        """The fault of an update with such a gradient; empty where it is not."""
        if math.isfinite(norm) and norm <= self._running_norm.limit(self.config.max_norm_factor):
            return ""
        where = f"at policy version {self.policy_version} (hardest pulled {blame.hardest(self._ranks)})"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm} {where}"
        running, factor = self._running_norm.mean, self.config.max_norm_factor
        return (
            f"the gradient's norm is {norm:.3g} {where}, {norm / running:.3g} times the running norm "
            f"{running:.3g} where `optimizer.max_norm_factor` allows {factor:g}"
        )


@dataclass(kw_only=True, slots=True)
class UpdateWork:
    """The work of all updates since a learner was made."""

    flops: int = 0
    """Floating-point operations of all ranks; 0 where they are not known."""
    seconds: float = 0.0


def sizes_of(batch: PackedBatch) -> PassSizes:
    return PassSizes(
        tokens=len(batch.tokens_N),
        states=len(batch.kept_K),
        predictions=len(batch.targets_U),
        pairs=batch.attention.num_pairs,
        kept_pairs=batch.attention.num_kept_pairs,
    )


def _flop_rates(model: Any, *, has_logits: bool) -> FlopRates | None:
    """Operations of a pass of `model`; None for what the built-in decoder does not compute."""
    if not isinstance(model, Decoder):
        return None
    adapter = {
        name: each.numel()
        for name, each in model.named_parameters()
        if each.requires_grad and is_of_adapter(name)
    }
    return update_rates(model.shape, adapters_of(adapter), has_logits=has_logits)


class ValueHead(nn.Linear):
    """[M, D] states ─► [M] values, float32 at least; zero at first: an untrained critic expects nothing."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    @classmethod
    def on(cls, model: Any) -> "ValueHead":
        """One that fits the hidden states of `model`, and their precision where that is above float32."""
        states_1_D = _first_states(model)
        return cls(states_1_D.shape[1]).to(torch.promote_types(states_1_D.dtype, torch.float32))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype)).squeeze(1)


@torch.no_grad()
def _first_states(model: Any) -> Tensor:
    """[1, D] of token 0 alone: the only thing that every model says about its width."""
    zero_1 = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
    # Over one token attention gives the token's own value, whatever the query is.
    alone: Attend = lambda layer, q, k, v: v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # noqa: E731
    return model.hidden(zero_1, zero_1, alone)


class _UpdateMetrics:
    """Token means over the micro-batches of one update."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.sums: dict[str, float] = {}
        self.num_tokens = 0
        self.largest_gap = 0.0
        self.flops = 0
        self.tokens: list[TokenNumbers] = []

    @torch.no_grad()
    def add(self, loss: Loss, tokens: TokenInputs, total: Tensor, *, only_finite: bool) -> None:
        """`only_finite` leaves out what is no number, of an update that is skipped."""
        measures = loss.measures(tokens)
        if only_finite:
            total = total.nan_to_num(0.0, 0.0, 0.0)
            measures = {name: each.nan_to_num(0.0, 0.0, 0.0) for name, each in measures.items()}
        self.loss += float(total)
        if not measures:
            return
        for name, values_M in measures.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(values_M.sum())
        self.num_tokens += len(tokens.new_M)
        gap_M = (tokens.new_M - tokens.old_M).abs()
        self.largest_gap = max(
            self.largest_gap, float((gap_M.nan_to_num(0.0) if only_finite else gap_M).max())
        )

    def take_sum(self, parts: Sequence["_UpdateMetrics"]) -> None:
        """Hold what all `parts` hold together."""
        self.loss = sum(each.loss for each in parts)
        self.tokens = [part for each in parts for part in each.tokens]
        self.num_tokens = sum(each.num_tokens for each in parts)
        self.largest_gap = max(each.largest_gap for each in parts)
        self.flops = sum(each.flops for each in parts)
        names = dict.fromkeys(name for each in parts for name in each.sums)
        self.sums = {name: sum(each.sums.get(name, 0.0) for each in parts) for name in names}

    def means(self) -> dict[str, float]:
        if not self.sums:
            return {"loss": self.loss}
        means = {name: value / self.num_tokens for name, value in self.sums.items()}
        return {"loss": self.loss, **means, "logprob_gap_max": self.largest_gap}


@torch.no_grad()
def _numbers_of(batch: PackedBatch, tokens: TokenInputs) -> TokenNumbers:
    entropy_M = tokens.measured_entropy_M if tokens.entropy_M is None else tokens.entropy_M
    ratio_M = (tokens.new_M - tokens.old_M).exp()
    return TokenNumbers(
        row_M=batch.row_M,
        place_M=batch.place_M,
        ratio_M=ratio_M.float().cpu().numpy(),
        entropy_M=torch.full_like(ratio_M, torch.nan).cpu().numpy()
        if entropy_M is None
        else entropy_M.float().cpu().numpy(),
    )


def optional_inputs(batch: PackedBatch) -> dict[str, Tensor | None]:
    """The columns of `TokenInputs` that only some samples have."""
    return {
        "rollout_M": batch.optional.get("rollout_logprobs"),
        "ref_M": batch.optional.get("ref_logprobs"),
        "values_M": batch.optional.get("values"),
        "returns_M": batch.optional.get("returns"),
        "chosen_M": batch.optional.get("chosen"),
    }


def trained_tokens(batch: PackedBatch) -> Mapping[str, Any]:
    """The columns of `TokenInputs` that every micro-batch has, the model's own words excepted."""
    return {
        "old_M": batch.old_logprobs_M,
        "advantages_M": batch.advantages_M,
        "weights_M": batch.weights_M,
        "row_M": batch.rank_M,
        "group_R": batch.group_R,
        **optional_inputs(batch),
    }
