"""A soak of `rllm serve model` under mixed requests: memory rises while caches fill and then stays, and every
request ends.

    this process ──HTTP──► rllm serve model, builtin:tiny, in a process of its own ─► its memory, by round

    python benchmarks/serving_memory.py [--minutes N] [--kinds KIND …] [--quick] [--json]

A round has every kind of request: short and long chats, streams, streams that are left, answers after a
schema that nobody asked for before, prompts of 200,000 characters, which are refused. Memory is that of
/proc/PID/smaps_rollup without what is shared. Growth is measured once the cache of compiled grammars is full,
which takes the longest, for as many requests as `LEAST_REQUESTS` says, however slow the machine: it is the
median of the slopes of four parts of those rounds. So one step is not taken for growth, as when a thread
reads its first large prompt, for which the C library sets 6 MiB aside that this thread then uses again and
again; what grows all the time does so in each part. Above `BOUND_KIB_A_REQUEST` the run fails. So it does
when a request has no answer within `STUCK_AFTER_S`, or when the server, asked at the end, still has calls in
flight or queued.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rllm.inference.local.grammar import MAX_KEPT
from rllm.models.builtin import create_model

BOUND_KIB_A_REQUEST = 4.0
"""Of growth once caches are full: what a gateway remembers of each session, and what it logs."""
LEAST_REQUESTS = 1_200
"""Before a verdict, once caches are full. While they fill memory grows by 16 KiB a request."""
PARTS = 4
REQUESTS_OF_A_KIND, AT_ONCE = 12, 4
STUCK_AFTER_S = 120.0
"""A request of this size takes seconds on a core that is shared by ten."""
IDLE_WITHIN_S = 30.0
"""After the last answer: streams whose client left are cancelled with the engine's next step."""
REFUSED_CHARACTERS = 200_000
PATH = "/v1/chat/completions"


class Server:
    """The process that is measured."""

    def __init__(self, scratch: Path) -> None:
        create_model(scratch / "model", "tiny")
        command = [str(Path(sys.executable).with_name("rllm")), "serve", "model", str(scratch / "model")]
        command += [
            "--no-auth",
            "--port",
            "0",
            "--threads",
            "1",
            "--json",
            "--ledger",
            str(scratch / "ledger"),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"]

    def memory_kib(self) -> int:
        """Private pages; those of libraries and of the mapped weights are not counted."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return sum(int(size) for size in re.findall(r"Private_(?:Clean|Dirty): +(\d+)", text))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Caller:
    """Asks one kind of request after another."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self._number = 0
        self.kinds: dict[str, Callable[[int], Awaitable[None]]] = {
            "chat": lambda number: self._answer(f"number {number}", max_tokens=12),
            "long": lambda number: self._answer("You are here. " * (20 + number % 80), max_tokens=24),
            "stream": lambda number: self._stream(f"number {number}", leave_after=None),
            "left": lambda number: self._stream(f"number {number}", leave_after=2),
            "schema": lambda number: self._answer("Say it.", max_tokens=24, response_format=schema(number)),
            "refused": lambda number: self._refused(number),
        }

    async def round(self, kinds: list[str]) -> int:
        """How many requests were answered, or refused as they should be."""
        waiting = asyncio.Semaphore(AT_ONCE)

        async def ask(kind: str, number: int) -> None:
            async with waiting:
                try:
                    async with asyncio.timeout(STUCK_AFTER_S):
                        await self.kinds[kind](number)
                except TimeoutError as error:
                    raise SystemExit(f"Request {number} ({kind}) is stuck: {STUCK_AFTER_S:g} s.") from error

        numbers = [(kind, self._next()) for _ in range(REQUESTS_OF_A_KIND) for kind in kinds]
        await asyncio.gather(*(ask(kind, number) for kind, number in numbers))
        return len(numbers)

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _answer(self, text: str, **options: Any) -> None:
        await self._post(body(text, **options), {200})

    async def _refused(self, number: int) -> None:
        text = f"{number} " + "ab1 " * (REFUSED_CHARACTERS // 4)
        await self._post(body(text, max_tokens=4), {400, 413})

    async def _post(self, asked: dict[str, Any], expected: set[int]) -> None:
        async with self._client.post(PATH, json=asked) as answer:
            text = await answer.text()
            assert answer.status in expected, text

    async def _stream(self, text: str, leave_after: int | None) -> None:
        asked = body(text, max_tokens=24, stream=True)
        async with self._client.post(PATH, json=asked) as answer:
            assert answer.status == 200
            num_lines = 0
            async for _ in answer.content:
                num_lines += 1
                if leave_after is not None and num_lines > leave_after:
                    return


def body(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **options}


def schema(number: int) -> dict[str, Any]:
    """One that no request had before."""
    properties = {f"field_{number}": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}}
    wanted = {"type": "object", "properties": properties, "required": list(properties)}
    wanted["additionalProperties"] = False
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": wanted}}


async def soak(
    server: Server, kinds: list[str], seconds: float, least_requests: int
) -> list[tuple[int, int]]:
    """(requests so far, KiB) after each round, for so long and for so many requests at least."""
    points: list[tuple[int, int]] = []
    num_requests, end = 0, time.monotonic() + seconds
    async with aiohttp.ClientSession(server.url) as client:
        caller = Caller(client)
        while time.monotonic() < end or num_requests < least_requests:
            num_requests += await caller.round(kinds)
            points.append((num_requests, server.memory_kib()))
            print(f"{num_requests:>8,} requests {points[-1][1] / 1024:>8.0f} MiB", file=sys.stderr)
        await require_idle(client)
    return points


async def require_idle(client: aiohttp.ClientSession) -> None:
    """End the run where calls are still under way although every client has its answer or has left."""
    end = time.monotonic() + IDLE_WITHIN_S
    while True:
        async with client.get("/health") as answer:
            health = await answer.json()
        under_way = {name: health[name] for name in ("in_flight", "queued")}
        if not any(under_way.values()):
            return
        if time.monotonic() > end:
            raise SystemExit(f"Calls are stuck: {under_way}, {IDLE_WITHIN_S:g} s after the last answer.")
        await asyncio.sleep(0.1)


def full_after(kinds: list[str]) -> int:
    """The requests after which each new grammar takes the place of an old one, and a round more."""
    filling = MAX_KEPT * len(kinds) if "schema" in kinds else 0
    return filling + REQUESTS_OF_A_KIND * len(kinds)


def summary_of(points: list[tuple[int, int]], num_filling: int) -> dict[str, float]:
    later = [point for point in points if point[0] >= num_filling] or points[-1:]
    parts = [part for part in np.array_split(np.array(later, dtype=np.float64), PARTS) if len(part) > 1]
    slopes = [float(np.polyfit(part[:, 0], part[:, 1], 1)[0]) for part in parts]
    return {
        "requests": points[-1][0],
        "first_mib": points[0][1] / 1024,
        "full_after_requests": later[0][0],
        "full_mib": later[0][1] / 1024,
        "last_mib": points[-1][1] / 1024,
        "kib_a_request": float(np.median(slopes)) if slopes else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kinds", nargs="+", default=["chat", "long", "stream", "left", "schema", "refused"])
    parser.add_argument("--quick", action="store_true", help="two rounds, which say nothing about growth")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(Path(scratch))
        try:
            seconds = 0.0 if options.quick else 60 * options.minutes
            num_filling = full_after(options.kinds)
            round_size = REQUESTS_OF_A_KIND * len(options.kinds)
            least_requests = 2 * round_size if options.quick else num_filling + LEAST_REQUESTS
            points = asyncio.run(soak(server, options.kinds, seconds, least_requests))
        finally:
            server.close()
    summary = summary_of(points, num_filling)
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        print(", ".join(f"{name} {value:,.1f}" for name, value in summary.items()))
    if not options.quick and summary["kib_a_request"] > BOUND_KIB_A_REQUEST:
        sys.exit(
            f"Memory grows by {summary['kib_a_request']:.1f} KiB a request; "
            f"the bound is {BOUND_KIB_A_REQUEST}."
        )


if __name__ == "__main__":
    main()
