"""A run of a program behind the gateway, as one of several ranks.

python words.py RUN MODEL CALLS CHANGES     CALLS: a file that every process appends a line of JSON to for
each call of its programs; CHANGES: JSON, on top of the settings
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import torch

import rllm
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types.episode import Episode
from rllm.types.task import AgentConfig, Task

SETTINGS: dict[str, Any] = {
    "steps": 2,
    "threads": 1,
    "inference": {"max_context": 64},
    "rollout": {"tasks_per_step": 3, "group_size": 3, "retry_limit": 1},
    "evaluation": {"num_tasks": 2, "every_steps": 0},
    "checkpoint": {"every_steps": 1},
}
TASKS = [{"id": word, "question": word} for word in ("Up", "Down", "Left", "Right")]


def trainer_of(run: Path, model: Path, calls: Path, changes: dict[str, Any]) -> AgentTrainer:
    @rllm.rollout
    def solve(task: Task, config: AgentConfig) -> None:
        question = {"role": "user", "content": str(task.instruction)}
        body = {"model": config.model, "messages": [question], "max_tokens": 3}
        request = urllib.request.Request(
            f"{config.base_url}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            json.load(reply)
        line = {"process": os.getpid(), "host": request.host, "task": task.id}
        with calls.open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    @rllm.evaluator
    def score(task: dict[str, Any], episode: Episode) -> float:
        """Pays by the first token, so that attempts differ by chance."""
        return (episode.trajectories[0].steps[0].response_ids[0] % 5) / 4

    settings = {**SETTINGS, "model": {"path": str(model)}, **changes}
    return AgentTrainer(settings, train_dataset=TASKS, agent_flow=solve, evaluator=score, output=run)


def main(run: str, model: str, calls: str, changes: str = "{}") -> None:
    torch.set_num_threads(1)
    trainer_of(Path(run), Path(model), Path(calls), json.loads(changes)).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
