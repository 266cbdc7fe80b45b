"""`AgentTrainer`: an agent, tasks and a configuration in, a run directory with a better model out.

    AgentTrainer(config, agent_class, env_class, train_dataset, val_dataset).train() ──► TrainResult
    AgentTrainer(config, agent_flow, evaluator, train_dataset, val_dataset).train()  ──► TrainResult

It checks everything that can be checked, takes the run directory, goes back to its last checkpoint, and hands
the parts to `rllm.trainer.loop.train`.
"""

import asyncio
import gc
import importlib.util
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.agents.base import BaseAgent
from rllm.agents.conversation import ConversationAgent
from rllm.agents.flow import as_flow
from rllm.config.loader import config_dict, load_config
from rllm.config.schema import TrainConfig
from rllm.data.sampler import TaskSampler
from rllm.data.tasks import tasks_of
from rllm.environments.base import BaseEnv, reset_env
from rllm.errors import ConfigError, MissingExtraError
from rllm.rewards.evaluator import as_evaluator
from rllm.store.episodes import EpisodeStore
from rllm.store.files import require_free_space
from rllm.store.run_directory import RunDirectory
from rllm.tracking.base import Tracker, Trackers
from rllm.tracking.jsonl import JsonlTracker, read_metrics, truncate_after
from rllm.trainer.programs import PROGRAM_DEFAULTS, program_engine, require_program_config
from rllm.trainer.warm_start import Demonstrate, answer_end
from rllm.types.task import Task

if TYPE_CHECKING:
    from rllm.engine.attempts import EpisodeEngine
    from rllm.inference.local.client import LocalClient
    from rllm.models.directory import LoadedModel
    from rllm.trainer.loop import Learner

PHASES = ("untrained", "warm_start", "before", "train", "after")
"""In the order of a run."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainResult:
    """Where a finished run is and what it came to."""

    directory: Path
    summary: dict[str, Any]
    """`untrained`, `before` and `after` (each `success`, `greedy` and their intervals),
    `wall_s`, `phase_s`."""

    @property
    def model_path(self) -> Path:
        """The trained model, in Hugging Face format."""
        return self.directory / "model"


class AgentTrainer:
    """Trains a model to act as `agent_class` in `env_class`, or inside the program `agent_flow`.

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
        workflow_class: type | None = None,
        validation_dataset: Sequence[Task | dict[str, Any]] | None = None,
        demonstrate: Demonstrate | None = None,
        output: str | Path = "runs/latest",
        tracker: Tracker | None = None,
    ) -> None:
        """
        `train_dataset`: tasks as dicts of environment arguments, each with a `task_id`; for a program, Tasks
        or dicts with an id and an instruction. `agent_flow`: a program, and `evaluator` what judges it: made
        by the decorators, plain functions, objects, or names such as `file.py:solve`. `val_dataset`:
        held-out tasks, reported before and after; the training tasks where None. `validation_dataset`:
        evaluated while training, where `evaluation.every_steps` is set; `val_dataset` where None.
        `demonstrate`: the expert of the warm start. `output`: the run directory; a run that is already there
        goes on.
        """
        if backend != "local":
            raise ConfigError(
                f"There is no training backend `{backend}`; "
                "the one there is, is `local` (torch in this process)."
            )
        _require_one_way(agent_class, env_class, agent_flow, evaluator, workflow_class)
        self.output = Path(output)
        self.flow = self.evaluator = None
        to_tasks: Callable[..., list[Any]] = list
        if agent_flow is not None:
            self.flow, self.evaluator = as_flow(agent_flow), as_evaluator(evaluator)
            named = {"task": {"environment": self.flow.name, "agent": self.flow.name}}
            self.config = load_config(config, base={**PROGRAM_DEFAULTS, **named})
            require_program_config(self.config, agent_args, env_args)
            to_tasks = tasks_of
        else:
            self.config = load_config(config)
            if self.config.rollout.max_tokens_per_turn == 0:
                raise ConfigError(
                    "`rollout.max_tokens_per_turn` is 0; an agent needs at least 1 to answer with."
                )
        self.agent_class, self.agent_args = agent_class, dict(agent_args or {})
        self.env_class, self.env_args = (
            env_class,
            {**dict(env_args or {}), **self.config.task.environment_args},
        )
        self.train_tasks: list[Any] = to_tasks(train_dataset)
        heldout = self.train_tasks if val_dataset is None else to_tasks(val_dataset)
        self.heldout_tasks = heldout[: self.config.evaluation.num_tasks]
        validation = heldout if validation_dataset is None else to_tasks(validation_dataset)
        self.validation_tasks = validation[: self.config.evaluation.every_num_tasks]
        self.demonstrate = demonstrate
        self.tracker = tracker
        if self.config.warm_start.steps and demonstrate is None:
            raise ConfigError(
                f"`warm_start.steps` is {self.config.warm_start.steps} but there is no expert to imitate; "
                "set it to 0, or give `demonstrate`."
            )
        if not self.train_tasks:
            raise ConfigError("`train_dataset` is empty; give at least one task.")

    def train(self) -> TrainResult:
        """Run, or resume, to the end."""
        return asyncio.run(self.fit_async())

    async def fit_async(self) -> TrainResult:
        """`train` for programs that have an event loop of their own."""
        with RunDirectory.create_or_open(self.output) as directory:
            self.require_same_config(directory)
            summary = directory.summary()
            if summary is None:
                summary = await self._run(directory)
                directory.write_summary(summary)
            if not directory.curve_path.exists():
                _draw_curve(directory, summary)
            return TrainResult(directory=self.output, summary=summary)

    def require_same_config(self, directory: RunDirectory) -> None:
        """A run keeps its configuration for life: anything else would make its curve a mixture."""
        recorded = directory.config()
        if not recorded:
            return
        # Read as a configuration, so that one from before a key existed has its default.
        if differing := sorted(_differences(config_dict(load_config(recorded)), config_dict(self.config))):
            raise ConfigError(
                f"{self.output} holds a run with another configuration ({'; '.join(differing[:4])}); start a "
                "new one with another output directory, or repeat the old values to go on."
            )

    async def _run(self, directory: RunDirectory) -> dict[str, Any]:
        try:
            from rllm.inference.local.client import LocalClient
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "torch", "train") from error
        if importlib.util.find_spec("matplotlib") is None:  # wanted at the very end: better missed now
            raise MissingExtraError("matplotlib", "train")
        config = self.config
        if not directory.config():
            self._create_initial_model(directory)
        loaded = self.load_initial_model(directory)
        bytes_each = 4 * loaded.num_parameters
        require_free_space(
            directory.path,
            bytes_each * (3 * (config.checkpoint.keep + 1) + 2)
            + 2_000 * config.derived()["episodes_in_total"],
            "checkpoints, model and recorded episodes",
        )
        client = LocalClient(
            loaded,
            num_slots=config.inference.num_slots,
            max_context=config.inference.max_context,
            max_prefill_tokens=config.inference.max_prefill_tokens,
            lockstep=config.inference.lockstep,
        )
        try:
            self._require_prompt_fits(client.renderer)
            # Written once all checks have passed: what was refused can be mended and started again in the
            # same directory.
            if not directory.config():
                directory.write_config(config_dict(config))
            async with self._engine(directory, client) as engine:
                summary = await self._train(directory, loaded, client, engine)
        finally:
            await client.close()
        return summary

    @asynccontextmanager
    async def _engine(self, directory: RunDirectory, client: "LocalClient") -> "AsyncIterator[EpisodeEngine]":
        """What plays the episodes."""
        config = self.config
        if self.flow is not None and self.evaluator is not None:
            ledger = directory.path / "gateway"
            async with program_engine(config, self.flow, self.evaluator, client, ledger) as engine:
                yield engine
            return
        from rllm.engine.agent_execution import AgentExecutionEngine

        assert self.agent_class is not None, "it is one of the two"
        assert self.env_class is not None, "it is one of the two"
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
            max_workers=config.rollout.env_workers,
            gamma=config.algorithm.gamma,
            seed=config.seed,
        )

    async def _train(
        self,
        directory: RunDirectory,
        loaded: "LoadedModel",
        client: "LocalClient",
        engine: "EpisodeEngine",
    ) -> dict[str, Any]:
        from rllm.models.directory import save_model
        from rllm.trainer.checkpoint import RunState, load_latest
        from rllm.trainer.loop import TrainingRun, train

        learner = self.make_learner(loaded, client.publish)
        backend = learner.backend
        state = load_latest(directory.checkpoints_path, backend) or RunState()
        backend.publish_weights()
        _take_back(directory, state)
        with EpisodeStore.open(directory.store_path) as store:
            store.rollback_to(state.steps - 1)
            trackers: list[Tracker] = [JsonlTracker(directory.metrics_path)]
            if self.tracker is not None:
                trackers.append(self.tracker)
            tracker = Trackers(trackers)
            run = TrainingRun(
                learner=learner,
                directory=directory,
                store=store,
                tracker=tracker,
                client=client,
                engine=engine,
                heldout_tasks=self.heldout_tasks,
                validation_tasks=self.validation_tasks,
                state=state,
                save_model=lambda: save_model(loaded, directory.model_path),
            )
            gc.collect()
            gc.freeze()  # tasks and modules stay for the whole run: looking through them again gains nothing
            try:
                return await train(run)
            finally:
                gc.unfreeze()
                tracker.close()
                run.learner_thread.shutdown()

    def make_learner(self, loaded: "LoadedModel", publish: Callable[[int], None]) -> "Learner":
        """What learns on `loaded`; `publish` tells a sampler of the same weights that they have changed."""
        from rllm.rendering.chat import ChatRenderer
        from rllm.trainer.backends.torch import TorchBackend
        from rllm.trainer.loop import Learner

        optimizer = self.config.optimizer
        backend = TorchBackend(
            loaded.model,
            publish=publish,
            optimizer=optimizer.name,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
            micro_batch_tokens=optimizer.micro_batch_tokens,
        )
        renderer = ChatRenderer(loaded.tokenizer)
        return Learner(
            config=self.config,
            backend=backend,
            tasks=TaskSampler(self.train_tasks, seed=self.config.seed, purpose="tasks"),
            make_agent=self._make_agent,
            demonstrate=self.demonstrate,
            renderer=renderer,
            end_token_id=answer_end(renderer, loaded.end_token_ids),
        )

    def _make_agent(self) -> BaseAgent:
        return ConversationAgent() if self.agent_class is None else self.agent_class(**self.agent_args)

    def load_initial_model(self, directory: RunDirectory) -> "LoadedModel":
        """The model that the run starts from, on as many threads as the run works with."""
        from rllm.models.devices import use_threads
        from rllm.models.directory import load_model

        use_threads(self.config.threads)
        builtin = ":" in self.config.model.path
        path = directory.path / "initial_model" if builtin else Path(self.config.model.path)
        return load_model(path, device=self.config.model.device)

    def _create_initial_model(self, directory: RunDirectory) -> None:
        """A built-in model is made inside the run, so that the run is all that is needed to repeat it."""
        kind, separator, preset = self.config.model.path.partition(":")
        if not separator:
            return
        if kind != "builtin":
            raise ConfigError(
                f"`model.path` is {self.config.model.path!r}; "
                "write builtin:tiny, builtin:small or a directory."
            )
        from rllm.models.builtin import create_model

        path = directory.path / "initial_model"
        shutil.rmtree(path, ignore_errors=True)  # of a start that was refused, perhaps with another seed
        create_model(path, preset, self.config.seed)

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
        needed = len(renderer.render(agent.chat_completions)) + self.config.rollout.max_tokens_per_turn
        if needed > self.config.inference.max_context:
            raise ConfigError(
                f"`inference.max_context` is {self.config.inference.max_context}, but the first prompt and "
                f"its answer take {needed} tokens; set it to {needed} times the expected turns, or shorten "
                "the prompt."
            )


def _require_one_way(
    agent_class: Any, env_class: Any, agent_flow: Any, evaluator: Any, workflow_class: Any
) -> None:
    """Raises ConfigError unless an agent is given in exactly one form."""
    if workflow_class is not None:
        raise ConfigError(
            "`workflow_class` is not supported yet; give `agent_flow` and `evaluator`, or `agent_class` and "
            "`env_class`."
        )
    classes = {"agent_class": agent_class, "env_class": env_class}
    program = {"agent_flow": agent_flow, "evaluator": evaluator}
    given = [name for name, value in (classes | program).items() if value is not None]
    if given not in (list(classes), list(program)):
        raise ConfigError(
            f"Given {', '.join(given) or 'neither agent nor program'}; give either `agent_class` and "
            "`env_class`, or `agent_flow` and `evaluator`."
        )


def _take_back(directory: RunDirectory, state: Any) -> None:
    """Remove what was logged beyond the checkpoint that the run goes on from."""
    done = [name for name in ("untrained", "before", "after") if name in state.reports]
    if not directory.metrics_path.exists():
        return
    order = {name: index for index, name in enumerate(PHASES)}
    last = {"warm_start": state.warm_steps - 1, "train": state.steps - 1, **dict.fromkeys(done, 0)}
    reached = [
        line for line in read_metrics(directory.metrics_path) if line["step"] <= last.get(line["phase"], -1)
    ]
    if reached:
        end = max(reached, key=lambda line: (order[line["phase"]], line["step"]))
        truncate_after(directory.metrics_path, PHASES, end["phase"], end["step"])
    else:
        directory.metrics_path.unlink()


def _draw_curve(directory: RunDirectory, summary: dict[str, Any]) -> None:
    from rllm.tracking.picture import draw_learning_curve

    draw_learning_curve(read_metrics(directory.metrics_path), summary, directory.curve_path)


def _differences(recorded: Mapping[str, Any], mine: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in recorded.keys() | mine.keys():
        old, new = recorded.get(key), mine.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}: {old!r} there, {new!r} here")
    return found
