"""Tokens per second of the built-in inference engine, beside transformers on the same model directory.

    requests ──► rLLM LocalClient           ─┐
             ──► generate, batch by batch   ─┼─► useful tokens / s, alternating, medians over repetitions
             ──► generate_batch's manager   ─┘
    warm caches ──► one decode step, no scheduling, no sampling: the bare forward pass that the engine is measured against

    python benchmarks/inference.py [--model builtin:small] [--threads 1] [--quick] [--json]

Prompts and answers are between 16 and 64 tokens, independently of each other. End tokens are off, so everybody samples the
same number of tokens, and only tokens that a request asked for count as useful. At concurrency B, B clients each keep one
request in flight; their first requests arrive one after another, and the others whenever an answer is finished. `generate`
takes the same requests in batches of B, padded to the longest prompt and run to the longest answer, and is never made to
wait for an arrival. Prefill is part of every total. rLLM returns log-probabilities; the others are not asked for them.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from rllm.inference.local.cache import KVCache
from rllm.inference.local.client import LocalClient
from rllm.inference.local.forward import DecodeRows, Row, forward, prefill
from rllm.models.builtin import create_model
from rllm.models.directory import LoadedModel, load_model
from rllm.types.messages import SamplingParams

SHORTEST, LONGEST = 16, 64
"""Tokens of prompts and of answers."""
MAX_CONTEXT = 2 * LONGEST
ARRIVAL_S = 0.02
"""The first requests of all clients arrive within this time."""
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
        return Work(
            concurrency=self.concurrency, prompts=self.prompts[:count], max_tokens=self.max_tokens[:count]
        )


@dataclass(slots=True)
class Spent:
    """What a measurement cost."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


def make_work(concurrency: int, num_requests: int, vocab_size: int) -> Work:
    rng = np.random.default_rng(concurrency)
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=(2, num_requests))
    return Work(
        concurrency=concurrency,
        prompts=[rng.integers(3, vocab_size, size=length).tolist() for length in lengths[0]],
        max_tokens=lengths[1].tolist(),
    )


# ---- the contestants ---------------------------------------------------------------------------------------------


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
            prompts = work.prompts[start : start + work.concurrency]
            ids, mask = left_padded(prompts)
            longest = max(work.max_tokens[start : start + work.concurrency])
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest)
            assert out.shape[1] == ids.shape[1] + longest
    return spent


def run_continuous(manager: Any, work: Work) -> Spent:
    with measured() as spent:
        for prompt, max_tokens in zip(work.prompts, work.max_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=max_tokens, eos_token_id=-1)
        finished = 0
        while finished < len(work.prompts):
            result = manager.get_result(timeout=10.0)
            if result is None:
                raise RuntimeError("transformers' continuous batching stopped answering.")
            finished += result.is_finished()
    return spent


# ---- the bare forward pass ---------------------------------------------------------------------------------------


def bare_rllm_s(loaded: LoadedModel, work: Work, num_steps: int) -> Spent:
    """One decode step of our decoder at the batch size and at the mixed lengths of `work`, caches warm."""
    lengths = lengths_in_flight(work)
    cache = new_cache(loaded, work.concurrency)
    rng = np.random.default_rng(0)
    slots = [cache.allocate() for _ in lengths]
    with torch.inference_mode():
        prefill(
            loaded.model,
            cache,
            [
                Row(slot, rng.integers(3, 500, size=n).tolist())
                for slot, n in zip(slots, lengths, strict=True)
            ],
        )
        rows = DecodeRows(cache, np.arange(len(slots)), np.array(lengths))
        tokens = torch.full((len(slots),), 5)
        forward(loaded.model, cache, rows, tokens, None)
        with measured() as spent:
            for _ in range(num_steps):
                rows.advance()
                forward(loaded.model, cache, rows, tokens, None)
    return Spent(spent.wall_s / num_steps, spent.cpu_s / num_steps)


def bare_transformers_s(model: Any, work: Work, num_steps: int) -> Spent:
    """The same step by transformers: `forward` on its own cache."""
    rng = np.random.default_rng(0)
    ids, mask = left_padded([rng.integers(3, 500, size=n).tolist() for n in lengths_in_flight(work)])
    one = torch.full((len(ids), 1), 5)
    with torch.inference_mode():
        cache = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
        spent = Spent()
        for step in range(num_steps + 1):
            mask = torch.cat((mask, torch.ones_like(one)), dim=1)
            position = mask.sum(-1, keepdim=True) - 1
            with measured() as single:
                model(
                    input_ids=one,
                    attention_mask=mask,
                    position_ids=position,
                    past_key_values=cache,
                    use_cache=True,
                )
            if step:
                spent.wall_s += single.wall_s / num_steps
                spent.cpu_s += single.cpu_s / num_steps
    return spent


def lengths_in_flight(work: Work) -> list[int]:
    """Context lengths as one finds them in the middle of the run: prompts with a part of their answers."""
    rng = np.random.default_rng(1)
    rows = zip(work.prompts[: work.concurrency], work.max_tokens[: work.concurrency], strict=True)
    return [len(prompt) + int(rng.integers(0, max_tokens)) for prompt, max_tokens in rows]


# ---- measuring ---------------------------------------------------------------------------------------------------


@contextmanager
def measured() -> Iterator[Spent]:
    spent = Spent()
    wall, cpu = time.perf_counter(), time.process_time()
    yield spent
    spent.wall_s, spent.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def new_cache(loaded: LoadedModel, num_slots: int) -> KVCache:
    parameter = next(loaded.model.parameters())
    return KVCache(
        num_layers=loaded.num_layers,
        num_slots=num_slots,
        num_kv_heads=loaded.num_kv_heads,
        max_context=MAX_CONTEXT * 2,
        head_dim=loaded.head_dim,
        device=parameter.device,
        dtype=parameter.dtype,
    )


# ---- the whole comparison ----------------------------------------------------------------------------------------


def compare(loaded: LoadedModel, model: Any, work: Work, repeats: int, bare_steps: int) -> dict[str, Any]:
    """All contestants at one concurrency, in turn, `repeats` times after a warm-up."""
    client = LocalClient(loaded, num_slots=work.concurrency, max_context=MAX_CONTEXT)
    client.end_token_ids = frozenset()
    contestants: dict[str, Callable[[], Spent]] = {
        "rllm": lambda: run_rllm(client, work),
        "generate": lambda: run_generate(model, work),
        "bare": lambda: bare_rllm_s(loaded, work, bare_steps),
        "bare_transformers": lambda: bare_transformers_s(model, work, bare_steps),
    }
    spent: dict[str, list[Spent]] = {name: [] for name in contestants}
    run_rllm(client, work.first(2 * work.concurrency))
    for _ in range(repeats):
        for name, run in contestants.items():
            spent[name].append(run())
    asyncio.run(client.close())
    def rate(name, clock):
        tokens = work.concurrency if name.startswith("bare") else work.num_tokens
        return [tokens / getattr(each, clock) for each in spent[name]]
    row = {"concurrency": work.concurrency, "requests": len(work.prompts)}
    for clock in ("wall_s", "cpu_s"):
        rates = {name: rate(name, clock) for name in contestants}
        row[clock] = {name: statistics.median(values) for name, values in rates.items()}
        for a, b in (("rllm", "generate"), ("rllm", "bare"), ("rllm","bare_transformers")):
            row[clock][f"{a}/{b}"] = statistics.median(x / y for x, y in zip(rates[a], rates[b], strict=True))
    return row


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="builtin:tiny")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--sizes", default="1,16,64,256")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    from transformers import AutoModelForCausalLM, GenerationConfig
    import transformers
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as tmp:
        d = Path(a.model)
        if a.model.startswith("builtin:"):
            d = Path(tmp) / "model"
            create_model(d, a.model.removeprefix("builtin:"))
        loaded = load_model(d)
        model = AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32).eval()
        model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0)
        for B in map(int, a.sizes.split(",")):
            work = make_work(B, {1: 16, 16: 96, 64: 256}.get(B, 3 * B), loaded.config["vocab_size"])
            r = compare(loaded, model, work, a.repeats, 40 if B < 64 else 20)
            for clock in ("wall_s", "cpu_s"):
                print(B, clock, {k: round(v, 2) for k, v in r[clock].items()}, flush=True)


if __name__ == "__main__":
    main()
