"""A learner that goes on from its last checkpoint, on whatever ranks it is.

python moved.py MODEL_DIRECTORY RUN KIND STEPS [DISTRIBUTED [CHECKPOINT]]

It does STEPS in all, and writes a checkpoint and the models. DISTRIBUTED and CHECKPOINT are these sections of
a configuration, as JSON.
Episodes are those of recorded.py.
"""

import json
import sys
from pathlib import Path
from typing import Any, cast

import torch
from recorded import episodes, learner_of

from rllm.config.distributed import DistributedConfig
from rllm.config.schema import CheckpointConfig
from rllm.distributed import open_ranks
from rllm.store.run_directory import RunDirectory
from rllm.trainer.backends.tensor_files import read_tensors, stored_tensors
from rllm.trainer.checkpoint import RunState, load_latest
from rllm.trainer.learning import learn
from rllm.trainer.record import RunRecord


def main(
    model: str, run: str, kind: str, steps: str, distributed: str = "{}", checkpoint: str = '{"keep": 9}'
) -> None:
    torch.set_num_threads(1)
    with open_ranks(DistributedConfig(**json.loads(distributed))) as ranks:
        directory = RunDirectory(Path(run), lock_descriptor=None)
        learner = learner_of(kind, Path(model), ranks)
        with ranks.writer_first():
            state = load_latest(directory.checkpoints_path, learner.backends()) or RunState()
        for step in range(state.steps, int(steps)):
            learn(learner, episodes(step, learner.config.rollout.tasks_per_step), step)
        state.steps = int(steps)
        record = RunRecord(directory, cast(Any, None), CheckpointConfig(**json.loads(checkpoint)), ranks)
        with record.checkpoints:
            record.save_checkpoint(state, learner.backends())
        learner.policies.publish()
        learner.policies.save_models(Path(run), ranks)


def kept(run: Path, steps: int) -> dict[str, torch.Tensor]:
    """Everything in the checkpoint of a step, whole."""
    directory = run / "checkpoints" / f"step-{steps:06d}"
    tensors: dict[str, torch.Tensor] = {}
    for place in (directory, *(each for each in directory.iterdir() if each.name == "critic")):
        for name in ("weights", "optimizer"):
            stored = stored_tensors(place / name)
            whole = {each: torch.empty(shape, dtype=dtype) for each, (shape, dtype) in stored.items()}
            read_tensors(place / name, whole)
            tensors |= {f"{place.name}/{name}/{each}": tensor for each, tensor in whole.items()}
    return tensors


if __name__ == "__main__":
    main(*sys.argv[1:])
