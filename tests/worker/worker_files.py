"""A contract and programs for the tests of workers."""

import os
import sys
from pathlib import Path

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


def serve(words: list[str]) -> None:
    """The command `rllm WORDS…`, as the work of a process."""
    from rllm.cli.main import rllm

    os.environ["WORKER_SLEEP_S"] = "0.02"
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    rllm(words, prog_name="rllm")
