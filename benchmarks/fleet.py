"""Costs of a fleet of model servers: a routed call, a push of weights, a server that ends.

    python benchmarks/fleet.py [--sizes 1m,20m] [--calls 2000] [--quick] [--json]

Routing is CPU of this process for choosing a replica and remembering what it read, with nothing behind it
that samples. Pushes and failover go over HTTP to two servers on the built-in engine that speak vLLM's
protocol (`tests/inference/policy_server.py`), in threads of this process: that they read the weights is in
the figure. A failover is timed from the end of a server to the first answer of a conversation that it had.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rllm.inference.fleet import Fleet
from rllm.inference.vllm import VLLMClient
from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model
from rllm.types.messages import ModelOutput, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "inference"))
from policy_server import PolicyServer

PROMPTS = (100, 1_000, 10_000)
SHORT = SamplingParams(max_tokens=8)


class AtOnce(VLLMClient):
    """Answers with one token, and asks nobody."""

    async def generate_ids(
        self, prompt_ids: list[int], sampling: SamplingParams, *, on_piece: Any = None
    ) -> ModelOutput:
        return ModelOutput(text="", prompt_ids=prompt_ids, completion_ids=[5])


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
            write_weights=lambda target: save_model(model, target, with_output_layer=True),
            directory=directory / "published",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="1m,20m", help="built-in models that are pushed")
    parser.add_argument("--calls", type=int, default=2_000)
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
    if options.json:
        print(json.dumps({"routing": routed, "servers": served}, indent=2))
        return
    table = Table("tokens of the prompt", "CPU µs of routing a call")
    for row in routed:
        table.add_row(f"{row['prompt']:,}", f"{row['routing_us']:.0f}")
    Console().print(table)
    table = Table("model", "MB", "a push to two servers, s", "without service at a failover, s")
    for row in served:
        table.add_row(row["model"], f"{row['mb']:.0f}", f"{row['push_s']:.2f}", f"{row['failover_s']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
