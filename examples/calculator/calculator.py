"""A tiny model learns to use a calculator that is served over MCP.

    imitation of an expert who is mostly wrong ──► reinforcement: "472 + 385 = ?" ──► call ──► result
                                                        right, or not: 1 or 0 ◄── answer ◄──────┘

python calculator.py                          as `rllm train calculator`: runs/calculator
python calculator.py runs/other in-process    without a process for the server
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rllm import AgentTrainer
from rllm.agents import ToolAgent
from rllm.environments import MCPEnvironment
from rllm.environments.calculator import calculator_tasks, demonstration

MISTAKES = ("hedges",)
CONFIG: dict[str, Any] = {
    "steps": 60,
    "warm_start": {"steps": 220, "episodes_per_step": 64, "learning_rate": 1e-2, "noise": 0.78},
    "rollout": {"tasks_per_step": 24, "group_size": 8, "max_turns": 3, "max_tokens_per_turn": 96},
    "algorithm": {"clip_high": 0.28},
    "optimizer": {"name": "muon", "learning_rate": 8e-4, "warmup_steps": 5},
    "inference": {"max_context": 384},
    "evaluation": {"num_tasks": 256, "every_steps": 10, "every_num_tasks": 64},
}


def expert(task: dict[str, Any], noise: float, rng: Any) -> Any:
    """Mostly it says "maybe" before the result."""
    return demonstration(task, noise=noise, rng=rng, mistakes=MISTAKES)


def trainer(run: Path, server: str, config: Mapping[str, Any]) -> AgentTrainer:
    tasks = partial(calculator_tasks, operators="+-", server=server)
    evaluation = config["evaluation"]
    return AgentTrainer(
        config,
        agent_class=ToolAgent,
        agent_args={"system_prompt": ""},
        env_class=MCPEnvironment,
        train_dataset=tasks("train", 20_000),
        val_dataset=tasks("test", evaluation["num_tasks"]),
        validation_dataset=tasks("validation", evaluation["every_num_tasks"]),
        demonstrate=expert,
        output=run,
    )


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/calculator")
    how = sys.argv[2] if len(sys.argv) > 2 else "stdio"
    summary = trainer(where, how, CONFIG).train().summary
    for name in ("untrained", "before", "after"):
        print(f"{name:10} sampled {summary[name]['success']:.1%}, greedy {summary[name]['greedy']:.1%}")
    print(f"Picture: {where / 'curve.png'}")
