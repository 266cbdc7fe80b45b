"""The task, and the place where the program that answers finds its model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rllm.errors import ConfigError

ID_FIELDS = ("task_id", "id", "uid")
INSTRUCTION_FIELDS = ("instruction", "question", "prompt", "problem")


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeId:
    """Identity of one attempt at one task. Typed, so that a task id may hold any character."""

    task_id: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.task_id}:{self.attempt}"


@dataclass(slots=True)
class Task:
    """An instruction, and the data to judge the answer by."""

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
    def data(self) -> dict[str, Any]:
        """`metadata`, as programs of spring 2026 call it."""
        return self.metadata

    @property
    def task_dir(self) -> Path:
        return self.dataset_dir if self.sub_dir is None else self.dataset_dir / self.sub_dir

    def to_row(self) -> dict[str, Any]:
        """The row that an evaluator gets: the dataset's, with `task_id` and `instruction` where it has
        none."""
        return {"task_id": self.id, "instruction": self.instruction, **self.metadata}


@dataclass(slots=True)
class AgentConfig:
    """The facts about its model that a program gets."""

    base_url: str
    """OpenAI base URL of a session of its own; any API key opens it."""
    model: str
    session_uid: str
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """`task_id`, `attempt` and `purpose` of this run of the program, and `timeout_s`, the seconds it has."""
    is_validation: bool = False
    """True when the answer is measured and not trained on."""
    sampling_params: dict[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters of the whole session, by the keywords of OpenAI's clients: they win over what the
    program asks for."""

    @property
    def api_key(self) -> str:
        """Any key opens the session's own address."""
        return "EMPTY"


def row_of(task: Task | Mapping[str, Any]) -> dict[str, Any]:
    """A task as a row: the same for programs, whose tasks are objects, and for agents and workflows."""
    return task.to_row() if isinstance(task, Task) else dict(task)


def task_id_of(task: Task | Mapping[str, Any], position: int) -> str:
    """The id of a task; a mapping without `task_id` is named by its position in the dataset."""
    return task.id if isinstance(task, Task) else str(task.get("task_id", position))


def with_id(task: Task | Mapping[str, Any], position: int) -> Task | dict[str, Any]:
    """The task, a mapping with the id that `task_id_of` gives it: of whoever gets a share of the tasks, none
    can see the positions."""
    return task if isinstance(task, Task) else {**task, "task_id": task_id_of(task, position)}


def tasks_of(rows: Iterable[Task | Mapping[str, Any]], *, dataset: str = "The dataset") -> list[Task]:
    """Tasks as they are; of a mapping the first id and instruction field that it has.

    A row without an id is named by its position. Raises ConfigError, naming dataset and row, for an id that
    is there twice: attempts at different tasks would be compared with each other.
    """
    tasks = [task_of(row, position, dataset) for position, row in enumerate(rows)]
    first_place: dict[str, int] = {}
    for position, task in enumerate(tasks):
        if task.id in first_place:
            raise ConfigError(
                f"{dataset} has the task id {task.id!r} in row {first_place[task.id]} and in row {position}; "
                "give each task an id of its own."
            )
        first_place[task.id] = position
    return tasks


def task_of(row: Task | Mapping[str, Any], position: int = 0, dataset: str = "The dataset") -> Task:
    if isinstance(row, Task):
        return row
    if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{dataset}: row {position} is {row!r:.80} (a {type(row).__name__}); give Tasks or dicts."
        )
    identity = next((row[name] for name in ID_FIELDS if row.get(name) is not None), position)
    instruction: Any = next((row[name] for name in INSTRUCTION_FIELDS if row.get(name) is not None), "")
    if not isinstance(instruction, str | list):
        raise ConfigError(
            f"{dataset}: the instruction of row {position} is {instruction!r:.80}; "
            "it must be text or a list of content parts."
        )
    return Task(
        id=str(identity), instruction=cast(str | list[dict[str, Any]], instruction), metadata=dict(row)
    )
