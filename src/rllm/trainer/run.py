"""`TrainingRun`: who plays, which tasks and a configuration in, a run directory with a better model out.

    build_run(config) ──► TrainingRun.train ──► rllm.trainer.loop.train ──► TrainResult

It takes the run directory, goes back to its last checkpoint, opens models, engine and trackers, and hands
them to the loop.
"""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from rllm.algorithms.curriculum import Curriculum
from rllm.algorithms.task_sampler import TaskSampler
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.distributed import ALONE, RankGroup, open_ranks
from rllm.engine.event_loop import run
from rllm.errors import ConfigError
from rllm.eval.task_facts import TaskFacts
from rllm.files.atomic import require_free_space
from rllm.store.encoding import EncodedEpisodes
from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.alarms import AlarmWatch
from rllm.tracking.base import Tracker, Trackers, require_tracker
from rllm.tracking.console import on_screen
from rllm.tracking.jsonl import JsonlTracker, read_metrics
from rllm.tracking.sinks import SinkRun, open_sinks, require_sinks
from rllm.trainer.cluster import ClusterEngine, EpisodePlayer, PolicyScorer, episode_engine
from rllm.trainer.defaults import KeyChoice, choices_dict, choices_line
from rllm.trainer.distribution import require_distributed
from rllm.trainer.extras import require_training_packages
from rllm.trainer.result import TrainResult
from rllm.trainer.resuming import (
    go_back_to,
    require_record,
    require_same_config,
    require_same_tasks,
    settle_muon_dtype,
)

if TYPE_CHECKING:
    from rllm.engine.attempts import EpisodeEngine
    from rllm.models.directory import LoadedModel
    from rllm.trainer.checkpoint import RunState
    from rllm.trainer.estimates import RunEstimate
    from rllm.trainer.imitation import PlayExpert
    from rllm.trainer.learning import Demonstrations, Learner
    from rllm.trainer.loop import RunParts
    from rllm.trainer.machine import RunMachine
    from rllm.trainer.memory_plan import MemoryPlan
    from rllm.trainer.policies import Policies, Publish
    from rllm.trainer.process_plan import ProcessPlan
    from rllm.trainer.samplers import PolicyClient
    from rllm.trainer.teacher import Teacher

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class Expert:
    """The expert that a warm start imitates."""

    demonstrations: "Callable[[Policies, RankGroup], Demonstrations]"
    """The rows that the policies of a run learn from; each of the ranks makes its share."""
    play: "PlayExpert | None" = None
    """Where it can be played in the environment of the run."""


class RunTasks(Protocol):
    """The tasks that are trained on and those that are measured on."""

    @property
    def train(self) -> Sequence[Any]: ...
    @property
    def heldout(self) -> Sequence[Any]:
        """Reported before and after."""
        ...

    @property
    def validation(self) -> Sequence[Any]:
        """Evaluated while training. It may be tuned on, so none of it is reported."""
        ...

    def facts(self) -> TaskFacts:
        """Facts of the reported tasks. Warns of those that are trained on as well."""
        ...

    def validation_facts(self) -> TaskFacts: ...


class TrainingRun:
    """A run from its start, or its last checkpoint, to its end.

    Raises ConfigError before any work for what cannot be honoured.
    """

    def __init__(
        self,
        config: TrainConfig,
        player: EpisodePlayer,
        tasks: RunTasks,
        *,
        expert: Expert | None = None,
        output: str | Path,
        tracker: Tracker | None = None,
        choices: Sequence[KeyChoice] = (),
    ) -> None:
        """`output`: the run directory; a run that is already there goes on. `tracker`: where numbers go as
        well as to `metrics.jsonl` and the screen. `choices`: the keys that were chosen for the model."""
        self.config, self.player, self.tasks, self.expert = config, player, tasks, expert
        self.output, self.choices = Path(output), choices
        self.ranks: RankGroup = ALONE
        """The processes of a run, while it works."""
        require_tracker(tracker)
        require_sinks(config.tracking.sinks)
        self.tracker = tracker
        """Looks on beside the screen; may be set until `train`."""
        self.teacher: Teacher | None = None
        """The model that `distill.teacher` names, once a run has loaded it."""
        self.work: Callable[[RunParts], Awaitable[dict[str, Any]]] | None = None
        """Work of the run in place of training, for a preview; returns a summary."""
        self.force = False
        """Whether a run starts that needs more memory than is free; may be set until `train`."""
        if config.warm_start.steps and expert is None and not config.distill.teacher:
            raise ConfigError(
                f"`warm_start.steps` is {config.warm_start.steps} but there is no expert to imitate; "
                "set it to 0, or give `demonstrate`."
            )
        if not tasks.train:
            raise ConfigError("`train_dataset` is empty; give at least one task.")

    def train(self) -> TrainResult:
        """Run, or resume, to the end; also from a notebook."""
        return run(self.fit_async())

    async def fit_async(self) -> TrainResult:
        """`train` for programs that have an event loop of their own."""
        config = self.config
        with (
            open_ranks(config.distributed, config.model.device) as self.ranks,
            self._directory() as directory,
        ):
            self.require_ranks_can(self.ranks.size)
            self.require_same_config(directory)
            summary = directory.summary()
            self.ranks.wait()  # a finished run is finished for all ranks
            if summary is None:
                require_record(directory, directory.config_path, directory.store_path, directory.metrics_path)
                summary = await self._run(directory)
                if self.ranks.is_writer:
                    directory.write_summary(summary)
            if self.ranks.is_writer and not directory.curve_path.exists():
                self.draw_curve(directory, summary)
            return TrainResult(directory=self.output, summary=summary)

    async def run_work(self, directory: RunDirectory) -> dict[str, Any]:
        """Return what `work` returns, in another directory than the run's and on one process."""
        with open_ranks(self.config.distributed, self.config.model.device) as self.ranks:
            return await self._run(directory)

    @contextmanager
    def _directory(self) -> Iterator[RunDirectory]:
        """The run, for writing on one rank and for reading on the others."""
        with self.ranks.writer_first():
            directory = (
                RunDirectory.create_or_open(self.output)
                if self.ranks.is_writer
                else RunDirectory(self.output, lock_descriptor=None)
            )
        with directory:
            yield directory

    def require_ranks_can(self, num_ranks: int) -> None:
        """Raises ConfigError for what a run on several ranks does not do, and for ranks that cannot share
        what the configuration wants them to."""
        self.config.distributed.require_ranks(num_ranks)
        if num_ranks > 1:
            require_distributed(self.config, num_ranks, is_program=self.player.kind == "program")

    def draw_curve(self, directory: RunDirectory, summary: dict[str, Any]) -> None:
        """The picture of a finished run."""
        from rllm.tracking.picture import draw_learning_curve

        name = self.config.task.environment
        title = f"Learning curve, {name}" if name else "Learning curve"
        draw_learning_curve(read_metrics(directory.metrics_path), summary, directory.curve_path, title=title)

    def as_shown(self, tracker: Tracker) -> Tracker:
        """`tracker` as it hears of this kind of run."""
        return tracker

    def require_same_config(self, directory: RunDirectory) -> None:
        """Raises ConfigError for a run with another configuration."""
        require_same_config(directory, self.config)

    def require_names(self) -> None:
        """Raises what `train` would raise of what the configuration names: a package that is missing, an
        estimator or a loss of one's own, a model, a device."""
        require_training_packages(self.config.optimizer, self.config.lora)
        from rllm.trainer.learning import require_algorithm
        from rllm.trainer.policies import require_models
        from rllm.trainer.samplers import require_servers

        require_algorithm(self.config)
        require_models(self.config)
        require_servers(self.config)

    def memory_plan(self, num_ranks: int, num_local_ranks: int, *, plays: bool = True) -> "MemoryPlan | None":
        """The memory that each process of the run will need; None where nothing is known of it."""
        from rllm.trainer.memory_plan import memory_plan

        return memory_plan(self.config, num_ranks=num_ranks, num_local_ranks=num_local_ranks, plays=plays)

    def estimate(self, num_ranks: int) -> "RunEstimate | None":
        """The time and disk that the run takes at most; None where nothing is known of it."""
        from rllm.trainer.estimates import estimate_run

        return estimate_run(self.config, num_ranks)

    def process_plan(self, num_ranks: int, *, is_of_torchrun: bool) -> "list[ProcessPlan]":
        """The processes that the run will consist of."""
        from rllm.trainer.process_plan import process_plan

        return process_plan(
            self.config,
            num_ranks=num_ranks,
            is_program=self.player.kind == "program",
            is_of_torchrun=is_of_torchrun,
        )

    def require_memory(self, *, plays: bool = True) -> None:
        """Raises ConfigError where the run does not fit into the free memory; with `force` it warns. A replay
        does not play."""
        plan = self.memory_plan(self.ranks.size, self.ranks.num_local, plays=plays)
        if plan is None:
            return
        # All ranks look before any of them loads its model, and come to one answer.
        plan = replace(plan, free=min(self.ranks.gather(plan.free)))
        if self.ranks.is_writer or not self.force:
            plan.require_fits(force=self.force)

    async def _run(self, directory: RunDirectory) -> dict[str, Any]:
        self.require_names()
        self.require_memory()
        from rllm.trainer.estimates import EPISODE_BYTES, disk_bytes_needed
        from rllm.trainer.policies import create_initial_models, load_initial_models, sampler_models
        from rllm.trainer.samplers import PolicyClient, open_client
        from rllm.trainer.teacher import teacher_of

        config = self.config
        ranks = self.ranks
        with ranks.writer_first():
            if ranks.is_writer and not directory.config():
                create_initial_models(config, directory.path)
            models = load_initial_models(config, directory.path, ranks)
            settle_muon_dtype(config.optimizer, config.model.device)
        config.optimizer.muon_dtype = ranks.gather(config.optimizer.muon_dtype)[0]
        self.teacher = await asyncio.to_thread(teacher_of, config, models)  # it may have to be asked
        num_parameters = sum(model.num_parameters for model in models.values())
        require_free_space(
            directory.path,
            disk_bytes_needed(config, num_parameters)
            + EPISODE_BYTES * config.derived()["most_episodes_in_total"],
            "checkpoints, model and recorded episodes",
        )
        async with AsyncExitStack() as open_until_done:
            clients: dict[str, PolicyClient] = {}
            samplers = sampler_models(config, models)
            sampled_models = models | samplers
            for name, model in sampled_models.items():
                clients[name] = await open_until_done.enter_async_context(
                    open_client(config, name, model, directory.path)
                )
            renderer = next(iter(clients.values())).renderer
            await self.player.require_prompt_fits(config, self.tasks.train[0], renderer)
            # Written once all checks have passed: what was refused can be mended and started again in the
            # same directory.
            if ranks.is_writer and not directory.config():
                directory.write_choices(choices_dict(self.choices))
                directory.write_config(config_dict(config))
            encodings = EncodedEpisodes()
            engine, cluster = await open_until_done.enter_async_context(
                episode_engine(config, self.player, sampled_models, clients, directory.path, ranks, encodings)
            )
            learner = self.make_learner(
                models, {name: each.publish for name, each in clients.items()}, samplers
            )
            return await self._train(directory, learner, clients, engine, cluster, encodings)

    async def _train(
        self,
        directory: RunDirectory,
        learner: "Learner",
        clients: "Mapping[str, PolicyClient]",
        engine: "EpisodeEngine",
        cluster: ClusterEngine | None,
        encodings: EncodedEpisodes,
    ) -> dict[str, Any]:
        from rllm.trainer.checkpoint import RunState, load_latest
        from rllm.trainer.loop import RunParts, train
        from rllm.trainer.record import RunRecord
        from rllm.trainer.reference import load_references
        from rllm.trainer.samplers import require_same_model

        ranks = self.ranks
        with ranks.writer_first():
            state = load_latest(directory.checkpoints_path, learner.backends()) or RunState()
        learner.kl_coefs = state.kl_coefs
        if learner.references and 0 < state.warm_steps == self.config.warm_start.steps:
            load_references(directory.path, learner.references, learner.policies)
        learner.policies.publish()
        for name, client in clients.items():
            await require_same_model(self.config, client, learner.policies[name])
        with ExitStack() as open_while_training:
            with ranks.writer_first():
                store = open_while_training.enter_context(
                    EpisodeStore.open(directory.store_path, read_only=not ranks.is_writer)
                )
                if ranks.is_writer:
                    require_same_tasks(store, {"training": self.tasks.train, "held-out": self.tasks.heldout})
                    go_back_to(directory, store, state, self.config.checkpoint.keep)
            record = RunRecord(directory, store, self.config.checkpoint, ranks, encodings)
            open_while_training.enter_context(record.checkpoints)
            tracker = self._trackers(directory, open_while_training)
            tracker.watch(engine)
            machine = self._machine(directory, learner.policies, state.warm_steps + state.steps)
            if self.choices:
                tracker.note(choices_line(self.choices))
            if machine is not None:
                tracker.note(machine.line())
            parts = RunParts(
                learner=learner,
                record=record,
                tracker=tracker,
                clients=clients
                if cluster is None
                else {name: PolicyScorer(engine=cluster, policy=name) for name in clients},
                engine=engine,
                machine=machine,
                num_ranks=ranks.size,
                cluster=cluster,
                play_expert=self.expert and self.expert.play,
                heldout_tasks=self.tasks.heldout,
                facts=await asyncio.to_thread(self.tasks.facts),
                validation_tasks=self.tasks.validation,
                validation_facts=self.tasks.validation_facts(),
                curriculum=self._curriculum(learner.tasks, state),
                state=state,
                alarms=AlarmWatch(
                    config_dict(self.config),
                    (line for line in read_metrics(directory.metrics_path) if line["phase"] == TRAIN_PHASE),
                ),
            )
            parts.learner_thread.submit(ranks.enter_thread)
            with _frozen_heap():
                try:
                    return await (self.work or train)(parts)
                finally:
                    tracker.close()
                    parts.learner_thread.shutdown()

    def _machine(self, directory: RunDirectory, policies: "Policies", from_step: int) -> "RunMachine | None":
        """The machine and kernels of the run, from its record or measured now."""
        from rllm.trainer.machine import keep_machine, largest_bytes, machine_of

        if not self.ranks.is_writer or (machine := machine_of(self.config, policies, from_step)) is None:
            return None
        return keep_machine(directory, machine, self.config.model.device, largest_bytes(policies))

    def _trackers(self, directory: RunDirectory, open_while_training: ExitStack) -> Trackers:
        """Where numbers go; of ranks that do not write, nowhere: all of them have the same."""
        if not self.ranks.is_writer:
            return Trackers([])
        title = f"rllm train {self.output.name}"
        view = open_while_training.enter_context(on_screen(self.tracker, self.config.steps, title))
        run = SinkRun(name=directory.name, directory=directory.path, config=directory.config())
        sinks = open_sinks(self.config.tracking.sinks, run)
        return Trackers([JsonlTracker(directory.metrics_path), self.as_shown(view), *sinks])

    def _curriculum(self, tasks: TaskSampler[Any], state: "RunState") -> Curriculum[Any]:
        settings = self.config.curriculum
        curriculum = Curriculum(
            tasks,
            seed=self.config.seed,
            replay_fraction=settings.replay_fraction,
            capacity=settings.capacity,
        )
        if state.curriculum:
            curriculum.restore(state.curriculum)
        return curriculum

    def make_learner(
        self,
        models: "Mapping[str, LoadedModel]",
        publish: "Mapping[str, Publish] | None" = None,
        samplers: "Mapping[str, LoadedModel]" = MappingProxyType({}),
    ) -> "Learner":
        """A learner on `models`; `publish` tells the sampler of a policy that its weights have changed, of
        which `samplers` has the copies to sample from."""
        from rllm.trainer.critic import make_critics
        from rllm.trainer.learning import Learner
        from rllm.trainer.policies import make_policies, require_8_bits
        from rllm.trainer.row_scores import make_references
        from rllm.trainer.teacher import teacher_of

        teacher = self.teacher or teacher_of(self.config, models)
        ranks = self.ranks
        own = teacher and teacher.loaded_model
        policies = make_policies(self.config, models, publish, own, ranks, samplers)
        critics = make_critics(self.config, policies, ranks)
        require_8_bits(self.config.optimizer, [*policies.backends().values(), *critics.values()])
        return Learner(
            config=self.config,
            policies=policies,
            references=make_references(self.config, policies, ranks),
            critics=critics,
            teacher=teacher,
            tasks=TaskSampler(self.tasks.train, seed=self.config.seed, purpose="tasks"),
            demonstrations=self.expert and self.expert.demonstrations(policies, ranks),
        )


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Tasks and modules stay for the whole run: looking through them again gains nothing. A heap that
    is frozen already stays as it is."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
