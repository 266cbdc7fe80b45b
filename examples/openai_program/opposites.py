"""A plain OpenAI-SDK program that learns from its rewards: what is the opposite of which word?

"Not of Left: opposite of Up?" ──► solve: one completion, one token ──► score ──► better weights

python opposites.py             train it, from random weights, on a CPU: runs/opposites
"""

import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

import rllm
from rllm import AgentConfig, AgentTrainer, Episode, Task

HERE = Path(__file__).parent


def questions(name: str) -> list[dict[str, str]]:
    """Rows of a file. Each asks about one word and not about another; no such pair is in both files."""
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]


client = OpenAI(base_url="http://unused", api_key="any")  # one pool of connections for all programs


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> None:
    """One call. Nothing is returned, so the episode is made from what the gateway captured."""
    client.with_options(base_url=config.base_url).chat.completions.create(
        model=config.model,
        messages=[{"role": "user", "content": task.instruction}],
        max_tokens=1,
    )


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    """Right is right: no hint about what an answer looks like."""
    return episode.trajectories[0].steps[0].model_response.strip() == task["answer"]


if __name__ == "__main__":
    trainer = AgentTrainer(
        Path(__file__).with_name("opposites.toml"),
        train_dataset=questions("opposites"),
        val_dataset=questions("opposites_test"),
        agent_flow=solve,
        evaluator=score,
        output=sys.argv[1] if len(sys.argv) > 1 else "runs/opposites",
    )
    after = trainer.train().summary["after"]
    print(f"right answers: {after['success']:.0%} sampled, {after['greedy']:.0%} greedy")
    print(f"run, model and picture: {trainer.output}")
