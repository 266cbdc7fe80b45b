"""Four turns with the tools of an MCP server: each call takes the result of the one before.

    "14. Times 3." ──► "14 * 3" ──► MCP server ──► "42. Plus 25." ──► "42 + 25" ──► … ──► "answer 59"

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
    *("14. Times 3.", "14 * 3", "42. Plus 25.", "42 + 25", "67. Less 8.", "67 - 8", "59. The end."),
    "answer 59",
)
TOOLS = {"+": "add", "-": "subtract", "*": "multiply"}
WORDS = {"+": ("Plus {}.", "Add {}."), "-": ("Minus {}.", "Less {}."), "*": ("Times {}.",)}
NUM_CALLS = 3
CONFIG: dict[str, Any] = {
    "steps": 10,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_turns": NUM_CALLS + 1, "max_tokens_per_turn": 14},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """No two splits share the first two numbers; no result is below zero."""
    draw = random.Random(0)
    pairs = draw.sample([(first, second) for first in range(20, 100) for second in range(2, 20)], 1200)
    size = {"test": slice(0, 128), "validation": slice(128, 256), "train": slice(256, None)}[split]
    drawn: list[dict[str, Any]] = []
    for first, second in pairs[size]:
        results, signs, parts = [first], list[str](), list[str]()
        for number in (second, *draw.choices(range(2, 20), k=NUM_CALLS - 1)):
            now = results[-1]
            signs.append(draw.choice([*"+", *"-" * (now >= number), *"*" * (now < 200)]))
            results.append({"+": now + number, "-": now - number, "*": now * number}[signs[-1]])
            parts.append(draw.choice(WORDS[signs[-1]]).format(number))
        row = {"task_id": " ".join([str(first), *parts]), "signs": signs, "results": results}
        drawn.append({**row, "parts": [*parts, "The end."]})
    return drawn


class CalculatorEnv(MCPEnvironment):
    """Pays a quarter for each call with the right result, and for the answer; a mistake ends the episode."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task, mcp_servers=SERVER, reward_fn=self.grade)
        self.num_right = 0

    def grade(self, task: dict[str, Any], answer: str) -> float:
        return 0.25 * (self.num_right == NUM_CALLS and answer == f"answer {task['results'][-1]}")

    def reset(self, seed: int | None = None) -> tuple[list[dict[str, str]], dict[str, Any]]:
        said = [{"role": "system", "content": "Use the calculator."}]
        for place, text in enumerate((*EXAMPLE, f"{self.task['results'][0]}. {self.task['parts'][0]}")):
            said.append({"role": "assistant" if place % 2 else "user", "content": text})
        return said, super().reset(seed)[1]

    def step(self, action: Any) -> Any:
        first, sign, *rest = (*str(action).split(), "", "")[:4]
        if sign not in TOOLS or self.num_right == NUM_CALLS:
            return super().step(str(action).strip())
        call = {"name": TOOLS[sign], "arguments": {"a": first, "b": rest[0]}}
        shown = super().step({"id": "0", "function": call})[0]
        result = shown.get("tool_outputs", {}).get("0", "")[:20]
        if result != str(self.task["results"][self.num_right + 1]):
            return "", 0.0, True, {"is_correct": False}
        self.num_right += 1
        return f"{result}. {self.task['parts'][self.num_right]}", 0.25, False, {}

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
    return f"{TOOLS[task['signs'][0]]} first"


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/calculator")[:2]
    trainer(model, run).train()
