"""`AgentTrainer`: an agent, tasks and a configuration in, a run directory with a better model out.

    AgentTrainer(config, agent_class, env_class, train_dataset, val_dataset).train() ──► TrainResult
    AgentTrainer(config, agent_flow, evaluator, train_dataset, val_dataset).train()  ──► TrainResult
    AgentTrainer(config, workflow_class, train_dataset, val_dataset).train()         ──► TrainResult

It checks everything that can be checked, takes the run directory, goes back to its last checkpoint, and hands
the parts to `rllm.trainer.loop.train`.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.agents.base import BaseAgent
from rllm.agents.conversation import ConversationAgent
from rllm.config.loader import config_dict, load_config
from rllm.config.schema import TrainConfig
from rllm.data.curriculum import Curriculum
from rllm.data.sampler import TaskSampler
from rllm.distributed import ALONE, RankGroup, open_ranks
from rllm.engine.event_loop import run
from rllm.engine.traced import Program
from rllm.environments.base import BaseEnv
from rllm.environments.world import World
from rllm.errors import ConfigError
from rllm.eval.task_facts import TaskFacts
from rllm.files.atomic import require_free_space
from rllm.store.encoding import EncodedEpisodes
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.base import Tracker, Trackers, require_tracker
from rllm.tracking.console import on_screen
from rllm.tracking.jsonl import JsonlTracker, read_metrics
from rllm.tracking.sinks import SinkRun, open_sinks, require_sinks
from rllm.trainer.agents import player_of
from rllm.trainer.backends.named import (
    backend_kind,
    chosen_backend,
    published_backend,
    published_output,
    with_backend,
)
from rllm.trainer.cluster import (
    ClusterEngine,
    EpisodePlayer,
    PolicyScorer,
    episode_engine,
    require_cluster,
)
from rllm.trainer.distribution import require_distributed
from rllm.trainer.extras import require_training_packages
from rllm.trainer.programs import (
    PROGRAM_DEFAULTS,
    ProgramPlayer,
    require_no_budget,
    require_one_policy,
    require_program_config,
)
from rllm.trainer.result import TrainResult
from rllm.trainer.resuming import (
    go_back_to,
    require_record,
    require_same_config,
    require_same_tasks,
    settle_muon_dtype,
)
from rllm.trainer.run_tasks import as_sequence, run_tasks
from rllm.trainer.warm_start import (
    Demonstrate,
    DemonstrateRoles,
    demonstration_samples,
    require_answers_fit,
    role_demonstration_samples,
)
from rllm.trainer.workflows import (
    WORKFLOW_DEFAULTS,
    WorkflowPlayer,
    contracts_of,
    require_workflow_config,
    with_estimators,
)
from rllm.types.callables import name_of, without_arguments
from rllm.types.task import Task, tasks_of
from rllm.workflows.workers import OpenWorkers
from rllm.workflows.workflow import Workflow

if TYPE_CHECKING:
    from rllm.engine.attempts import EpisodeEngine
    from rllm.models.directory import LoadedModel
    from rllm.trainer.checkpoint import RunState
    from rllm.trainer.learning import Demonstrations, Learner
    from rllm.trainer.machine import RunMachine
    from rllm.trainer.memory_plan import MemoryPlan
    from rllm.trainer.policies import Policies, Publish
    from rllm.trainer.process_plan import ProcessPlan
    from rllm.trainer.samplers import PolicyClient
    from rllm.trainer.teacher import Teacher

log = logging.getLogger(__name__)

NUM_WAITING_EXPERTS = 8
"""Experts that wait for another process and demonstrate at the same time."""


@without_arguments(
    agent_run_func="write it as `def solve(task, config)` and give that as `agent_flow`; its reward is the "
    "`evaluator`'s to say",
    hooks="what they judge with is `evaluator`",
    sandbox_backend="a benchmark's own `sandbox` says where programs run (docs/sandbox.md)",
    sandbox_concurrency="`rollout.num_parallel` is how many episodes are played at a time",
    store="give it to the workflow, in `workflow_args`",
    traj_grouping_hook="trajectories of one task are compared by their `name`",
)
class AgentTrainer:
    """Trains a model to act as `agent_class` in `env_class`, or inside the program `agent_flow`, or one or
    several models to play the roles of `workflow_class`.

    Raises ConfigError before any work for what cannot be honoured.
    """

    def __init__(
        self,
        config: TrainConfig | Mapping[str, Any] | str | Path | Iterable[str] | None = None,
        train_dataset: Sequence[Task | dict[str, Any]] = (),
        val_dataset: Sequence[Task | dict[str, Any]] | None = None,
        backend: str = "",
        *,
        agent_class: type[BaseAgent] | None = None,
        env_class: type[BaseEnv] | None = None,
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        agent_flow: Any = None,
        evaluator: Any = None,
        workflow_class: type[Workflow] | None = None,
        workflow_args: Mapping[str, Any] | None = None,
        open_workers: OpenWorkers | None = None,
        traj_group_adv_estimator_map: Mapping[str, str] | None = None,
        validation_dataset: Sequence[Task | dict[str, Any]] | None = None,
        demonstrate: Demonstrate | DemonstrateRoles | None = None,
        world: World | None = None,
        output: str | Path | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        """
        `backend`: as the key of that name, which it is where empty; `config` may be in its own keys then.
        `train_dataset`: tasks as dicts of environment arguments, each with a `task_id`; for a program, Tasks
        or dicts with an id and an instruction. `agent_flow`: a program, and `evaluator` what judges it: made
        by the decorators, plain functions, objects, or names such as `file.py:solve`. `workflow_class`: made
        anew for each attempt with `workflow_args`; `open_workers` (`rllm.worker.step_host.open_workers`)
        runs the workers that it calls and that have a model or program of their own.
        `traj_group_adv_estimator_map`: role -> advantage estimator, as `roles.ROLE.estimator`.
        `val_dataset`: held-out tasks, reported before and after; the training tasks where None.
        `validation_dataset`: evaluated while training, every `evaluation.every_steps`; what `val_dataset`
        has beyond `evaluation.num_tasks` where None. `demonstrate`: the expert of the warm start; for a
        workflow, of all its roles. `world`: what knows which tasks are one instance, and what simple
        policies come to; without one, tasks that are the same but for their names. `output`: the run
        directory, `runs/latest` where None, or named by the project and experiment of a published
        configuration; a run that is already there goes on. `tracker`: where numbers go as well as to
        `metrics.jsonl` and the screen.
        """
        on_cluster = list[str]()
        _require_one_way(
            agent_class=agent_class,
            env_class=env_class,
            agent_flow=agent_flow,
            evaluator=evaluator,
            workflow_class=workflow_class,
        )
        if backend == "ray":  # the published name of a run whose episodes are played on a cluster
            backend, on_cluster = "", ['cluster.kind="ray"']
        self.output = published_output(config) if output is None else Path(output)
        backend = backend or published_backend(config)
        if backend and (kind := backend_kind(backend)):
            config = kind.translated(config, len(train_dataset))
        backend = chosen_backend(backend)
        self.ranks: RankGroup = ALONE
        """The processes of a run, while it works."""
        self.program: Program | None = None
        if workflow_args and workflow_class is None:
            raise ConfigError("`workflow_args` is given, but no `workflow_class` that takes it.")
        self.workflow_class, self.workflow_args = workflow_class, dict(workflow_args or {})
        self.open_workers = open_workers
        to_tasks: Callable[..., Sequence[Any]] = as_sequence
        if agent_flow is not None:
            self.program = Program.of(agent_flow, evaluator)
            name = self.program.flow.name
            task_names = {"task": {"environment": name, "agent": name}}
            self.config = load_config(config, base={**PROGRAM_DEFAULTS, **task_names})
            require_program_config(self.config, agent_args, env_args)
            to_tasks = tasks_of
        elif workflow_class is not None:
            task_names = {"task": {"environment": name_of(workflow_class), "agent": name_of(workflow_class)}}
            self.config = load_config(config, base={**WORKFLOW_DEFAULTS, **task_names})
            require_workflow_config(self.config, workflow_class, agent_args, env_args)
            require_no_budget(self.config, "workflow_class")
        else:
            self.config = load_config(config)
            require_one_policy(self.config, "agent_class")
            require_no_budget(self.config, "agent_class")
            if self.config.rollout.max_tokens_per_turn == 0:
                raise ConfigError(
                    "`rollout.max_tokens_per_turn` is 0; an agent needs at least 1 to answer with."
                )
        self.config = load_config(self.config, on_cluster)
        self.config = with_backend(self.config, backend, plays_agent=agent_class is not None)
        require_cluster(self.config)
        self.config = with_estimators(self.config, traj_group_adv_estimator_map or {})
        self.player = player_of(agent_class, env_class, agent_args, env_args)
        heldout, validation = (
            None if dataset is None else to_tasks(dataset) for dataset in (val_dataset, validation_dataset)
        )
        self.tasks = run_tasks(self.config, to_tasks(train_dataset), heldout, validation, world)
        self.demonstrate: Any = demonstrate
        """DemonstrateRoles for a workflow, otherwise Demonstrate."""
        require_tracker(tracker)
        require_sinks(self.config.tracking.sinks)
        self.tracker = tracker
        """Looks on beside the screen; may be set until `train`."""
        self.teacher: Teacher | None = None
        """The model that `distill.teacher` names, once a run has loaded it."""
        if self.config.warm_start.steps and demonstrate is None and not self.config.distill.teacher:
            raise ConfigError(
                f"`warm_start.steps` is {self.config.warm_start.steps} but there is no expert to imitate; "
                "set it to 0, or give `demonstrate`."
            )
        if not self.tasks.train:
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
            require_distributed(self.config, num_ranks, is_program=self.program is not None)

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

    def memory_plan(self, num_ranks: int, num_local_ranks: int) -> "MemoryPlan | None":
        """The memory that each process of the run will need; None where nothing is known of it."""
        from rllm.trainer.memory_plan import memory_plan

        return memory_plan(self.config, num_ranks=num_ranks, num_local_ranks=num_local_ranks)

    def process_plan(self, num_ranks: int, *, is_of_torchrun: bool) -> "list[ProcessPlan]":
        """The processes that the run will consist of."""
        from rllm.trainer.process_plan import process_plan

        return process_plan(
            self.config,
            num_ranks=num_ranks,
            is_program=self.program is not None,
            is_of_torchrun=is_of_torchrun,
        )

    def _require_memory(self) -> None:
        """Raises ConfigError where the run cannot fit into this machine; warns where it may not."""
        plan = self.memory_plan(self.ranks.size, self.ranks.num_local)
        if plan is None:
            return
        plan.require_fits()
        if (warning := plan.warning()) and self.ranks.is_writer:
            log.warning(warning)

    async def _run(self, directory: RunDirectory) -> dict[str, Any]:
        self.require_names()
        self._require_memory()
        from rllm.trainer.policies import create_initial_models, load_initial_models
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
        critics = 1 if config.critic.trunk == "separate" else 0
        bytes_each = 4 * (1 + critics) * sum(each.num_parameters for each in models.values())
        num_references = 1 if config.algorithm.kl_coef and config.warm_start.steps else 0  # the reference
        require_free_space(
            directory.path,
            bytes_each * (3 * (config.checkpoint.keep + 2) + 2 + num_references)
            + 2_000 * config.derived()["most_episodes_in_total"],
            "checkpoints, model and recorded episodes",
        )
        async with AsyncExitStack() as open_until_done:
            clients: dict[str, PolicyClient] = {}
            for name, model in models.items():
                clients[name] = await open_until_done.enter_async_context(
                    open_client(config, name, model, directory.path)
                )
            if self.player is not None:  # what a program will ask is known only once it runs
                renderer = next(iter(clients.values())).renderer
                await self.player.require_prompt_fits(config, self.tasks.train[0], renderer)
            # Written once all checks have passed: what was refused can be mended and started again in the
            # same directory.
            if ranks.is_writer and not directory.config():
                directory.write_config(config_dict(config))
            player, encodings = self._episode_player(), EncodedEpisodes()
            engine, cluster = await open_until_done.enter_async_context(
                episode_engine(config, player, models, clients, directory.path, ranks, encodings)
            )
            return await self._train(directory, models, clients, engine, cluster, encodings)

    def _episode_player(self) -> EpisodePlayer:
        if self.workflow_class is not None:
            return WorkflowPlayer(
                workflow_class=self.workflow_class,
                workflow_args=self.workflow_args,
                open_workers=self.open_workers,
                contracts=contracts_of(self.workflow_class),
            )
        if self.program is not None:
            return ProgramPlayer(program=self.program)
        assert self.player is not None, "it is one of the three"
        return self.player

    async def _train(
        self,
        directory: RunDirectory,
        models: "Mapping[str, LoadedModel]",
        clients: "Mapping[str, PolicyClient]",
        engine: "EpisodeEngine",
        cluster: ClusterEngine | None,
        encodings: EncodedEpisodes,
    ) -> dict[str, Any]:
        from rllm.trainer.checkpoint import RunState, load_latest
        from rllm.trainer.imitation import expert_player
        from rllm.trainer.loop import TrainingRun, train
        from rllm.trainer.record import RunRecord
        from rllm.trainer.reference import load_references
        from rllm.trainer.samplers import require_same_model

        learner = self.make_learner(models, {name: client.publish for name, client in clients.items()})
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
            if machine is not None:
                tracker.note(machine.line())
            run = TrainingRun(
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
                play_expert=expert_player(self.config, self.demonstrate, self.player)
                if self.player is not None and self.demonstrate is not None
                else None,
                heldout_tasks=self.tasks.heldout,
                facts=await asyncio.to_thread(self.task_facts),
                validation_tasks=self.tasks.validation,
                validation_facts=self.tasks.validation_facts(),
                curriculum=self._curriculum(learner.tasks, state),
                state=state,
            )
            run.learner_thread.submit(ranks.enter_thread)
            with _frozen_heap():
                try:
                    return await train(run)
                finally:
                    tracker.close()
                    run.learner_thread.shutdown()

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

    def task_facts(self) -> TaskFacts:
        """Facts of the reported tasks. Simple policies are paid by the world, so they are compared with
        nobody whom another judge pays.
        """
        pays = self.player is not None and "reward_fn" not in self.player.env_args
        return self.tasks.facts(with_baselines=pays)

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
        self, models: "Mapping[str, LoadedModel]", publish: "Mapping[str, Publish] | None" = None
    ) -> "Learner":
        """A learner on `models`; `publish` tells the sampler of a policy that its weights have changed."""
        from rllm.trainer.critic import make_critics
        from rllm.trainer.learning import Learner
        from rllm.trainer.policies import make_policies, require_8_bits
        from rllm.trainer.row_scores import make_references
        from rllm.trainer.teacher import teacher_of

        teacher = self.teacher or teacher_of(self.config, models)
        ranks = self.ranks
        policies = make_policies(self.config, models, publish, teacher and teacher.loaded_model, ranks)
        critics = make_critics(self.config, policies, ranks)
        require_8_bits(self.config.optimizer, [*policies.backends().values(), *critics.values()])
        return Learner(
            config=self.config,
            policies=policies,
            references=make_references(self.config, policies, ranks),
            critics=critics,
            teacher=teacher,
            tasks=TaskSampler(self.tasks.train, seed=self.config.seed, purpose="tasks"),
            demonstrations=self._demonstrations(policies),
        )

    def _demonstrations(self, policies: "Policies") -> "Demonstrations | None":
        """The expert as what the warm start learns from."""
        demonstrate, noise = self.demonstrate, self.config.warm_start.noise
        if demonstrate is None:
            return None
        # Rows with images come with bytes that each process keeps for itself, so each makes all of them.
        ranks = ALONE if any(each.renderer.tokenizer.images for each in policies.values()) else self.ranks
        if self.workflow_class is not None:
            return lambda tasks, key: require_answers_fit(
                role_demonstration_samples(
                    tasks, demonstrate, policies.voice_of, noise=noise, key=key, ranks=ranks
                ),
                self.config.max_tokens_of,
            )
        (policy,) = policies.values()
        make_agent = self.player.make_agent if self.player is not None else ConversationAgent
        world = self.tasks.world
        return lambda tasks, key: require_answers_fit(
            demonstration_samples(
                tasks,
                demonstrate,
                make_agent,
                policy.renderer,
                policy.end_token_id,
                noise=noise,
                key=key,
                num_experts=NUM_WAITING_EXPERTS if world is not None and world.expert_waits else 1,
                ranks=ranks,
            ),
            self.config.max_tokens_of,
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


def _require_one_way(**by_way: Any) -> None:
    """Raises ConfigError unless what is trained is given in exactly one form."""
    ways = (("agent_class", "env_class"), ("agent_flow", "evaluator"), ("workflow_class",))
    names = tuple(name for name, value in by_way.items() if value is not None)
    if names not in ways:
        raise ConfigError(
            f"Given {', '.join(names) or 'neither agent, program nor workflow'}; give either `agent_class` "
            "and `env_class`, or `agent_flow` and `evaluator`, or `workflow_class`."
        )
