"""The trainer beside TRL's: GRPO, SFT and DPO on the same model, rows and batches, in turn; and how much of
the bare model's speed it keeps.

    GRPO       whole steps of `rllm train`, as in train_step.py       │ GRPOTrainer  ┐
    SFT, DPO   `TorchBackend.update` on rows of token ids             │ SFTTrainer, DPOTrainer   ├ .venv-trl
    bare       `update` on rows of a kind                             │ forward + backward, no optimizer, here

    python benchmarks/trainer.py [--model builtin:tiny | DIR] [--only grpo,sft,dpo,bare] [--threads N]
    [--quick]
        [--json] [--peer-python PATH]

Rows of SFT and DPO have long-tailed lengths. Both sides get them tokenized, in the same order and batches,
and must agree on the first loss; the log-probabilities of DPO's reference are computed by both before the
clock starts. TRL pads a batch to its longest row, rLLM packs; a prompt of a DPO pair is computed once. The
bare model is rLLM's decoder on full rectangles of tokens, at the batch size that is fastest.

TRL is installed into `.venv-trl` at the root of the repository on first use, which takes minutes.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from train_step import SETTINGS, Spent, TrlSide, compare, trl_python
from trl_side import cpu_seconds

from rllm.algorithms.losses import ImitationLoss, Loss
from rllm.algorithms.preference import PairLoss
from rllm.config.optimizer import OptimizerConfig
from rllm.models.builtin import create_model
from rllm.models.devices import use_threads
from rllm.models.directory import LoadedModel, load_model
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.sample import NOT_SAMPLED, TrainingSample

LEARNING_RATE = 5e-4
BETA = 0.1
KEPT = 0.85
"""The least share of the bare model's tokens per second."""
LARGEST_GAP = 1e-3
"""How far the two sides' first losses may be apart: TRL logs four digits."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(kw_only=True, slots=True)
class Rows:
    """The batches of a run, as each side wants them."""

    ours: list[list[TrainingSample]]
    theirs: list[dict[str, list[int]]]
    batch: int
    """Rows, or pairs, of a batch."""
    trained: float
    """Mean number of trained tokens of a batch."""


@dataclass(slots=True)
class Turns:
    """Seconds per step of two sides, turn by turn."""

    ours: list[Spent] = field(default_factory=list[Spent])
    theirs: list[Spent] = field(default_factory=list[Spent])

    def summary(self) -> dict[str, float]:
        pairs = list(zip(self.ours, self.theirs, strict=True))
        return {
            "rllm_s": statistics.median(each.wall for each in self.ours),
            "peer_s": statistics.median(each.wall for each in self.theirs),
            "rllm_cpu_s": statistics.median(each.cpu for each in self.ours),
            "peer_cpu_s": statistics.median(each.cpu for each in self.theirs),
            "ratio": statistics.median(theirs.wall / ours.wall for ours, theirs in pairs),
            "ratio_cpu": statistics.median(theirs.cpu / ours.cpu for ours, theirs in pairs),
        }


def sft_rows(num_batches: int, loaded: LoadedModel, batch: int = 32) -> Rows:
    """Prompts of 16 tokens, answers of 8 to 400; the answers are learned."""
    rng, vocabulary = np.random.default_rng(1), loaded.config["vocab_size"]
    ours: list[list[TrainingSample]] = []
    theirs: list[dict[str, list[int]]] = []
    for number in range(num_batches):
        ours.append([])
        for row, length in enumerate(_long_tail(rng, batch, 8, 400)):
            prompt, answer = rng.integers(10, vocabulary, 16), rng.integers(10, vocabulary, length)
            ours[-1].append(_sample(prompt, answer, f"{number}/{row}"))
            labels = [-100] * len(prompt) + answer.tolist()
            theirs.append({"input_ids": [*prompt.tolist(), *answer.tolist()], "labels": labels})
    return Rows(ours=ours, theirs=theirs, batch=batch, trained=_trained(ours))


def dpo_rows(num_batches: int, loaded: LoadedModel, batch: int = 16) -> Rows:
    """Prompts of 48 tokens; two answers of 8 to 200 each."""
    rng, vocabulary = np.random.default_rng(2), loaded.config["vocab_size"]
    ours: list[list[TrainingSample]] = []
    theirs: list[dict[str, list[int]]] = []
    for number in range(num_batches):
        ours.append([])
        for pair in range(batch):
            prompt = rng.integers(10, vocabulary, 48)
            chosen, rejected = (rng.integers(10, vocabulary, size) for size in _long_tail(rng, 2, 8, 200))
            for side, (answer, sign) in enumerate(((chosen, 1.0), (rejected, -1.0))):
                ours[-1].append(_sample(prompt, answer, f"{number}/{pair}", side, sign))
            columns = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
            theirs.append({name: values.tolist() for name, values in columns.items()})
    scores = TorchBackend(loaded.model, publish=_nobody).score([each for rows in ours for each in rows])
    for sample, score_T in zip((each for rows in ours for each in rows), scores, strict=True):
        sample.ref_logprobs_T = score_T
    return Rows(ours=ours, theirs=theirs, batch=batch, trained=_trained(ours))


def _long_tail(rng: np.random.Generator, num: int, low: int, high: int) -> list[int]:
    return np.clip(rng.lognormal(4.0, 0.8, num), low, high).astype(int).tolist()


def _sample(
    prompt: np.ndarray, answer: np.ndarray, task: str, attempt: int = 0, advantage: float = 1.0
) -> TrainingSample:
    sampled_T = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return TrainingSample(
        token_ids_T=np.concatenate((prompt, answer)),
        policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
        logprobs_T=np.zeros(len(sampled_T), dtype=np.float32),
        advantages_T=np.where(sampled_T, advantage, 0.0).astype(np.float32),
        group_key=(task, "agent"),
        order_key=(task, attempt, 0, 0),
    )


def _trained(batches: Sequence[Sequence[TrainingSample]]) -> float:
    return sum(each.num_trainable for rows in batches for each in rows) / len(batches)


def _nobody(policy_version: int) -> None: ...


def beside_trl(
    kind: str, loss: Loss, make: Callable[[int, LoadedModel], Rows], options: argparse.Namespace
) -> dict[str, Any]:
    """One kind of supervised training on both sides, in turn."""
    turns, turn_steps, warmup = plan_of(options)
    loaded = load_model(options.directory)
    rows = make(warmup + turns * turn_steps, loaded)
    learner = TorchBackend(loaded.model, publish=_nobody, config=OptimizerConfig())
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "kind": kind,
            "model": str(options.directory),
            "rows": rows.theirs,
            "threads": options.threads,
            "batch": rows.batch,
            "beta": BETA,
            "learning_rate": LEARNING_RATE,
            "scratch": scratch,
        }
        trl = TrlSide(options.peer_python, settings, script="trl_supervised_side.py")
        losses = [learner.update(batch, loss, LEARNING_RATE)["loss"] for batch in rows.ours[:warmup]]
        trl.run(warmup)
        gap = abs(trl.completion_length - losses[0])  # what this side tells beside the seconds is its loss
        if gap > LARGEST_GAP:
            raise RuntimeError(f"{kind}: the first loss is {losses[0]:.5f} here and {gap:.2g} away at TRL.")
        seen = Turns()
        for turn in range(turns):
            first = warmup + turn * turn_steps
            batches = rows.ours[first : first + turn_steps]
            seen.ours.append(_timed(lambda each: learner.update(each, loss, LEARNING_RATE), batches))
            theirs = trl.run(turn_steps)
            seen.theirs.append(Spent(theirs.wall / turn_steps, theirs.cpu / turn_steps))
        trl.close()
    return {
        "name": f"{kind.upper()}, {rows.batch} {'pairs' if kind == 'dpo' else 'rows'}, long-tailed",
        "trained": rows.trained,
        "target": 1.0,
        "loss_gap": gap,
        **seen.summary(),
    }


def beside_trl_grpo(setting: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Whole steps, as train_step.py measures them."""
    options.trl_python = options.peer_python
    with tempfile.TemporaryDirectory() as scratch:
        row = compare(setting, options.directory, Path(scratch), options)
    return {
        "name": f"GRPO, {setting.name}",
        "trained": setting.tasks_per_step * setting.group_size * row["completion_mean_trl"],
        "target": setting.target,
        "peer_s": row["trl_s"],
        "peer_cpu_s": row["trl_cpu_s"],
        **{name: row[name] for name in ("rllm_s", "rllm_cpu_s", "ratio", "ratio_cpu")},
    }


def beside_bare_model(length: int, tail: bool, options: argparse.Namespace) -> dict[str, Any]:
    """`update`, optimizer included, against forward and backward passes at their best batch size, in tokens
    per second. All tokens but the first of a row are trained."""
    turns, turn_steps, _ = plan_of(options)
    loaded = load_model(options.directory)
    learner = TorchBackend(loaded.model, publish=_nobody, config=OptimizerConfig())
    rng, vocabulary = np.random.default_rng(3), loaded.config["vocab_size"]
    lengths = _long_tail(rng, 64, 8, 400) if tail else [length] * 64
    mean = round(sum(lengths) / len(lengths))
    rows = [
        _sample(rng.integers(10, vocabulary, 1), rng.integers(10, vocabulary, size - 1), str(index))
        for index, size in enumerate(lengths)
    ]
    num_tokens = sum(size - 1 for size in lengths)
    update = lambda _: learner.update(rows, ImitationLoss(), 0.0)  # noqa: E731
    passes = {size: _bare_pass(loaded, size, mean, vocabulary) for size in BATCH_SIZES}
    for size in BATCH_SIZES:
        passes[size](None)
    speeds = {size: size * (mean - 1) / _timed(each, [0] * 3).cpu for size, each in passes.items()}
    best = max(speeds, key=lambda size: speeds[size])
    update(None)
    seen = Turns()
    for _ in range(turns):
        seen.ours.append(_per(_timed(update, [0] * turn_steps), num_tokens))
        seen.theirs.append(_per(_timed(passes[best], [0] * turn_steps), best * (mean - 1)))
    return {
        "name": f"64 rows of {'long-tailed lengths' if tail else f'{length} tokens'}",
        "best_batch": best,
        "rllm_tokens_per_cpu_s": 1.0 / statistics.median(each.cpu for each in seen.ours),
        "bare_tokens_per_cpu_s": 1.0 / statistics.median(each.cpu for each in seen.theirs),
        "kept": seen.summary()["ratio"],
        "kept_cpu": seen.summary()["ratio_cpu"],
        "target": KEPT,
    }


def _bare_pass(loaded: LoadedModel, batch: int, length: int, vocabulary: int) -> Callable[[Any], None]:
    """A forward and backward pass over a full rectangle of tokens."""
    generator = torch.Generator().manual_seed(batch)
    tokens_B_T = torch.randint(10, vocabulary, (batch, length), generator=generator)
    inputs_N, targets_N = tokens_B_T[:, :-1].flatten(), tokens_B_T[:, 1:].flatten()
    positions_N = torch.arange(length - 1).repeat(batch)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.view(batch, length - 1, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return seen.transpose(1, 2).flatten(0, 1)

    def once(_: Any) -> None:
        model = loaded.model
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model.logits(model.hidden(inputs_N, positions_N, attend)), targets_N).backward()

    return once


def _timed(work: Callable[[Any], Any], arguments: Sequence[Any]) -> Spent:
    """Seconds of one call."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    for each in arguments:
        work(each)
    num = len(arguments)
    return Spent((time.perf_counter() - wall) / num, (cpu_seconds() - cpu) / num)


def _per(spent: Spent, num: int) -> Spent:
    return Spent(spent.wall / num, spent.cpu / num)


def plan_of(options: argparse.Namespace) -> tuple[int, int, int]:
    """(turns of each side, steps in a turn, steps before the first turn)."""
    return (2, 3, 2) if options.quick else (options.turns, options.turn_steps, 3)


def show(result: dict[str, Any]) -> None:
    console = Console(width=130)
    if result["beside_trl"]:
        table = Table(title=f"{result['model']}, {result['threads']} thread(s); medians per step")
        for name in (
            "training",
            "rLLM s",
            "TRL s",
            "× wall",
            "× CPU",
            "target",
            "CPU µs a trained token",
            "TRL",
        ):
            table.add_column(name, justify="left" if name == "training" else "right")
        for row in result["beside_trl"]:
            mine, theirs = (1e6 * row[f"{side}_cpu_s"] / row["trained"] for side in ("rllm", "peer"))
            table.add_row(
                row["name"],
                f"{row['rllm_s']:.3f}",
                f"{row['peer_s']:.3f}",
                f"{row['ratio']:.2f}",
                f"{row['ratio_cpu']:.2f}",
                f"{row['target']:.1f}",
                f"{mine:.0f}",
                f"{theirs:.0f}",
            )
        console.print(table)
    if result["beside_bare_model"]:
        table = Table(title="`update` beside forward and backward of the bare model at its best batch size")
        for name in (
            "rows",
            "tokens/CPU s",
            "bare tokens/CPU s",
            "best batch",
            "kept",
            "kept, CPU",
            "target",
        ):
            table.add_column(name, justify="left" if name == "rows" else "right")
        for row in result["beside_bare_model"]:
            table.add_row(
                row["name"],
                f"{row['rllm_tokens_per_cpu_s']:,.0f}",
                f"{row['bare_tokens_per_cpu_s']:,.0f}",
                str(row["best_batch"]),
                f"{row['kept']:.0%}",
                f"{row['kept_cpu']:.0%}",
                f"{row['target']:.0%}",
            )
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:tiny", help="builtin:NAME or a model directory")
    parser.add_argument("--only", default="grpo,sft,dpo,bare", help="which of grpo, sft, dpo, bare")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--updates", type=int, default=2, help="optimizer updates per GRPO step")
    parser.add_argument("--turns", type=int, default=5, help="turns of each side")
    parser.add_argument("--turn-steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--quick", action="store_true", help="two turns of three steps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--peer-python", type=Path, help="a Python that has TRL; without it, .venv-trl is made"
    )
    options = parser.parse_args()
    kinds = options.only.split(",")
    if unknown := set(kinds) - {"grpo", "sft", "dpo", "bare"}:
        parser.error(f"--only has {sorted(unknown)[0]!r}; it takes grpo, sft, dpo and bare")
    use_threads(options.threads)
    if set(kinds) != {"bare"}:
        options.peer_python = options.peer_python or trl_python()
    result: dict[str, Any] = {
        "model": options.model,
        "threads": options.threads,
        "beside_trl": [],
        "beside_bare_model": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        options.directory = Path(options.model)
        if options.model.startswith("builtin:"):
            options.directory = Path(scratch) / "model"
            create_model(options.directory, options.model.removeprefix("builtin:"))
        if "grpo" in kinds:
            result["beside_trl"] += [beside_trl_grpo(setting, options) for setting in SETTINGS]
        if "sft" in kinds:
            result["beside_trl"].append(beside_trl("sft", ImitationLoss(), sft_rows, options))
        if "dpo" in kinds:
            result["beside_trl"].append(beside_trl("dpo", PairLoss(beta=BETA), dpo_rows, options))
        if "bare" in kinds:
            shapes = ((128, False), (0, True))
            result["beside_bare_model"] = [beside_bare_model(*shape, options) for shape in shapes]
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
