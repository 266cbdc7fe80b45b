"""Instructions that can be checked: a sentence with a word, in a case, that ends with a mark.

    "About the dog, in capital letters, with ! at the end" ──► a sentence ──► how much of it is so

python constraints.py MODEL [RUN]
"""

import itertools
import random
import re
import sys
from typing import Any

from rllm import AgentTrainer
from rllm.agents.conversation import ConversationAgent
from rllm.environments import BaseEnv

WORDS = (
    *("dog", "river", "moon", "bread", "train", "garden", "winter", "music", "window", "teacher", "ship"),
    *("horse", "letter", "market", "bridge", "cloud", "doctor", "forest", "king", "lamp", "mouse", "night"),
    *("paper", "queen", "road", "school", "table", "uncle", "village", "water", "zebra", "bird", "fire"),
    *("apple", "ocean", "coat"),
)
CASES = {"capital": "CAPITAL LETTERS", "small": "small letters"}
MARKS = {"!": "an exclamation mark", "?": "a question mark"}
ASK = "Write a short sentence about the {} in {} with {}."
EXAMPLE = [
    (ASK.format("sun", CASES["capital"], MARKS["?"]), "IS THE SUN HOT?"),
    (ASK.format("hill", CASES["small"], MARKS["?"]), "can you see the hill?"),
    (ASK.format("door", CASES["capital"], MARKS["!"]), "PLEASE OPEN THE DOOR!"),
    (ASK.format("cat", CASES["small"], MARKS["!"]), "the cat is so fast!"),
]
MIN_WORDS = 3
CONFIG: dict[str, Any] = {
    "steps": 20,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_turns": 1, "max_tokens_per_turn": 16},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """No two splits share a word; a word is asked for in four ways."""
    words = random.Random(0).sample(WORDS, len(WORDS))
    size = {"test": slice(0, 12), "validation": slice(12, 18), "train": slice(18, None)}[split]
    asked = [
        {"task_id": f"{word} {case} {mark}", "word": word, "case": case, "mark": mark}
        for word, case, mark in itertools.product(words[size], CASES, MARKS)
    ]
    return random.Random(1).sample(asked, len(asked))


class SentenceEnv(BaseEnv):
    """Pays a third for each constraint that holds. A sentence has three words or more."""

    def __init__(self, word: str, case: str, mark: str) -> None:
        self.word, self.case, self.mark = word, case, mark

    def reset(self, seed: int | None = None) -> tuple[list[dict[str, str]], dict[str, Any]]:
        now = ASK.format(self.word, CASES[self.case], MARKS[self.mark])
        messages = [{"role": "system", "content": "Do as you are told."}]
        messages += [
            {"role": role, "content": text}
            for turn in EXAMPLE
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*messages, {"role": "user", "content": now}], {}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        answer = str(action).strip()
        words = re.findall("[a-z]+", answer.lower())
        in_case = answer.isupper() if self.case == "capital" else answer.islower()
        held = [self.word in words and len(words) >= MIN_WORDS, in_case, answer.endswith(self.mark)]
        return "", sum(held) / len(held), True, {"is_correct": all(held)}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "SentenceEnv":
        return SentenceEnv(info["word"], info["case"], info["mark"])


def trainer(model: str, run: Any, seed: int = 0, split: str = "test", **settings: Any) -> AgentTrainer:
    return AgentTrainer(
        {**CONFIG, "model": {"path": model}, "seed": seed, **settings},
        agent_class=ConversationAgent,
        env_class=SentenceEnv,
        train_dataset=tasks("train"),
        val_dataset=tasks(split)[: CONFIG["evaluation"]["num_tasks"]],
        output=run,
    )


def kind(task: dict[str, Any]) -> str:
    return f"{task['case']} {task['mark']}"


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/constraints")[:2]
    trainer(model, run).train()
