"""Sums, differences and products that are worked out with the tools of an MCP server.

    question ──► "multiply 47 38" ──► MCP server ──► "Result: 1786" ──► "answer 1786"

python calculator.py MODEL [RUN]
"""

import random
import sys
from typing import Any

from rllm import AgentTrainer
from rllm.agents.conversation import ConversationAgent
from rllm.environments import MCPEnvironment

SERVER = {"calculator": {"target": "rllm.tools.mcp_calculator:calculator_server", "shared": True}}
EXAMPLE = (
    *("How many are 14 times 31 apples?", "multiply 14 31", "Result: 434", "answer 434"),
    *("How many are 21 plus 62 apples?", "add 21 62", "Result: 83", "answer 83"),
    *("How many are 58 minus 17 hats?", "subtract 58 17", "Result: 41", "answer 41"),
)
PROBLEMS = {
    "add": "How many are {0} plus {1} {2}?",
    "subtract": "How many are {0} minus {1} {2}?",
    "multiply": "How many are {0} times {1} {2}?",
}
THINGS = ("pens", "books", "cups", "eggs", "nuts", "coins", "keys", "shoes")
CONFIG: dict[str, Any] = {
    "steps": 24,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_turns": 3, "max_tokens_per_turn": 10},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """No two splits share a pair of numbers."""
    draw = random.Random(0)
    pairs = draw.sample([(first, second) for first in range(20, 100) for second in range(11, first)], 2000)
    size = {"test": slice(0, 128), "validation": slice(128, 256), "train": slice(256, None)}[split]
    return [problem(a, b, draw.choice(list(PROBLEMS)), draw.choice(THINGS)) for a, b in pairs[size]]


def problem(first: int, second: int, command: str, thing: str) -> dict[str, Any]:
    answer = {"add": first + second, "subtract": first - second, "multiply": first * second}[command]
    question = PROBLEMS[command].format(first, second, thing)
    return {"task_id": question, "question": question, "answer": answer, "command": command}


class CalculatorEnv(MCPEnvironment):
    """Commands in plain words, as a model needs them whose chat template knows no tools."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task, mcp_servers=SERVER, reward_fn=self.grade)
        self.has_found = False

    def grade(self, task: dict[str, Any], answer: str) -> float:
        """Half for the answer; the other half was for a call whose result it is."""
        return 0.5 * (self.has_found and answer == str(task["answer"]))

    def reset(self, seed: int | None = None) -> tuple[list[dict[str, str]], dict[str, Any]]:
        said, info = [{"role": "system", "content": "Use the calculator."}], super().reset(seed)[1]
        for place, text in enumerate((*EXAMPLE, self.task["question"])):
            said.append({"role": "assistant" if place % 2 else "user", "content": text})
        return said, info

    def step(self, action: Any) -> Any:
        name, *words = str(action).split() or [""]
        if name == "answer":
            return super().step(" ".join(words))
        call = {"name": name, "arguments": dict(zip(("a", "b"), words, strict=False))}
        shown, reward, done, info = super().step({"id": "0", "function": call})
        result = shown.get("tool_outputs", {}).get("0", "")[:20]
        if result == str(self.task["answer"]) and not self.has_found:
            self.has_found, reward = True, 0.5
        return f"Result: {result}", reward, done, info

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "CalculatorEnv":
        return CalculatorEnv(info)


def trainer(model: str, run: Any, seed: int = 0, split: str = "test", **settings: Any) -> AgentTrainer:
    return AgentTrainer(
        {**CONFIG, "model": {"path": model}, "seed": seed, **settings},
        agent_class=ConversationAgent,
        env_class=CalculatorEnv,
        train_dataset=tasks("train"),
        val_dataset=tasks(split)[: CONFIG["evaluation"]["num_tasks"]],
        output=run,
    )


def kind(task: dict[str, Any]) -> str:
    return task["command"]


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/calculator")[:2]
    trainer(model, run).train()
