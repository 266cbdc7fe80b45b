"""What is asked."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeId:
    """Identity of one attempt at one task. Typed, so that a task id may hold any character."""

    task_id: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.task_id}:{self.attempt}"


@dataclass(slots=True)
class Task:
    """What is asked: an instruction and the data to judge the answer by."""

    id: str
    """Stable identifier, unique in its dataset; attempts at one task are compared with each other."""
    instruction: str | list[dict[str, Any]] = ""
    """Text, or a list of content parts in the OpenAI form."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """The dataset row: ground truth, choices, environment arguments."""
    dataset_dir: Path = field(default_factory=Path)
    """Directory of the dataset this task came from."""
    sub_dir: Path | None = None
    """The task's own directory under `dataset_dir`; None where rows share one."""

    @property
    def task_dir(self) -> Path:
        return self.dataset_dir if self.sub_dir is None else self.dataset_dir / self.sub_dir
