"""A request to `rllm eval`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rllm.build.configs import ProgramNames
from rllm.build.providers import ModelPlace
from rllm.data.row_filter import RowFilter
from rllm.errors import ConfigError
from rllm.types.chat_forms import OWN_FORM, ChatForm
from rllm.types.episode_clock import MODEL_TIMEOUT_S
from rllm.types.task import Task
from rllm.workflows.workers import OpenWorkers

Row = TypeVar("Row")


@dataclass(kw_only=True, slots=True, frozen=True)
class Asked:
    """A request for an evaluation; what is left empty is settled by the benchmark."""

    benchmark: str = ""
    program: ProgramNames | None = None
    """Instead of a benchmark."""
    place: ModelPlace
    """Where the model is: `resolve_model("runs/lake-seed0")`."""
    agent: str = ""
    as_trained: bool | None = None
    """Whether the tasks of a world are shown as in training; None settles it by the model."""
    evaluator: str = ""
    split: str = ""
    num_tasks: int | None = None
    """None: all of a benchmark's rows, 256 where there is no end."""
    indices: tuple[int, ...] = ()
    """Places of the tasks that are measured; empty is all of them."""
    expression: str = ""
    """A filter over the fields of tasks; empty keeps all."""
    few_shot: int = 0
    """Number of worked examples before each question."""
    likelihood: str = ""
    """The reading by which choices are compared by their likelihood; empty asks the model."""
    attempts: int = 1
    sampling: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields of SamplingParams as text; empty measures the built-in engine sampled and greedy."""
    seed: int = 0
    concurrency: int = 0
    """0 takes what the benchmark says, 64 for a server."""
    episode_timeout_s: float = 0.0
    """An episode's own time, model calls not counted; 0 takes what the benchmark or program says."""
    model_timeout_s: float = MODEL_TIMEOUT_S
    """A server that answers no call for so long has failed."""
    threads: int = 0
    dtype: str = "auto"
    """Data type of the model on the built-in engine; `auto` is float32."""
    form: ChatForm = OWN_FORM
    """Form of conversations with a model that is here."""
    trust_remote_code: bool = False
    """Whether Python that the model's directory brings along may run."""
    judge: ModelPlace | None = None
    """Where the model is that an LLM judge asks, or that chooses among attempts."""
    select: str = ""
    """The rule that chooses one of several attempts at a task; empty chooses none."""
    open_workers: OpenWorkers | None = None
    """Runs the workers that a workflow calls."""

    @property
    def call_timeout_s(self) -> float:
        """The time of one model call: longer than the model may be silent, so that its silence shows."""
        return max(600.0, 1.25 * self.model_timeout_s)

    @property
    def name(self) -> str:
        return self.program.label if self.program else self.benchmark

    @property
    def directory_name(self) -> str:
        return self.program.directory_name if self.program else self.benchmark

    @property
    def num_read(self) -> int | None:
        """Tasks that are looked through; a filter goes through all that there are."""
        return None if self.expression else self.num_tasks

    def chosen(self, tasks: Sequence[Row]) -> list[Row]:
        """The tasks that are measured; see `places`."""
        return [tasks[place] for place in self.places(tasks)]

    def places(self, tasks: Sequence[Any]) -> list[int]:
        """The places of the tasks at `indices` that the filter keeps, `num_tasks` at most.

        Raises ConfigError for a place that is not there, a filter that cannot be read, or where none is left.
        """
        beyond = [place for place in self.indices if place >= len(tasks)]
        if beyond:
            raise ConfigError(
                f"--task-indices has {beyond[0]}, and there are {len(tasks)} tasks; the first is 0, the last "
                f"{len(tasks) - 1}."
            )
        places = list(self.indices) if self.indices else list(range(len(tasks)))
        if not self.expression:
            return places
        rows = {place: _row_of(tasks[place]) for place in places}
        fields = dict.fromkeys(str(name) for row in rows.values() for name in row)
        keeps = RowFilter(self.expression, tuple(fields))
        selection = [place for place in places if keeps(rows[place])]
        if not selection:
            raise ConfigError(
                f"--filter {self.expression!r:.200} keeps none of {len(places)} tasks; change it."
            )
        return selection[: self.num_tasks]


def _row_of(task: Any) -> Mapping[str, Any]:
    """The fields of a task, whatever holds it."""
    return task.to_row() if isinstance(task, Task) else task if isinstance(task, Mapping) else {}


MOST_PLACES = 1_000_000


def task_places(text: str) -> tuple[int, ...]:
    """The places in a text such as `3,7,10-12`, in order, each once. Raises ConfigError for any other."""
    places: set[int] = set()
    for part in filter(None, (each.strip() for each in text.split(","))):
        first, dash, last = part.partition("-")
        last = last if dash else first
        digits = first.isdecimal() and last.isdecimal() and len(first) + len(last) <= 40
        if not digits or int(last) < int(first):
            raise ConfigError(
                f"--task-indices has `{part:.60}`; write places and ranges, such as 0, 3,7 or 0-9."
            )
        if int(last) - int(first) >= MOST_PLACES:
            raise ConfigError(
                f"--task-indices has `{part}`, which is more than {MOST_PLACES:,} tasks; name fewer, or all "
                "of them by leaving it out."
            )
        places.update(range(int(first), int(last) + 1))
    if text and not places:
        raise ConfigError(
            f"--task-indices is `{text:.60}`, which names no task; leave it out for all of them."
        )
    return tuple(sorted(places))
