"""A run on preferences of a second, with any of the losses."""

from pathlib import Path
from typing import Any

from letter_game import merged

from rllm.trainer.dpo import AgentDPOTrainer

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "threads": 1,
    "epochs": 2,
    "batch_size": 5,
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1},
    "evaluation": {"every_steps": 2},
    "checkpoint": {"every_steps": 2, "keep": 2},
    "data": {"heldout_fraction": 0.25},
}
PAIRS = [
    {"prompt": f"{letter} or {other}", "chosen": letter, "rejected": f"{other} {other}"}
    for letter in "ABC"
    for other in "DEFG"
]
LABELLED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for pair in PAIRS
    for side in ("chosen", "rejected")
]


def make_trainer(
    run: Path, loss: str = "dpo", changes: dict[str, Any] | None = None, **more: Any
) -> AgentDPOTrainer:
    """A trainer of the game; `changes` are sections or keys on top of SETTINGS."""
    config = merged(merged(SETTINGS, {"preference": {"loss": loss}}), changes or {})
    rows = LABELLED if loss == "kto" else PAIRS
    return AgentDPOTrainer(**{"config": config, "train_dataset": rows, "output": run, **more})
