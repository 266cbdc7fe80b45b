"""A request to `rllm eval`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rllm.build.configs import ProgramNames
from rllm.inference.providers import ModelPlace
from rllm.workflows.workers import OpenWorkers


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
    attempts: int = 1
    sampling: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields of SamplingParams as text; empty measures the built-in engine sampled and greedy."""
    seed: int = 0
    concurrency: int = 0
    """0 takes what the benchmark says, 64 for a server."""
    threads: int = 0
    trust_remote_code: bool = False
    """Whether Python that the model's directory brings along may run."""
    judge: ModelPlace | None = None
    """Where the model is that an LLM judge asks."""
    open_workers: OpenWorkers | None = None
    """Runs the workers that a workflow calls."""

    @property
    def name(self) -> str:
        return self.program.label if self.program else self.benchmark

    @property
    def directory_name(self) -> str:
        return self.program.directory_name if self.program else self.benchmark
