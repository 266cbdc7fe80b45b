"""The most bytes that torch allocates on one of several ranks in an update, as rank 0 writes them.

python allocated.py OUT CONFIG     CONFIG: assignments, as JSON; rows are as long as it allows
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from rllm.algorithms.losses import policy_loss
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.distributed import open_ranks
from rllm.trainer.learning import context_of
from rllm.trainer.policies import create_initial_models, load_initial_models, make_policies
from rllm.types.sample import NOT_SAMPLED, TrainingSample


def rows_of(config: TrainConfig) -> list[TrainingSample]:
    """Groups with one prompt."""
    length, rng = config.inference.max_context, np.random.default_rng(0)
    sampled_T = np.arange(length) >= length - config.rollout.max_tokens_per_turn
    return [
        TrainingSample(
            token_ids_T=np.where(sampled_T, rng.integers(7, 600, length), 7 + task),
            policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
            logprobs_T=np.where(sampled_T, -6.4, 0.0).astype(np.float32),
            advantages_T=np.where(sampled_T, (-1.0) ** attempt, 0.0).astype(np.float32),
            group_key=(f"t{task}", "agent"),
            order_key=(f"t{task}", attempt, 0, 0),
        )
        for task in range(config.rollout.tasks_per_step)
        for attempt in range(config.rollout.group_size)
    ]


def main(out: str, assignments: str) -> None:
    torch.set_num_threads(1)
    config = load_config(json.loads(assignments))
    with open_ranks(config.distributed) as ranks, tempfile.TemporaryDirectory() as place:
        create_initial_models(config, Path(place))
        policies = make_policies(config, load_initial_models(config, Path(place)), ranks=ranks)
        ((_, trained),) = policies.trainable()
        backend: Any = trained
        loss, rows = policy_loss(config.algorithm, context_of(config, 0)), rows_of(config)
        backend.update(rows, loss, 1e-4)
        backend._weights.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            backend.update(rows, loss, 1e-4)
        assert profiled.profiler is not None
        assert profiled.profiler.kineto_results is not None
        recorded: list[Any] = profiled.profiler.kineto_results.events()
        events = sorted((each for each in recorded if each.name() == "[memory]"), key=lambda e: e.start_ns())
        most = max(ranks.gather(int(np.cumsum([each.nbytes() for each in events]).max())))
        if ranks.is_writer:
            Path(out).write_text(str(most))


if __name__ == "__main__":
    main(*sys.argv[1:])
