"""Questions about a table: the model writes SQL, SQLite runs it in the sandbox, the model reads the result.

    question ──► "SELECT …" ──► sandbox ──► "Result: 12" ──► "answer 12"

python sql.py MODEL [RUN]
"""

import random
import sys
from typing import Any

from rllm import AgentTrainer
from rllm.agents.conversation import ConversationAgent
from rllm.environments import BaseEnv
from rllm.sandbox import shared_runner

ITEMS = ("pear", "plum", "fig", "lime", "kiwi", "date", "grape", "lemon", "melon", "peach")
QUESTIONS = {
    "price": "What is the price of {0}?",
    "above": "How many have a price > {1}?",
    "below": "How many have a price < {1}?",
}
EXAMPLE = (
    *("How many have a price > 50?", "SELECT COUNT(*) FROM stock WHERE price > 50", "Result: 3", "answer 3"),
    *("What is the price of salt?", "SELECT price FROM stock WHERE name = 'salt'", "Result: 14", "answer 14"),
    *("How many have a price < 9?", "SELECT COUNT(*) FROM stock WHERE price < 9", "Result: 2", "answer 2"),
)
PROGRAM = """import sqlite3
(rows, query), base = {!r}, sqlite3.connect(":memory:")
base.execute("CREATE TABLE stock (name TEXT, price INT)")
base.executemany("INSERT INTO stock VALUES (?, ?)", rows)
print("Result:", *sum(base.execute(query).fetchmany(2), ()))
"""
CONFIG: dict[str, Any] = {
    "steps": 8,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_turns": 2, "max_tokens_per_turn": 20},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """Tables are drawn anew for each task; no two splits share one."""
    draw = random.Random(split)
    drawn: list[dict[str, Any]] = []
    for number in range(800 if split == "train" else 64):
        rows = [(name, draw.randrange(2, 100)) for name in draw.sample(ITEMS, 8)]
        (name, price), limit, asked = rows[0], draw.randrange(20, 80), draw.choice(list(QUESTIONS))
        above, below = (sum(sign * (row[1] - limit) > 0 for row in rows) for sign in (1, -1))
        answer = {"price": price, "above": above, "below": below}[asked]
        row = {"question": QUESTIONS[asked].format(name, limit), "answer": answer, "rows": rows}
        drawn.append({"task_id": f"{split} {number}", "asked": asked, **row})
    return drawn


class TableEnv(BaseEnv):
    """Pays a quarter for a query that runs, a quarter for the right result, half for the answer."""

    def __init__(self, rows: list[Any], question: str, answer: int) -> None:
        self.rows, self.question, self.answer = rows, question, str(answer)

    def reset(self, seed: int | None = None) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.has_found = False
        said = [{"role": "system", "content": "Table stock: name, price. Ask in SQL, then answer."}]
        for place, text in enumerate((*EXAMPLE, self.question)):
            said.append({"role": "assistant" if place % 2 else "user", "content": text})
        return said, {}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        text = str(action).strip()
        if self.has_found:
            is_right = text == f"answer {self.answer}"
            return "", 0.5 * is_right, True, {"is_correct": is_right}
        result = shared_runner().run(PROGRAM.format((self.rows, text)))
        self.has_found = result.stdout.strip() == f"Result: {self.answer}"
        reward = 0.25 * result.stdout.startswith("Result:") + 0.25 * self.has_found
        return result.stdout.strip(), reward, not self.has_found, {"is_correct": False}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "TableEnv":
        return TableEnv(info["rows"], info["question"], info["answer"])


def trainer(model: str, run: Any, seed: int = 0, split: str = "test", **settings: Any) -> AgentTrainer:
    return AgentTrainer(
        {**CONFIG, "model": {"path": model}, "seed": seed, **settings},
        agent_class=ConversationAgent,
        env_class=TableEnv,
        train_dataset=tasks("train"),
        val_dataset=tasks(split),
        output=run,
    )


def kind(task: dict[str, Any]) -> str:
    return task["asked"]


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/sql")[:2]
    trainer(model, run).train()
