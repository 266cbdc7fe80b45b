"""A stored run ──► the same run again, without an engine: were these the losses, is this the model?

    config.json, initial models ─► Learner ──► imitate ──► learn(stored episodes) ──► parameters
                                                  │                │                      │
    metrics.jsonl ──────────────────────────── compared         compared          model/: same sha256

The updates are those of `rllm.trainer.learning`, function by function; only the rollouts come from the store.
So whatever a run learned can be taken apart afterwards, without an engine and without a single sampled token.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rllm.distributed import open_ranks, world_size
from rllm.errors import ConfigError
from rllm.store.episodes import GREEDY_PHASE, TRAIN_PHASE, EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.backends.named import service_kind
from rllm.trainer.checkpoint import ranks_of
from rllm.trainer.learning import Learner, imitate, learn
from rllm.trainer.policies import combined_sha256, load_initial_models, load_saved_models
from rllm.trainer.resuming import other_tasks
from rllm.trainer.run import TrainingRun


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplayDifference:
    """A number that came out otherwise than it was recorded."""

    phase: str
    step: int
    metric: str
    recorded: Any
    """None when the run did not record it."""
    replayed: Any


@dataclass(kw_only=True, slots=True, frozen=True)
class ReplayResult:
    """The findings of a replay."""

    num_warm_steps: int
    num_train_steps: int
    num_compared: int
    """Recorded numbers that were computed again: losses, gradient norms, counts of tokens and groups."""
    differences: list[ReplayDifference]
    """In the order of the run: the first one is where it went another way."""
    recorded_sha256: str
    """The hash of the parameters in the run's models."""
    replayed_sha256: str

    @property
    def is_identical(self) -> bool:
        return not self.differences and self.recorded_sha256 == self.replayed_sha256


def replay(run: TrainingRun, on_step: Callable[[str, int], None] = lambda phase, step: None) -> ReplayResult:
    """Compute all updates of the finished run in `run.output` again. Changes nothing in it.

    `run` is made as for training, with the run's own configuration. The numbers are the same bit for bit
    on the machine and number of threads of the training; elsewhere the last digits may differ. `on_step`
    hears of each (phase, step) once it is computed, in the thread that computes. A run of several ranks is
    replayed by as many: raises ConfigError for another number.
    """
    if service_kind(run.config.backend) is not None:
        raise ConfigError(
            f"`backend` is {run.config.backend!r}: a service made the updates of {run.output}, "
            "and nobody can have repeat them bit for bit."
        )
    directory = RunDirectory.read(run.output)
    run.require_same_config(directory)
    if (summary := directory.summary()) is None:
        raise ConfigError(f"{directory.path} has not finished; let it end before you replay it.")
    _require_ranks(directory)
    num_steps = summary.get("ended_early_after", run.config.steps)
    with open_ranks(run.config.distributed, run.config.model.device) as run.ranks:
        run.require_memory(plays=False)
        return _replay(run, directory, num_steps, on_step)


def _require_ranks(directory: RunDirectory) -> None:
    """Another number of them adds up in another order."""
    num_ranks = ranks_of(directory.checkpoints_path)
    if num_ranks != world_size():
        raise ConfigError(
            f"{directory.path} was trained by {num_ranks} processes and would be replayed by {world_size()}, "
            f"which does not give the same last digits; use `rllm runs replay --nproc {num_ranks}`."
        )


def _replay(
    run: TrainingRun, directory: RunDirectory, num_steps: int, on_step: Callable[[str, int], None]
) -> ReplayResult:
    models = load_initial_models(run.config, directory.path, run.ranks)
    learner = run.make_learner(models)
    recorded_lines = {(line["phase"], line["step"]): line for line in read_metrics(directory.metrics_path)}
    # In a thread of its own, as in training: how torch shares out its work may depend on the thread.
    with (
        EpisodeStore.open(directory.store_path, read_only=True) as store,
        ThreadPoolExecutor(1, "rllm-replay") as thread,
    ):
        # A run from Python need not have played the world that its configuration names; only demonstrations
        # are made of tasks here, all else of episodes.
        if run.config.warm_start.steps and other_tasks(store, {"training": run.tasks.train}):
            raise ConfigError(
                f"{directory.path} imitated an expert on other tasks than it would be replayed with, as "
                "a run that was started from Python may have. Give the `run` of the trainer that made it to "
                "`rllm.trainer.replay.replay`, or its data sets as they were."
            )
        thread.submit(run.ranks.enter_thread)
        replayed_lines = thread.submit(_updates, learner, store, num_steps, on_step).result()
    differences = [
        ReplayDifference(
            phase=phase,
            step=step,
            metric=name,
            recorded=recorded_lines.get((phase, step), {}).get(name),
            replayed=value,
        )
        for (phase, step), metrics in replayed_lines.items()
        for name, value in metrics.items()
        if not name.endswith("_s")  # seconds are not repeatable
    ]
    return ReplayResult(
        num_warm_steps=run.config.warm_start.steps,
        num_train_steps=num_steps,
        num_compared=len(differences),
        differences=[each for each in differences if each.recorded != each.replayed],
        recorded_sha256=combined_sha256(load_saved_models(run.config, directory.path)),
        replayed_sha256=combined_sha256(models),
    )


def _updates(
    learner: Learner, store: EpisodeStore, num_steps: int, on_step: Callable[[str, int], None]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Metrics of every step, by (phase, step); `num_steps` of reinforcement."""
    config = learner.config
    metrics: dict[tuple[str, int], dict[str, Any]] = {}
    for step in range(config.warm_start.steps):
        metrics["warm_start", step] = imitate(learner, step)
        on_step("warm_start", step)
    if config.warm_start.steps:
        learner.begin_reinforcement()
    for step in range(num_steps):
        episodes, greedy = (list(store.episodes(phase, step)) for phase in (TRAIN_PHASE, GREEDY_PHASE))
        _, metrics[TRAIN_PHASE, step] = learn(learner, episodes, step, greedy)
        on_step(TRAIN_PHASE, step)
    learner.policies.publish()  # what is compared is what would be sampled from
    return metrics
