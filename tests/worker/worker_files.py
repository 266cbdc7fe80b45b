"""A contract and programs for the tests of workers."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rllm.agents.flow import AgentFlow
from rllm.contracts import Contract, read_contract
from rllm.worker.admission import Admission
from rllm.worker.attempt import Backing
from rllm.worker.disk import StoreThread
from rllm.worker.runtime import WorkerRuntime
from rllm.worker.store import RunStore

CONTRACT = """\
---
id: {id}
version: 1.0.0
rllm: {{program: "{program}"}}
---

## worker.md contract

Purpose: Say how long a task is.

### Input schema

```json
{{"type": "object", "additionalProperties": false, "required": ["run_id", "task"],
 "properties": {{"run_id": {{"type": "string", "minLength": 1}}, "task": {{"type": "string"}}}}}}
```

### Output schema

```json
{{"type": "object", "additionalProperties": false, "required": ["run_id", "status", "length"],
 "properties": {{"run_id": {{"type": "string"}}, "status": {{"type": "string"}},
                "length": {{"type": "integer"}}}}}}
```

### Constraints

- timeout_seconds: {timeout_s}
- max_attempts: {attempts}
- idempotency_key: run_id
"""

PROGRAM = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def solve(task, config):
    with open(HERE / "calls.txt", "a") as calls:
        calls.write(f"{task.metadata['run_id']} {config.session_uid}\\n")
    time.sleep(float(os.environ.get("WORKER_SLEEP_S", "0")))
    return {"length": len(task.metadata["task"])}
"""


def write_worker(
    folder: Path,
    *,
    id: str = "measure",
    program: str = "program.py:solve",
    timeout_s: float = 20,
    attempts: int = 3,
) -> Path:
    """A worker.md file with its program beside it."""
    (folder / "program.py").write_text(PROGRAM)
    path = folder / f"{id}.worker.md"
    path.write_text(CONTRACT.format(id=id, program=program, timeout_s=timeout_s, attempts=attempts))
    return path


@asynccontextmanager
async def runtime(
    folder: Path, solve: Callable[..., Any], *, room: Admission | None = None, **limits: Any
) -> AsyncIterator[WorkerRuntime]:
    """A worker of one function, with its runs in `folder`."""
    contract = read_contract(write_worker(folder, **limits))
    async with runtime_of(contract, solve, folder, room=room) as worker:
        yield worker


@asynccontextmanager
async def runtime_of(
    contract: Contract, solve: Callable[..., Any], folder: Path, *, room: Admission | None = None
) -> AsyncIterator[WorkerRuntime]:
    """One function behind a contract."""
    disk = StoreThread(RunStore(folder / "runs"))
    worker = WorkerRuntime(contract, Backing(flow=AgentFlow(solve, "solve")), disk, admission=room)
    try:
        yield worker
    finally:
        await worker.close()
        disk.close()


class HeldProgram:
    """Says how long a task is once it may go on."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go_on = threading.Event()

    async def solve(self, task: Any, config: Any) -> dict[str, Any]:
        self.began.set()
        while not self.go_on.is_set():
            await asyncio.sleep(0.005)
        return {"length": len(task.metadata["task"])}


def serve(words: list[str]) -> None:
    """The command `rllm WORDS…`, as the work of a process."""
    from rllm.cli.main import rllm

    os.environ["WORKER_SLEEP_S"] = "0.02"
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    rllm(words, prog_name="rllm")
