"""What a contract costs: CPU a run and latency, beside the bare program and a plain FastAPI handler.

    clients (this process) ──► rllm worker serve      every run on disk before its answer leaves
                           ──► a FastAPI handler      the same program and schema checks, nothing kept
    in this process: the runtime beside the bare program

    python benchmarks/worker.py [--quick] [--json] [--at-once 1 64 512]

CPU is that of the serving process, all its threads. Each caller asks one run after another.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from rllm.contracts import read_contract
from rllm.types.task import Task
from rllm.worker.host import WorkerHost

CONTRACT = """\
---
id: measure
version: 1.0.0
rllm: {program: "program.py:solve"}
---
## worker.md contract

Purpose: Say how long a text is.

### Input schema

```json
{"type": "object", "additionalProperties": false, "required": ["run_id", "text"],
 "properties": {"run_id": {"type": "string"}, "text": {"type": "string", "maxLength": 10000}}}
```

### Output schema

```json
{"type": "object", "additionalProperties": false, "required": ["run_id", "status", "length"],
 "properties": {"run_id": {"type": "string"}, "status": {"type": "string"}, "length": {"type": "integer"}}}
```

### Constraints

- idempotency_key: run_id
"""
PROGRAM = """\
async def solve(task, config):
    return {"length": len(task.metadata["text"])}
"""
HANDLER = """\
import sys
from typing import Any
import uvicorn
from fastapi import Body, FastAPI, HTTPException
from jsonschema import Draft202012Validator
from rllm.contracts import read_contract
from rllm.types.task import Task
from program import solve
contract = read_contract("measure.worker.md")
schemas = contract.input_schema, contract.output_schema
takes, gives = (Draft202012Validator(dict(each.document)) for each in schemas)
app = FastAPI()
@app.post("/workers/measure/runs")
async def run(inputs: dict[str, Any] = Body(embed=True)) -> dict[str, Any]:
    if not takes.is_valid(inputs):
        raise HTTPException(422)
    outputs = await solve(Task(id="", metadata=inputs), None) | {"run_id": inputs["run_id"], "status": "ok"}
    if not gives.is_valid(outputs):
        raise HTTPException(502)
    return {"status": "ok", "outputs": outputs}
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""
QUICK, WHOLE = 300, 4000


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(url: str, pid: int, *, at_once: int, num_runs: int, prefix: str) -> dict[str, float]:
    """CPU of the server a run, and how long runs took."""
    latencies: list[float] = []
    numbers = iter(range(num_runs))

    async def call(http: aiohttp.ClientSession) -> None:
        for number in numbers:
            started = time.perf_counter()
            inputs = {"run_id": f"{prefix}-{number}", "text": "a text of some length"}
            async with http.post(url, json={"inputs": inputs}) as reply:
                assert (await reply.json())["outputs"]["length"] == 21
            latencies.append(time.perf_counter() - started)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        before, started = cpu_s(pid), time.perf_counter()
        await asyncio.gather(*(call(http) for _ in range(at_once)))
        wall_s = time.perf_counter() - started
        used_s = cpu_s(pid) - before
    latencies.sort()
    return {
        "at_once": at_once,
        "cpu_ms": 1000 * used_s / num_runs,
        "runs_per_s": num_runs / wall_s,
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[int(0.99 * len(latencies))],
    }


async def in_process(folder: Path, num_runs: int) -> dict[str, float]:
    """CPU ms a run of the runtime above the bare program, 64 at once."""
    scope: dict[str, Any] = {}
    exec(PROGRAM, scope)
    started = time.process_time()
    for number in range(num_runs):
        await scope["solve"](Task(id=str(number), metadata={"text": "a text of some length"}), None)
    bare_s = time.process_time() - started
    contract = read_contract(folder / "measure.worker.md")
    async with WorkerHost([contract], folder / "in-process") as host:
        numbers = iter(range(num_runs))

        async def call() -> None:
            for number in numbers:
                await host.workers["measure"].run({"run_id": f"{number}", "text": "a text of some length"})

        started = time.process_time()
        await asyncio.gather(*(call() for _ in range(64)))
        runtime_s = time.process_time() - started
    return {"bare_ms": 1000 * bare_s / num_runs, "durable_ms": 1000 * runtime_s / num_runs}


async def until_it_listens(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as http:
        while process.poll() is None:
            try:
                async with http.get(url):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
    raise SystemExit("A server ended before its time.")


async def measure(num_runs: int, at_once: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "measure.worker.md").write_text(CONTRACT)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "handler.py").write_text(HANDLER)
        figures: dict[str, Any] = {"in_process": await in_process(folder, num_runs), "http": {}}
        serve = [*(sys.executable, "-m", "rllm", "worker", "serve", "measure.worker.md", "--no-auth")]
        servers = {
            "rllm": [*serve, "--directory", "served", "--parallel", "512", "--json", "--port"],
            "fastapi": [sys.executable, "handler.py"],
        }
        for port, (who, command) in enumerate(servers.items(), 18_431):
            process = subprocess.Popen([*command, str(port)], cwd=folder, stdout=subprocess.DEVNULL)
            try:
                url = f"http://127.0.0.1:{port}/workers/measure/runs"
                await until_it_listens(url, process)
                await load(url, process.pid, at_once=8, num_runs=50, prefix="warm")
                figures["http"][who] = [
                    await load(url, process.pid, at_once=each, num_runs=num_runs, prefix=f"at-{each}")
                    for each in at_once
                ]
            finally:
                process.terminate()
                process.wait()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} runs each instead of {WHOLE}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 64, 512])
    options = parser.parse_args()
    if min(options.at_once) < 1:
        parser.error(f"--at-once is {min(options.at_once)}; it must be at least 1.")
    figures = asyncio.run(measure(QUICK if options.quick else WHOLE, options.at_once))
    if options.json:
        print(json.dumps(figures))
        return
    own = figures["in_process"]
    print(f"in process: {own['bare_ms']:.3f} ms CPU bare, {own['durable_ms']:.3f} durable")
    for who, rows in figures["http"].items():
        for row in rows:
            print(
                f"{who:8} {row['at_once']:4} at once: {row['cpu_ms']:.2f} ms CPU, "
                f"{row['runs_per_s']:6.0f} runs/s, p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms"
            )


if __name__ == "__main__":
    main()
