"""A workflow of two agents: one reads a long list and writes a note, the other answers from the note alone.

    stock, question ──► writer ──► note ──► reader, question ──► number ──► both are paid if it is right

python relay.py MODEL [RUN [STEPS [TEST_TASKS]]]
"""

import random
import sys
from typing import Any

from rllm import AgentTrainer, Episode, Step, Trajectory
from rllm.workflows import Workflow

FRUIT = ("apples", "pears", "plums", "lemons", "grapes", "figs", "dates", "limes", "melons", "peaches")
NUM_KINDS = 4
WRITE = "Store: {}. Write a note about the {}."
READ = "Note: {}\nHow many {}?"
EXAMPLES = {
    "writer": [
        (WRITE.format("31 nuts, 56 beans, 84 onions, 17 leeks", "beans"), "56 beans"),
    ],
    "reader": [
        (READ.format("56 beans", "beans"), "56"),
    ],
}
CONFIG: dict[str, Any] = {
    "steps": 30,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_tokens_per_turn": 10},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """No two splits share an answer to the same question."""
    draw = random.Random(0)
    asked = draw.sample([(fruit, count) for fruit in FRUIT for count in range(10, 100)], 900)
    size = {"test": slice(0, 128), "validation": slice(128, 256), "train": slice(256, None)}[split]
    drawn: list[dict[str, Any]] = []
    for fruit, count in asked[size]:
        others = draw.sample([other for other in FRUIT if other != fruit], NUM_KINDS - 1)
        numbers = draw.sample([number for number in range(10, 100) if number != count], NUM_KINDS - 1)
        stock = draw.sample([(fruit, count), *zip(others, numbers, strict=True)], NUM_KINDS)
        drawn.append({"task_id": f"{fruit} {count}", "fruit": fruit, "count": count, "stock": stock})
    return drawn


class Relay(Workflow):
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        stock = ", ".join(f"{count} {fruit}" for fruit, count in task["stock"])
        note, writer = await self.ask("writer", WRITE.format(stock, task["fruit"]))
        answer, reader = await self.ask("reader", READ.format(note, task["fruit"]))
        is_right = answer.strip().rstrip(".") == str(task["count"])
        writer.reward = reader.reward = float(is_right)
        return Episode(trajectories=[writer, reader], is_correct=is_right)

    async def ask(self, role: str, text: str) -> tuple[str, Trajectory]:
        messages = [{"role": "system", "content": "Be brief."}]
        messages += [
            {"role": speaker, "content": said}
            for turn in EXAMPLES[role]
            for speaker, said in zip(("user", "assistant"), turn, strict=True)
        ]
        messages.append({"role": "user", "content": text})
        output = await self.rollout_engine.get_model_response(messages, role=role)
        return output.content, Trajectory(name=role, steps=[Step.from_model_output(output, messages)])


def trainer(model: str, run: Any, seed: int = 0, split: str = "test", **settings: Any) -> AgentTrainer:
    return AgentTrainer(
        {**CONFIG, "model": {"path": model}, "seed": seed, **settings},
        workflow_class=Relay,
        train_dataset=tasks("train"),
        val_dataset=tasks(split)[: CONFIG["evaluation"]["num_tasks"]],
        output=run,
    )


def kind(task: dict[str, Any]) -> str:
    return f"place {[fruit for fruit, _ in task['stock']].index(task['fruit']) + 1}"


if __name__ == "__main__":
    defaults = ("", "runs/relay", str(CONFIG["steps"]), str(CONFIG["evaluation"]["num_tasks"]))
    model, run, steps, num_tasks = (*sys.argv[1:], *defaults[len(sys.argv) - 1 :])
    trainer(model, run, steps=int(steps), evaluation={"num_tasks": int(num_tasks)}).train()
