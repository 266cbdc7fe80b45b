"""A game whose rules are in the prompt: what to do at which light is different in every game.

    rules ──► "Light: blue" ──► "blue is jump" ──► "Light: red" ──► … four lights, and one mistake ends it

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
MOVES = ("jump", "wait", "turn", "clap", "sing", "knock", "smile", "run", "sit", "wave", "dance", "shout")
NUM_LIGHTS = 4
EXAMPLE = [
    ("gold is nod\ngray is kneel\nsilver is swim\npurple is climb\nLight: silver", "silver is swim"),
    ("Light: gold", "gold is nod"),
    ("Light: purple", "purple is climb"),
    ("Light: gray", "gray is kneel"),
]
"""A game as the model sees it first."""
CONFIG: dict[str, Any] = {
    "steps": 20,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_turns": NUM_LIGHTS, "max_tokens_per_turn": 8},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """Games of a split; no two splits share a set of rules."""
    draw = random.Random(0)
    orders = draw.sample(list(itertools.permutations(COLOURS, 4)), 1400)
    size = {"test": slice(0, 128), "validation": slice(128, 192), "train": slice(192, None)}[split]
    drawn: list[dict[str, Any]] = []
    for colours in orders[size]:
        rules = dict(zip(colours, draw.sample(MOVES, 4), strict=True))
        lights = draw.choices(colours, k=NUM_LIGHTS)
        drawn.append({"task_id": " ".join(colours), "rules": rules, "lights": lights})
    return drawn


class LightsEnv(BaseEnv):
    """Pays an eighth for each light that is named, and for each that is answered by the rules."""

    def __init__(self, rules: dict[str, str], lights: list[str]) -> None:
        self.rules, self.lights = rules, lights

    def reset(self, seed: int | None = None) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.num_passed = 0
        messages = [{"role": "system", "content": "Follow the rules."}]
        for question, answer in EXAMPLE:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rules = "\n".join(f"{colour} is {move}" for colour, move in self.rules.items())
        return [*messages, {"role": "user", "content": f"{rules}\nLight: {self.lights[0]}"}], {}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        light, text = self.lights[self.num_passed], str(action).strip()
        if text != f"{light} is {self.rules[light]}":
            return "", text.startswith(f"{light} is ") / 8, True, {"is_correct": False}
        self.num_passed += 1
        if self.num_passed == NUM_LIGHTS:
            return "", 1 / NUM_LIGHTS, True, {"is_correct": True}
        return f"Light: {self.lights[self.num_passed]}", 1 / NUM_LIGHTS, False, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "LightsEnv":
        return LightsEnv(info["rules"], info["lights"])


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
    return f"{len(set(task['lights']))} colours"


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/lights")[:2]
    trainer(model, run).train()
