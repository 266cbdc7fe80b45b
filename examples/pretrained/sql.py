"""Questions about a table: the model writes SQL, SQLite runs it in the sandbox, the model reads the result.

    question ──► SELECT … ──► sandbox ──► "Result: 12", or what is wrong ──► … ──► "answer 12"

python sql.py MODEL [RUN]
"""

import json
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
    "above": "How many cost more than {1}?",
    "below": "How many cost less than {1}?",
}
EXAMPLE = (
    *("What is the price of salt?", "SELECT price FROM stock WHERE name = 'salt'", "Result: 14", "answer 14"),
    *("How many cost more than 50?", "SELECT COUNT(*) FROM stock WHERE price > 50", "Result: 3", "answer 3"),
)
PROGRAM = """import json, sqlite3
(rows, query), base = json.loads({!r}), sqlite3.connect(":memory:")
base.execute("CREATE TABLE stock (name TEXT, price INT)")
base.executemany("INSERT INTO stock VALUES (?, ?)", rows)
print("Result:", *sum(base.execute(query).fetchmany(2), ()))
"""
CONFIG: dict[str, Any] = {
    "steps": 24,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_turns": 4, "max_tokens_per_turn": 20},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """Tables are drawn anew for each task; no two splits share one."""
    draw = random.Random(split)
    drawn: list[dict[str, Any]] = []
    for number in range({"train": 800}.get(split, 64)):
        rows = [(name, draw.randrange(2, 100)) for name in draw.sample(ITEMS, 8)]
        (name, price), limit, asked = rows[0], draw.randrange(20, 80), draw.choice(list(QUESTIONS))
        above, below = (sum(sign * (row[1] - limit) > 0 for row in rows) for sign in (1, -1))
        answer = {"price": price, "above": above, "below": below}[asked]
        row = {"question": QUESTIONS[asked].format(name, limit), "answer": answer, "rows": rows}
        drawn.append({"task_id": f"{split} {number}", "asked": asked, **row})
    return drawn


class TableEnv(BaseEnv):
    """Half of the reward is for a query that finds the answer, half for the answer."""

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
        if text.startswith("answer"):
            is_right = self.has_found and text == f"answer {self.answer}"
            return "", 0.5 * is_right, True, {"is_correct": is_right}
        result = shared_runner().run(PROGRAM.format(json.dumps([self.rows, text])))
        shown = (result.stdout or result.stderr).strip().splitlines()[-1][:60]
        had_found, self.has_found = self.has_found, self.has_found or shown == f"Result: {self.answer}"
        return shown, 0.5 * (self.has_found - had_found), False, {}

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
