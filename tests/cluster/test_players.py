"""Workers play programs, and workflows with several policies and workers, as one process does."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import letter_program
import letter_world
import psutil
import pytest
from two_nodes import Nodes

from rllm.errors import ConfigError
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.agent_trainer import AgentTrainer

PROGRAM: dict[str, Any] = {
    "seed": 5,
    "steps": 2,
    "threads": 1,
    "inference": {"num_slots": 8, "max_context": 128},
    "rollout": {"tasks_per_step": 3, "group_size": 4, "num_parallel": 8, "retry_limit": 1},
    "evaluation": {"num_tasks": 3, "every_steps": 0},
}
QUESTIONS = [{"id": letter, "question": letter} for letter in "ABCDEF"]


def test_a_workflow_of_two_policies_whose_worker_is_killed_comes_to_the_same_bits(
    nodes: Nodes, tmp_path: Path
) -> None:
    """The trainer itself says how likely sampled tokens were, so parameters have no rounding of samplers."""
    plain, run, flag = tmp_path / "plain", tmp_path / "run", tmp_path / "flag"
    letter_world.make_pair_trainer(plain).train()
    letter_world.make_pair_trainer(
        run,
        letter_world.on_cluster(nodes.address, workers=2),
        workflow_class=letter_world.FragilePair,
        workflow_args={"flag": str(flag)},
    ).train()
    assert not psutil.pid_exists(int(flag.read_text()))
    letter_world.require_same_tokens(run, plain)
    for name in ("solver", "judge"):
        weights = [each / "models" / name / "model.safetensors" for each in (run, plain)]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def program_trainer(run: Path, changes: dict[str, Any], **more: Any) -> AgentTrainer:
    named = f"{letter_program.__file__}:ask", f"{letter_program.__file__}:pay"
    options = {"agent_flow": named[0], "evaluator": named[1], "train_dataset": QUESTIONS, **more}
    return AgentTrainer({**PROGRAM, **changes}, output=run, **options)


def test_a_program_of_a_file_samples_what_it_samples_in_one_process(nodes: Nodes, tmp_path: Path) -> None:
    start, plain, run = tmp_path / "start", tmp_path / "plain", tmp_path / "run"
    program_trainer(start, {"steps": 0}).train()
    program_trainer(plain, {}).train()
    program_trainer(run, letter_world.on_cluster(nodes.address, workers=2)).train()
    letter_world.require_same_tokens(run, plain)
    letter_world.require_same_learning(run, plain, start)


def test_a_program_that_cannot_travel_is_refused_with_the_way_to_name_it(
    nodes: Nodes, tmp_path: Path
) -> None:
    lock = letter_program.LOCK

    def ask(task: Any, config: Any) -> None:
        with lock:
            letter_program.ask(task, config)

    with pytest.raises(ConfigError, match=r"travel .*lock.*file\.py:NAME"):
        program_trainer(
            tmp_path / "run", letter_world.on_cluster(nodes.address, workers=2), agent_flow=ask
        ).train()


BOUND_FLOW = """
from rllm import Episode, Workflow


class Guess(Workflow):
    workers = {"guess": "guess.worker.md", "measure": "measure.worker.md"}

    async def run(self, task, uid, **kwargs):
        measured = await self.worker("measure", {"text": task["question"]})
        guess = await self.worker("guess", {"text": task["question"]})
        guess.trajectory.reward = float(guess.outputs["length"] == measured.outputs["length"])
        return Episode(is_correct=guess.trajectory.reward == 1.0)
"""
MEASURE = """
import os
from pathlib import Path


def solve(task, config):
    with open(Path(__file__).with_name("calls.txt"), "a") as calls:
        calls.write(f"{os.getpid()}\\n")
    return {"length": 1 + len(task.metadata["text"]) % 2}
"""
CONTRACT = """\
---
id: {id}
version: 1.0.0
{binding}---
## worker.md contract

Purpose: Say how long a text is.

### Input schema

```json
{{"type": "object", "required": ["text"], "properties": {{"text": {{"type": "string"}}}}}}
```

### Output schema

```json
{{"type": "object", "additionalProperties": false, "required": ["length"],
 "properties": {{"length": {{"enum": [1, 2]}}}}}}
```
"""


def test_workers_with_programs_of_their_own_run_beside_a_workflow_on_each_node(
    nodes: Nodes, tmp_path: Path
) -> None:
    """By the command; what the policy writes as the other worker is what it writes in one process."""
    (tmp_path / "flow.py").write_text(BOUND_FLOW)
    (tmp_path / "measure.py").write_text(MEASURE)
    for name, binding in (("guess", ""), ("measure", 'rllm: {program: "measure.py:solve"}\n')):
        (tmp_path / f"{name}.worker.md").write_text(CONTRACT.format(id=name, binding=binding))
    rows = [{"id": letter, "question": "x" * number} for number, letter in enumerate("ABCDEFGH")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = f"cluster.address={nodes.address}"
    cluster = (
        "cluster.kind=ray",
        place,
        "cluster.workers=2",
        "cluster.lease_episodes=8",
        "cluster.timeout_s=900",
    )
    for name, more in (("plain", ()), ("run", cluster)):
        settings = ("steps=2", "threads=1", "rollout.tasks_per_step=4", "rollout.group_size=4", *more)
        subprocess.run(
            [
                *(sys.executable, "-m", "rllm", "train", f"{tmp_path / 'flow.py'}:Guess", "--json"),
                *("--dataset", tmp_path / "rows.jsonl", "--output", tmp_path / name),
                *(word for each in settings for word in ("--set", each)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        callers = Counter((tmp_path / "calls.txt").read_text().split())
        (tmp_path / "calls.txt").unlink()
    assert len(callers) == 2, "both rollout workers have called it"
    letter_world.require_same_tokens(tmp_path / "run", tmp_path / "plain")
    with EpisodeStore.open(tmp_path / "run" / "store.sqlite", read_only=True) as store:
        episodes = [store.episode(row) for step in range(2) for row in store.row_ids("train", step)]
    assert len(episodes) == 2 * 16
    for episode in episodes:
        measured, guess = episode.info["workers"]
        assert (measured["worker"], measured["status"], measured["attempt"]) == ("measure", "ok", 1)
        assert (guess["worker"], guess["status"], guess["output_schema"]) == ("guess", "ok", "enforced")
    steps = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "train"]
    assert all(line["cluster.workers"] == 2 and line["tokens.trained"] > 0 for line in steps)
