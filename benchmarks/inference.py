"""Tokens per second of the built-in inference engine, beside transformers on the same model directory.

    requests ──► rLLM: LocalClient                       ─┐
             ──► transformers: generate, batch by batch  ─┼─► useful tokens / s, in turn: medians
             ──► transformers: continuous batching       ─┘
    warm caches ──► one decode step without scheduling and sampling: the bare forward pass
    rows of two kinds, apart and together ──► what mixing them costs, in CPU time

    python benchmarks/inference.py [--model builtin:small | DIR] [--threads N] [--quick] [--json]

Prompts and answers have 16 to 64 tokens, independently of each other. End tokens are off, so that everybody
samples the same number of tokens, and only tokens that a request asked for are counted. At concurrency B, B
clients keep one request in flight each: their first ones arrive one after another, the others whenever an
answer is finished. `generate` takes the same requests in batches of B, padded to the longest prompt and run
to the longest answer; it never waits for an arrival. transformers' continuous batching gets all requests at
once and is set up before the clock starts. Reading the prompts is part of every total. rLLM returns the
log-probability of every token; the others are not asked for any.
"""

import argparse
import asyncio
import gc
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from rllm.inference.local.cache import KVCache, Slot
from rllm.inference.local.client import LocalClient
from rllm.inference.local.forward import DecodeRows, PromptRow, forward, prefill
from rllm.models.builtin import create_model
from rllm.models.directory import LoadedModel, load_model
from rllm.types.messages import SamplingParams

SHORTEST, LONGEST = 16, 64
"""Tokens of prompts and of answers."""
ARRIVAL_S = 0.02
"""The first requests of all clients arrive within this time."""
WAVES = {1: 24, 16: 16, 64: 8, 256: 5}
"""Requests per client, by concurrency."""
QUICK_WAVES = {1: 8, 16: 4, 64: 3, 256: 2}
CONTINUOUS_LIMIT_S = 60.0
"""transformers' continuous batching is left out where it would take longer than this."""
TARGETS = {1: 1.5, 16: 1.5, 64: 2.0, 256: 2.0}
"""Times `generate`."""
BARE_TARGET = 0.7


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """The requests of one measurement, in the order of their arrival."""

    concurrency: int
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.max_tokens)

    def first(self, count: int) -> "Work":
        prompts, max_tokens = self.prompts[:count], self.max_tokens[:count]
        return Work(concurrency=self.concurrency, prompts=prompts, max_tokens=max_tokens)


@dataclass(slots=True)
class Spent:
    """Seconds that a measurement took."""

    wall: float = 0.0
    cpu: float = 0.0


def make_work(concurrency: int, num_requests: int, vocab_size: int) -> Work:
    rng = np.random.default_rng(concurrency)
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=(2, num_requests))
    return Work(
        concurrency=concurrency,
        prompts=[rng.integers(3, vocab_size, size=length).tolist() for length in lengths[0]],
        max_tokens=lengths[1].tolist(),
    )


# ---- the contestants ---------------------------------------------------------------------------------------


def run_rllm(client: LocalClient, work: Work) -> Spent:
    async def serve() -> Spent:
        waiting = iter(range(len(work.prompts)))
        with measured() as spent:
            await asyncio.gather(*(keep_asking(number, waiting) for number in range(work.concurrency)))
        return spent

    async def keep_asking(number: int, waiting: Iterator[int]) -> None:
        await asyncio.sleep(ARRIVAL_S * number / work.concurrency)
        for index in waiting:
            sampling = SamplingParams(max_tokens=work.max_tokens[index], seed=index)
            output = await client.generate_ids(work.prompts[index], sampling)
            assert len(output.completion_ids) == work.max_tokens[index]

    return asyncio.run(serve())


def run_generate(model: Any, work: Work) -> Spent:
    with measured() as spent, torch.inference_mode():
        for start in range(0, len(work.prompts), work.concurrency):
            batch = slice(start, start + work.concurrency)
            ids, mask = left_padded(work.prompts[batch])
            longest = max(work.max_tokens[batch])
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest)
            assert out.shape[1] == ids.shape[1] + longest
    return spent


def run_continuous(manager: Any, work: Work) -> Spent:
    """`manager` is what `generate_batch` works with; used directly, it takes a length for every request."""
    with measured() as spent:
        for prompt, max_tokens in zip(work.prompts, work.max_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=max_tokens, eos_token_id=-1)
        finished = 0
        while finished < len(work.prompts):
            result = manager.get_result(timeout=30.0)
            if result is None:
                raise RuntimeError("transformers' continuous batching stopped answering.")
            finished += result.is_finished()
    return spent


@contextmanager
def continuous_batching(model: Any, concurrency: int) -> Iterator[Any]:
    """transformers' manager with room for `concurrency` requests of the longest kind."""
    page = 32
    settings = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=concurrency * (2 * LONGEST // page + 1) + 8,
        max_batch_tokens=max(256, 4 * concurrency),
        max_requests_per_batch=concurrency,
    )
    with model.continuous_batching_context_manager(continuous_batching_config=settings) as manager:
        yield manager


# ---- the bare forward pass ---------------------------------------------------------------------------------


def bare_step(loaded: LoadedModel, work: Work, num_steps: int) -> Spent:
    """One decode step of our decoder, at the batch size and the mixed lengths of `work`, caches warm."""
    lengths = lengths_in_flight(work)
    cache = new_cache(loaded, work.concurrency)
    tokens = torch.full((len(lengths),), 5)
    with torch.inference_mode():
        rows = decoding_rows(loaded, cache, lengths, num_steps)
        forward(loaded.model, cache, rows, tokens, None)
        with measured() as spent:
            for _ in range(num_steps):
                rows.advance()
                forward(loaded.model, cache, rows, tokens, None)
    return Spent(spent.wall / num_steps, spent.cpu / num_steps)


def bare_prefill(loaded: LoadedModel, work: Work) -> Spent:
    """One pass over the first prompts, as many as run at once."""
    cache = new_cache(loaded, work.concurrency)
    with torch.inference_mode():
        prompts = work.prompts[: work.concurrency]
        slots = slots_for(cache, [len(ids) for ids in prompts])
        rows = [PromptRow(slot, ids) for slot, ids in zip(slots, prompts, strict=True)]
        with measured() as spent:
            prefill(loaded.model, cache, rows)
    return spent


def bare_transformers(model: Any, work: Work, num_steps: int) -> Spent:
    """The same decode step by transformers: `forward` on its own cache."""
    ids, mask = left_padded([[5] * length for length in lengths_in_flight(work)])
    token = torch.full((len(ids), 1), 5)
    total = Spent()
    with torch.inference_mode():
        cache = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
        for step in range(num_steps + 1):
            mask = torch.cat((mask, torch.ones_like(token)), dim=1)
            inputs = {
                "input_ids": token,
                "attention_mask": mask,
                "position_ids": mask.sum(-1, keepdim=True) - 1,
            }
            with measured() as spent:
                model(**inputs, past_key_values=cache, use_cache=True)
            if step:  # the first one warms up
                total.wall += spent.wall / num_steps
                total.cpu += spent.cpu / num_steps
    return total


def lengths_in_flight(work: Work) -> list[int]:
    """Context lengths as they are in the middle of a run: prompts with a part of their answers."""
    rng = np.random.default_rng(1)
    rows = zip(work.prompts[: work.concurrency], work.max_tokens[: work.concurrency], strict=True)
    return [len(prompt) + int(rng.integers(0, max_tokens)) for prompt, max_tokens in rows]


# ---- rows of different lengths -----------------------------------------------------------------------------

MIXTURES = {"one long, 63 short": ([1900], [32] * 63), "8 long, 56 short": ([512] * 8, [48] * 56)}
"""Tokens of the rows of both kinds."""
MIXED_TARGET = 1.2
"""Times the sum of its parts."""


def mixed(loaded: LoadedModel, repeats: int) -> list[dict[str, Any]]:
    """CPU time of prompts, and of decode steps, of mixed lengths over that of both kinds one after the
    other: medians of what was measured in turn."""
    found: list[dict[str, Any]] = []
    for name, kinds in MIXTURES.items():
        together = [length for kind in kinds for length in kind]
        for phase, seconds in (("prompts", read_s), ("decode", decode_s)):
            ratios = [
                seconds(loaded, together) / sum(seconds(loaded, list(kind)) for kind in kinds)
                for _ in range(repeats)
            ]
            found.append({"mixture": name, "phase": phase, "ratio": statistics.median(ratios)})
    return found


def read_s(loaded: LoadedModel, lengths: list[int]) -> float:
    """The second time, so that the cache's memory is there."""
    cache = new_cache(loaded, len(lengths), max(lengths))
    slots = slots_for(cache, lengths)
    with torch.inference_mode():
        for _ in range(2):
            for slot in slots:
                cache.truncate(slot, 0)
            rows = [PromptRow(slot, [5] * length) for slot, length in zip(slots, lengths, strict=True)]
            with measured() as spent:
                prefill(loaded.model, cache, rows)
    return spent.cpu


def decode_s(loaded: LoadedModel, lengths: list[int], num_steps: int = 20) -> float:
    cache = new_cache(loaded, len(lengths), max(lengths) + num_steps + 1)
    tokens = torch.full((len(lengths),), 5)
    with torch.inference_mode():
        rows = decoding_rows(loaded, cache, lengths, num_steps)
        forward(loaded.model, cache, rows, tokens, None)
        with measured() as spent:
            for _ in range(num_steps):
                rows.advance()
                forward(loaded.model, cache, rows, tokens, None)
    return spent.cpu / num_steps


# ---- the comparison ----------------------------------------------------------------------------------------


def compare(loaded: LoadedModel, model: Any, work: Work, repeats: int) -> dict[str, Any]:
    """All contestants at one concurrency, in turn, `repeats` times after a warm-up."""
    concurrency, num_steps = work.concurrency, 30
    client = LocalClient(loaded, num_slots=concurrency, max_context=2 * LONGEST)
    client.end_token_ids = frozenset()
    with ExitStack() as stack:
        stack.callback(lambda: asyncio.run(client.close()))
        contestants: dict[str, Callable[[], Spent]] = {
            "rllm": lambda: run_rllm(client, work),
            "generate": lambda: run_generate(model, work),
            "bare_step": lambda: bare_step(loaded, work, num_steps),
            "bare_prefill": lambda: bare_prefill(loaded, work),
            "bare_transformers": lambda: bare_transformers(model, work, num_steps),
        }
        manager = stack.enter_context(continuous_batching(model, concurrency))
        trial = work.first(2 * concurrency)
        run_rllm(client, trial)
        run_generate(model, trial.first(concurrency))
        run_continuous(manager, trial.first(max(1, concurrency // 4)))
        trial_s = run_continuous(manager, trial).wall
        if trial_s * len(work.prompts) / len(trial.prompts) < CONTINUOUS_LIMIT_S:
            contestants["continuous"] = lambda: run_continuous(manager, work)
        runs: dict[str, list[Spent]] = {name: [] for name in contestants}
        for _ in range(repeats):
            for name, run in contestants.items():
                gc.collect()
                runs[name].append(run())
    row: dict[str, Any] = {
        "concurrency": concurrency,
        "requests": len(work.prompts),
        "tokens": work.num_tokens,
    }
    for clock in ("wall", "cpu"):
        row[clock] = summarise(work, {name: [getattr(each, clock) for each in runs[name]] for name in runs})
    return row


def summarise(work: Work, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Tokens per second of everybody, and how rLLM compares: medians of what was measured side by side."""
    steps, batches = work.num_tokens / work.concurrency, len(work.prompts) / work.concurrency
    passes = [
        step * steps + prompts * batches
        for step, prompts in zip(seconds["bare_step"], seconds["bare_prefill"], strict=True)
    ]
    same_work = {
        "rllm": seconds["rllm"],
        "generate": seconds["generate"],
        "continuous": seconds.get("continuous"),
        "bare_step": [step * steps for step in seconds["bare_step"]],
        "bare_passes": passes,
        "bare_transformers": [step * steps for step in seconds["bare_transformers"]],
    }
    rates: dict[str, Any] = {}
    for name, values in same_work.items():
        rates[name] = values and work.num_tokens / statistics.median(values)
        if values and name != "rllm":
            ours = zip(values, seconds["rllm"], strict=True)
            rates[f"rllm / {name}"] = statistics.median(theirs / mine for theirs, mine in ours)
    return rates


@contextmanager
def measured() -> Iterator[Spent]:
    spent = Spent()
    wall, cpu = time.perf_counter(), time.process_time()
    yield spent
    spent.wall, spent.cpu = time.perf_counter() - wall, time.process_time() - cpu


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def new_cache(loaded: LoadedModel, num_slots: int, max_context: int = 4 * LONGEST) -> KVCache:
    return KVCache(
        num_layers=loaded.num_layers,
        num_slots=num_slots,
        num_kv_heads=loaded.num_kv_heads,
        max_context=max_context,
        head_dim=loaded.head_dim,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def slots_for(cache: KVCache, lengths: Sequence[int]) -> list[Slot]:
    """A slot with room for each length, in their order."""
    slots: list[Slot] = []
    for length in lengths:
        slot = cache.allocate(length)
        assert slot is not None, "the cache was made for them"
        slots.append(slot)
    return slots


def decoding_rows(loaded: LoadedModel, cache: KVCache, lengths: Sequence[int], num_steps: int) -> DecodeRows:
    """Rows that have read so many tokens, with room for as many steps and one before them."""
    slots = slots_for(cache, [length + num_steps + 1 for length in lengths])
    for slot, length in zip(slots, lengths, strict=True):
        prefill(loaded.model, cache, [PromptRow(slot, [5] * length)])
    slots.sort(key=lambda slot: slot.index)
    return DecodeRows(cache, slots, np.array([len(slot.ids) for slot in slots]))


def show(rows: list[dict[str, Any]], model: str, threads: int) -> None:
    table = Table(title=f"{model}, {threads} thread(s): tokens/s; ratios by wall clock | by CPU time")
    rates = ("at once", "rLLM", "generate", "rLLM is ×", "continuous", "rLLM is ×")
    for name in (*rates, "bare step", "rLLM is", "with prompts", "their bare step"):
        table.add_column(name, justify="right")
    for row in rows:
        wall, cpu = row["wall"], row["cpu"]

        def ratio(name: str, wall: dict[str, Any] = wall, cpu: dict[str, Any] = cpu) -> str:
            key = f"rllm / {name}"
            return f"{wall[key]:.2f} | {cpu[key]:.2f}" if key in wall else "–"

        table.add_row(
            str(row["concurrency"]),
            f"{wall['rllm']:,.0f}",
            f"{wall['generate']:,.0f}",
            ratio("generate"),
            f"{wall['continuous']:,.0f}" if wall["continuous"] else f"> {CONTINUOUS_LIMIT_S:.0f} s",
            ratio("continuous"),
            f"{wall['bare_step']:,.0f}",
            ratio("bare_step"),
            ratio("bare_passes"),
            f"{wall['bare_transformers']:,.0f}",
        )
    console = Console(width=130)
    console.print(table)
    wanted = ", ".join(f"{times} at {size}" for size, times in TARGETS.items())
    console.print(
        f"Targets: {wanted} times generate; {BARE_TARGET} of the bare step. “with prompts” also counts one "
        "bare pass over each prompt, which the engine's total contains and a decode step does not."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:tiny", help="builtin:NAME or a model directory")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 16, 64, 256], help="none: mixtures alone")
    parser.add_argument("--quick", action="store_true", help="fewer requests, two repetitions")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    waves = QUICK_WAVES if options.quick else WAVES
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(options.model)
        if options.model.startswith("builtin:"):
            directory = Path(scratch) / "model"
            create_model(directory, options.model.removeprefix("builtin:"))
        loaded = load_model(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0
        )
        rows = [
            compare(
                loaded,
                model,
                make_work(size, size * waves.get(size, 5), loaded.config["vocab_size"]),
                2 if options.quick else options.repeats,
            )
            for size in options.sizes
        ]
        mixtures = mixed(loaded, 2 if options.quick else options.repeats)
    if options.json:
        figures = {"model": options.model, "threads": options.threads, "rows": rows, "mixtures": mixtures}
        print(json.dumps(figures, indent=2))
        return
    show(rows, options.model, options.threads)
    for each in mixtures:
        print(f"{each['mixture']}, {each['phase']}: {each['ratio']:.2f} times the sum of their parts")
    print(f"Target: {MIXED_TARGET}.")


if __name__ == "__main__":
    main()
