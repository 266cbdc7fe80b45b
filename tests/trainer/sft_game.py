"""A supervised run of a second."""

from pathlib import Path
from typing import Any

from letter_game import merged

from rllm.trainer.sft import AgentSFTTrainer

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "threads": 1,
    "epochs": 2,
    "batch_size": 4,
    "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 1},
    "evaluation": {"every_steps": 2},
    "checkpoint": {"every_steps": 2, "keep": 2},
    "data": {"heldout_fraction": 0.25},
}
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{letter} {other}"},
            {"role": "assistant", "content": letter},
            {"role": "user", "content": other},
            {"role": "assistant", "content": f"{letter} {letter}"},
        ]
    }
    for letter in "ABCD"
    for other in "EFG"
]


def make_trainer(run: Path, changes: dict[str, Any] | None = None, **more: Any) -> AgentSFTTrainer:
    """A trainer of the game; `changes` are sections or keys on top of SETTINGS."""
    config = merged(SETTINGS, changes or {})
    return AgentSFTTrainer(**{"config": config, "train_dataset": CHATS, "output": run, **more})
