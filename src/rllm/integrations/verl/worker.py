# verl has an environment of its own.
# pyright: reportMissingImports=false
"""verl's `TrainingWorker` with rows in place of padded batches: forward, one optimizer step, weights, files.

rows ──► nested tensors ──► TrainingWorker ──► FSDP2 engine ──► log-probabilities or values, by micro-batch
                                                                     │
                                          Σ weight · term ◄── the loss, as the torch backend has it

The weight of each token is fixed before verl splits the rows into micro-batches, so how it splits them cannot
be told from outside. With several ranks each computes its share of the rows; all of them are given the same.
Imported after `rllm.integrations.verl.platform.use_cpu`.
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers.utils import logging as transformers_logging
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from rllm.config.schema import TrainConfig
from rllm.integrations.verl import engines  # noqa: F401  # registers them
from rllm.integrations.verl.platform import join_processes
from rllm.models.packing import WeightedRow

Terms = Callable[[Tensor, Tensor | None, Sequence[WeightedRow], Tensor], tuple[Tensor, dict[str, Any]]]
"""(the model's output at each place [N], its entropy [N], rows, where each begins [R]) -> (loss, report)."""

_FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
_FILES = ["model", "optimizer"]
PASS_TOKENS = 16_384
"""Tokens of a pass where `optimizer.micro_batch_tokens` is open."""


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Leave out what verl and transformers print while they work; their errors are raised as ever."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        transformers_logging.enable_progress_bar()
        transformers_logging.set_verbosity(verbosity)


class EngineWorker:
    """One model with its optimizer in verl's hands."""

    def __init__(self, directory: Path, config: TrainConfig, model_type: str) -> None:
        """`model_type`: `language_model`, or `value_model` for a critic."""
        join_processes()
        optimizer = config.optimizer
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.is_critic = model_type == "value_model"
        self._max_tokens = optimizer.micro_batch_tokens or PASS_TOKENS
        with _silent():
            self._worker = TrainingWorker(
                TrainingWorkerConfig(
                    model_type=model_type,
                    model_config=HFModelConfig(
                        path=str(directory),
                        load_tokenizer=False,
                        use_remove_padding=False,
                        enable_gradient_checkpointing=optimizer.gradient_checkpointing,
                        override_config={"attn_implementation": "sdpa"},
                    ),
                    engine_config=FSDPEngineConfig(
                        strategy="fsdp2",
                        model_dtype="fp32",
                        mixed_precision=_FLOAT32,
                        use_dynamic_bsz=True,
                        max_token_len_per_gpu=self._max_tokens,
                        infer_max_token_len_per_gpu=self._max_tokens,
                        use_torch_compile=False,
                    ),
                    optimizer_config=FSDPOptimizerConfig(
                        lr=optimizer.learning_rate,
                        betas=(optimizer.beta1, optimizer.beta2),
                        weight_decay=optimizer.weight_decay,
                        clip_grad=optimizer.max_grad_norm,
                        total_training_steps=max(1, config.steps),
                    ),
                    checkpoint_config=CheckpointConfig(save_contents=_FILES, load_contents=_FILES),
                )
            )
            self._worker.reset()
        self.engine = self._worker.engine

    def forward(self, rows: Sequence[WeightedRow]) -> list[NDArray[np.float32]]:
        """For each row [T - 1] the log-probability of each next token; from a critic, the value before it."""
        mine, count = self._share(rows)
        batch = self._batch(mine, rows)
        tensordict_utils.assign_non_tensor(batch, compute_loss=False)
        output = self._worker.infer_batch(batch)
        values = output["values" if self.is_critic else "log_probs"]
        outputs = [each.detach().float().numpy()[:-1] for each in values.unbind()[:count]]
        if self.num_ranks == 1:
            return outputs
        everybody: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(everybody, outputs)
        return [everybody[place % self.num_ranks][place // self.num_ranks] for place in range(len(rows))]

    def step(
        self, rows: Sequence[WeightedRow], terms: Terms, learning_rate: float, *, with_entropy: bool
    ) -> tuple[float, float, list[dict[str, Any]]]:
        """One optimizer step: (loss, gradient norm, what `terms` reported of each micro-batch of all ranks).

        A loss or norm that is no number leaves weights and optimizer as they were.
        """
        # By length, so that dealing them out in turn gives all ranks about as much to compute.
        mine, count = self._share(sorted(rows, key=lambda row: -row.last))

        def loss(model_output: Mapping[str, Tensor], data: TensorDict, dp_group: Any) -> tuple[Tensor, Any]:
            outputs = model_output["values" if self.is_critic else "log_probs"].values()
            entropy = model_output["entropy"].values() if with_entropy else None
            starts_R, places = data["input_ids"].offsets()[:-1], data["place"].tolist()
            numbers = [number for number, place in enumerate(places) if place < count]
            # A micro-batch of rows that only stand in: it keeps verl's ranks in step.
            if not numbers:
                return (outputs * 0.0).sum(), {"report": {}}
            own_rows = [mine[places[number]] for number in numbers]
            total, report = terms(outputs, entropy, own_rows, starts_R[numbers])
            if not torch.isfinite(total):  # no rank may step
                total = (outputs * float("nan")).sum()
            return total * self.num_ranks, {"report": report}  # FSDP takes the mean over ranks

        self._worker.set_loss_fn(loss)
        batch = self._batch(mine, rows)
        tensordict_utils.assign_non_tensor(
            batch, calculate_entropy=with_entropy, distillation_use_topk=False, distillation_only=False
        )
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        with _silent():
            metrics = tensordict_utils.get(self._worker.train_batch(batch), "metrics")
        reports = [each for of_rank in metrics["report"] for each in of_rank if each]
        return float(metrics["loss"]), float(metrics["grad_norm"]), reports

    def _share(self, rows: Sequence[WeightedRow]) -> tuple[list[WeightedRow], int]:
        """This rank's rows, and how many of them count. verl computes as many micro-batches on every rank, so
        each has as many rows: where one is missing, the shortest of all stands in and counts for nothing."""
        mine = list(rows[self.rank :: self.num_ranks])
        missing = -(-len(rows) // self.num_ranks) - len(mine)
        return mine + [min(rows, key=lambda row: row.last)] * missing, len(mine)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by their Hugging Face names."""
        weights_by_name, _ = self.engine.get_per_tensor_param()
        yield from weights_by_name

    def take_over(self, weights: Mapping[str, Tensor]) -> None:
        """Weights by their Hugging Face names; those that it has not stay as they are."""
        set_model_state_dict(
            self.engine.module,
            {name: each.detach().clone() for name, each in weights.items()},
            options=StateDictOptions(full_state_dict=True, strict=False),
        )

    def forget_moments(self) -> None:
        """AdamW begins anew at its next step."""
        self.engine.optimizer.state.clear()

    def save(self, directory: Path, facts: Mapping[str, Any]) -> None:
        with _silent():
            self._worker.save_checkpoint(str(directory))
        if self.rank == 0:
            (directory / "verl.json").write_text(json.dumps({**facts, "ranks": self.num_ranks}))

    def load(self, directory: Path) -> dict[str, Any]:
        """The value that `save` was given. Raises OSError, ValueError or RuntimeError where it does not
        fit."""
        facts = json.loads((directory / "verl.json").read_text())
        if facts["ranks"] != self.num_ranks:
            raise ValueError(f"it was written by {facts['ranks']} ranks, and there are {self.num_ranks}")
        self._worker.load_checkpoint(str(directory), del_local_after_load=False)
        return facts

    def _batch(self, rows: Sequence[WeightedRow], all_rows: Sequence[WeightedRow]) -> TensorDict:
        """Rows up to their last trained token, as verl wants them; all ranks must say the same limit of a
        micro-batch, which the longest row of any of them fits into."""
        ids = [torch.from_numpy(row.sample.token_ids_T[: row.last + 1]) for row in rows]
        batch = TensorDict(
            {
                "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
                "position_ids": torch.nested.as_nested_tensor(
                    [torch.arange(len(each)) for each in ids], layout=torch.jagged
                ),
                "loss_mask": torch.tensor([len(row.places) for row in rows]),
                "place": torch.arange(len(rows)),
                "temperature": torch.tensor([row.sample.temperature for row in rows], dtype=torch.float32),
            },
            batch_size=[len(rows)],
        )
        most_tokens = max(self._max_tokens, *(row.last + 1 for row in all_rows))
        tensordict_utils.assign_non_tensor(batch, max_token_len_per_gpu=most_tokens, use_dynamic_bsz=True)
        return batch
