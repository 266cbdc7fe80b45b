"""Supervised runs: rows in, a run directory with a better model out. What SFT, DPO and distillation share.

    class MyJob(SupervisedJob):                          # trainer/sft.py is the shortest whole example
        steps = 100                                      # optimizer updates in all
        loss = ImitationLoss()                           # any Loss of rllm.algorithms.losses
        def samples(self, step): ...                     # the rows of one update, from (seed, step) alone
        def evaluate(self): return {"loss": 0.5}         # held-out numbers under the weights as they are

    class AgentMyTrainer(SupervisedTrainer[MyConfig]):   # MyConfig is a SupervisedConfig
        kind, config_class = "my", MyConfig
        def make_job(self, policy): return MyJob(policy, …)

    AgentMyTrainer(config, output="runs/mine").train() ──► TrainResult

The loop, and everything that a run owes its user, is here:

    report before ──► samples(step) ──► update ──► metrics, checkpoint ──► … ──► report after ──► model/

A run that was killed goes on from its last checkpoint and ends with the same parameters as one that never
stopped, because rows are a function of the step. What must be the same as well is the job's `identity`.
"""

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rllm.config.loader import config_dict, load_as
from rllm.config.policies import ONLY_POLICY
from rllm.config.supervised import SupervisedConfig
from rllm.distributed import world_size
from rllm.errors import ConfigError
from rllm.files.atomic import require_free_space
from rllm.store.run_directory import RunDirectory
from rllm.tracking.base import Tracker, Trackers, require_tracker
from rllm.tracking.console import on_screen
from rllm.tracking.jsonl import JsonlTracker, read_metrics
from rllm.tracking.sinks import SinkRun, open_sinks, require_sinks
from rllm.trainer.defaults import choices_dict, choices_line, settle_supervised
from rllm.trainer.extras import require_training_packages
from rllm.trainer.result import TrainResult
from rllm.trainer.resuming import (
    keep_muon_dtype,
    require_record,
    require_same,
    settle_muon_dtype,
    take_back,
    take_words_for_dtype,
)
from rllm.trainer.schedules import learning_rate_at
from rllm.types.sample import TrainingSample

if TYPE_CHECKING:
    from rllm.algorithms.losses import Loss
    from rllm.models.directory import LoadedModel
    from rllm.trainer.backends.base import TrainingBackend
    from rllm.trainer.checkpoint import Checkpoints, RunState
    from rllm.trainer.machine import RunMachine
    from rllm.trainer.memory_plan import MemoryPlan
    from rllm.trainer.policies import Policies, PolicyModel

AnySupervised = TypeVar("AnySupervised", bound=SupervisedConfig)


class SupervisedJob(ABC):
    """The part that one kind of supervised run adds to the loop."""

    steps: int
    """Optimizer updates in all."""
    loss: "Loss"

    def __init__(self, policy: "PolicyModel") -> None:
        self.policy = policy

    @property
    def backend(self) -> "TrainingBackend":
        """The backend that is trained."""
        assert self.policy.backend is not None, "the only policy of a supervised run learns"
        return self.policy.backend

    @abstractmethod
    def samples(self, step: int) -> Sequence[TrainingSample]:
        """The rows of one update. Nothing but the seed, the step and the weights may play a part in them."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Held-out numbers under the weights as they are, `loss` among them; the same whenever asked."""

    def update(self, step: int, learning_rate: float) -> dict[str, Any]:
        """One optimizer update; returns its metrics. Raises NumericsError before weights are spoilt."""
        samples = self.samples(step)
        return {
            **self.backend.update(samples, self.loss, learning_rate),
            "rows": len(samples),
            "trained_tokens": sum(each.num_trainable for each in samples),
            "tokens": sum(each.num_tokens for each in samples),
        }

    def largest_update(self) -> list[TrainingSample]:
        """The rows of an update that needs as much memory as any of the run, or more."""
        return list(self.samples(0))

    def plan(self) -> dict[str, int | float | str]:
        """The quantities that follow from configuration and data, such as tokens per update; `--dry-run`
        prints them."""
        return {"optimizer_updates": self.steps}

    def identity(self) -> dict[str, Any]:
        """The values that must be the same for a run to go on, beside its configuration: a digest of its
        rows."""
        return {}

    def prepare(self, directory: RunDirectory) -> None:  # noqa: B027  most jobs need none of the three
        """Before the first report, and again after every restart: what is computed once and kept in the run,
        such as log-probabilities of a reference."""

    def on_publish(self, policy_version: int) -> None:  # noqa: B027
        """The weights have changed; a job that samples from them tells its sampler."""

    def facts(self) -> dict[str, Any]:
        """The facts of the summary beside the reports."""
        return {}

    def close(self) -> None:  # noqa: B027
        """The run has ended, well or not."""


class SupervisedTrainer(ABC, Generic[AnySupervised]):
    """A configuration and a job in, a finished run out. Made anew, it goes on with the run in `output`."""

    kind: ClassVar[str]
    """Name of the command, and what the run directory says it is."""
    config_class: type[AnySupervised]

    def __init__(
        self,
        config: Any = None,
        *,
        output: str | Path = "runs/latest",
        tracker: Tracker | None = None,
        base: Mapping[str, Any] | None = None,
    ) -> None:
        """`config`: whatever `load_as` takes, on top of `base`. `output`: the run directory; a run that is
        already there goes on."""
        self.config = load_as(self.config_class, config, base=base)
        if not self.config.model.path:
            self.config.model.path = self.default_model()
        self.output = Path(output)
        self.choices = settle_supervised(self.config, self.output, self.kind)
        """The keys that were chosen for the model."""
        require_tracker(tracker)
        require_sinks(self.config.tracking.sinks)
        self.tracker = tracker
        self.force = False
        """Whether a run starts that needs more memory than is free; may be set until `train`."""
        self.image_album: Path | None = None
        """Where the run keeps images that its rows have at addresses; None while it is only planned."""

    @abstractmethod
    def make_job(self, policy: "PolicyModel") -> SupervisedJob:
        """The job to do with the model. Raises ConfigError for data that cannot be trained on."""

    def default_model(self) -> str:
        """`model.path` of a run whose configuration has none."""
        return "builtin:tiny"

    def train(self) -> TrainResult:
        """Run, or resume, to the end. Raises ConfigError for a process that is one of several ranks."""
        if world_size() > 1:
            raise ConfigError(
                f"WORLD_SIZE is {world_size()}, but fine-tuning on rows works in one process; start it "
                "without torchrun."
            )
        with RunDirectory.create_or_open(self.output) as directory:
            self.require_same_config(directory)
            summary = directory.summary()
            if summary is None:
                require_record(directory, directory.config_path, directory.metrics_path)
                summary = self._run(directory)
                directory.write_summary(summary)
            if not directory.curve_path.exists():
                _draw_curve(directory, self.kind, summary)
            return TrainResult(directory=self.output, summary=summary)

    def plan(self) -> dict[str, Any]:
        """Quantities that follow from configuration and data; see `dry_run`."""
        return self.dry_run()[0]

    def dry_run(self) -> "tuple[dict[str, Any], MemoryPlan | None]":
        """Quantities that follow from configuration and data, and memory where it is known; all that a run
        would check is checked, but for the memory, and nothing is written."""
        with TemporaryDirectory(prefix="rllm-plan-") as place:
            policies, _ = self._policies(Path(place), {})
            job = self.make_job(policies[ONLY_POLICY])
            try:
                return dict(job.plan()), self._memory_plan(job)
            finally:
                job.close()

    def _memory_plan(self, job: SupervisedJob) -> "MemoryPlan | None":
        from rllm.trainer.memory_plan import FixedRows, memory_plan

        rows = FixedRows(rows=job.largest_update(), whole_groups=job.loss.needs_whole_groups)
        return memory_plan(self.config.train_config(), num_ranks=1, num_local_ranks=1, fixed_rows=rows)

    def require_same_config(self, directory: RunDirectory) -> None:
        """Raises ConfigError for a run with another configuration, or of another kind."""
        old_config = directory.config()
        if not old_config:
            return
        if (kind := old_config.pop("kind", "train")) != self.kind:
            raise ConfigError(
                f"{directory.path} holds a run of `rllm {kind}`; choose another --output for this one."
            )
        old_config.pop("identity", None)  # compared once the job is made
        began_with = load_as(self.config_class, old_config)
        keep_muon_dtype(began_with.optimizer, self.config.optimizer)
        take_words_for_dtype(began_with.model, self.config.model)
        began_with.tracking = self.config.tracking  # who is given numbers is not what the run is
        require_same(directory, config_dict(began_with), config_dict(self.config))

    def _run(self, directory: RunDirectory) -> dict[str, Any]:
        require_training_packages(self.config.optimizer, self.config.lora)
        from rllm.trainer.estimates import disk_bytes_needed

        listeners: dict[str, SupervisedJob] = {}
        settle_muon_dtype(self.config.optimizer, self.config.model.device)
        self.image_album = directory.path / "images"
        policies, models = self._policies(directory.path, listeners)
        job = listeners[ONLY_POLICY] = self.make_job(policies[ONLY_POLICY])
        try:
            memory = self._memory_plan(job)
            if memory is not None:
                memory.require_fits(force=self.force)
            num_parameters = sum(model.num_parameters for model in models.values())
            require_free_space(
                directory.path,
                disk_bytes_needed(self.config.train_config(), num_parameters),
                "checkpoints and the trained model",
            )
            if not directory.config():
                directory.write_choices(choices_dict(self.choices))
            _keep_identity(directory, self.kind, job.identity(), config_dict(self.config))
            return self._supervise(directory, policies, job)
        finally:
            job.close()

    def _policies(
        self, run: Path, listeners: Mapping[str, SupervisedJob]
    ) -> "tuple[Policies, dict[str, LoadedModel]]":
        from rllm.trainer.policies import (
            create_initial_models,
            load_initial_models,
            make_policies,
            require_8_bits,
            require_models,
        )

        config = self.config.train_config()
        require_models(config)
        # Until that is written nothing has begun: what a refused start has left is made anew.
        if not (run / "config.json").exists():
            create_initial_models(config, run)
        models = load_initial_models(config, run)

        def publish(policy_version: int) -> None:
            # The job is made of the policies, so they are there before anybody can be told.
            if ONLY_POLICY in listeners:
                listeners[ONLY_POLICY].on_publish(policy_version)

        policies = make_policies(config, models, {ONLY_POLICY: publish})
        require_8_bits(config.optimizer, policies.backends().values())
        return policies, models

    def _supervise(self, directory: RunDirectory, policies: "Policies", job: SupervisedJob) -> dict[str, Any]:
        from rllm.trainer.checkpoint import Checkpoints, RunState, load_latest, remove_old
        from rllm.trainer.machine import keep_machine, largest_bytes, machine_of

        state = load_latest(directory.checkpoints_path, policies.backends()) or RunState()
        take_back(directory, state)
        remove_old(directory.checkpoints_path, state, self.config.checkpoint.keep)
        job.backend.publish_weights()
        title = f"rllm {self.kind} {self.output.name}"
        checkpoints = Checkpoints(directory.checkpoints_path, self.config.checkpoint)
        sink_run = SinkRun(name=directory.name, directory=directory.path, config=directory.config())
        sinks = open_sinks(self.config.tracking.sinks, sink_run)
        machine = machine_of(self.config.train_config(), policies, state.steps)
        if machine is not None:
            machine = keep_machine(directory, machine, self.config.model.device, largest_bytes(policies))
        with (
            checkpoints,
            on_screen(self.tracker, 0, title) as view,
            closing(Trackers([JsonlTracker(directory.metrics_path), view, *sinks])) as tracker,
            Stopping() as stopping,
        ):
            if self.choices:
                tracker.note(choices_line(self.choices))
            if machine is not None:
                tracker.note(machine.line())
            run = SupervisedRun(
                config=self.config,
                job=job,
                policies=policies,
                directory=directory,
                checkpoints=checkpoints,
                tracker=tracker,
                state=state,
                stopping=stopping,
                machine=machine,
            )
            return supervise(run)


@dataclass(kw_only=True, slots=True)
class SupervisedRun:
    """Everything a supervised run works with."""

    config: SupervisedConfig
    job: SupervisedJob
    policies: "Policies"
    directory: RunDirectory
    checkpoints: "Checkpoints"
    tracker: Tracker
    state: "RunState"
    stopping: "Stopping"
    machine: "RunMachine | None" = None
    """The machine and its peak; None where a service computes."""

    def save(self) -> None:
        """Checkpoint the run as it stands."""
        self.checkpoints.save(self.state, self.policies.backends())


def supervise(run: SupervisedRun) -> dict[str, Any]:
    """The whole run; returns the summary that `summary.json` holds."""
    run.job.prepare(run.directory)
    report(run, "before")
    fit(run)
    report(run, "after")
    run.policies.save_models(run.directory.path)
    return summary_of(run)


def fit(run: SupervisedRun) -> None:
    """One update after the other, until all steps are done."""
    job, state, config = run.job, run.state, run.config
    from rllm.trainer.machine import update_work, updates_since

    run.tracker.begin("train")
    for step in range(state.steps, job.steps):
        with state.time_phase("train"):
            start_s = time.perf_counter()
            rate = learning_rate_at(config.optimizer, step, job.steps)
            updates_before = update_work({"": job.backend})
            metrics = {"learning_rate": rate, **job.update(step, rate)}
            metrics |= updates_since(updates_before, {"": job.backend})
            job.backend.publish_weights()
            elapsed_s = time.perf_counter() - start_s
            state.steps = step + 1
            every = config.evaluation.every_steps
            if every and state.steps % every == 0 and state.steps < job.steps:  # then comes the report
                metrics |= {f"heldout_{name}": value for name, value in job.evaluate().items()}
        if run.machine is not None:
            metrics |= run.machine.shares(metrics, num_ranks=1)
        if "tokens" in metrics:
            metrics["tokens_per_s"] = metrics["tokens"] / elapsed_s
        metrics |= {"total_steps": job.steps, "step_s": elapsed_s, "run_s": state.wall_s}
        # Before the checkpoint: a line beyond it is taken back when the run goes on, and one that was not
        # written by then would stay missing.
        run.tracker.log(step, "train", metrics)
        is_last = state.steps == job.steps
        is_best = "heldout_loss" in metrics and state.is_best(-metrics["heldout_loss"])
        is_stopping = run.stopping.is_asked  # read once: who asks after this is answered by the next step
        if state.steps % config.checkpoint.period == 0 or is_best or is_last or is_stopping:
            run.save()
        if is_stopping:
            raise KeyboardInterrupt


def report(run: SupervisedRun, name: str) -> None:
    """Held-out numbers, unless they were measured before the run was interrupted."""
    state = run.state
    if name in state.reports:
        return
    run.tracker.begin(name)
    with state.time_phase(f"report_{name}"):
        metrics = run.job.evaluate()
    run.tracker.log(0, name, {**metrics, "run_s": state.wall_s})
    state.reports[name] = dict(metrics)
    run.save()
    run.stopping.raise_if_asked()


class Stopping:
    """Ctrl-C or SIGTERM takes effect where a run is whole: when its step is done and saved. A second one
    takes effect at once, and the step is repeated when the run goes on.

    Outside the main thread, where Python has no signals, nothing is held back.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: dict[signal.Signals, Any] = {}

    def raise_if_asked(self) -> None:
        if self.is_asked:
            raise KeyboardInterrupt

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGINT, signal.SIGTERM):
                self._before[each] = signal.signal(each, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for each, before in self._before.items():
            # None stands for a handler that Python did not set, which nobody can put back.
            signal.signal(each, signal.SIG_DFL if before is None else before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.raise_if_asked()
        self.is_asked = True


def summary_of(run: SupervisedRun) -> dict[str, Any]:
    """The content of `summary.json`."""
    state = run.state
    lines = [line for line in read_metrics(run.directory.metrics_path) if line["phase"] == "train"]
    return {
        "kind": run.directory.config()["kind"],
        **state.reports,
        "steps": state.steps,
        "trained_tokens": sum(line.get("trained_tokens", 0) for line in lines),
        "wall_s": state.wall_s,
        "phase_s": state.phase_s,
        "machines": run.directory.machines(),
        "parameters_sha256": run.job.policy.parameters_sha256(),
        **run.job.facts(),
    }


def _keep_identity(
    directory: RunDirectory, kind: str, identity: dict[str, Any], config: dict[str, Any]
) -> None:
    """Written once all checks have passed: what was refused can be mended and started again in the same
    directory."""
    old_config = directory.config()
    if old_config:
        require_same(directory, old_config["identity"], identity)
    else:
        directory.write_config({"kind": kind, "identity": identity, **config})


def _draw_curve(directory: RunDirectory, kind: str, summary: Mapping[str, Any]) -> None:
    from rllm.tracking.picture import draw_loss_curve

    draw_loss_curve(
        read_metrics(directory.metrics_path),
        directory.curve_path,
        title=f"rllm {kind}",
        measured_on=summary.get("measured_on", "measured rows"),
    )
