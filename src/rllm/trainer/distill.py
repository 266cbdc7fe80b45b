"""`DistillationRun`: a student, a teacher and tasks in, a run directory with a student like its teacher.

    warm_start.steps   the teacher plays ──► its rows ──► cross-entropy               forward KL
    steps              the student plays ──► the teacher scores ──► policy gradient   reverse KL

It is a `TrainingRun` whose advantages come from a teacher (`algorithm.estimator = "teacher"`), so the loop,
the engines, checkpoints and everything else of a run are those of `rllm train`. Tasks are an environment's, a
program's or a workflow's; without any of them they are prompts, answered once.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rllm.config.distill import TEACHER
from rllm.config.policies import ONLY_POLICY
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError
from rllm.store.run_directory import RunDirectory
from rllm.tracking.base import Metric, Tracker, Trackers
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.cluster import EpisodePlayer
from rllm.trainer.resuming import PHASES
from rllm.trainer.run import TrainingRun
from rllm.types.sample import TrainingSample
from rllm.types.task import task_id_of

if TYPE_CHECKING:
    from rllm.engine.attempts import EpisodeEngine
    from rllm.inference.local.client import LocalClient
    from rllm.models.directory import LoadedModel
    from rllm.trainer.learning import Learner
    from rllm.trainer.policies import Publish
    from rllm.trainer.teacher import Teacher


class DistillationRun(TrainingRun):
    """A run that makes a student like its teacher where the student itself goes.

    Raises ConfigError before any work for a teacher that cannot score, or has another vocabulary.
    """

    def __init__(
        self, config: TrainConfig, player: EpisodePlayer, *parts: Any, has_rewards: bool = True, **more: Any
    ) -> None:
        """As `TrainingRun`; `has_rewards`: whether somebody pays for the answers."""
        super().__init__(config, player, *parts, **more)
        self.has_rewards = has_rewards
        if not config.distill.teacher:
            raise ConfigError(
                "There is no teacher; set `distill.teacher` to a model directory, or to the address of a "
                "server that returns the log-probabilities of prompts, such as vLLM's http://HOST:8000/v1."
            )
        if not config.distill.is_server and not Path(config.distill.teacher).is_dir():
            raise ConfigError(
                f"`distill.teacher` is {config.distill.teacher!r}, and there is no such directory; give "
                "a run, a model directory, or the address of a server."
            )
        if config.warm_start.steps and player.kind != "agent":
            raise ConfigError(
                f"`warm_start.steps` is {config.warm_start.steps}, but a teacher shows only "
                "environments and prompts how they are played; set it to 0."
            )

    async def _run(self, directory: RunDirectory) -> dict[str, Any]:
        summary = await super()._run(directory)
        if not self.has_rewards:  # success without anybody who judges is no number to read
            for report in (summary[name] for name in PHASES if name in summary):
                for name in ("success", "success_interval", "greedy", "greedy_interval", "return"):
                    del report[name]
            for name in ("baselines", "skill", "kinds"):
                del summary[name]
        return summary

    def make_learner(
        self,
        models: "Mapping[str, LoadedModel]",
        publish: "Mapping[str, Publish] | None" = None,
        samplers: "Mapping[str, LoadedModel]" = MappingProxyType({}),
    ) -> "Learner":
        learner = super().make_learner(models, publish, samplers)
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
            playing = self.player.open_engine(self.config, {ONLY_POLICY: client}, self.output)
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
