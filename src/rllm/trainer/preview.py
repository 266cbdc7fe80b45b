"""The first step of a run, to see whether it will learn before it is started.

    TrainingRun ──► 8 attempts at each of 8 tasks ──► one update ──► Preview: answers, pass@k, signal, cost

The directory of the run is not touched: models and everything else are in one beside it, which is removed.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.algorithms.estimators import estimator_named
from rllm.config.filters import FiltersConfig
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.config.tracking import TrackingConfig
from rllm.engine.event_loop import run
from rllm.errors import ConfigError
from rllm.eval.pass_at_k import pass_at_k
from rllm.store.run_directory import RunDirectory
from rllm.tracking.alarms import Alarm, AlarmWatch
from rllm.trainer.estimates import num_evaluated
from rllm.trainer.free_memory import peak_bytes
from rllm.types.episode import LEARNABLE, Episode

if TYPE_CHECKING:
    from rllm.trainer.loop import RunParts
    from rllm.trainer.run import TrainingRun

NUM_TASKS, NUM_ATTEMPTS = 8, 8
SOLVED = 0.9
"""Success from which on there is little to learn."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Preview:
    """The measurements of one step."""

    config: TrainConfig
    """The configuration of the run, not that of its preview."""
    episodes: Sequence[Episode]
    """All attempts, ordered by task."""
    metrics: dict[str, Any]
    """Those of a training step: `success`, `groups_tied`, `update_kl`, `policy_entropy` and so on."""
    sampling_s: float
    learning_s: float
    peak_bytes: int
    """Most memory that this process had so far, in bytes."""

    def groups(self) -> dict[str, list[Episode]]:
        """Task id -> its attempts."""
        by_task: dict[str, list[Episode]] = {}
        for episode in self.episodes:
            by_task.setdefault(episode.task_id, []).append(episode)
        return by_task

    def pass_rate(self, k: int) -> float | None:
        """Return pass@k over the tasks with at least `k` attempts that did not fail; None without any."""
        rates = [
            pass_at_k(len(correct), sum(correct), k)
            for attempts in self.groups().values()
            if len(correct := [attempt.is_correct for attempt in attempts if attempt.outcome in LEARNABLE])
            >= k
        ]
        return sum(rates) / len(rates) if rates else None

    @property
    def num_with_signal(self) -> int:
        """Number of tasks whose attempts got different rewards."""
        return sum(
            len({attempt.reward for attempt in attempts if attempt.outcome in LEARNABLE}) > 1
            for attempts in self.groups().values()
        )

    def costs(self) -> dict[str, float]:
        """Return the tokens and seconds of a step, and the seconds of the whole run, of tokens and seconds
        that were measured here."""
        share = self.config.derived()["most_episodes_per_step"] / len(self.episodes)
        evaluations = num_evaluated(self.config) / len(self.episodes)
        step_s = share * (self.sampling_s + self.learning_s)
        return {
            "step_tokens": round(share * self.metrics["tokens.sampled"]),
            "step_s": step_s,
            "run_s": self.config.steps * step_s + evaluations * self.sampling_s,
        }

    def alarms(self) -> list[Alarm]:
        """Return the critical alarms that this step raises."""
        watch = AlarmWatch(config_dict(self.config))
        return [event.alarm for event in watch.observe({"step": 0, **self.metrics})]

    def verdict(self) -> tuple[str, str]:
        """Return `good`, `warning` or `bad`, and one sentence on whether the run will learn."""
        if warm_steps := self.config.warm_start.steps:
            return "warning", (
                f"The run first imitates an expert for {warm_steps} steps; this is the model before, and "
                "says little of what it will learn."
            )
        num_groups, num_signal = len(self.groups()), self.num_with_signal
        success = self.pass_rate(1) or 0.0
        names = self.config.estimators()
        compares = all(estimator_named(name).compares_attempts for name in names)
        if not compares and len({episode.reward for episode in self.episodes}) > 1:
            num_signal = num_groups  # a critic or a baseline of its own learns from any difference
        if success > SOLVED:
            return "warning", (
                f"There is little to learn: {success:.0%} of attempts succeed. Make the tasks harder."
            )
        if not num_signal:
            return "bad", (
                "This will not learn: all attempts at a task got the same reward, at each of "
                f"{num_groups} tasks. Make the tasks easier, show an example in the prompt, pay for parts of "
                "a solution, or begin with `rllm sft`."
            )
        if 2 * num_signal < num_groups:
            return "warning", (
                f"This may learn slowly: the attempts at only {num_signal} of {num_groups} tasks got "
                "different rewards. Raise `rollout.group_size`, set `filters.dynamic` to true, or pay for "
                "parts of a solution."
            )
        return "good", (
            f"This can learn: the attempts at {num_signal} of {num_groups} tasks got different rewards."
        )

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        level, sentence = self.verdict()
        return {
            "tasks": len(self.groups()),
            "attempts": len(self.episodes),
            "pass_at_1": self.pass_rate(1),
            f"pass_at_{NUM_ATTEMPTS}": self.pass_rate(NUM_ATTEMPTS),
            "groups_with_signal": self.num_with_signal,
            **self.costs(),
            "sampling_s": self.sampling_s,
            "learning_s": self.learning_s,
            "peak_bytes": self.peak_bytes,
            "metrics": self.metrics,
            "alarms": [alarm.to_dict() for alarm in self.alarms()],
            "verdict": level,
            "sentence": sentence,
            "episodes": [
                {
                    "task_id": episode.task_id,
                    "answers": answers(episode),
                    "reward": episode.reward,
                    "is_correct": episode.is_correct,
                    "outcome": str(episode.outcome),
                }
                for episode in self.episodes
            ],
        }


def answers(episode: Episode) -> list[str]:
    """Return the model's answers in an episode, in order."""
    return [step.model_response for trajectory in episode.trajectories for step in trajectory.steps]


def preview(training: "TrainingRun") -> Preview:
    """Play and learn from the first step of `training`, which has not begun, and keep nothing of it.

    Raises ConfigError for a run that learns from a teacher, and all that the start of the run raises.
    """
    config = training.config
    if config.distill.teacher:
        raise ConfigError(
            f"--preview shows rewards, and `distill.teacher` is {config.distill.teacher!r}: such a run "
            "learns from its teacher. Leave --preview out."
        )
    training.config = replace(
        config,
        rollout=replace(
            config.rollout,
            group_size=NUM_ATTEMPTS,
            tasks_per_step=min(NUM_TASKS, config.rollout.tasks_per_step, len(training.tasks.train)),
        ),
        filters=FiltersConfig(),
        tracking=TrackingConfig(),
    )
    previews: list[Preview] = []

    async def play(parts: "RunParts") -> dict[str, Any]:
        previews.append(await preview_step(parts, config))
        return {}

    training.work = play
    # Beside the run, because model servers have to see it.
    place = next(path for path in training.output.absolute().parents if path.is_dir())
    with (
        tempfile.TemporaryDirectory(prefix=f".{training.output.name}-preview-", dir=place) as directory,
        RunDirectory.create_or_open(Path(directory) / "run") as run_directory,
    ):
        run(training.run_work(run_directory))
    return previews[0]


async def preview_step(parts: "RunParts", config: TrainConfig) -> Preview:
    """Play one step and learn from it. `config`: of the run that is previewed."""
    from rllm.trainer.learning import learn
    from rllm.trainer.loop import in_learner, publish
    from rllm.trainer.rollouts import sample_step

    parts.tracker.begin("train")
    start_s = time.perf_counter()
    rollouts = await sample_step(parts.engine, parts.learner, parts.curriculum, 0)
    sampled_s = time.perf_counter()
    batch, metrics = await in_learner(
        parts, lambda: learn(parts.learner, rollouts.episodes, 0, rollouts.greedy)
    )
    metrics |= await publish(parts, batch.samples)
    learned_s = time.perf_counter()
    return Preview(
        config=config,
        episodes=rollouts.episodes,
        metrics=metrics | rollouts.metrics(),
        sampling_s=sampled_s - start_s,
        learning_s=learned_s - sampled_s,
        peak_bytes=peak_bytes(config.model.device),
    )
