"""The letters again: a teacher with other weights shows a student, and then tells it, what to say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from letter_game import SETTINGS, TASKS, LetterAgent, LetterEnv, merged

from rllm.models.builtin import create_model
from rllm.trainer.distill import AgentDistillTrainer


def make_trainer(run: Path, changes: Mapping[str, Any] | None = None, **more: Any) -> AgentDistillTrainer:
    """A trainer of the game; the teacher is made beside the run."""
    teacher = run.parent / "teacher"
    if not teacher.exists():
        create_model(teacher, seed=9)
    settings = merged(SETTINGS, {"warm_start": {"steps": 1, "noise": 0.0, "episodes_per_step": 2}})
    return AgentDistillTrainer(
        **{
            "config": merged(settings, changes or {}),
            "train_dataset": TASKS,
            "val_dataset": TASKS[:4],
            "validation_dataset": TASKS[4:6],
            "teacher": teacher,
            "agent_class": LetterAgent,
            "env_class": LetterEnv,
            "output": run,
            **more,
        }
    )
