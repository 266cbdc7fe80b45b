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
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.agents.base import BaseAgent
from rllm.agents.conversation import ConversationAgent
from rllm.agents.flow import as_flow
from rllm.config.callables import name_of
from rllm.config.loader import config_dict, load_config
from rllm.config.schema import TrainConfig
from rllm.data.curriculum import Curriculum
from rllm.data.sampler import TaskSampler
from rllm.data.tasks import argument_mixtures, tasks_of, with_defaults
from rllm.engine.event_loop import run
from rllm.environments.base import BaseEnv, reset_env
from rllm.environments.world import World, task_content
from rllm.errors import ConfigError
from rllm.eval.task_facts import TaskFacts, also_in, task_facts
from rllm.rewards.evaluator import as_evaluator
from rllm.store.episodes import EpisodeStore
from rllm.store.files import require_free_space
from rllm.store.run_directory import RunDirectory
from rllm.tracking.base import Tracker, Trackers, require_tracker
from rllm.tracking.console import on_screen
from rllm.tracking.jsonl import JsonlTracker, read_metrics
from rllm.trainer.extras import require_training_packages
from rllm.trainer.programs import (
    PROGRAM_DEFAULTS,
    program_engine,
    require_one_policy,
    require_program_config,
)
from rllm.trainer.resuming import (
    require_episodes,
    require_record,
    require_same_config,
    require_same_tasks,
    settle_muon_dtype,
    take_back,
)
from rllm.trainer.warm_start import (
    Demonstrate,
    DemonstrateRoles,
    demonstration_samples,
    role_demonstration_samples,
)
from rllm.trainer.workflows import WORKFLOW_DEFAULTS, require_workflow_config, workflow_engine
from rllm.types.task import Task, task_id_of
from rllm.workflows.workflow import Workflow

if TYPE_CHECKING:
    from rllm.engine.attempts import EpisodeEngine
    from rllm.inference.local.client import LocalClient
    from rllm.models.directory import LoadedModel
    from rllm.trainer.checkpoint import RunState
    from rllm.trainer.learning import Demonstrations, Learner
    from rllm.trainer.policies import Policies, Publish
    from rllm.trainer.teacher import Teacher


_TRIES = 4
"""Tasks that are looked through for each one that is evaluated while training: reported ones are left out."""
_LOOKED_AT = 256
"""Training tasks, the first that are drawn, that are looked through for reported ones where a world makes
them: its splits are apart by a hash, and to make them all would take minutes."""
_NAMED = 5
log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainResult:
    """Where a finished run is and what it came to."""

    directory: Path
    summary: dict[str, Any]
    """`untrained`, `before` and `after` (each `success`, `greedy` and their intervals),
    `wall_s`, `phase_s`."""

    @property
    def model_path(self) -> Path:
        """The trained model, in Hugging Face format; of a run with one policy."""
        return self.directory / "model"

    def model_path_of(self, policy: str) -> Path:
        """The model of one of several policies."""
        return self.directory / "models" / policy


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
        backend: str = "local",
        *,
        agent_class: type[BaseAgent] | None = None,
        env_class: type[BaseEnv] | None = None,
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        agent_flow: Any = None,
        evaluator: Any = None,
        workflow_class: type[Workflow] | None = None,
        workflow_args: Mapping[str, Any] | None = None,
        traj_group_adv_estimator_map: Mapping[str, str] | None = None,
        validation_dataset: Sequence[Task | dict[str, Any]] | None = None,
        demonstrate: Demonstrate | DemonstrateRoles | None = None,
        world: World | None = None,
        output: str | Path = "runs/latest",
        tracker: Tracker | None = None,
    ) -> None:
        """
        `train_dataset`: tasks as dicts of environment arguments, each with a `task_id`; for a program, Tasks
        or dicts with an id and an instruction. `agent_flow`: a program, and `evaluator` what judges it: made
        by the decorators, plain functions, objects, or names such as `file.py:solve`. `workflow_class`: made
        anew for each attempt with `workflow_args`. `traj_group_adv_estimator_map`: role -> advantage
        estimator, as `roles.ROLE.estimator`. `val_dataset`: held-out tasks, reported before and after; the
        training tasks where None. `validation_dataset`: evaluated while training, every
        `evaluation.every_steps`; what `val_dataset` has beyond `evaluation.num_tasks` where None.
        `demonstrate`: the expert of the warm start; for a workflow, of all its roles. `world`: what knows
        which tasks are one instance, and what simple policies come to; without one, tasks that are the same
        but for their names. `output`: the run directory; a run that is already there goes on. `tracker`:
        where numbers go as well as to `metrics.jsonl` and the screen.
        """
        if backend != "local":
            raise ConfigError(
                f"There is no training backend `{backend}`; "
                "the one there is, is `local` (torch in this process)."
            )
        _require_one_way(
            agent_class=agent_class,
            env_class=env_class,
            agent_flow=agent_flow,
            evaluator=evaluator,
            workflow_class=workflow_class,
        )
        self.output = Path(output)
        self.flow = self.evaluator = None
        if workflow_args and workflow_class is None:
            raise ConfigError("`workflow_args` is given, but no `workflow_class` that takes it.")
        self.workflow_class, self.workflow_args = workflow_class, dict(workflow_args or {})
        to_tasks: Callable[..., Sequence[Any]] = _as_sequence
        if agent_flow is not None:
            self.flow, self.evaluator = as_flow(agent_flow), as_evaluator(evaluator)
            named = {"task": {"environment": self.flow.name, "agent": self.flow.name}}
            self.config = load_config(config, base={**PROGRAM_DEFAULTS, **named})
            require_program_config(self.config, agent_args, env_args)
            to_tasks = tasks_of
        elif workflow_class is not None:
            named = {"task": {"environment": name_of(workflow_class), "agent": name_of(workflow_class)}}
            self.config = load_config(config, base={**WORKFLOW_DEFAULTS, **named})
            require_workflow_config(self.config, workflow_class, agent_args, env_args)
        else:
            self.config = load_config(config)
            require_one_policy(self.config, "agent_class")
            if self.config.rollout.max_tokens_per_turn == 0:
                raise ConfigError(
                    "`rollout.max_tokens_per_turn` is 0; an agent needs at least 1 to answer with."
                )
        self.config = _with_estimators(self.config, traj_group_adv_estimator_map or {})
        self.agent_class, self.agent_args = agent_class, dict(agent_args or {})
        shared = self.config.task.environment_args
        own = [{**shared, **mixture} for mixture in argument_mixtures(self.config.task.train_args)]
        self.train_tasks = with_defaults(to_tasks(train_dataset), own)
        self.env_class, self.env_args = env_class, dict(env_args or {})
        heldout = self.train_tasks if val_dataset is None else with_defaults(to_tasks(val_dataset), [shared])
        self.heldout_tasks = heldout[: self.config.evaluation.num_tasks]
        # What is watched while training may be tuned on, so it is never what is reported.
        end = len(self.heldout_tasks) + _TRIES * self.config.evaluation.every_num_tasks
        spare = () if val_dataset is None else heldout[len(self.heldout_tasks) : end]
        validation = spare
        if validation_dataset is not None:
            validation = with_defaults(to_tasks(validation_dataset), [shared])
        self.world = world
        self.validation_tasks = self._unreported(validation)[: self.config.evaluation.every_num_tasks]
        self._require_validation_tasks(len(validation))
        self.demonstrate: Any = demonstrate
        """DemonstrateRoles for a workflow, otherwise Demonstrate."""
        require_tracker(tracker)
        self.tracker = tracker
        self.teacher: Teacher | None = None
        """What `distill.teacher` names, once a run has loaded it."""
        if self.config.warm_start.steps and demonstrate is None and not self.config.distill.teacher:
            raise ConfigError(
                f"`warm_start.steps` is {self.config.warm_start.steps} but there is no expert to imitate; "
                "set it to 0, or give `demonstrate`."
            )
        if not self.train_tasks:
            raise ConfigError("`train_dataset` is empty; give at least one task.")

    def train(self) -> TrainResult:
        """Run, or resume, to the end; also from a notebook."""
        return run(self.fit_async())

    async def fit_async(self) -> TrainResult:
        """`train` for programs that have an event loop of their own."""
        with RunDirectory.create_or_open(self.output) as directory:
            self.require_same_config(directory)
            summary = directory.summary()
            if summary is None:
                require_record(directory, directory.config_path, directory.store_path, directory.metrics_path)
                summary = await self._run(directory)
                directory.write_summary(summary)
            if not directory.curve_path.exists():
                self.draw_curve(directory, summary)
            return TrainResult(directory=self.output, summary=summary)

    def draw_curve(self, directory: RunDirectory, summary: dict[str, Any]) -> None:
        """The picture of a finished run."""
        from rllm.tracking.picture import draw_learning_curve

        draw_learning_curve(read_metrics(directory.metrics_path), summary, directory.curve_path)

    def as_shown(self, tracker: Tracker) -> Tracker:
        """`tracker` as it hears of this kind of run."""
        return tracker

    def require_same_config(self, directory: RunDirectory) -> None:
        """Raises ConfigError for a run with another configuration."""
        require_same_config(directory, self.config)

    async def _run(self, directory: RunDirectory) -> dict[str, Any]:
        require_training_packages()
        from rllm.trainer.learning import require_algorithm
        from rllm.trainer.policies import create_initial_models, load_initial_models, make_client
        from rllm.trainer.teacher import teacher_of

        config = self.config
        require_algorithm(config)
        if not directory.config():
            create_initial_models(config, directory.path)
        models = load_initial_models(config, directory.path)
        settle_muon_dtype(config.optimizer, config.model.device)
        self.teacher = await asyncio.to_thread(teacher_of, config, models)  # it may have to be asked
        critics = 1 if config.critic.trunk == "separate" else 0
        bytes_each = 4 * (1 + critics) * sum(each.num_parameters for each in models.values())
        kept = 1 if config.algorithm.kl_coef and config.warm_start.steps else 0  # the reference
        require_free_space(
            directory.path,
            bytes_each * (3 * (config.checkpoint.keep + 2) + 2 + kept)
            + 2_000 * config.derived()["most_episodes_in_total"],
            "checkpoints, model and recorded episodes",
        )
        async with AsyncExitStack() as open_until_done:
            clients: dict[str, LocalClient] = {}
            for name, loaded in models.items():
                clients[name] = make_client(config, loaded)
                open_until_done.push_async_callback(clients[name].close)
            self._require_prompt_fits(next(iter(clients.values())).renderer)
            # Written once all checks have passed: what was refused can be mended and started again in the
            # same directory.
            if not directory.config():
                directory.write_config(config_dict(config))
            engine = await open_until_done.enter_async_context(self._engine(directory, clients))
            return await self._train(directory, models, clients, engine)

    @asynccontextmanager
    async def _engine(
        self, directory: RunDirectory, clients: "Mapping[str, LocalClient]"
    ) -> "AsyncIterator[EpisodeEngine]":
        """What plays the episodes."""
        config = self.config
        if self.workflow_class is not None:
            yield workflow_engine(config, self.workflow_class, self.workflow_args, clients)
            return
        (client,) = clients.values()
        if self.flow is not None and self.evaluator is not None:
            ledger = directory.path / "gateway"
            async with program_engine(config, self.flow, self.evaluator, client, ledger) as engine:
                yield engine
            return
        from rllm.engine.agent_execution import AgentExecutionEngine

        assert self.agent_class is not None, "it is one of the three"
        assert self.env_class is not None, "it is one of the three"
        yield AgentExecutionEngine(
            self.agent_class,
            self.env_class,
            self.agent_args,
            self.env_args,
            rollout_engine=client,
            n_parallel_agents=config.rollout.num_parallel,
            max_steps=config.rollout.max_turns,
            trajectory_timeout=config.rollout.episode_timeout_s,
            step_timeout_s=config.rollout.step_timeout_s,
            retry_limit=config.rollout.retry_limit,
            max_failed_fraction=config.rollout.max_failed_fraction,
            max_workers=config.rollout.env_workers,
            max_prompt_length=0,  # `inference.max_context` is the limit
            max_response_length=0,
            requires_ids=True,
            stored=True,
            gamma=config.algorithm.gamma,
            seed=config.seed,
        )

    async def _train(
        self,
        directory: RunDirectory,
        models: "Mapping[str, LoadedModel]",
        clients: "Mapping[str, LocalClient]",
        engine: "EpisodeEngine",
    ) -> dict[str, Any]:
        from rllm.trainer.checkpoint import RunState, load_latest, remove_old
        from rllm.trainer.loop import TrainingRun, train
        from rllm.trainer.reference import load_references

        learner = self.make_learner(models, {name: client.publish for name, client in clients.items()})
        state = load_latest(directory.checkpoints_path, learner.backends()) or RunState()
        learner.kl_coefs = state.kl_coefs
        if learner.references and 0 < state.warm_steps == self.config.warm_start.steps:
            load_references(directory.path, learner.references, learner.policies)
        learner.policies.publish()
        take_back(directory, state)
        remove_old(directory.checkpoints_path, state, self.config.checkpoint.keep)
        with EpisodeStore.open(directory.store_path) as store, ExitStack() as open_while_training:
            require_episodes(store, state)
            require_same_tasks(store, {"training": self.train_tasks, "held-out": self.heldout_tasks})
            store.rollback_to(state.steps - 1)
            view = open_while_training.enter_context(
                on_screen(self.tracker, self.config.steps, f"rllm train {self.output.name}")
            )
            tracker = Trackers([JsonlTracker(directory.metrics_path), self.as_shown(view)])
            tracker.watch(engine)
            run = TrainingRun(
                learner=learner,
                directory=directory,
                store=store,
                tracker=tracker,
                clients=clients,
                engine=engine,
                heldout_tasks=self.heldout_tasks,
                facts=await asyncio.to_thread(self.task_facts),
                validation_tasks=self.validation_tasks,
                validation_facts=task_facts(self.validation_tasks, self.world, with_baselines=False),
                curriculum=self._curriculum(learner.tasks, state),
                state=state,
            )
            gc.collect()
            gc.freeze()  # tasks and modules stay for the whole run: looking through them again gains nothing
            try:
                return await train(run)
            finally:
                gc.unfreeze()
                tracker.close()
                run.learner_thread.shutdown()

    def _unreported(self, tasks: Sequence[Any]) -> Sequence[Any]:
        """Those of `tasks` that are instances of no reported one. Two splits of a world share none."""
        makes_splits = self.world is not None and self.world.identity is not task_content
        if not tasks or (makes_splits and self.config.evaluation.split == "test"):
            return tasks
        facts = task_facts(tasks, self.world, with_baselines=False)
        reported = set(also_in(facts, self.heldout_tasks, self.world))
        return [task for place, task in enumerate(tasks) if task_id_of(task, place) not in reported]

    def _require_validation_tasks(self, num_given: int) -> None:
        """Raises ConfigError where evaluations between are asked for and there is nothing to evaluate on."""
        evaluation = self.config.evaluation
        if self.validation_tasks or (evaluation.every_steps <= 0 and not evaluation.patience):
            return
        key = "patience" if evaluation.patience else "every_steps"
        lack = f"all {num_given} that there are, are reported" if num_given else "none were given"
        raise ConfigError(
            f"`evaluation.{key}` is {getattr(evaluation, key)}, but there are no validation tasks: {lack}. "
            "Give `validation_dataset`, or more held-out tasks than `evaluation.num_tasks`, which is "
            f"{evaluation.num_tasks}; or leave the key out."
        )

    def task_facts(self) -> TaskFacts:
        """Of the reported tasks. Simple policies are paid by the world, so they are compared with nobody whom
        another judge pays."""
        pays = self.env_class is not None and "reward_fn" not in self.env_args
        facts = task_facts(self.heldout_tasks, self.world, with_baselines=pays)
        trained = TaskSampler(self.train_tasks, seed=self.config.seed, purpose="tasks")
        is_listed = self.world is None or (self.world.identity is task_content and not self.world.draws)
        count = len(self.train_tasks) if is_listed else min(_LOOKED_AT, len(self.train_tasks))
        known = also_in(facts, trained.batch(0, count), self.world)
        if known and len(known) < len(facts.instances):
            log.warning(
                "%d of the %d tasks that are to be held out are trained on as well, such as %s: they are "
                "counted and not called held-out. Take them out of either.",
                len(known),
                len(facts.instances),
                ", ".join(known[:_NAMED]),
            )
        return replace(facts, trained_on=known)

    def _curriculum(self, tasks: TaskSampler[Any], state: "RunState") -> Curriculum[Any]:
        chosen = self.config.curriculum
        curriculum = Curriculum(
            tasks,
            seed=self.config.seed,
            replay_fraction=chosen.replay_fraction,
            capacity=chosen.capacity,
        )
        if state.curriculum:
            curriculum.restore(state.curriculum)
        return curriculum

    def make_learner(
        self, models: "Mapping[str, LoadedModel]", publish: "Mapping[str, Publish] | None" = None
    ) -> "Learner":
        """What learns on `models`; `publish` tells the sampler of a policy that its weights have changed."""
        from rllm.trainer.critic import make_critics
        from rllm.trainer.learning import Learner
        from rllm.trainer.policies import make_policies
        from rllm.trainer.scored import make_references
        from rllm.trainer.teacher import teacher_of

        teacher = self.teacher or teacher_of(self.config, models)
        policies = make_policies(self.config, models, publish, teacher and teacher.loaded)
        return Learner(
            config=self.config,
            policies=policies,
            references=make_references(self.config, policies),
            critics=make_critics(self.config, policies),
            teacher=teacher,
            tasks=TaskSampler(self.train_tasks, seed=self.config.seed, purpose="tasks"),
            demonstrations=self._demonstrations(policies),
        )

    def _demonstrations(self, policies: "Policies") -> "Demonstrations | None":
        """The expert as what the warm start learns from."""
        demonstrate, noise = self.demonstrate, self.config.warm_start.noise
        if demonstrate is None:
            return None
        if self.workflow_class is not None:
            return lambda tasks, key: role_demonstration_samples(
                tasks, demonstrate, policies.voice_of, noise=noise, key=key
            )
        (policy,) = policies.values()
        return lambda tasks, key: demonstration_samples(
            tasks,
            demonstrate,
            self._make_agent,
            policy.renderer,
            policy.end_token_id,
            noise=noise,
            key=key,
        )

    def _make_agent(self) -> BaseAgent:
        return ConversationAgent() if self.agent_class is None else self.agent_class(**self.agent_args)

    def _require_prompt_fits(self, renderer: Any) -> None:
        """Raises ConfigError when the context cannot even hold the first prompt and its answer.

        What a program will ask is known only once it runs.
        """
        if self.env_class is None:
            return
        env = self.env_class.from_dict({**self.train_tasks[0], **self.env_args})
        try:
            observation, info = reset_env(env, 0)
        finally:
            env.close()
        agent = self._make_agent()
        agent.update_from_env(observation, 0.0, False, info)
        prompt = renderer.render(agent.chat_completions, agent.tool_schemas)
        needed = len(prompt) + self.config.rollout.max_tokens_per_turn
        if needed > self.config.inference.max_context:
            raise ConfigError(
                f"`inference.max_context` is {self.config.inference.max_context}, but the first prompt and "
                f"its answer take {needed} tokens; set it to {needed} times the expected turns, or shorten "
                "the prompt."
            )


def _as_sequence(tasks: Iterable[Any]) -> Sequence[Any]:
    """As it is: a sequence may make its tasks when they are played."""
    return tasks if isinstance(tasks, Sequence) else list(tasks)


def _require_one_way(**given: Any) -> None:
    """Raises ConfigError unless what is trained is given in exactly one form."""
    ways = (("agent_class", "env_class"), ("agent_flow", "evaluator"), ("workflow_class",))
    names = tuple(name for name, value in given.items() if value is not None)
    if names not in ways:
        raise ConfigError(
            f"Given {', '.join(names) or 'neither agent, program nor workflow'}; give either `agent_class` "
            "and `env_class`, or `agent_flow` and `evaluator`, or `workflow_class`."
        )


def _with_estimators(config: TrainConfig, estimators: Mapping[str, str]) -> TrainConfig:
    for role, estimator in estimators.items():
        configured = config.role(role).estimator
        if configured not in ("", estimator):
            raise ConfigError(
                f"`roles.{role}.estimator` is {configured!r}, but `traj_group_adv_estimator_map` says "
                f"{estimator!r}; give one of them."
            )
    return load_config(config, (f"roles.{role}.estimator={name}" for role, name in estimators.items()))
