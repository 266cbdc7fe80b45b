"""What walls cost: a program in a warm sandbox beside a bare interpreter, and what many live sandboxes hold.

    PythonRunner.run("print(1)")   one after another, from one caller        warm start: p50, p99
    a grading of a function        from as many callers as there are cores   isolated gradings a second
    open_sandbox × N               all alive at once                         memory of each, time to open
    5,000 runs                     then look                                 processes, mounts, files, cgroups
    python -I -S -c "print(1)"     before and after, in the same minutes     what no walls cost

    python benchmarks/sandbox.py [--quick] [--json] [--backends bubblewrap unshare] [--live 1000] [--leaks
    5000]

Linux only. Times swing with whatever else the machine does: the bare interpreter is measured around each
part, so compare within one run. `docker run` is timed too where an engine answers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllm.errors import RllmError
from rllm.sandbox import PythonRunner, open_sandbox
from rllm.sandbox.inside.cellmates import members
from rllm.sandbox.interpreter import interpreter
from rllm.sandbox.leftovers import state_folder
from rllm.sandbox.programs import find_program

GRADING = """
import json, os
def add(a, b):
    return a + b
answers = [add(*args) for args in [(1, 2), (3, 4), (5, 6), (-1, 1)]]
os.write(int(os.environ["RLLM_RESULT_FD"]), json.dumps(answers).encode())
"""
GRADED = "[3, 7, 11, 0]"
WARM_MS, GRADINGS_PER_S = 8.0, 150.0
"""The targets."""


def seconds(act: Callable[[], Any]) -> float:
    begun_s = time.perf_counter()
    act()
    return time.perf_counter() - begun_s


def spread_ms(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    return {
        "p50_ms": round(statistics.median(ordered) * 1000, 2),
        "p99_ms": round(ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)] * 1000, 2),
        "min_ms": round(ordered[0] * 1000, 2),
    }


def bare(count: int) -> dict[str, float]:
    """The same interpreter without walls, a process each."""
    command = [interpreter().path, "-I", "-S", "-c", "print(1)"]
    return spread_ms(
        [seconds(lambda: subprocess.run(command, capture_output=True, check=True)) for _ in range(count)]
    )


def warm_start(backend: str, count: int) -> dict[str, float]:
    """From `run` to its result, one caller, workers that are up."""
    with PythonRunner(backend, workers=2) as runner:
        runner.warm()
        for _ in range(10):
            runner.run("print(1)")
        times_s = []
        for _ in range(count):
            times_s.append(seconds(lambda: _expect(runner.run("print(1)").stdout, "1\n")))
    return spread_ms(times_s)


def gradings(backend: str, count: int, cores: int) -> dict[str, float]:
    """Functions called in sandboxes, values out as JSON, from `cores` callers at once."""
    left = iter(range(count))
    with PythonRunner(backend, workers=cores) as runner:
        runner.warm()

        def work() -> None:
            for _ in left:
                _expect(runner.run(GRADING, wants_result=True).result, GRADED)

        callers = [threading.Thread(target=work) for _ in range(cores)]
        begun_s = time.perf_counter()
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        wall_s = time.perf_counter() - begun_s
    return {"per_s": round(count / wall_s, 1), "count": count, "callers": cores}


def live(backend: str, count: int) -> dict[str, float]:
    """Memory of sandboxes that are open and idle: the fair share of every page, over all their processes."""
    boxes = []
    try:
        begun_s = time.perf_counter()
        for _ in range(count):
            boxes.append(open_sandbox(backend))
        opened_s = time.perf_counter() - begun_s
        pids = members(True, os.getpid())
        held_kb = sum(_fair_share_kb(pid) for pid in pids)
    finally:
        begun_s = time.perf_counter()
        for box in boxes:
            box.close()
        closed_s = time.perf_counter() - begun_s
    return {
        "count": count,
        "mb_each": round(held_kb / 1024 / count, 2),
        "mb_all": round(held_kb / 1024, 1),
        "processes_each": round(len(pids) / count, 2),
        "open_ms_each": round(opened_s / count * 1000, 1),
        "close_ms_each": round(closed_s / count * 1000, 1),
    }


def leaks(backend: str, count: int) -> dict[str, Any]:
    """What `count` runs leave behind."""

    def holdings() -> dict[str, Any]:
        return {
            "processes": len(members(True, os.getpid())),
            "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "files": len(list(state_folder().glob(f"owner-{os.getpid()}-*/*"))),
            "cgroups": len(list(Path("/sys/fs/cgroup").rglob("*rllm*"))),
        }

    PythonRunner(backend, workers=1).close()
    before = holdings()
    with PythonRunner(backend, workers=2) as runner:
        for _ in range(count):
            runner.run(GRADING, wants_result=True)
    after = holdings()
    return {"runs": count} | {name: after[name] - before[name] for name in before}


def docker_run(count: int) -> dict[str, float] | None:
    """A container a program; None without an engine."""
    try:
        open_sandbox("docker").close()
    except RllmError:
        return None
    command = [
        "docker",
        "run",
        "--rm",
        "--network=none",
        "python:3.11-slim",
        "python3",
        "-I",
        "-S",
        "-c",
        "print(1)",
    ]
    return spread_ms(
        [seconds(lambda: subprocess.run(command, capture_output=True, check=True)) for _ in range(count)]
    )


def _fair_share_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def _expect(said: str | None, wanted: str) -> None:
    if said != wanted:
        raise SystemExit(f"A sandbox said {said!r} instead of {wanted!r}.")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    runs = 150 if options.quick else 1000
    found: dict[str, Any] = {"cores": cores, "python": interpreter().version, "load": os.getloadavg()[0]}
    found["bare python -I -S, before"] = bare(runs // 10)
    for backend in options.backends:
        part = found[backend] = {"warm_start": warm_start(backend, runs)}
        part["gradings"] = gradings(backend, runs * 2, cores)
        part["live"] = live(backend, options.live)
        if options.leaks:
            part["leaks"] = leaks(backend, options.leaks)
    found["bare python -I -S, after"] = bare(runs // 10)
    found["docker run"] = docker_run(5)
    return found


def show(found: dict[str, Any], backends: list[str]) -> None:
    print(f"{found['cores']} cores, load {found['load']:.1f}, Python {found['python']} inside\n")
    for name in ("bare python -I -S, before", "bare python -I -S, after", "docker run"):
        print(f"{name:28} {_line(found[name]) if found[name] else 'no engine answers'}")
    for backend in backends:
        part = found[backend]
        print(f"\n{backend}")
        print(f"  warm start                 {_line(part['warm_start'])}   (target: p50 {WARM_MS:g} ms)")
        print(
            f"  isolated gradings          {part['gradings']['per_s']:.0f}/s   (target: {GRADINGS_PER_S:g}/s)"
        )
        held = part["live"]
        print(
            f"  {held['count']} live sandboxes        {held['mb_each']} MB each, {held['mb_all']} MB in all, "
            f"opened in {held['open_ms_each']} ms each"
        )
        if "leaks" in part:
            print(f"  left after {part['leaks']['runs']} runs       {part['leaks']}")


def _line(spread: dict[str, float]) -> str:
    return f"p50 {spread['p50_ms']:.1f} ms, p99 {spread['p99_ms']:.1f} ms, least {spread['min_ms']:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--backends", nargs="+", default=["bubblewrap", "unshare"])
    parser.add_argument("--live", type=int, default=1000, help="sandboxes that are open at once")
    parser.add_argument("--leaks", type=int, default=0, help="runs after which to look for what is left")
    options = parser.parse_args()
    if not sys.platform.startswith("linux") or find_program("bwrap") is None:
        sys.exit("This needs Linux and bubblewrap; see docs/sandbox.md.")
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(found, options.backends)


if __name__ == "__main__":
    main()
