"""A game whose rules are in the prompt: at which lights to stop is different in every game.

    rules ──► "Light: blue" ──► stop ──► "Light: red" ──► go … four lights, and one mistake ends it

python lights.py MODEL [RUN]
"""

import itertools
import random
import sys
from typing import Any

from rllm import AgentTrainer
from rllm.agents.conversation import ConversationAgent
from rllm.environments import BaseEnv

COLOURS = ("red", "blue", "green", "white", "black", "pink", "yellow", "brown")
NUM_LIGHTS = 4
RULES = "Stop at {} and {}, go at {} and {}."
EXAMPLE = [
    (RULES.format("gold", "gray", "silver", "purple") + " Light: silver", "go"),
    ("Light: gray", "stop"),
]
"""A game as the model sees it first."""
CONFIG: dict[str, Any] = {
    "steps": 24,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_turns": NUM_LIGHTS, "max_tokens_per_turn": 6},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """Games of a split; no two splits share a set of rules."""
    draw = random.Random(0)
    pairs = list(itertools.combinations(COLOURS, 2))
    rules = [(*stop, *go) for stop, go in itertools.product(pairs, pairs) if not {*stop} & {*go}]
    rules = draw.sample(rules, len(rules))
    size = {"test": slice(0, 128), "validation": slice(128, 192), "train": slice(192, None)}[split]
    return [
        {"task_id": " ".join(colours), "colours": colours, "lights": draw.choices(colours, k=NUM_LIGHTS)}
        for colours in rules[size]
    ]


class LightsEnv(BaseEnv):
    """Pays a quarter for each light that is answered by the rules."""

    def __init__(self, colours: list[str], lights: list[str]) -> None:
        self.colours, self.lights = list(colours), lights

    def reset(self, seed: int | None = None) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.num_passed = 0
        messages = [{"role": "system", "content": "Follow the rules."}]
        for question, answer in EXAMPLE:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        now = f"{RULES.format(*self.colours)} Light: {self.lights[0]}"
        return [*messages, {"role": "user", "content": now}], {}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        stops = self.colours.index(self.lights[self.num_passed]) < 2
        if str(action).strip() != ("stop" if stops else "go"):
            return "", 0.0, True, {"is_correct": False}
        self.num_passed += 1
        if self.num_passed == NUM_LIGHTS:
            return "", 1 / NUM_LIGHTS, True, {"is_correct": True}
        return f"Light: {self.lights[self.num_passed]}", 1 / NUM_LIGHTS, False, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "LightsEnv":
        return LightsEnv(info["colours"], info["lights"])


def trainer(model: str, run: Any, seed: int = 0, split: str = "test", **settings: Any) -> AgentTrainer:
    return AgentTrainer(
        {**CONFIG, "model": {"path": model}, "seed": seed, **settings},
        agent_class=ConversationAgent,
        env_class=LightsEnv,
        train_dataset=tasks("train"),
        val_dataset=tasks(split)[: CONFIG["evaluation"]["num_tasks"]],
        output=run,
    )


def kind(task: dict[str, Any]) -> str:
    return f"{sum(task['colours'].index(light) < 2 for light in task['lights'])} times stop"


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/lights")[:2]
    trainer(model, run).train()
