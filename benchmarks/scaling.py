"""Seconds of an update on two ranks with one core each, beside one rank with one core and with two.

    python benchmarks/scaling.py [--models 10m 100m] [--steps 5] [--json]

Every rank has 2,048 tokens, so two ranks do twice the work of one. Efficiency against one core is the seconds
of one rank on one core, by those of two ranks: 1 where the second rank costs nothing. The ceiling is the same
of two processes that share nothing, each with a model of its own: less than 1 where two cores are threads of
one, or share the memory's bandwidth or clock; no training of ours gets above it. Wall seconds mean little on
a machine that others use; the processor's seconds for 2,048 tokens show what the second rank adds. Needs two
cores; ranks are pinned to theirs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rllm.config.distributed import DistributedConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.distributed import ALONE, open_ranks
from rllm.distributed.launch import free_port
from rllm.types.sample import NOT_SAMPLED, TrainingSample

TOKENS_PER_RANK = 2_048
ROW = 256
SIZES = {"10m": (384, 6, 6, 1024), "100m": (768, 13, 12, 2304)}
"""Width, layers, heads, inner width; about so many parameters with a vocabulary of 604."""
APART = "2 processes that share nothing"
SETTINGS = {
    "1 rank, 1 core": (1, 1),
    "1 rank, 2 cores": (1, 2),
    "2 ranks, 1 core each": (2, 1),
    APART: (2, 1),
}
"""Ranks, and cores of each."""


def samples(num_tokens: int) -> list[TrainingSample]:
    """Rows of random tokens, four attempts at each task."""
    rng = np.random.default_rng(0)
    sampled_T = np.arange(ROW) >= ROW // 4
    return [
        TrainingSample(
            token_ids_T=rng.integers(7, 600, ROW),
            policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
            logprobs_T=np.where(sampled_T, -6.4, 0.0).astype(np.float32),
            advantages_T=np.where(sampled_T, (-1.0) ** index, 0.0).astype(np.float32),
            group_key=(f"t{index // 4}", "agent"),
            order_key=(f"t{index // 4}", index, 0, 0),
        )
        for index in range(num_tokens // ROW)
    ]


def measure(directory: Path, cores: int, steps: int, *, apart: bool) -> None:
    """One rank; rank 0 prints seconds of each step, and the processor's, of all ranks.

    `apart`: each updates a model of its own, and they only begin a step together.
    """
    from rllm.algorithms.losses import policy_loss
    from rllm.config.algorithm import AlgorithmConfig
    from rllm.config.schema import TrainConfig
    from rllm.models.devices import use_threads
    from rllm.models.directory import load_model
    from rllm.trainer.backends.torch import TorchBackend
    from rllm.trainer.learning import context_of

    use_threads(cores)
    with open_ranks(DistributedConfig()) as ranks:
        os.sched_setaffinity(0, set(range(ranks.rank * cores, (ranks.rank + 1) * cores)))
        model = load_model(directory).model
        backend = TorchBackend(
            model,
            publish=lambda version: None,
            config=OptimizerConfig(learning_rate=1e-5),
            ranks=ALONE if apart else ranks,
        )
        loss = policy_loss(AlgorithmConfig(), context_of(TrainConfig(), 0))
        rows = samples(TOKENS_PER_RANK * (1 if apart else ranks.size))
        backend.update(rows, loss, 1e-5)
        wall: list[float] = []
        cpu: list[float] = []
        for _ in range(steps):
            ranks.wait()
            started, processor = time.perf_counter(), time.process_time()
            backend.update(rows, loss, 1e-5)
            cpu.append(sum(ranks.gather(time.process_time() - processor)))
            wall.append(time.perf_counter() - started)
        if ranks.is_writer:
            print(json.dumps({"wall_s": min(wall), "cpu_s": min(cpu) / ranks.size}))


def of_setting(directory: Path, num_ranks: int, cores: int, steps: int, *, apart: bool) -> dict[str, float]:
    """The best of the steps: what others do on the machine only adds."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    words = ["--rank", str(directory), f"--cores={cores}", f"--steps={steps}", *["--apart"] * apart]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *words],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("A rank failed; what it said is above.")
    return json.loads(printed[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.rank, options.cores, options.steps, apart=options.apart)
        return
    from rllm.models.builtin import TinyModel, create_model

    results: dict[str, dict[str, Any]] = {}
    for name in options.models:
        width, layers, heads, inner = SIZES[name]
        with tempfile.TemporaryDirectory() as place:
            size = TinyModel(hidden_size=width, num_layers=layers, num_heads=heads, intermediate_size=inner)
            create_model(Path(place) / "model", size)
            by_setting: dict[str, Any] = {
                setting: of_setting(Path(place) / "model", *shape, options.steps, apart=setting == APART)
                for setting, shape in SETTINGS.items()
            }
        alone, _, together, apart = (by_setting[setting] for setting in SETTINGS)
        for what, two in (("efficiency", together), ("ceiling of this machine", apart)):
            by_setting[what] = {each: alone[each] / two[each] for each in ("wall_s", "cpu_s")}
        results[name] = by_setting
    if options.json:
        print(json.dumps(results, indent=2))
        return
    title = "an update of 2,048 tokens a rank"
    table = Table("model", "setting", "seconds", "CPU seconds a rank", title=title)
    for name, by_setting in results.items():
        for setting, figures in by_setting.items():
            table.add_row(name, setting, f"{figures['wall_s']:.3f}", f"{figures['cpu_s']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
