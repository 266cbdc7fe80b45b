"""Tensors by name, on disk: in one file, or each rank's part of them in a file of its own.

    whole tensors ──► STEM.safetensors                              by one rank
    with shards   ──► STEM/ __0_0.distcp  __1_0.distcp  .metadata   by all (torch.distributed.checkpoint)

Either is read into whole tensors or into shards of any number of ranks, each of which reads its own part.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rllm.distributed import RankGroup
from rllm.errors import CheckpointError
from rllm.trainer.backends.sharded_weights import is_shard, rows_of

METADATA = ".metadata"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""The files of a learner in a checkpoint."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""As safetensors names them."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LearnerTensors:
    """The content of a checkpoint for one learner."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    policy_version: int
    process_group: Any = None
    """Through which ranks that hold shards agree on who writes what; None: the one of all their work."""

    def save(self, directory: Path) -> None:
        save_tensors(self.weights, directory / WEIGHTS, group=self.process_group)
        metadata = {"version": str(self.policy_version)}
        save_tensors(self.optimizer, directory / OPTIMIZER, metadata, group=self.process_group)

    def snapshot(self, ranks: RankGroup) -> "LearnerTensors":
        """The same numbers in memory of their own, for another thread."""
        return LearnerTensors(
            weights={name: each.clone() for name, each in self.weights.items()},
            optimizer={name: each.clone() for name, each in self.optimizer.items()},
            policy_version=self.policy_version,
            process_group=ranks.process_group,
        )


def save_tensors(
    tensors: Mapping[str, Tensor],
    stem: Path,
    metadata: dict[str, str] | None = None,
    *,
    group: Any = None,
) -> None:
    """Write them; with shards among them, all ranks have to be here, and agree through `group`. `metadata` is
    of one file alone."""
    if not any(is_shard(each) for each in tensors.values()):
        save_file(
            {name: each.cpu().contiguous() for name, each in tensors.items()},
            stem.with_suffix(".safetensors"),
            metadata,
        )
        return
    # `torch.distributed.checkpoint` takes half a second to import, so only who has shards does.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(tensors), storage_writer=FileSystemWriter(stem), process_group=group)
    except CheckpointException as error:  # a BaseException, of all ranks
        raise next(iter(error.failures.values()))[0] from None


def stored_tensors(stem: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of each. Raises CheckpointError for what cannot be read."""
    try:
        if (stem / METADATA).is_file():
            return _stored_shards(stem)
        with safe_open(stem.with_suffix(".safetensors"), "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            return {
                name: (torch.Size(each.get_shape()), DTYPES[each.get_dtype()])
                for name, each in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise _unreadable(stem, error) from error


def _stored_shards(stem: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    tensor_metadata = FileSystemReader(stem).read_metadata().state_dict_metadata
    return {
        name: (each.size, each.properties.dtype)
        for name, each in tensor_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }


def read_tensors(stem: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill `targets`, each of the shape that is stored. Raises CheckpointError for what cannot be read."""
    try:
        if (stem / METADATA).is_file():
            _read_shards(stem, targets)
            return
        with safe_open(stem.with_suffix(".safetensors"), "pt") as file:
            for name, target in targets.items():
                if is_shard(target):
                    target.to_local().copy_(rows_of(target, file.get_tensor(name)))
                else:
                    target.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise _unreadable(stem, error) from error


def _read_shards(stem: Path, targets: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each reads its own part
        try:
            load(dict(targets), storage_reader=FileSystemReader(stem), no_dist=True)
        except CheckpointException as error:  # a BaseException, of all ranks
            raise _unreadable(stem, next(iter(error.failures.values()))[0]) from None


def _unreadable(stem: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{stem.parent} cannot be read: {error}; delete it to use the one before.")
