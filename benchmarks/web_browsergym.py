"""The side of BrowserGym in benchmarks/web.py, run by the Python of an environment that has it.

    python benchmarks/web_browsergym.py TASK CONTEXTS EPISODES CHROMIUM ──► one JSON line

Its slow motion and its delay before an observation are 0. Each of its environments starts a browser and
belongs to the thread that made it, so several at a time are several processes, each with one.
"""

import argparse
import contextlib
import functools
import http.server
import importlib.util
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

ACTIONS = ("noop(1)", 'click("{first}")')
"""As in benchmarks/web.py: a page with a click that is observed, and one without."""
BUILD = "chromium-1117/chrome-linux/chrome"
"""Where Playwright 1.44 looks for its Chromium."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


def serve() -> str:
    """The pages of the `miniwob` wheel, in a thread."""
    spec = importlib.util.find_spec("miniwob")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "html"
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/miniwob/"


def play(task: str, seed: int, num_episodes: int, pipe: Connection) -> None:
    """One environment in this process: an episode to warm up, then, when it is told to, those that count."""
    import gymnasium

    importlib.import_module("browsergym.miniwob")  # registers its tasks

    with contextlib.redirect_stderr(None):
        env = gymnasium.make(
            f"browsergym/{task}", slow_mo=0, pre_observation_delay=0, disable_env_checker=True
        )
    resets_s: list[float] = []
    steps_s: list[float] = []

    def episode() -> None:
        start_s = time.perf_counter()
        observation, _ = env.reset(seed=seed)
        resets_s.append(time.perf_counter() - start_s)
        first = next(
            each["browsergym_id"]
            for each in observation["axtree_object"]["nodes"]
            if each.get("role", {}).get("value") == "button"
        )
        for action in ACTIONS:
            start_s = time.perf_counter()
            error = env.step(action.format(first=first))[0]["last_action_error"]
            steps_s.append(time.perf_counter() - start_s)
            if error:
                raise RuntimeError(error)

    episode()
    resets_s.clear()
    steps_s.clear()
    pipe.send("ready")
    pipe.recv()
    for _ in range(num_episodes):
        episode()
    pipe.send((resets_s, steps_s))
    pipe.recv()
    env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", help="such as miniwob.click-test")
    parser.add_argument("contexts", type=int)
    parser.add_argument("episodes", type=int, help="of each context")
    parser.add_argument("chromium", help="its path")
    options = parser.parse_args()
    num_contexts = options.contexts
    own = psutil.Process()

    def cpu_s() -> float:
        times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / BUILD
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {options.chromium} --no-sandbox "$@"\n')
        program.chmod(0o755)
        os.environ["PLAYWRIGHT_BROWSERS_PATH"] = folder
        os.environ["MINIWOB_URL"] = serve()
        context = multiprocessing.get_context("spawn")
        pipes, players = [], []
        for seed in range(num_contexts):
            pipe, far_end = context.Pipe()
            players.append(context.Process(target=play, args=(options.task, seed, options.episodes, far_end)))
            players[-1].start()
            pipes.append(pipe)
        for pipe in pipes:
            pipe.recv()
        start_s, start_cpu_s = time.perf_counter(), cpu_s()
        for pipe in pipes:
            pipe.send("go")
        times = [pipe.recv() for pipe in pipes]
        wall_s, used_cpu_s = time.perf_counter() - start_s, cpu_s() - start_cpu_s
        lines = [
            line
            for each in own.children(recursive=True)
            for line in Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
            if line.startswith("Pss:")
        ]
        for pipe in pipes:
            pipe.send("end")
        for player in players:
            player.join()
    resets_s = [each for resets, _ in times for each in resets]
    steps_s = [each for _, steps in times for each in steps]
    row = {
        "num_contexts": num_contexts,
        "num_steps": len(steps_s),
        "steps_per_s": round(len(steps_s) / wall_s, 2),
        "cpu_ms_per_step": round(1000 * used_cpu_s / len(steps_s), 1),
        "reset_ms": round(1000 * statistics.median(resets_s), 1),
        "step_ms": round(1000 * statistics.median(steps_s), 1),
        "pss_mb": round(sum(int(line.split()[1]) for line in lines) / 1024, 1),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
