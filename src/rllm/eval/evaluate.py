"""Tasks in, a report out that hides nothing: what was attempted, what was scored, what failed."""

import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from rllm.engine.attempts import EpisodeEngine
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import SamplingParams
from rllm.types.task import task_id_of


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationReport:
    """attempted = scored + truncated + failed.

    `success` counts failures as zero, `success_without_failed` leaves them out.
    """

    attempted: int
    scored: int
    truncated: int
    failed: int
    successes: int
    success: float
    success_interval: tuple[float, float]
    """95 % Wilson interval of `success`."""
    success_without_failed: float | None
    """None when everything failed."""
    mean_reward: float | None
    """Over the episodes that did not fail."""
    mean_turns: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


async def evaluate(
    engine: EpisodeEngine,
    tasks: Sequence[Any],
    sampling: SamplingParams | None,
    purpose: str,
    on_episode: Callable[[Episode], None] = lambda episode: None,
) -> tuple[EvaluationReport, list[Episode]]:
    """One attempt at each task; without `sampling` as the engine samples by itself.

    Episodes come back in the order of the tasks; `on_episode` hears of each as it finishes.
    """
    episodes: list[Episode] = []
    async with aclosing(engine.run(tasks, purpose=purpose, sampling=sampling)) as running:
        async for episode in running:
            episodes.append(episode)
            on_episode(episode)
    place = {task_id_of(task, index): index for index, task in enumerate(tasks)}
    episodes.sort(key=lambda episode: place[episode.task_id])
    return report_on(episodes), episodes


def report_on(episodes: Sequence[Episode]) -> EvaluationReport:
    """The report of a set of finished episodes."""
    scored = sum(episode.outcome is Outcome.SCORED for episode in episodes)
    truncated = sum(episode.outcome is Outcome.TRUNCATED for episode in episodes)
    successes = sum(episode.is_correct for episode in episodes)
    attempted, valid = len(episodes), scored + truncated
    rewards = [
        episode.reward for episode in episodes if episode.outcome in (Outcome.SCORED, Outcome.TRUNCATED)
    ]
    turns = [len(trajectory.steps) for episode in episodes for trajectory in episode.trajectories]
    return EvaluationReport(
        attempted=attempted,
        scored=scored,
        truncated=truncated,
        failed=attempted - valid,
        successes=successes,
        success=successes / attempted if attempted else 0.0,
        success_interval=wilson_interval(successes, attempted),
        success_without_failed=successes / valid if valid else None,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        mean_turns=sum(turns) / len(turns) if turns else 0.0,
    )


def wilson_interval(successes: int, attempts: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927); [0, 1] when nothing was attempted.

    Unlike the normal approximation it stays inside [0, 1] and has a width at 0 and at 1.
    """
    if attempts == 0:
        return (0.0, 1.0)
    share = successes / attempts
    denominator = 1.0 + z * z / attempts
    center = (share + z * z / (2 * attempts)) / denominator
    margin = z * math.sqrt(share * (1 - share) / attempts + z * z / (4 * attempts * attempts)) / denominator
    # At 0 and at 1 an end is the share itself; rounding must not push it to the wrong side.
    return (max(0.0, min(share, center - margin)), min(1.0, max(share, center + margin)))
