"""One GPU: tokens per second of training and of sampling, peak memory, share of the measured matmul peak.

    Qwen3 of 0.6 B parameters, random weights, bfloat16 ──┬─► TorchBackend.update   rows of random tokens
                                                          └─► LocalClient           many conversations at once
    a small one ──► ranks: a world of one over NCCL, and `rllm train --nproc 2` where there are two GPUs

    python benchmarks/gpu.py [--rows 64] [--row-tokens 1024] [--micro-batch-tokens 16384]
        [--gradient-checkpointing] [--conversations 256] [--prompt 256] [--new 256] [--agreement]
        [--dry] [--json]

The peak is that of a square product of 8192 in bfloat16, measured here. A trained token counts 6
floating-point operations per parameter of a matrix, a sampled one 2, and both what their attention takes;
recomputed layers and logits count once, so they lower the share. Without a GPU it says so and ends with exit
code 2. `--dry` runs the code of each case on the processor, with a small model, and lists what is not
measured.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllm.algorithms.losses import PolicyLoss
from rllm.config.distributed import DistributedConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.distributed.cards import backend_of
from rllm.distributed.launch import free_port
from rllm.distributed.torch_ranks import joined_ranks
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import create_model
from rllm.models.decoder import Decoder, DecoderShape
from rllm.models.directory import LoadedModel, load_model
from rllm.trainer.backends.sharding import gather_into, shard_model
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.messages import SamplingParams
from rllm.types.sample import NOT_SAMPLED, TrainingSample

QWEN3_600M = DecoderShape(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=4096,
    tied=True,
    qkv_bias=False,
    out_bias=False,
    qk_norm=True,
)
SMALL = replace(
    QWEN3_600M,
    vocab_size=2_048,
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)
DRY = {
    "rows": 2,
    "row_tokens": 32,
    "micro_batch_tokens": 64,
    "conversations": 2,
    "prompt": 8,
    "new": 8,
    "square": 128,
}
"""Options of a dry run: the work of a processor in a few seconds."""
ON_TWO_CARDS = "ranks on two GPUs"
CASES = ("matmul peak", "training", "sampling", "a world of one", ON_TWO_CARDS)
RUNS_ON_TWO = {
    "replicate": [],
    "shard": ["distributed.strategy=shard"],
    "tensor parallel": ["distributed.tensor_parallel=2"],
}
RUN_ON_TWO = [
    *("steps=2", "warm_start.steps=2", "warm_start.episodes_per_step=8", "model.dtype=float32"),
    *(
        "evaluation.num_tasks=8",
        "evaluation.every_steps=0",
        "rollout.tasks_per_step=2",
        "rollout.group_size=4",
    ),
]
SQUARE = 8192
WARMUP, REPEATS = 2, 5


@dataclass(kw_only=True, slots=True)
class Machine:
    """Where it is measured."""

    device: torch.device

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median of the repeats, all kernels done."""
        spent: list[float] = []
        for repeat in range(WARMUP + REPEATS):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            if repeat >= WARMUP:
                spent.append(time.perf_counter() - started)
        return statistics.median(spent)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float:
        if self.device.type != "cuda":
            return 0.0
        return torch.cuda.max_memory_allocated(self.device) / 2**30


def matmul_peak(machine: Machine, size: int = SQUARE) -> float:
    """Floating-point operations per second."""
    left, right = (torch.randn(size, size, device=machine.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / machine.seconds(lambda: left @ right)


def random_model(machine: Machine, shape: DecoderShape, scratch: Path) -> LoadedModel:
    """Random weights of `shape`; tokenizer and files are the built-in model's, whose text is never looked
    at."""
    create_model(scratch / "model", "tiny")
    with machine.device:
        model = Decoder(shape)
    generator = torch.Generator(machine.device).manual_seed(0)
    model.initialize(generator)
    model.to(device=machine.device, dtype=torch.bfloat16)
    loaded = load_model(scratch / "model")
    return replace(
        loaded,
        model=model,
        config={**loaded.config, "vocab_size": shape.vocab_size},
        end_token_ids=(),  # so that every conversation has its full length
        max_positions=shape.max_positions,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )


def training(machine: Machine, loaded: LoadedModel, options: argparse.Namespace) -> dict[str, float]:
    """Updates of policy gradient on rows without a common prompt, all tokens but the first trained."""
    machine.forget_peak()
    learner = TorchBackend(
        loaded.model,
        publish=lambda policy_version: None,
        config=OptimizerConfig(
            micro_batch_tokens=options.micro_batch_tokens,
            gradient_checkpointing=options.gradient_checkpointing,
        ),
    )
    rng = np.random.default_rng(0)
    rows = [
        _row(rng, options.row_tokens, loaded.config["vocab_size"], index) for index in range(options.rows)
    ]
    seconds = machine.seconds(lambda: learner.update(rows, PolicyLoss(), 1e-6))
    num_tokens = options.rows * (options.row_tokens - 1)
    per_token = 3 * _forward_flops(loaded.model, options.row_tokens / 2)
    return {
        "tokens_per_s": num_tokens / seconds,
        "flops_per_s": num_tokens * per_token / seconds,
        "peak_gib": machine.peak_gib(),
    }


def sampling(machine: Machine, loaded: LoadedModel, options: argparse.Namespace) -> dict[str, float]:
    """New tokens of many conversations at once, prompts and their prefill included in the time."""
    loaded.model.requires_grad_(False)
    machine.forget_peak()
    rng = np.random.default_rng(1)
    prompts = rng.integers(loaded.config["vocab_size"], size=(options.conversations, options.prompt)).tolist()

    async def all_of_them(client: LocalClient) -> int:
        answers = await asyncio.gather(
            *(client.generate_ids(each, SamplingParams(max_tokens=options.new)) for each in prompts)
        )
        return sum(len(each.completion_ids) for each in answers)

    async def timed() -> tuple[int, float]:
        client = LocalClient(
            loaded, num_slots=options.conversations, max_context=options.prompt + options.new
        )
        await all_of_them(client)  # the first time finds kernels and reserves the cache
        machine.wait()
        started = time.perf_counter()
        num_tokens = await all_of_them(client)
        machine.wait()
        seconds = time.perf_counter() - started
        await client.close()
        return num_tokens, seconds

    num_tokens, seconds = asyncio.run(timed())
    per_token = _forward_flops(loaded.model, options.prompt + options.new / 2)
    return {
        "tokens_per_s": num_tokens / seconds,
        "flops_per_s": num_tokens * per_token / seconds,
        "peak_gib": machine.peak_gib(),
    }


def world_of_one(machine: Machine, loaded: LoadedModel) -> dict[str, str]:
    """All that ranks do with each other, by one alone: sums, objects, a mesh, FSDP2. Shows that it works, and
    says nothing of how fast."""
    on_card = machine.device.type == "cuda"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(alone)
    config, sizes = DistributedConfig(), {"num_local": 1, "shard_size": 1, "tensor_size": 1}
    with joined_ranks(config, **sizes, card=0 if on_card else None) as ranks:
        ones = torch.ones(8, device=machine.device)
        ranks.sum_in_place([ones])
        assert float(ones.sum()) == 8.0
        assert ranks.gather({"rank": 0}) == [{"rank": 0}]
        twin = shard_model(loaded.model, ranks)
        row = torch.arange(16, device=machine.device)
        expected, states = loaded.model.hidden(row, row, _values), twin.hidden(row, row, _values)
        torch.testing.assert_close(states, expected)
        states.float().square().sum().backward()
        gather_into(loaded.model, twin)
        return {"backend": backend_of(ranks.card), "mesh": str(ranks.mesh(machine.device.type))}


def _values(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *wishes: Any) -> torch.Tensor:
    """Attention to oneself alone."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def on_two_cards(scratch: Path) -> dict[str, str]:
    """How a small run of two ranks, one on each card, ends."""
    outcomes: dict[str, str] = {}
    for name, more in RUNS_ON_TWO.items():
        settings = [word for each in (*RUN_ON_TWO, "model.device=cuda", *more) for word in ("--set", each)]
        place = str(scratch / name.replace(" ", "-"))
        words = [sys.executable, "-m", "rllm", "train", "frozenlake", "--nproc", "2", "--output", place]
        done = subprocess.run([*words, *settings], capture_output=True, text=True)
        outcomes[name] = "ran" if done.returncode == 0 else done.stderr.strip()[-500:]
    return outcomes


def agreement(machine: Machine, scratch: Path) -> dict[str, float]:
    """The largest gap between what the sampler recorded and the trainer computes, in nats, by number type."""
    create_model(scratch / "model", "tiny")
    gaps: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(scratch / "model", device=machine.device.type, dtype=dtype)
        gaps[str(dtype).removeprefix("torch.")] = asyncio.run(_gap(loaded))
    return gaps


async def _gap(loaded: LoadedModel) -> float:
    prompts = [list(range(10 + number, 42 + number)) for number in range(16)]
    client = LocalClient(loaded, num_slots=len(prompts), max_context=128)
    outputs = await asyncio.gather(
        *(client.generate_ids(ids, SamplingParams(max_tokens=64, seed=ids[0])) for ids in prompts)
    )
    await client.close()
    learner = TorchBackend(loaded.model, publish=client.publish)
    rows = [
        TrainingSample(
            token_ids_T=np.array(output.prompt_ids + output.completion_ids),
            policy_versions_T=np.array(
                [NOT_SAMPLED] * len(output.prompt_ids) + [0] * len(output.completion_ids)
            ),
            logprobs_T=np.array([0.0] * len(output.prompt_ids) + output.logprobs, dtype=np.float32),
            advantages_T=np.zeros(len(output.prompt_ids) + len(output.completion_ids), dtype=np.float32),
            group_key=("agreement", "agent"),
            order_key=("agreement", number, 0, 0),
        )
        for number, output in enumerate(outputs)
    ]
    scores = learner.score(rows)
    return max(
        float(np.abs(score_T - row.logprobs_T).max()) for score_T, row in zip(scores, rows, strict=True)
    )


def _row(rng: np.random.Generator, length: int, vocabulary: int, index: int) -> TrainingSample:
    sampled_T = np.arange(length) > 0
    return TrainingSample(
        token_ids_T=rng.integers(vocabulary, size=length),
        policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
        logprobs_T=np.where(sampled_T, -np.log(vocabulary), 0.0).astype(np.float32),
        advantages_T=np.where(sampled_T, rng.normal(), 0.0).astype(np.float32),
        group_key=(str(index), "agent"),
        order_key=(str(index), 0, 0, 0),
    )


def _forward_flops(model: Decoder, mean_context: float) -> float:
    """Of one token that sees `mean_context` others."""
    matrices = sum(each.numel() for name, each in model.named_parameters() if each.dim() == 2)
    if model.head is not None:  # an embedding that is not the output layer multiplies nothing
        matrices -= model.embed.weight.numel()
    shape = model.shape
    return 2 * matrices + 4 * shape.num_layers * shape.num_heads * shape.head_dim * mean_context


def measure(machine: Machine, shape: DecoderShape, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one record."""
    peak = matmul_peak(machine, options.square)
    with tempfile.TemporaryDirectory() as scratch:
        loaded = random_model(machine, shape, Path(scratch))
        record: dict[str, Any] = {
            "device": torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else "cpu",
            "parameters": loaded.num_parameters,
            "matmul_peak_tflops": peak / 1e12,
            "training": training(machine, loaded, options),
            "sampling": sampling(machine, loaded, options),
        }
        small = random_model(machine, SMALL, Path(scratch) / "small")
        record["a world of one"] = world_of_one(machine, small)
        record[ON_TWO_CARDS] = (
            on_two_cards(Path(scratch)) if torch.cuda.device_count() > 1 else "not measured: needs two GPUs"
        )
    for kind in ("training", "sampling"):
        record[kind]["share_of_peak"] = record[kind].pop("flops_per_s") / peak
    return record


def dry_run(options: argparse.Namespace) -> dict[str, Any]:
    """The same code on the processor. Its figures say nothing about a GPU, so the record has none."""
    measure(Machine(device=torch.device("cpu")), SMALL, argparse.Namespace(**(vars(options) | DRY)))
    cases = {case: {"cpu": "ran", "cuda": "not measured"} for case in CASES}
    cases[ON_TWO_CARDS] = {"cpu": "not run here, but by the tests", "cuda": "not measured: needs two GPUs"}
    return {"device": "cpu", "cases": cases}


def show(record: dict[str, Any]) -> None:
    if "cases" in record:
        for case, states in record["cases"].items():
            print(f"{case:18} on the processor: {states['cpu']}; CUDA: {states['cuda']}")
        return
    print(
        f"{record['device']}: {record['parameters'] / 1e6:.0f} M parameters in bfloat16; matmul peak "
        f"{record['matmul_peak_tflops']:.0f} TFLOP/s"
    )
    for kind in ("training", "sampling"):
        seen = record[kind]
        print(
            f"  {kind:9} {seen['tokens_per_s']:12,.0f} tokens/s   peak memory {seen['peak_gib']:6.1f} GiB   "
            f"{seen['share_of_peak']:6.1%} of the matmul peak"
        )
    print(f"  a world of one: {record['a world of one']['backend']}; {ON_TWO_CARDS}: {record[ON_TWO_CARDS]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64, help="rows of an update")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--conversations", type=int, default=256, help="sampled at the same time")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--agreement", action="store_true", help="sampler beside trainer, and nothing else")
    parser.add_argument("--dry", action="store_true", help="run each case's code on the processor")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.square = SQUARE
    if not (options.dry or torch.cuda.is_available()):
        print(
            "benchmarks/gpu.py needs a GPU, and torch sees none here; --dry runs its code on the processor, "
            "which benchmarks/trainer.py measures.",
            file=sys.stderr,
        )
        sys.exit(2)
    if options.agreement:
        machine = Machine(device=torch.device("cpu" if options.dry else "cuda"))
        with tempfile.TemporaryDirectory() as scratch:
            gaps = agreement(machine, Path(scratch))
        print(json.dumps({"device": machine.device.type, "largest gap in nats": gaps}, indent=2))
        return
    record = (
        dry_run(options)
        if options.dry
        else measure(Machine(device=torch.device("cuda")), QWEN3_600M, options)
    )
    if options.json:
        print(json.dumps(record, indent=2))
    else:
        show(record)


if __name__ == "__main__":
    main()
