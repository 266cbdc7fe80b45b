"""Costs of a fleet of model servers: a routed call, a push of weights, a server that ends.

    python benchmarks/fleet.py [--sizes 1m,20m] [--calls 2000] [--server-python PYTHON] [--quick] [--json]

Routing is CPU of this process for choosing a replica and remembering what it read, with nothing behind it
that samples. Pushes and failover go over HTTP to two servers on the built-in engine that speak vLLM's
protocol (`tests/inference/policy_server.py`), in threads of this process: that they read the weights is in
the figure. A failover is timed from the end of a server to the first answer of a conversation that it had.

With --server-python, the Python of an environment that has vLLM, two replicas of one thread each start, and
128 conversations of 64 tokens are sampled by one of them and by both, in turn.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rllm.inference.answer_parts import AnswerParts
from rllm.inference.fleet import Fleet, WeightFiles
from rllm.inference.vllm import VLLMClient
from rllm.inference.vllm_process import ServerSettings, start_replicas
from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model
from rllm.types.messages import ModelOutput, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "inference"))
from policy_server import PolicyServer

PROMPTS = (100, 1_000, 10_000)
CONVERSATIONS, TOKENS = 128, 64
SHORT = SamplingParams(max_tokens=8)


class AtOnce(VLLMClient):
    """Answers with one token, and asks nobody."""

    async def go_on(self, answer: AnswerParts) -> ModelOutput:
        return ModelOutput(text="", prompt_ids=answer.prompt_ids, completion_ids=[5])


async def routing(model: Path, num_calls: int) -> list[dict[str, float]]:
    """CPU µs of a call through a fleet of four, and less those of the client alone."""
    rows: list[dict[str, float]] = []
    for length in PROMPTS:
        clients = [AtOnce(f"http://127.0.0.1:{port}/v1", model) for port in range(1, 5)]
        fleet = Fleet(clients, max_context=1 << 20)
        prompts = [[number, *range(length - 1)] for number in range(64)]

        async def timed(ask: Any, prompts: list[list[int]] = prompts) -> float:
            begin = time.process_time()
            for number in range(num_calls):
                await ask(prompts[number % len(prompts)], SHORT)
            return 1e6 * (time.process_time() - begin) / num_calls

        times = [(await timed(fleet.generate_ids), await timed(clients[0].generate_ids)) for _ in range(3)]
        rows.append({"prompt": length, "routing_us": statistics.median(one - alone for one, alone in times)})
        await fleet.close()
    return rows


async def pushes_and_failover(preset: str, directory: Path, repeats: int) -> dict[str, Any]:
    create_model(directory / "model", preset, 0)
    model = load_model(directory / "model")
    with PolicyServer(directory / "model") as first, PolicyServer(directory / "model") as second:
        fleet = Fleet(
            [VLLMClient(each.url, model.tokenizer, processed_logprobs=True) for each in (first, second)],
            weights=WeightFiles(
                lambda target: save_model(model, target, with_output_layer=True), directory / "published"
            ),
            max_context=512,
        )
        pushes: list[float] = []
        for version in range(repeats):
            begin = time.perf_counter()
            fleet.publish(version)
            await asyncio.gather(*(fleet.bring_up_to_date(each) for each in fleet.replicas))
            pushes.append(time.perf_counter() - begin)
        failovers: list[float] = []
        for _ in range(repeats):
            session = fleet.session(("task", 0))
            await session.respond([{"role": "user", "content": "A 1"}], SHORT)
            server = first if session.replica is fleet.replicas[0] else second
            begin = time.perf_counter()
            server.stop()
            await session.respond([{"role": "user", "content": "A 2"}], SHORT)
            failovers.append(time.perf_counter() - begin)
            server.start()
            while fleet.num_in_service < 2:
                await asyncio.sleep(0.01)
        await fleet.close()
    return {
        "model": preset,
        "mb": sum(each.numel() * each.element_size() for each in model.model.parameters()) / 1e6,
        "push_s": statistics.median(pushes),
        "failover_s": statistics.median(failovers),
    }


async def throughput(python: str, directory: Path, repeats: int) -> dict[str, float]:
    """Tokens a second through one replica of vLLM and through two; medians, in turn."""
    create_model(directory / "tied", "small", 0)
    model = load_model(directory / "tied")
    save_model(model, directory / "model", with_output_layer=True)
    settings = ServerSettings(
        python=python,
        model=directory / "model",
        max_context=256,
        max_requests=128,
        max_prefill_tokens=2_048,
        dtype="float32",
    )
    sampling = SamplingParams(max_tokens=TOKENS)
    rates: dict[int, list[float]] = {1: [], 2: []}
    async with AsyncExitStack() as open_until_done:
        processes = await start_replicas(settings, 2, directory / "logs", open_until_done)
        for _ in range(repeats):
            for count, of_count in rates.items():
                clients = [VLLMClient(each.url, model.tokenizer, sends_seeds=False) for each in processes]
                fleet = Fleet(clients[:count], max_context=256)
                prompts = [[5 + number % 100, *range(5, 69)] for number in range(CONVERSATIONS)]
                begin = time.perf_counter()
                answers = await asyncio.gather(*(fleet.generate_ids(each, sampling) for each in prompts))
                num_tokens = sum(len(each.completion_ids) for each in answers)
                of_count.append(num_tokens / (time.perf_counter() - begin))
                await fleet.close()
    one, two = (statistics.median(each) for each in rates.values())
    return {"one_replica": one, "two_replicas": two, "times": two / one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="1m,20m", help="built-in models that are pushed")
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--server-python", default="", help="of an environment that has vLLM")
    parser.add_argument("--quick", action="store_true", help="the smallest model, few calls")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes, num_calls = (["tiny"], 200) if options.quick else (options.sizes.split(","), options.calls)
    with tempfile.TemporaryDirectory() as scratch:
        create_model(Path(scratch) / "tokenizer", "tiny", 0)
        routed = asyncio.run(routing(Path(scratch) / "tokenizer", num_calls))
        served = [
            asyncio.run(pushes_and_failover(preset, Path(scratch) / preset, 2 if options.quick else 5))
            for preset in sizes
        ]
        sampled = None
        if options.server_python:
            (Path(scratch) / "vllm").mkdir()
            sampled = asyncio.run(throughput(options.server_python, Path(scratch) / "vllm", 3))
    if options.json:
        print(json.dumps({"routing": routed, "servers": served, "tokens_per_s": sampled}, indent=2))
        return
    table = Table("tokens of the prompt", "CPU µs of routing a call")
    for row in routed:
        table.add_row(f"{row['prompt']:,}", f"{row['routing_us']:.0f}")
    Console().print(table)
    table = Table("model", "MB", "a push to two servers, s", "without service at a failover, s")
    for row in served:
        table.add_row(row["model"], f"{row['mb']:.0f}", f"{row['push_s']:.2f}", f"{row['failover_s']:.2f}")
    Console().print(table)
    if sampled is not None:
        Console().print(
            f"vLLM, {CONVERSATIONS} conversations: {sampled['one_replica']:,.0f} tokens/s by one replica, "
            f"{sampled['two_replicas']:,.0f} by two ({sampled['times']:.2f} times)"
        )


if __name__ == "__main__":
    main()
