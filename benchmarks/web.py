"""Websites in a browser: steps a second, CPU of a step, memory of a context, at several contexts at once.

    MiniWoB++ episodes (one page, two clicks) ──► 1, 4, 16 environments at the same time ──► a row each

CPU time and memory are those of this process and all below it: Playwright's driver and Chromium. The memory
of a further context is what the last row has more than the first, as PSS: shared pages are divided among
those who share them.

    python benchmarks/web.py
    python benchmarks/web.py --quick --json
    python benchmarks/web.py --browsergym .venv-browsergym/bin/python

The last one runs BrowserGym's own environment on the same tasks beside it. It pins another Playwright, so it
has a Python of its own: `.venv-browsergym/bin/pip install browsergym-miniwob miniwob psutil`.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rllm.environments.web import MiniWobEnv, close_browser
from rllm.environments.web.chromium import find_chromium

TASK = "click-button-sequence"
CLICKS = ("noop(1)", 'click("1")')
"""Never done: a page with a click that is observed, and one without."""


@dataclass(kw_only=True, slots=True)
class Row:
    side: str = "rllm"
    num_contexts: int
    num_steps: int
    steps_per_s: float
    cpu_ms_per_step: float
    """Of all processes."""
    reset_ms: float
    """Median, of a context that was used before."""
    step_ms: float
    """Median."""
    pss_mb: float
    """Of all processes."""


def processes() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def cpu_s() -> float:
    times = [each.cpu_times() for each in processes()]
    return sum(each.user + each.system for each in times)


def pss_mb() -> float:
    lines = [
        line
        for each in processes()
        for line in Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    ]
    return sum(int(line.split()[1]) for line in lines) / 1024


async def play(env: MiniWobEnv, num_episodes: int, resets_s: list[float], steps_s: list[float]) -> None:
    for _ in range(num_episodes):
        start_s = time.perf_counter()
        await env.reset()
        resets_s.append(time.perf_counter() - start_s)
        for action in CLICKS:
            start_s = time.perf_counter()
            await env.step(action)
            steps_s.append(time.perf_counter() - start_s)


async def measure(num_contexts: int, num_episodes: int) -> Row:
    envs = [MiniWobEnv(TASK, seed) for seed in range(num_contexts)]
    await asyncio.gather(*(play(env, 1, [], []) for env in envs))  # opens the contexts, fills the caches
    resets_s: list[float] = []
    steps_s: list[float] = []
    start_s, start_cpu_s = time.perf_counter(), cpu_s()
    await asyncio.gather(*(play(env, num_episodes, resets_s, steps_s) for env in envs))
    wall_s, used_cpu_s = time.perf_counter() - start_s, cpu_s() - start_cpu_s
    row = Row(
        num_contexts=num_contexts,
        num_steps=len(steps_s),
        steps_per_s=round(len(steps_s) / wall_s, 2),
        cpu_ms_per_step=round(1000 * used_cpu_s / len(steps_s), 1),
        reset_ms=round(1000 * statistics.median(resets_s), 1),
        step_ms=round(1000 * statistics.median(steps_s), 1),
        pss_mb=round(pss_mb(), 1),
    )
    for env in envs:
        env.close()
    return row


def measure_browsergym(python: str, num_contexts: int, num_episodes: int) -> Row:
    words = [f"miniwob.{TASK}", str(num_contexts), str(num_episodes), find_chromium().path]
    script = Path(__file__).with_name("web_browsergym.py")
    process = subprocess.run([python, str(script), *words], capture_output=True, text=True)
    if process.returncode != 0:
        raise SystemExit(f"BrowserGym failed: {process.stderr.strip()[-1000:]}")
    return Row(side="BrowserGym", **json.loads(process.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--episodes", type=int, default=20, help="of each context")
    parser.add_argument("--quick", action="store_true", help="two contexts and two episodes of each")
    parser.add_argument("--browsergym", metavar="PYTHON", help="of an environment that has BrowserGym")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts, num_episodes = ([1, 2], 2) if options.quick else (options.contexts, options.episodes)
    rows = [asyncio.run(measure(count, num_episodes)) for count in counts]
    close_browser()
    beside = [
        measure_browsergym(options.browsergym, count, num_episodes) for count in counts if options.browsergym
    ]
    further = (rows[-1].pss_mb - rows[0].pss_mb) / max(1, rows[-1].num_contexts - rows[0].num_contexts)
    if options.json:
        print(
            json.dumps(
                {
                    "rows": [asdict(row) for row in (*rows, *beside)],
                    "pss_mb_of_a_further_context": round(further, 1),
                }
            )
        )
        return
    print("| | contexts | steps/s | CPU ms a step | reset ms | step ms | PSS MB |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in (*rows, *beside):
        print(
            f"| {row.side} | {row.num_contexts} | {row.steps_per_s} | {row.cpu_ms_per_step} | {row.reset_ms} "
            f"| {row.step_ms} | {row.pss_mb} |"
        )
    print(f"\nA further context takes {further:.1f} MB.")


if __name__ == "__main__":
    main()
