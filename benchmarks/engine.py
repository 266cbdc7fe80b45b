"""What the engine costs: trajectories a second, CPU of a turn, memory of a live one, lag of the event loop.

    engine_rllm.py: AgentExecutionEngine    ─┐
                    the same in a bare loop ─┼─► five-step trajectories, N at once, in turn: medians
    engine_peer.py: verifiers' rollout loop ─┘    └─► a model in the same process, or engine_model.py by HTTP

    python benchmarks/engine.py [--quick] [--json] [--peer-python .venv-verifiers/bin/python]
                                [--parts in_process http tail] [--at-once 64 1024 8192]

Linux only. Every run is a process of its own. `as fast as it goes`: the model answers at once, N trajectories
are live until the last is begun; CPU is that of the process with all its threads. `constant time`: every
answer takes as long as it needs for PACE turns a second, which leaves room to see how late the loop is. The
bare loop plays the same agent, environment and model without the engine; over HTTP it asks through aiohttp
itself, so it is the least that such calls can cost.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from engine_probe import TURNS
from engine_tables import show

HERE = Path(__file__).parent
PARTS = ("in_process", "http", "tail")
PACE = {"in_process": 2000.0, "http": 500.0}
"""Turns a second of the constant-time runs."""
FEWEST = {"in_process": 4096, "http": 1024}
"""Episodes of a run; at least two for each that is live at once, so that they end at different times."""
PEER_LIMIT_S = 180.0
"""The peer is left out where it would take longer, by its CPU of the size before."""
TAIL_MODEL_S = 0.1


class Bench:
    """Starts runs, and keeps what they said."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.turns: int = arguments.turns or (1 if arguments.quick else 3)
        self.at_once: list[int] = arguments.at_once or ([64, 1024] if arguments.quick else [64, 1024, 8192])
        self.pythons: dict[str, str] = {"engine": sys.executable, "bare": sys.executable}
        if arguments.peer_python:
            self.pythons["peer"] = arguments.peer_python

    def in_process(self) -> list[dict[str, Any]]:
        return self.sizes("in_process", "")

    def http(self) -> list[dict[str, Any]]:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_model.py")], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            port = json.loads(process.stdout.readline())["port"]
            return self.sizes("http", f"http://127.0.0.1:{port}/v1")
        finally:
            process.terminate()
            process.wait()

    def tail(self) -> dict[str, Any]:
        runs = [run(sys.executable, {"way": "tail", "model_s": TAIL_MODEL_S}) for _ in range(self.turns)]
        return {
            name: {key: statistics.median(each[name][key] for each in runs) for key in runs[0][name]}
            for name in runs[0]
        }

    def sizes(self, part: str, url: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for at_once in self.at_once:
            ways = [way for way in self.pythons if way != "peer" or self.has_time_for_peer(rows, at_once)]
            rows.append(
                {
                    "at_once": at_once,
                    "fast": self.compare(part, url, ways, at_once, model_s=0.0),
                    "constant": self.compare(
                        part,
                        url,
                        [way for way in ways if way != "peer"],
                        at_once,
                        model_s=at_once / PACE[part],
                    ),
                }
            )
        return rows

    def has_time_for_peer(self, rows: list[dict[str, Any]], at_once: int) -> bool:
        if not rows:
            return True
        peer = rows[-1]["fast"].get("peer")
        return peer is not None and peer["cpu_us_per_turn"] * 1e-6 * TURNS * at_once < PEER_LIMIT_S

    def compare(
        self, part: str, url: str, ways: list[str], at_once: int, *, model_s: float
    ) -> dict[str, dict[str, float]]:
        """All of `ways` take turns; every figure is the median over the turns."""
        if url:
            hold(url, model_s)
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(self.turns):
            for way in ways:
                # One of each that is live has to do for the peer; it starts them all at once as well.
                episodes = max(256, at_once) if way == "peer" else max(FEWEST[part], 2 * at_once)
                wanted = {
                    "way": way,
                    "at_once": at_once,
                    "episodes": episodes,
                    "model_s": model_s,
                    "url": url,
                }
                runs[way].append(run(self.pythons[way], wanted))
        return {
            way: {key: statistics.median(each[key] for each in runs[way]) for key in runs[way][0]}
            for way in ways
        }


def run(python: str, wanted: dict[str, Any]) -> dict[str, Any]:
    script = HERE / ("engine_peer.py" if wanted["way"] == "peer" else "engine_rllm.py")
    done = subprocess.run(
        [python, str(script), json.dumps(wanted)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{script.name} {wanted} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def hold(url: str, hold_s: float) -> None:
    """Tell the model server how long an answer takes."""
    body = json.dumps({"hold_s": hold_s}).encode()
    with urllib.request.urlopen(url.removesuffix("/v1") + "/hold", data=body, timeout=30):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--at-once", type=int, nargs="+", help="64 1024 8192 by default")
    parser.add_argument("--turns", type=int, help="turns of everybody, 3 by default")
    parser.add_argument("--quick", action="store_true", help="one turn, without 8192")
    parser.add_argument("--peer-python", help="Python of an environment with verifiers==0.2.1")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    measured: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    for part in arguments.parts:
        measured[part] = getattr(bench, part)()
    measured["load_after"] = os.getloadavg()[0]
    print(json.dumps(measured, indent=2)) if arguments.json else show(measured)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
