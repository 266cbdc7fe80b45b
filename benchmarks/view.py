"""How long the server of `rllm view` works on each page, and what a page that is left open costs a live run.

A store of `--episodes` episodes (rows of 512 real ones, copied by SQLite into further steps), an episode of
`--turns` turns, 400 lines of metrics. Seconds of CPU in the server's process, the median of `--repeats`, JSON
included; the first request of a process is reported beside it. A page asks every 2 s whether there is news:
its CPU seconds over 2 s are its share of one core.
"""

import argparse
import json
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.messages import ModelOutput
from rllm.view.pages import answer
from rllm.view.sources import Sources

LIMIT_MS, REFRESH_S = 300.0, 2.0
BASE, ATTEMPTS, TOKENS = 512, 8, 24


def conversation(turns: int) -> Trajectory:
    """Turns of 24 tokens, each prompt going on from the one before."""
    steps: list[Step] = []
    ids, messages = (
        list(range(40)),
        [{"role": "user", "content": "Where is the goal, and how do you get there?"}],
    )
    for turn in range(turns):
        answer_ids = [100 + (turn + place) % 800 for place in range(TOKENS)]
        output = ModelOutput(
            text=f"I go down, for the {turn}. time, because the goal is below.",
            content=f"I go down, for the {turn}. time, because the goal is below.",
            prompt_ids=list(ids),
            completion_ids=answer_ids,
            logprobs=[-0.1 * place for place in range(TOKENS)],
            policy_versions=[turn] * TOKENS,
        )
        step = Step.from_model_output(output, list(messages), action="Down")
        step.timings = {"model_s": 0.2, "env_s": 0.01}
        steps.append(step)
        messages = [*step.chat_completions, {"role": "user", "content": f"You are in row {turn}."}]
        ids = [*ids, *answer_ids, 5]
    return Trajectory(steps=steps, reward=float(turns % 2), termination_reason=TerminationReason.ENV_DONE)


def episode(task: int, attempt: int, turns: int) -> Episode:
    return Episode(
        task={"task_id": f"test-{task}", "question": "Where to?", "map": "SFFF\nFHFH\nFFFH\nHFFG"},
        task_id=f"test-{task}",
        rollout_idx=attempt,
        trajectories=[conversation(turns)],
        is_correct=(task + attempt) % 3 == 0,
        outcome=Outcome.SCORED,
        termination_reason=TerminationReason.ENV_DONE,
        metrics={"started_at": 1_700_000_000.0 + task, "duration_s": 1.5},
    )


def write_store(path: Path, episodes: int, turns: int) -> int:
    """Fill a run; returns how many episodes there are."""
    steps = max(1, episodes // BASE)
    with RunDirectory.create_or_open(path) as run:
        run.write_config({"seed": 0, "steps": steps, "task": {"environment": "frozenlake"}})
        with EpisodeStore.open(run.store_path) as store:
            store.save_episodes(
                "train", 0, [episode(row // ATTEMPTS, row % ATTEMPTS, 3) for row in range(BASE)]
            )
            store.save_episodes("after", 0, [episode(0, 0, turns)])
        with sqlite3.connect(run.store_path) as connection:
            for table, key, step in (("episodes", "id", "step"), ("steps", "episode", None)):
                names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                values = [
                    f"{name} + 100000 + {BASE} * (n - 1)"
                    if name == key
                    else f"{name} + n"
                    if name == step
                    else name
                    for name in names
                ]
                connection.execute(
                    "WITH RECURSIVE counter (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counter "
                    f"WHERE n < ?) INSERT INTO {table} SELECT {', '.join(values)} FROM counter, {table} "
                    f"WHERE {key} <= {BASE} AND n < ?",
                    (steps, steps),
                )
        line = {
            "success": 0.5,
            "reward_mean": 0.4,
            "groups": 64,
            "groups_tied": 20,
            "episodes": BASE,
            "failed": 0,
        }
        line |= {f"metric_{number}": 0.123456 * number for number in range(30)}
        run.metrics_path.write_text(
            "".join(
                json.dumps({"phase": "train", "step": step, "time_s": 2.0 * step, **line}) + "\n"
                for step in range(400)
            )
        )
    return steps * BASE + 1


def requests(root: Path, turns: int) -> dict[str, str]:
    """Page -> what it asks for."""
    long_id = BASE + 1
    return {
        "runs": "runs",
        "run": "run?run=run",
        "run, news": f"run?run=run&after={(root / 'run' / 'metrics.jsonl').stat().st_size}",
        "distribution by step": "distribution?run=run",
        "episodes": "episodes?run=run&limit=100",
        "episodes, last page": "episodes?run=run&limit=100&offset=199000",
        "episodes, by reward": "episodes?run=run&limit=100&order=reward&descending=1",
        "episodes, wrong": "episodes?run=run&limit=100&correct=0",
        "episodes of a task": "episodes?run=run&limit=100&task=test-7",
        "step": "groups?run=run&step=0",
        "attempts": "attempts?run=run&step=0&task=test-7",
        "this task elsewhere": "elsewhere?run=run&task=test-7",
        "evaluation, by task": "evaluation?run=run&phase=train",
        "evaluation, by attempt": "evaluation?run=run&phase=train&by=attempt&verdict=wrong",
        "long episode": f"episode?run=run&id={long_id}",
        "its last turns": f"episode?run=run&id={long_id}&from={turns - 50}",
        "its last prompt": f"prompt?run=run&id={long_id}&turn={turns - 1}",
    }


def cpu_ms(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return 1000.0 * (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--episodes", type=int, default=200_000)
    parser.add_argument("--turns", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLLM_HOME"] = f"{folder}/home"
        root = Path(folder) / "runs"
        count = write_store(root / "run", options.episodes, options.turns)
        sources, rows = Sources([root]), []
        for name, request in requests(root, options.turns).items():
            times_ms = [
                cpu_ms(lambda request=request: json.dumps(answer(sources, request), default=str))
                for _ in range(1 + options.repeats)
            ]
            rows.append({"page": name, "first_ms": times_ms[0], "cpu_ms": statistics.median(times_ms[1:])})
    news = next(row["cpu_ms"] for row in rows if row["page"] == "run, news")
    figures = {"episodes": count, "turns": options.turns, "limit_ms": LIMIT_MS, "rows": rows}
    figures |= {"live_page_share_of_a_core": news / 1000.0 / REFRESH_S}
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{count:,} episodes, one of {options.turns:,} turns; CPU ms of the server, first and then\n")
    for row in rows:
        late = "" if max(row["first_ms"], row["cpu_ms"]) < LIMIT_MS else f"   above {LIMIT_MS:g}"
        print(f"{row['page']:26} {row['first_ms']:9.1f} {row['cpu_ms']:9.1f}{late}")
    print(f"\nA page of a live run: {figures['live_page_share_of_a_core']:.2%} of one core.")


if __name__ == "__main__":
    main()
