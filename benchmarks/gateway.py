"""What the gateway costs: CPU and latency of a captured call, beside the bare upstream and LiteLLM's proxy.

    gateway_load.py ──► the scripted upstream (gateway_upstream.py)          the bare upstream
                    ──► a bare forwarder ──► the same upstream            gateway_forwarder.py
                    ──► rllm serve gateway ──► the same upstream             captured, on disk
                    ──► LiteLLM's proxy ──► the same upstream                with --litellm-python

    python benchmarks/gateway.py [--quick] [--json] [--litellm-python .venv-litellm/bin/python] [--long]
                                 [--parts calls paced open memory] [--at-once 1 64 512] [--alternatives 3]

Linux only: CPU is that of the proxy's process alone, all its threads, as the kernel counts it. Everybody is
measured in each of several turns, the forwarder and the gateway right after each other and each of them first
in every other turn: the ratio of their medians is shown with the least and the greatest ratio of a turn.
Calls are made one after another on each of N connections, so N calls are open all the time and whoever serves
works as fast as it can; latencies at 64 and 512 are then the time in the queue. `paced` has answers that take
as long as it needs for about 100 calls a second, which leaves the machine idle between them.
"""

import argparse
import json
import os
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway_tables import MANY, MOST, TRACES, show

HERE = Path(__file__).parent
CALLS = {1: 300, 64: 1920, 512: 3072}
"""In one turn, by how many are open at once."""
QUICK_CALLS = {1: 80, 64: 512, 512: 768}
FEWER_FOR_LITELLM = 8
TURNS = 7
QUICK_TURNS = 5
PACE = 100.0
"""Calls a second of the paced part."""
START_LIMIT_S = 120.0
PARTS = ("calls", "paced", "open", "memory")
_CPU_CLOCK_OF_PROCESS = 2
"""Linux makes the clock's number of this and the process, as clock_getcpuclockid(3) does."""


@dataclass(kw_only=True, slots=True)
class Server:
    """Somebody who answers chat completions."""

    name: str
    pid: int
    port: int
    path: str = "/v1/chat/completions"
    key: str = "none"

    def cpu_s(self) -> float:
        """Of all its threads, since it began. In ns where /proc/PID/stat counts in steps of 10 ms."""
        return time.clock_gettime(~self.pid << 3 | _CPU_CLOCK_OF_PROCESS)

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Load:
    """The clients' process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._runs = 0

    def run(
        self, server: Server, *, stream: bool, at_once: int, calls: int, warm: int = -1, spread_s: float = 0.0
    ) -> dict[str, Any]:
        """One run. `cpu_ms` is the server's per call; a call that failed is an entry of `errors`."""
        self._runs += 1
        self._say(
            {
                "port": server.port,
                "path": server.path,
                "key": server.key,
                "model": "scripted",
                "session_prefix": f"bench-{self._runs}-",
                "stream": stream,
                "concurrency": at_once,
                "calls": calls,
                "warm_calls": at_once if warm < 0 else warm,
                "spread_s": spread_s,
            }
        )
        warmed = self._hear()
        if warmed.get("failed") or warmed.get("errors"):
            raise SystemExit(f"{server.name}: {warmed.get('failed') or warmed['errors'][0]}")
        before = server.cpu_s()
        self._say("go")
        said = self._hear()
        said["cpu_ms"] = 1000 * (server.cpu_s() - before) / max(1, said["calls"])
        said["calls_per_s"] = said["calls"] / said["wall_s"]
        return said

    def _say(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write((what if isinstance(what, str) else json.dumps(what)) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("gateway_load.py ended before its time.")
        return json.loads(line)


class Bench:
    """Everything that runs, and what was measured."""

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace, ledgers: Path) -> None:
        self.quick: bool = arguments.quick
        self.long: bool = arguments.long
        self.turns: int = arguments.turns or (QUICK_TURNS if self.quick else TURNS)
        self.at_once: list[int] = arguments.at_once
        self.alternatives: int = arguments.alternatives
        self.ledgers = ledgers
        self._stack = stack
        self.load = Load(self.start(sys.executable, str(HERE / "gateway_load.py")))
        self.upstream = self.start_upstream()
        self.forwarder = self.start_forwarder()
        self.gateway = self.start_gateway("ledger")
        self.litellm: Server | None = None
        if arguments.litellm_python:
            self.litellm = self.start_litellm(arguments.litellm_python)

    # ---- processes -----------------------------------------------------------------------------------------

    def start(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._stack.callback(stop, process)
        return process

    def start_upstream(self) -> Server:
        script = str(HERE / "gateway_upstream.py")
        process = self.start(sys.executable, script, str(self.alternatives))
        return Server(name="bare upstream", pid=process.pid, port=first_line(process)["port"])

    def start_forwarder(self) -> Server:
        url = f"http://127.0.0.1:{self.upstream.port}/v1/chat/completions"
        process = self.start(sys.executable, str(HERE / "gateway_forwarder.py"), url)
        return Server(name="bare forwarder", pid=process.pid, port=first_line(process)["port"])

    def start_gateway(self, ledger: str) -> Server:
        token = secrets.token_hex(16)
        process = self.start(
            *(sys.executable, "-m", "rllm.cli.main", "serve", "gateway", "--json", "--port", "0"),
            *("--upstream", f"http://127.0.0.1:{self.upstream.port}/v1"),
            *("--ledger", str(self.ledgers / ledger), "--token", token),
        )
        return gateway_server(process, token)

    def start_in_process(self, hold_all: int) -> Server:
        token, script = secrets.token_hex(16), str(HERE / "gateway_in_process.py")
        directory = str(self.ledgers / "ledger-in-process")
        return gateway_server(self.start(sys.executable, script, directory, token, str(hold_all)), token)

    def start_litellm(self, python: str) -> Server:
        port, key = free_port(), f"sk-{secrets.token_hex(24)}"
        upstream = f"http://127.0.0.1:{self.upstream.port}/v1"
        process = self.start(python, str(HERE / "gateway_peer.py"), str(port), upstream, key)
        deadline = time.monotonic() + START_LIMIT_S
        while not answers(f"http://127.0.0.1:{port}/health/liveliness"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"LiteLLM's proxy did not start with {python}; see above.")
            time.sleep(0.5)
        return Server(name="LiteLLM", pid=process.pid, port=port, key=key)

    def hold(self, **wanted: float) -> None:
        """Tell the upstream how long its answers take; nothing is at once."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.upstream.port}/control", data=json.dumps(wanted).encode()
        )
        with urllib.request.urlopen(request, timeout=30):
            pass

    # ---- the parts -----------------------------------------------------------------------------------------

    def calls(self) -> list[dict[str, Any]]:
        """As many calls as possible, for each kind of answer and each number of open ones."""
        numbers = QUICK_CALLS if self.quick else CALLS
        return [
            self.compare(stream, at_once, calls=numbers.get(at_once, 2 * at_once), hold_s=0.0)
            for stream in (False, True)
            for at_once in self.at_once
        ]

    def paced(self) -> list[dict[str, Any]]:
        return [
            self.compare(stream, at_once, calls=int(8 * PACE), hold_s=at_once / PACE)
            for stream in (False, True)
            for at_once in self.at_once
            if at_once > 1
        ]

    def compare(self, stream: bool, at_once: int, *, calls: int, hold_s: float) -> dict[str, Any]:
        """Everybody takes turns; each figure is the median over the turns."""
        self.hold(hold_s=hold_s)
        runs: dict[str, list[dict[str, Any]]] = {}
        proxies = [("forwarder", self.forwarder), ("rllm", self.gateway)]
        for turn in range(self.turns):
            for name, server in [("bare", self.upstream), *(proxies if turn % 2 else proxies[::-1])]:
                said = self.load.run(server, stream=stream, at_once=at_once, calls=calls, spread_s=hold_s)
                runs.setdefault(name, []).append(checked(said))
        if self.litellm is not None and not hold_s:
            fewer = max(at_once, calls // FEWER_FOR_LITELLM)
            said = self.load.run(self.litellm, stream=stream, at_once=at_once, calls=fewer)
            runs["litellm"] = [checked(said)]
        self.hold()
        row: dict[str, Any] = {"stream": stream, "at_once": at_once, "hold_s": hold_s}
        pairs = zip(runs["rllm"], runs["forwarder"], strict=True)
        row["times_forwarder"] = [rllm["cpu_ms"] / forwarder["cpu_ms"] for rllm, forwarder in pairs]
        for name, each in runs.items():
            keys = ("cpu_ms", "calls_per_s", "p50_ms", "p99_ms", "first_p50_ms", "first_p99_ms", "bytes")
            row[name] = {key: statistics.median(run[key] for run in each) for key in keys}
        return row

    def open(self) -> dict[str, Any]:
        return {"many": self.many_open(), "most": self.most_open()}

    def many_open(self) -> dict[str, Any]:
        """CPU of a call while 2,000 are open, beside 64, both as fast as it goes."""
        few = checked(self.load.run(self.gateway, stream=False, at_once=64, calls=QUICK_CALLS[64]))
        self.hold(hold_s=MANY / few["calls_per_s"])
        calls = (1 if self.quick else 3) * MANY
        many = checked(self.load.run(self.gateway, stream=False, at_once=MANY, calls=calls))
        self.hold()
        return {"few": few, "many": many}

    def most_open(self) -> list[dict[str, Any]]:
        """All open before the first is answered: through the upstream, and in the gateway's process.

        A gateway that may not have two open files a request sends a part of them on at a time.
        """
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        at_once = min(MANY if self.quick else MOST, files - files // 6 - 300)
        self.hold(hold_all=min(at_once, files // 8))
        rows = [self.all_open(self.gateway, at_once) | {"where": "an upstream answers"}]
        self.hold()
        server = self.start_in_process(at_once)
        rows.append(self.all_open(server, at_once) | {"where": "the gateway's own process answers"})
        return rows

    def all_open(self, server: Server, at_once: int) -> dict[str, Any]:
        said = self.load.run(server, stream=False, at_once=at_once, calls=at_once, warm=0)
        return said | {"at_once": at_once, "rss_mib": server.rss_mib()}

    def memory(self) -> dict[str, Any]:
        """A gateway of its own, so that nothing but its traces grows."""
        server = self.start_gateway("ledger-memory")
        steps = (22_250,) * 4 if self.long else (1_000, 1_000) if self.quick else (3_000, 3_000)
        points = [(0, server.rss_mib())]
        for calls in steps:
            checked(self.load.run(server, stream=False, at_once=64, calls=calls, warm=0))
            points.append((points[-1][0] + calls, server.rss_mib()))
        (early, rss), (late, rss_late) = points[-2:]
        slope = max(0.0, (rss_late - rss) / (late - early))
        return {
            "points": points,
            "traces": late,
            "mib": rss_late,
            "mib_at_89000": rss_late + slope * max(0, TRACES - late),
            "is_extrapolated": late < TRACES,
        }


# ---- helpers -----------------------------------------------------------------------------------------------


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def first_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args} ended before it listened.")
    return json.loads(line)


def gateway_server(process: subprocess.Popen[str], token: str) -> Server:
    port = urlsplit(first_line(process)["url"]).port
    assert port is not None, "the gateway says where it listens"
    path = "/sessions/{session}/v1/chat/completions"
    return Server(name="rLLM", pid=process.pid, port=port, path=path, key=token)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def checked(said: dict[str, Any]) -> dict[str, Any]:
    if said["errors"]:
        raise SystemExit(f"{said['errors']} of {said['calls']} calls failed: {said['first_error']}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="all, but for `paced` with --quick")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--turns", type=int, help=f"turns of everybody, {TURNS} by default")
    parser.add_argument(
        "--alternatives",
        type=int,
        default=0,
        help="of each token, that the upstream sends unasked; engines send none",
    )
    parser.add_argument("--quick", action="store_true", help="fewer calls, open requests and turns")
    parser.add_argument("--long", action="store_true", help=f"memory is measured over all {TRACES:,} traces")
    parser.add_argument("--litellm-python", help="Python of an environment with litellm[proxy]")
    parser.add_argument(
        "--ledger", type=Path, help="where the ledgers are written, a temporary directory else"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        ledgers = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.ledger))
        parts = arguments.parts or [part for part in PARTS if part != "paced" or not arguments.quick]
        measured = measure(Bench(stack, arguments, Path(ledgers)), parts)
    print(json.dumps(measured, indent=2)) if arguments.json else show(measured)


def measure(bench: Bench, parts: Sequence[str]) -> dict[str, Any]:
    measured: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    for part in parts:
        measured[part] = getattr(bench, part)()
    return measured | {
        "load_after": os.getloadavg()[0],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    }


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
