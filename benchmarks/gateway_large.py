"""What others feel while one client posts requests of size: latency of 64 sessions.

    python benchmarks/gateway_large.py [--seconds 10] [--quick] [--json]

The sessions make five calls a second each. Meanwhile one client posts one kind of request again and again:
60 MB with a Content-Length, 60 MB in chunks, more text than a context holds, or as much as it holds.
The policy is `LocalPolicy` before a scripted client with the tokenizer of a built-in model, so that
rendering and encoding are real and answers cost nothing. Its context is that of a large model.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

SESSIONS, CALLS_PER_S = 64, 5
MAX_CONTEXT = 32_768
P99_MS = 100.0
"""The target beside each kind of large request."""
NUM_BYTES: dict[str, int] = {
    "60 MB": 60_000_000,
    "60 MB in chunks": 60_000_000,
    "1 MB": 1_000_000,
    "as much as fits": MAX_CONTEXT,
}
"""Of each kind of large request."""


def serve(directory: Path) -> None:
    """The gateway's process: prints its URL as JSON when it listens."""
    from rllm.build.serving import run_server, settle_process
    from rllm.gateway.local import LocalPolicy
    from rllm.gateway.server import Gateway
    from rllm.inference.scripted import ScriptedClient
    from rllm.models.builtin import create_model
    from rllm.models.tokenizer import HuggingFaceTokenizer

    create_model(directory / "model", "tiny", 0)
    tokenizer = HuggingFaceTokenizer(directory / "model")
    client = ScriptedClient(lambda messages: "yes", tokenizer=tokenizer, max_context=MAX_CONTEXT)
    policy = LocalPolicy(client, "scripted")

    async def run() -> None:
        gateway = Gateway(policy, directory / "ledger", token=None, max_body_bytes=policy.max_body_bytes)
        async with gateway:
            settle_process()
            print(json.dumps({"url": gateway.url}), flush=True)
            await asyncio.Event().wait()

    run_server(run())


class Clients:
    def __init__(self, http: aiohttp.ClientSession, url: str, seconds: float) -> None:
        self.http = http
        self.url = url
        self.ends_at = time.perf_counter() + seconds
        self.latencies_ms: list[float] = []
        self.statuses: list[int] = []
        self.slowest_ms = 0.0

    async def session(self, number: int) -> None:
        await asyncio.sleep(number / SESSIONS / CALLS_PER_S)
        turn = 0
        while time.perf_counter() < self.ends_at:
            start = time.perf_counter()
            said = [{"role": "user", "content": f"Turn {turn} of {number}: which way?"}]
            body = {"messages": said, "max_tokens": 4}
            async with self.http.post(
                f"{self.url}/sessions/small-{number}-{turn // 10}/v1/chat/completions", json=body
            ) as reply:
                await reply.read()
                assert reply.status == 200, await reply.text()
            took = time.perf_counter() - start
            self.latencies_ms.append(1000 * took)
            turn += 1
            await asyncio.sleep(max(0.0, 1 / CALLS_PER_S - took))

    async def poster(self, kind: str) -> None:
        frame, filler = b'{"messages": [{"role": "user", "content": "%b"}]}', b"hello world, "
        body = frame % (filler * (NUM_BYTES[kind] // len(filler)))
        while time.perf_counter() < self.ends_at:
            start = time.perf_counter()
            self.statuses.append(await self._post(body, "chunks" in kind))
            self.slowest_ms = max(self.slowest_ms, 1000 * (time.perf_counter() - start))

    async def _post(self, body: bytes, in_chunks: bool) -> int:
        """From a thread and a socket of its own, so that the clients' own loop is not what is late."""
        return await asyncio.to_thread(_post, self.url, body, in_chunks)


def _post(url: str, body: bytes, in_chunks: bool) -> int:
    import http.client

    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        data: Any = (body[at : at + (1 << 16)] for at in range(0, len(body), 1 << 16)) if in_chunks else body
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            connection.request("POST", "/sessions/large/v1/chat/completions", data)
        return connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        return 0
    finally:
        connection.close()


async def measure(url: str, seconds: float, *, beside: str = "") -> dict[str, Any]:
    """Latencies of the sessions, alone or beside a client that posts one kind of request."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = Clients(http, url, seconds)
        sessions = (clients.session(number) for number in range(SESSIONS))
        await asyncio.gather(*sessions, *([clients.poster(beside)] if beside else []))
    ordered = sorted(clients.latencies_ms)
    return {
        "beside": beside,
        "calls": len(ordered),
        "p50_ms": ordered[len(ordered) // 2],
        "p99_ms": ordered[int(0.99 * len(ordered))],
        "max_ms": ordered[-1],
        "posts": len(clients.statuses),
        "statuses": sorted(set(clients.statuses)),
        "slowest_post_ms": clients.slowest_ms,
    }


def described(row: dict[str, Any]) -> str:
    verdict = "met" if row["p99_ms"] <= P99_MS else "MISSED"
    latencies = f"p50 {row['p50_ms']:.1f}, p99 {row['p99_ms']:.1f} ({verdict}), max {row['max_ms']:.1f} ms"
    if not row["beside"]:
        return f"alone: {row['calls']} calls, {latencies}"
    statuses = ", ".join(map(str, row["statuses"]))
    posts = f"{row['posts']} posts, {statuses}, slowest {row['slowest_post_ms']:.0f} ms"
    return f"beside {row['beside']}: {row['calls']} calls, {latencies}; {posts}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument(
        "--kinds", nargs="*", choices=NUM_BYTES, default=list(NUM_BYTES), help="of large requests"
    )
    parser.add_argument("--quick", action="store_true", help="two seconds a row")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    seconds = 2.0 if arguments.quick else arguments.seconds
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--serve", directory]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            rows = [asyncio.run(measure(url, seconds, beside=kind)) for kind in ("", *arguments.kinds)]
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        finally:
            process.terminate()
            process.wait()
    rss_mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    measured = {"rows": rows, "rss_mib": rss_mib, "load": os.getloadavg()[0]}
    if arguments.json:
        print(json.dumps(measured, indent=2))
        return
    for row in rows:
        print(described(row))
    print(f"memory {rss_mib:.0f} MiB; load {measured['load']:.1f}; the target is p99 ≤ {P99_MS:.0f} ms")


if __name__ == "__main__":
    main()
