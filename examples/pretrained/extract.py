"""A plain OpenAI program that turns a message into JSON of a schema.

    "Please send 3 lamps to Ana in Rome, not 5." ──► solve: one call ──► {"item": …, "count": …, …} ──► score

python extract.py MODEL [RUN]
"""

import json
import random
import sys
from typing import Any

from openai import OpenAI

import rllm
from rllm import AgentConfig, AgentTrainer, Episode, Task

NAMES = (
    *("Ana", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ines", "Jonas", "Karin", "Leo"),
    *("Mia", "Nora", "Oscar", "Paul", "Rosa", "Sam", "Tara", "Victor"),
)
ITEMS = ("lamps", "chairs", "books", "cups", "knives", "shirts", "boxes", "clocks", "spoons", "plates")
FORMS = (
    "{name} wants {count} {item}, not {other}.",
    "Order {other}: send {count} {item} to {name}.",
    "I am {name}. Last week I had {other} {item}, now I need {count}.",
    "{item} for {name}, house {other}, {count} of them.",
)
EXAMPLES = (("Tom, 42, would like 4 hats.", {"name": "Tom", "count": 4, "item": "hats"}),)
CONFIG: dict[str, Any] = {
    "steps": 20,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_tokens_per_turn": 28},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """No two splits share what is ordered by whom."""
    draw = random.Random(0)
    orders = draw.sample([(name, item) for name in NAMES for item in ITEMS], 200)
    size = {"test": slice(0, 48), "validation": slice(48, 72), "train": slice(72, None)}[split]
    drawn: list[dict[str, Any]] = []
    for name, item in orders[size]:
        for form, pattern in enumerate(FORMS):
            count, other = draw.sample(range(2, 60), 2)
            text = pattern.format(name=name, item=item, count=count, other=other)
            answer = {"name": name, "count": count, "item": item}
            drawn.append({"id": f"{name} {item} {form}", "instruction": text, "answer": answer, "form": form})
    return draw.sample(drawn, len(drawn))


client = OpenAI(base_url="http://unused", api_key="any")


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> None:
    messages: list[Any] = [{"role": "system", "content": "Write the order as JSON."}]
    for text, order in EXAMPLES:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": json.dumps(order)}]
    messages.append({"role": "user", "content": task.instruction})
    server = client.with_options(base_url=config.base_url)
    server.chat.completions.create(model=config.model, messages=messages)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> tuple[float, bool]:
    """The share of keys that are right; right are all of them and no others."""
    try:
        said = json.loads(episode.trajectories[0].steps[0].model_response)
    except ValueError:
        return 0.0, False
    if not isinstance(said, dict):
        return 0.0, False
    right = sum(said.get(key) == value for key, value in task["answer"].items())
    return right / len(task["answer"]), said == task["answer"]


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
    return f"form {task['form'] + 1}"


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/extract")[:2]
    trainer(model, run).train()
