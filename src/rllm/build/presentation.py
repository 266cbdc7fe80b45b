"""The form in which an evaluation shows a benchmark's tasks to its model.

    a model trained on them, or a built-in one ──► as training shows them: no rules, short turns
    any other model                            ──► with rules and the form of an answer, and room to think

Rules are dear for a small model, which reads them at every turn; any other model can answer nothing without.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.build.asked import Asked
from rllm.build.configs import SCRATCH, evaluation_config, training_config
from rllm.build.models import is_from_here
from rllm.build.providers import ModelPlace
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError
from rllm.eval.catalogue import Benchmark, benchmarks
from rllm.eval.results import is_for_show
from rllm.eval.tasks import world_name
from rllm.models.facts import ModelFacts
from rllm.store.run_directory import RunDirectory, is_run
from rllm.trainer.defaults import settle_for_model

_HOLDER_DEPTH = 2
"""The number of levels above a model directory at which its run may be: RUN/model, RUN/models/NAME."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Presentation:
    """With which settings the model plays."""

    config: TrainConfig
    agent_args: dict[str, Any]
    as_trained: bool
    """Whether tasks are shown as training shows them."""

    def record(self) -> dict[str, Any]:
        """The record that an evaluation keeps of it."""
        return {
            "of": "training" if self.as_trained else "benchmark",
            "environment_args": self.config.task.environment_args,
            "agent_args": self.agent_args,
        }


def presentation_of(request: Asked, spec: Benchmark) -> Presentation:
    """As the command says, else by the model. Raises ConfigError where there is nothing to choose."""
    name = request.benchmark  # a path is found again by what was given, not by its last part
    run_config = None if request.place.is_server else _trained_config(request.place, spec, name)
    is_own_agent = request.agent in ("", spec.agent)
    as_trained = request.as_trained
    if spec.asks_questions:
        if as_trained is not None:
            raise ConfigError(
                f"`{spec.name}` asks the same of every model, so --as-trained and --with-rules change "
                "nothing; leave them out."
            )
        as_trained = True
    elif as_trained is None:
        as_trained = run_config is not None or (
            not request.place.is_server and is_from_here(request.place.path)
        )
    config = run_config or training_config(name, recipe=SCRATCH) if as_trained else evaluation_config(name)
    settle_for_model(config, ModelFacts(from_scratch=True))
    agent_args = config.task.agent_args if is_own_agent else {}
    return Presentation(config=config, agent_args=agent_args, as_trained=as_trained)


def _trained_config(place: ModelPlace, spec: Benchmark, benchmark: str) -> TrainConfig | None:
    """The settings that a model was trained on the benchmark's world with, such as lakes of another size;
    None for one that was not. One of another benchmark of that world plays this one's tasks, shown as it
    knows them. `benchmark` is how `spec` is found."""
    run = _run_of(Path(place.path))
    if run is None:
        return None
    record = RunDirectory.read(run).config()
    if "kind" in record:  # it learned from rows
        return None
    run_config = load_config(record)
    if run_config.task.environment != world_name(spec):
        return None
    if spec.asks_questions or _nearest(run_config, spec).name == spec.name:
        return run_config
    config = evaluation_config(benchmark)
    config.rollout.max_tokens_per_turn = run_config.rollout.max_tokens_per_turn
    config.task.agent_args = run_config.task.agent_args
    config.task.environment_args = {
        **{name: value for name, value in config.task.environment_args.items() if not is_for_show(name)},
        **{name: value for name, value in run_config.task.environment_args.items() if is_for_show(name)},
    }
    return config


def _run_of(path: Path) -> Path | None:
    """The run that a model is of: the directory itself, or the one that holds it."""
    holders = path.absolute().parents[:_HOLDER_DEPTH]
    return next((each for each in (path, *holders) if is_run(each)), None)


def _nearest(run_config: TrainConfig, spec: Benchmark) -> Benchmark:
    """The benchmark of a run's world whose tasks differ least from those that the run was trained on; `spec`
    among equals."""

    def num_differing(other: Benchmark) -> tuple[int, bool]:
        own, theirs = (
            run_config.task.environment_args,
            training_config(other.name, recipe=SCRATCH).task.environment_args,
        )
        names = {*own, *theirs}
        return sum(own.get(name) != theirs.get(name) for name in names), other.name != spec.name

    world = world_name(spec)
    return min((each for each in benchmarks() if world_name(each) == world), key=num_differing, default=spec)
