"""`AgentDistillTrainer`: a student, a teacher and tasks in, a run directory with a student like its teacher.

    warm_start.steps   the teacher plays ──► its rows ──► cross-entropy               forward KL
    steps              the student plays ──► the teacher scores ──► policy gradient   reverse KL

It is an `AgentTrainer` whose advantages come from a teacher (`algorithm.estimator = "teacher"`), so the loop,
the engines, checkpoints and everything else of a run are those of `rllm train`. Tasks are an environment's, a
program's or a workflow's; without any of them they are prompts, answered once.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.agents.base import BaseAgent
from rllm.agents.conversation import ConversationAgent
from rllm.config.distill import PROMPTS, TEACHER
from rllm.config.loader import load_config
from rllm.config.policies import ONLY_POLICY
from rllm.config.schema import TrainConfig
from rllm.environments.base import BaseEnv
from rllm.environments.prompts import PromptEnv, prompt_tasks
from rllm.errors import ConfigError
from rllm.store.run_directory import RunDirectory
from rllm.tracking.base import Metric, Tracker, Trackers
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.programs import PROGRAM_DEFAULTS
from rllm.trainer.resuming import PHASES
from rllm.trainer.workflows import WORKFLOW_DEFAULTS
from rllm.types.sample import TrainingSample
from rllm.types.task import Task, task_id_of

if TYPE_CHECKING:
    from rllm.engine.attempts import EpisodeEngine
    from rllm.inference.local.client import LocalClient
    from rllm.models.directory import LoadedModel
    from rllm.trainer.learning import Learner
    from rllm.trainer.policies import Publish
    from rllm.trainer.teacher import Teacher

DISTILL_DEFAULTS: dict[str, Any] = {
    "algorithm": {"estimator": TEACHER},
    "warm_start": {"steps": 0, "noise": 0.0},
    "rollout": {"temperature": 1.0, "final_temperature": 0.0},
}
"""Where a distillation differs from the defaults of `TrainConfig`, and from a benchmark's configuration."""
PROMPT_DEFAULTS: dict[str, Any] = {
    "task": {"environment": PROMPTS, "agent": "conversation"},
    "inference": {"max_context": 1024},
    "rollout": {"max_turns": 1, "max_tokens_per_turn": 256, "group_size": 1},
}
"""The same for prompts."""


class AgentDistillTrainer(AgentTrainer):
    """Makes a student like its teacher where the student itself goes.

    Raises ConfigError before any work for a teacher that cannot score, or has another vocabulary.
    """

    def __init__(
        self,
        config: TrainConfig | Mapping[str, Any] | str | Path | Iterable[str] | None = None,
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
        self.has_rewards = any(each is not None for each in (env_class, agent_flow, workflow_class))
        defaults = over(
            PROGRAM_DEFAULTS if agent_flow is not None else WORKFLOW_DEFAULTS if workflow_class else {},
            DISTILL_DEFAULTS,
        )
        if not self.has_rewards:
            defaults = over(defaults, PROMPT_DEFAULTS)
            agent_class, env_class = agent_class or ConversationAgent, PromptEnv
            train_dataset = prompt_tasks(_plain(train_dataset), dataset="`train_dataset`")
            if val_dataset is not None:
                val_dataset = prompt_tasks(_plain(val_dataset), dataset="`val_dataset`")
        assignments = (f"distill.teacher={teacher}",) if teacher else ()
        super().__init__(
            load_config(config, assignments, base=defaults),
            train_dataset,  # pyright: ignore[reportArgumentType]
            val_dataset,  # pyright: ignore[reportArgumentType]
            backend,
            agent_class=agent_class,
            env_class=env_class,
            agent_flow=agent_flow,
            workflow_class=workflow_class,
            output=output,
            tracker=tracker,
            **more,
        )
        if not self.config.distill.teacher:
            raise ConfigError(
                "There is no teacher; set `distill.teacher` to a model directory, or to the address of a "
                "server that returns the log-probabilities of prompts, such as vLLM's http://HOST:8000/v1."
            )
        if not self.config.distill.is_server and not Path(self.config.distill.teacher).is_dir():
            raise ConfigError(
                f"`distill.teacher` is {self.config.distill.teacher!r}, and there is no such directory; give "
                "a run, a model directory, or the address of a server."
            )
        if self.config.warm_start.steps and (agent_flow is not None or workflow_class is not None):
            raise ConfigError(
                f"`warm_start.steps` is {self.config.warm_start.steps}, but a teacher shows only "
                "environments and prompts how they are played; set it to 0."
            )

    async def _run(self, directory: RunDirectory) -> dict[str, Any]:
        summary = await super()._run(directory)
        if not self.has_rewards:  # success without anybody who judges is no number to read
            for report in (summary[name] for name in PHASES if name in summary):
                for name in ("success", "success_interval", "greedy", "greedy_interval"):
                    del report[name]
            for name in ("baselines", "skill", "kinds"):
                del summary[name]
        return summary

    def make_learner(
        self, models: "Mapping[str, LoadedModel]", publish: "Mapping[str, Publish] | None" = None
    ) -> "Learner":
        learner = super().make_learner(models, publish)
        if self.config.warm_start.steps:
            (student,) = models.values()
            teacher = learner.teacher
            assert teacher is not None, "__init__ checked it"
            learner.demonstrations = lambda tasks, key: asyncio.run(
                self._written_by(teacher, student, tasks, key)
            )
        return learner

    async def _written_by(
        self, teacher: "Teacher", student: "LoadedModel", tasks: Sequence[Any], key: tuple[str | int, ...]
    ) -> list[TrainingSample]:
        """Rows of one attempt of the teacher at each task, as if the student had sampled them."""
        from rllm.trainer.rollouts import sampling_of
        from rllm.trainer.samples import trajectory_rows
        from rllm.types.episode import LEARNABLE

        purpose, sampling = "/".join(map(str, (TEACHER, *key[1:]))), sampling_of(self.config)
        async with (
            self._engine_of(teacher, student) as engine,
            aclosing(engine.run(tasks, purpose=purpose, sampling=sampling)) as running,
        ):
            episodes = {each.task_id: each async for each in running if each.outcome in LEARNABLE}
        plays = [episodes.get(task_id_of(task, place)) for place, task in enumerate(tasks)]
        return [
            row
            for place, episode in enumerate(plays)
            if episode is not None
            for index, trajectory in enumerate(episode.trajectories)
            for row in trajectory_rows(trajectory, episode.task_id, place, index, 0.0)
        ]

    @asynccontextmanager
    async def _engine_of(self, teacher: "Teacher", student: "LoadedModel") -> "AsyncIterator[EpisodeEngine]":
        """The engine that plays the teacher's episodes; it lives as long as one batch of them."""
        from rllm.trainer.policies import make_client

        if teacher.loaded_model is not None:
            client: LocalClient | Any = make_client(self.config, teacher.loaded_model)
        else:
            from rllm.trainer.teacher_server import sampling_client

            client = await sampling_client(self.config.distill, student.tokenizer)
        try:
            playing = self._episode_player().open_engine(self.config, {ONLY_POLICY: client}, self.output)
            async with playing as engine:
                yield engine
        finally:
            await client.close()

    def draw_curve(self, directory: RunDirectory, summary: dict[str, Any]) -> None:
        """Success, where somebody pays for it; otherwise the divergence from the teacher."""
        if self.has_rewards:
            super().draw_curve(directory, summary)
            return
        from rllm.tracking.picture import draw_loss_curve

        names = {"phase": "phase", "step": "step", "time_s": "time_s"}
        names |= {"reverse_kl": "loss", "heldout_reverse_kl": "heldout_loss"}
        lines = [
            {title: line[name] for name, title in names.items() if name in line}
            for line in read_metrics(directory.metrics_path)
        ]
        draw_loss_curve(
            lines,
            directory.curve_path,
            title="rllm distill",
            unit="reverse KL, nats per token",
            measured_on=summary["tasks"]["title"],
        )

    def as_shown(self, tracker: Tracker) -> Tracker:
        return tracker if self.has_rewards else _WithoutSuccess(tracker)


class _WithoutSuccess:
    """A tracker for runs that nobody pays in."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def begin(self, phase: str) -> None:
        self._tracker.begin(phase)

    def advance(self, done: int, total: int) -> None:
        self._tracker.advance(done, total)

    def note(self, line: str) -> None:
        Trackers([self._tracker]).note(line)

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        unpaid = ("success", "reward_mean", "greedy")
        self._tracker.log(step, phase, {name: metrics[name] for name in metrics if name not in unpaid})

    def close(self) -> None:
        self._tracker.close()


def over(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """The nested mapping `base`, with the values of `update` in place of its own."""
    result = dict(base)
    for key, value in update.items():
        old = result.get(key)
        result[key] = over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _plain(rows: Sequence[Task | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{**row.to_row(), "prompt": row.instruction} if isinstance(row, Task) else row for row in rows]
