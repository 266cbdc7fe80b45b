"""Word problems: an agent of the OpenAI Agents SDK writes the calculation, and what it comes to is compared.

    "12 boxes have 7 pens each …" ──► "12 * 7" ──► 84

python word_problems.py MODEL [RUN]
"""

import random
import sys
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from openai import AsyncOpenAI

import rllm
from rllm import AgentConfig, AgentTrainer, Episode, Task, Trajectory
from rllm.tools import ToolError
from rllm.tools.calculator import calculate

EXAMPLES = [
    ("14 bags have 31 apples each. How many apples?", "14 * 31"),
    ("A man has 65 hats and sells 18. How many are left?", "65 - 18"),
]
PROBLEMS = {
    "*": "{0} boxes have {1} {2} each. How many {2}?",
    "-": "A girl has {0} {2} and loses {1}. How many are left?",
    "+": "{0} {2} are here and {1} there. How many {2} in all?",
}
THINGS = ("pens", "books", "cups", "eggs", "nuts", "coins", "keys", "shoes")
CONFIG: dict[str, Any] = {
    "steps": 16,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_tokens_per_turn": 16},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """No two splits share a pair of numbers."""
    draw = random.Random(0)
    pairs = draw.sample([(first, second) for first in range(12, 99) for second in range(3, first)], 1200)
    size = {"test": slice(0, 128), "validation": slice(128, 256), "train": slice(256, None)}[split]
    drawn: list[dict[str, Any]] = []
    for first, second in pairs[size]:
        sign = draw.choice(list(PROBLEMS))
        question = PROBLEMS[sign].format(first, second, draw.choice(THINGS))
        answer = str(calculate(f"{first} {sign} {second}"))
        drawn.append({"id": question, "instruction": question, "answer": answer, "sign": sign})
    return drawn


@rllm.rollout
async def solve(task: Task, config: AgentConfig) -> Trajectory:
    messages: list[Any] = []
    for question, answer in EXAMPLES:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": task.instruction})
    async with AsyncOpenAI(base_url=config.base_url, api_key="any") as client:
        model = OpenAIChatCompletionsModel(config.model, client)
        agent = Agent(name="calculator", instructions="Write the calculation.", model=model)
        done = await Runner.run(agent, messages, run_config=RunConfig(tracing_disabled=True))
    return Trajectory(output=done.final_output)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    try:
        return str(calculate(str(episode.trajectories[0].output).split("=")[0])) == task["answer"]
    except ToolError:
        return False


def trainer(model: str, run: Any, seed: int = 0, split: str = "test", **settings: Any) -> AgentTrainer:
    return AgentTrainer(
        {**CONFIG, "model": {"path": model}, "seed": seed, **settings},
        agent_flow=solve,
        evaluator=score,
        train_dataset=tasks("train"),
        val_dataset=tasks(split)[: CONFIG["evaluation"]["num_tasks"]],
        output=run,
    )


def kind(task: dict[str, Any]) -> str:
    return task["sign"]


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/word_problems")[:2]
    trainer(model, run).train()
