"""`AgentTrainer` and `AgentDistillTrainer`: the published constructors of a run.

    AgentTrainer(config, agent_class, env_class, train_dataset, val_dataset).train() ──► TrainResult
    AgentTrainer(config, agent_flow, evaluator, train_dataset, val_dataset).train()  ──► TrainResult
    AgentTrainer(config, workflow_class, train_dataset, val_dataset).train()         ──► TrainResult

They are importable from `rllm` and `rllm.trainer`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.agents.conversation import ConversationAgent
from rllm.build.agent_player import AgentPlayer
from rllm.build.demonstrations import Demonstrate, DemonstrateRoles
from rllm.build.distillation import DISTILL_DEFAULTS, PROMPT_DEFAULTS, over, prompt_datasets
from rllm.build.program_player import PROGRAM_DEFAULTS
from rllm.build.runs import ConfigSource, RunDatasets, RunOptions, agent_run, program_run, workflow_run
from rllm.build.workflow_player import WORKFLOW_DEFAULTS, workflow_player
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.engine.traced import Program
from rllm.environments.base import BaseEnv
from rllm.environments.prompts import PromptEnv
from rllm.environments.world import World
from rllm.errors import ConfigError
from rllm.tracking.base import Tracker
from rllm.trainer.backends.named import backend_kind, chosen_backend, published_backend, published_output
from rllm.trainer.distill import DistillationRun
from rllm.trainer.result import TrainResult
from rllm.trainer.run import RunTasks, TrainingRun
from rllm.types.callables import without_arguments
from rllm.types.task import Task
from rllm.workflows.workers import OpenWorkers
from rllm.workflows.workflow import Workflow


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

    run: TrainingRun
    _make_run: Callable[..., TrainingRun] = TrainingRun

    def __init__(
        self,
        config: ConfigSource = None,
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
        _require_one_way(
            agent_class=agent_class,
            env_class=env_class,
            agent_flow=agent_flow,
            evaluator=evaluator,
            workflow_class=workflow_class,
        )
        for name, value in (("workflow_args", workflow_args), ("open_workers", open_workers)):
            if value and workflow_class is None:
                raise ConfigError(f"`{name}` is given, but no `workflow_class` that takes it; leave it out.")
        for name, arguments in (("agent_args", agent_args), ("env_args", env_args)):
            if arguments and agent_flow is not None:
                raise ConfigError(f"`{name}` is given, but `agent_flow` takes none; put it into the tasks.")
            if arguments and workflow_class is not None:
                raise ConfigError(f"`{name}` is given, but `workflow_class` takes `workflow_args`.")
        on_cluster = backend == "ray"  # the published name of a run whose episodes are played on a cluster
        backend = ("" if on_cluster else backend) or published_backend(config)
        options = RunOptions(
            output=published_output(config) if output is None else Path(output),
            tracker=tracker,
            backend=chosen_backend(backend),
            assignments=['cluster.kind="ray"'] if on_cluster else [],
            estimators=traj_group_adv_estimator_map,
            make=self._make_run,
        )
        if backend and (kind := backend_kind(backend)):
            config = kind.translated(config, len(train_dataset))
        datasets = RunDatasets(train=train_dataset, heldout=val_dataset, validation=validation_dataset)
        expert: Any = demonstrate
        if agent_flow is not None:
            program = Program.of(agent_flow, evaluator)
            self.run = program_run(config, datasets, program, options, demonstrate=expert, world=world)
        elif workflow_class is not None:
            workflow = workflow_player(workflow_class, workflow_args, open_workers)
            self.run = workflow_run(config, datasets, workflow, options, demonstrate=expert, world=world)
        else:
            assert agent_class is not None, "it is one of the three"
            assert env_class is not None, "it comes with it"
            agent = AgentPlayer(
                agent_class=agent_class,
                env_class=env_class,
                agent_args=dict(agent_args or {}),
                env_args=dict(env_args or {}),
            )
            self.run = agent_run(config, datasets, agent, options, demonstrate=expert, world=world)

    def train(self) -> TrainResult:
        """Run, or resume, to the end; also from a notebook."""
        return self.run.train()

    async def fit_async(self) -> TrainResult:
        """`train` for programs that have an event loop of their own."""
        return await self.run.fit_async()

    @property
    def config(self) -> TrainConfig:
        return self.run.config

    @property
    def tasks(self) -> RunTasks:
        return self.run.tasks

    @property
    def output(self) -> Path:
        """The run directory."""
        return self.run.output

    @property
    def tracker(self) -> Tracker | None:
        """Looks on beside the screen; may be set until `train`."""
        return self.run.tracker

    @tracker.setter
    def tracker(self, tracker: Tracker | None) -> None:
        self.run.tracker = tracker


class AgentDistillTrainer(AgentTrainer):
    """Makes a student like its teacher where the student itself goes.

    Raises ConfigError before any work for a teacher that cannot score, or has another vocabulary.
    """

    _make_run = DistillationRun

    def __init__(
        self,
        config: ConfigSource = None,
        train_dataset: Sequence[Task | Mapping[str, Any]] = (),
        val_dataset: Sequence[Task | Mapping[str, Any]] | None = None,
        backend: str = "local",
        *,
        teacher: str | Path = "",
        agent_class: type[BaseAgent] | None = None,
        env_class: type[BaseEnv] | None = None,
        agent_flow: Any = None,
        workflow_class: Any = None,
        output: str | Path = "runs/latest",
        tracker: Tracker | None = None,
        **more: Any,
    ) -> None:
        """As `AgentTrainer`, and `teacher`: `distill.teacher`. `train_dataset` without agent, program or
        workflow: prompts, rows with `messages` or with text in `prompt`."""
        defaults = over(
            PROGRAM_DEFAULTS if agent_flow is not None else WORKFLOW_DEFAULTS if workflow_class else {},
            DISTILL_DEFAULTS,
        )
        datasets = RunDatasets(train=train_dataset, heldout=val_dataset)
        if all(each is None for each in (env_class, agent_flow, workflow_class)):
            defaults = over(defaults, PROMPT_DEFAULTS)
            agent_class, env_class = agent_class or ConversationAgent, PromptEnv
            datasets = prompt_datasets(datasets)
            self._make_run = partial(DistillationRun, has_rewards=False)
        assignments = (f"distill.teacher={teacher}",) if teacher else ()
        super().__init__(
            load_config(config, assignments, base=defaults),
            datasets.train,
            datasets.heldout,
            backend,
            agent_class=agent_class,
            env_class=env_class,
            agent_flow=agent_flow,
            workflow_class=workflow_class,
            output=output,
            tracker=tracker,
            **more,
        )


def _require_one_way(**by_way: Any) -> None:
    """Raises ConfigError unless what is trained is given in exactly one form."""
    ways = (("agent_class", "env_class"), ("agent_flow", "evaluator"), ("workflow_class",))
    names = tuple(name for name, value in by_way.items() if value is not None)
    if names not in ways:
        raise ConfigError(
            f"Given {', '.join(names) or 'neither agent, program nor workflow'}; give either `agent_class` "
            "and `env_class`, or `agent_flow` and `evaluator`, or `workflow_class`."
        )
