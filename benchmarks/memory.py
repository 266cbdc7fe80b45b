"""Memory of an update as `rllm train NAME --dry-run` predicts it, beside what the process then takes.

    processes of each setting: load, baseline ─► two updates ─► the most − baseline ──┐
    memory_plan of the same configuration ────────────────────────────────────────────┴─► error

    python benchmarks/memory.py [--settings NAME …] [--keep] [--json]

Rows are as long as the plan takes them to be, so that the most that a run can need is what is measured.
What Python and its libraries take is there before the baseline. glibc gives freed memory back late, so
processes are measured with one arena and with mmap for what is above 1 MiB, which it gives back at once.
Of several ranks the one that takes most is measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench_results import keep
from rich.console import Console
from rich.table import Table

from rllm.types.sample import NOT_SAMPLED, TrainingSample

LAKE = {
    "inference.max_context": 257,
    "inference.num_slots": 32,
    "rollout.max_turns": 1,
    "rollout.max_tokens_per_turn": 64,
    "rollout.tasks_per_step": 4,
    "rollout.group_size": 8,
    "optimizer.micro_batch_tokens": 2048,
    "algorithm.updates_per_step": 1,
    "warm_start.steps": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": {"model.path": "builtin:tiny"},
    "tiny, one pass": {"model.path": "builtin:tiny", "optimizer.micro_batch_tokens": 16384},
    "5m": {"model.path": "builtin:5m"},
    "5m, muon": {"model.path": "builtin:5m", "optimizer.name": "muon", "optimizer.muon_dtype": "float32"},
    "20m": {"model.path": "builtin:20m"},
    "20m, layers again": {"model.path": "builtin:20m", "optimizer.gradient_checkpointing": True},
    "20m, lora": {"model.path": "builtin:20m", "lora.rank": 16},
    "100m, one pass": {"model.path": "builtin:100m", "rollout.tasks_per_step": 1},
    "100m, adamw8bit": {
        "model.path": "builtin:100m",
        "rollout.tasks_per_step": 1,
        "optimizer.name": "adamw8bit",
    },
    "100m, lora": {"model.path": "builtin:100m", "rollout.tasks_per_step": 1, "lora.rank": 16},
    "100m, lora in 4 bits": {
        "model.path": "builtin:100m",
        "rollout.tasks_per_step": 1,
        "lora.rank": 16,
        "lora.base_dtype": "nf4",
    },
    "20m, 2 copies": {"model.path": "builtin:20m"},
    "20m, 2 shards": {"model.path": "builtin:20m", "distributed.strategy": "shard"},
    "20m, lora, 2 shards": {"model.path": "builtin:20m", "lora.rank": 16, "distributed.strategy": "shard"},
    "20m, layers on 2": {"model.path": "builtin:20m", "distributed.tensor_parallel": 2},
    "100m, 2 copies": {"model.path": "builtin:100m", "rollout.tasks_per_step": 2},
    "100m, 2 shards": {
        "model.path": "builtin:100m",
        "rollout.tasks_per_step": 2,
        "distributed.strategy": "shard",
    },
}
NUM_RANKS = {name: 2 for name in SETTINGS if name.endswith(("copies", "shards", "on 2"))}
"""Of the settings that have more than one."""
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": "0"}
BOUND = 0.10
"""Of the error, where more than 100 MB are measured: below, what libraries take with them is seen."""
LARGE = 100e6
FIRST_USE = 12_000_000
"""Bytes that libraries take with their first work, for every model."""


def samples(config: Any) -> list[TrainingSample]:
    """Rows as long as they may be, in groups that share a prompt as long as it can be."""
    length = config.inference.max_context
    sampled_T = np.arange(length) >= length - config.rollout.max_tokens_per_turn
    rng = np.random.default_rng(0)
    rows: list[TrainingSample] = []
    for task in range(config.rollout.tasks_per_step):
        prompt_T = rng.integers(7, 600, length)
        for attempt in range(config.rollout.group_size):
            rows.append(
                TrainingSample(
                    token_ids_T=np.where(sampled_T, rng.integers(7, 600, length), prompt_T),
                    policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
                    logprobs_T=np.where(sampled_T, -6.4, 0.0).astype(np.float32),
                    advantages_T=np.where(sampled_T, (-1.0) ** attempt, 0.0).astype(np.float32),
                    group_key=(f"t{task}", "agent"),
                    order_key=(f"t{task}", attempt, 0, 0),
                )
            )
    return rows


def config_of(name: str) -> Any:
    from rllm.config.loader import load_config

    return load_config([f"{key}={json.dumps(value)}" for key, value in {**LAKE, **SETTINGS[name]}.items()])


def measure(name: str) -> dict[str, float]:
    """In a process of its own: bytes of two updates above what it had before."""
    from rllm.algorithms.losses import policy_loss
    from rllm.distributed import open_ranks
    from rllm.models.devices import use_threads
    from rllm.trainer.learning import context_of
    from rllm.trainer.policies import create_initial_models, load_initial_models, make_policies

    use_threads(1)
    config = config_of(name)
    warm_up(config)
    with open_ranks(config.distributed) as ranks, tempfile.TemporaryDirectory() as place:
        create_initial_models(config, Path(place))
        models = load_initial_models(config, Path(place))
        policies = make_policies(config, models, ranks=ranks)
        ((_, backend),) = policies.trainable()
        loss, rows = policy_loss(config.algorithm, context_of(config, 0)), samples(config)
        ranks.wait()
        forget_peak()
        before = resident_bytes()
        for _ in range(2):
            backend.update(rows, loss, 1e-5)
        return {"measured": max(ranks.gather(peak_bytes() - before))}


def warm_up(config: Any) -> None:
    """What torch makes on first use, such as its thread pools, is part of the baseline."""
    import torch
    import torch.nn.functional as F

    first = torch.ones(64, 64, requires_grad=True)
    F.scaled_dot_product_attention(first[None, None], first[None, None], first[None, None]).sum().backward()
    torch.optim.AdamW([first], fused=True).step()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def forget_peak() -> None:
    """A base that is put into 4 bits was larger while it was loaded."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def compare(name: str) -> dict[str, Any]:
    from rllm.distributed.launch import free_port
    from rllm.trainer.memory_plan import memory_plan

    num_ranks = NUM_RANKS.get(name, 1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--measure", name],
            env={**os.environ, **MALLOC, **place, "RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("A rank failed; its error is above.")
    plan = memory_plan(config_of(name), num_ranks=num_ranks, num_local_ranks=num_ranks)
    assert plan is not None, "the built-in models have a plan"
    there = plan.parts.weights + plan.parts.cache
    # Python and torch are in the baseline; what torch makes on first use is not.
    predicted = plan.moments["update"] - there - plan.parts.process + FIRST_USE
    measured = json.loads(printed[0])["measured"]
    return {
        **{part: value for part, value in plan.parts.as_dict().items() if value},
        "activations": plan.activations,
        "tokens": plan.pass_tokens,
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--keep", action="store_true", help="write it into results/, for report.py")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    rows = {name: compare(name) for name in options.settings}
    if options.keep:
        keep(Path(__file__).stem, rows)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        table = Table("setting", "gradients", "optimizer", "activations", "predicted", "measured", "error")
        table.title = "MB that an update takes beside the weights"
        for name, row in rows.items():
            parts = ("gradients", "optimizer", "activations", "predicted", "measured")
            table.add_row(name, *(f"{row[part] / 1e6:,.1f}" for part in parts), f"{row['error']:+.1%}")
        Console(width=110).print(table)
    wrong = [name for name, row in rows.items() if row["measured"] > LARGE and abs(row["error"]) > BOUND]
    if wrong:
        sys.exit(f"{', '.join(wrong)}: more than {BOUND:.0%} from what was measured.")


if __name__ == "__main__":
    main()
