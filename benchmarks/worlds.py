"""Worlds of software-engineering tasks on this machine: start, exec, states, grading, memory; beside others.

    python benchmarks/worlds.py [--mb 100] [--repeats 20] [--live 64] [--output worlds.json]

A repository of random files is made, with a bug and a test of it. Beside a world stand a plain copy of the
same directory and, where a container engine answers, `docker run`. Times are p50 and p90 in milliseconds
of wall time. Between two measured calls there is a pause, as an agent that thinks makes one.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rllm.data.swe_repository import PLACE
from rllm.data.swe_rows import SWETask
from rllm.environments.swe.swe import SWEEnv
from rllm.rewards.swe_grading import grade_patch
from rllm.rewards.swe_world import SWEWorld
from rllm.sandbox import Limits, Root, SandboxPool

FILE_KB = 50
LIMITS = Limits(wall_s=120, cpu_s=120, memory_mb=1024, disk_mb=512, processes=128)
IMAGE = "python:3.11-slim"
COMMANDS = {"true": "true", "grep": "grep -rn VALUE /testbed/calc"}


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="rllm-worlds-") as folder:
        os.environ["RLLM_HOME"] = f"{folder}/home"
        source = _project(Path(folder) / "source", options.mb)
        started_s = time.perf_counter()
        world = SWEWorld.of(_task(source), limits=LIMITS)
        figures: dict[str, Any] = {
            "mb": options.mb,
            "repeats": options.repeats,
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "made once, s": time.perf_counter() - started_s,
        }
        figures |= _of_a_world(world, options.repeats)
        figures |= _of_copies(source, Path(folder), options.repeats)
        figures |= _of_docker(source, options.repeats)
        figures |= _of_many(world, options.live)
    print(json.dumps(figures, indent=1))
    if options.output:
        Path(options.output).write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


def _of_a_world(world: SWEWorld, repeats: int) -> dict[str, Any]:
    def start() -> None:
        world.open().close()

    figures: dict[str, Any] = {"start and close": _timed(start, repeats)}
    starts: list[float] = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        sandbox = world.open()
        starts.append(time.perf_counter() - began_s)
        sandbox.close()
    figures["start"] = _summary(starts)
    root = Root(folders=(PLACE,), layers=world.layers)
    with SandboxPool(size=2, limits=LIMITS, root=root, packages=world.environment.packages) as pool:
        figures["start, from a pool"] = _summary([_taken_s(pool) for _ in range(repeats)])
    figures |= _of_environments(world.task, repeats)
    with world.open() as sandbox:
        figures["disk before a write, KiB"] = int(
            sandbox.exec("df --output=used -k / | tail -1").stdout.split()[-1]
        )
        for name, command in COMMANDS.items():
            figures[f"exec {name}"] = _timed(partial(sandbox.exec, command), repeats)
            bare = ["sh", "-c", command.replace("/testbed", f"{world.repository.layer}/testbed")]
            run_bare = partial(subprocess.run, bare, capture_output=True)
            figures[f"exec {name}, bare"] = _timed(run_bare, repeats)
        first = sandbox.keep_state()

        def keep() -> None:
            sandbox.keep_state()

        def write_and_return() -> None:
            sandbox.return_to(first)

        sandbox.exec("for i in $(seq 50); do echo $i > /testbed/new$i; done")
        figures["keep a state"] = _timed(keep, repeats)
        figures["return to a state"] = _timed(write_and_return, repeats)
    gold = world.repository.gold
    figures["grade"] = _timed(lambda: grade_patch(world, gold), max(repeats // 5, 3))
    assert grade_patch(world, gold).is_correct
    return figures


def _of_environments(task: SWETask, repeats: int) -> dict[str, Any]:
    """What an attempt waits for its world: the first at a task, and one beside another."""
    entry = {
        "instance_id": task.instance_id,
        "source": task.source,
        "problem_statement": task.problem_statement,
        "patch": task.patch,
        "test_files": task.test_files,
        "FAIL_TO_PASS": list(task.fail_to_pass),
    }
    other, env = SWEEnv(entry=entry), SWEEnv(entry=entry)
    figures = {"reset of an environment, alone": _summary([_reset_s(env) for _ in range(repeats)])}
    env.close()
    other.reset()
    figures["reset of an environment, beside another"] = _summary([_reset_s(env) for _ in range(repeats)])
    env.close()
    other.close()
    return figures


def _reset_s(env: SWEEnv) -> float:
    """Seconds until an environment has its next world, some time after the one before was closed."""
    env.close()
    time.sleep(0.5)
    began_s = time.perf_counter()
    env.reset()
    return time.perf_counter() - began_s


def _taken_s(pool: SandboxPool) -> float:
    """Seconds until a pool, which had time to fill, gives a sandbox in which a program has run."""
    time.sleep(1.0)
    began_s = time.perf_counter()
    with pool.take() as sandbox:
        sandbox.exec("test -d /testbed")
        return time.perf_counter() - began_s


def _of_copies(source: Path, folder: Path, repeats: int) -> dict[str, Any]:
    def copy() -> None:
        shutil.rmtree(folder / "copy", ignore_errors=True)
        shutil.copytree(source, folder / "copy")

    return {"plain copy of the directory": _timed(copy, max(repeats // 4, 3))}


def _of_docker(source: Path, repeats: int) -> dict[str, Any]:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        return {"docker run": "no container engine answers"}
    command = ["docker", "run", "--rm", "-v", f"{source}:/testbed:ro", IMAGE, "true"]
    subprocess.run(command, check=True, capture_output=True)
    return {"docker run": _timed(lambda: subprocess.run(command, capture_output=True), repeats)}


def _of_many(world: SWEWorld, count: int) -> dict[str, Any]:
    """Memory of live worlds, each of which has written a file; shared pages are counted once (PSS)."""
    before_mb = _children_mb()
    opened = [world.open() for _ in range(count)]
    try:
        for sandbox in opened:
            sandbox.exec("echo x >> /testbed/calc/__init__.py")
        return {"live worlds": count, "live worlds, PSS MiB": _children_mb() - before_mb}
    finally:
        for sandbox in opened:
            sandbox.close()


def _children_mb() -> float:
    """PSS in MiB of all processes below this one."""
    parents = {
        each.parent.name: each.read_text("utf-8", "replace").rpartition(")")[2].split()[1]
        for each in Path("/proc").glob("[0-9]*/stat")
    }
    family = {str(os.getpid())}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    total_kb = 0
    for pid in family - {str(os.getpid())}:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8").splitlines()
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kb / 1024


def _timed(act: Callable[[], object], repeats: int, *, pause_s: float = 0.05) -> dict[str, float]:
    seconds: list[float] = []
    for _ in range(repeats):
        time.sleep(pause_s)
        began_s = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began_s)
    return _summary(seconds)


def _summary(seconds: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return {
        "p50_ms": statistics.median(seconds) * 1e3,
        "p90_ms": tenths[-1] * 1e3,
        "min_ms": min(seconds) * 1e3,
    }


def _project(source: Path, mb: int) -> Path:
    draw = random.Random(0)
    for name, text in {
        "calc/__init__.py": "VALUE = 1\n\n\ndef add(a, b):\n    return a - b\n",
        "tests/test_add.py": "from calc import add\n\n\ndef test_zero():\n    assert add(3, 0) == 3\n",
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, "utf-8")
    for number in range(mb * 1024 // FILE_KB):
        path = source / "data" / str(number % 50) / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes(FILE_KB * 1024))
    return source


def _task(source: Path) -> SWETask:
    patch = (
        "diff --git a/calc/__init__.py b/calc/__init__.py\n--- a/calc/__init__.py\n+++ b/calc/__init__.py\n"
        "@@ -2,4 +2,4 @@\n \n \n def add(a, b):\n-    return a - b\n+    return a + b\n"
    )
    hidden = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    row = {
        "instance_id": "worlds-1",
        "source": str(source),
        "problem_statement": "add subtracts",
        "patch": patch,
        "test_files": {"tests/test_more.py": hidden},
        "FAIL_TO_PASS": ["tests/test_more.py::test_add"],
        "PASS_TO_PASS": ["tests/test_add.py::test_zero"],
    }
    return SWETask.from_row(row)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__)
    parser.add_argument("--mb", type=int, default=100, help="size of the repository")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--live", type=int, default=64, help="worlds at one time")
    parser.add_argument("--output", default="", help="a JSON file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
