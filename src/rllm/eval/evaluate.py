"""Tasks in, a report out that hides nothing: what was attempted, what was scored, what failed."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from rllm.engine.attempts import EpisodeEngine
from rllm.eval.report import EvaluationReport, report_of
from rllm.eval.results import Result, result_of
from rllm.eval.task_facts import NO_FACTS, TaskFacts
from rllm.types.episode import Episode
from rllm.types.messages import SamplingParams
from rllm.types.task import task_id_of


async def evaluate(
    engine: EpisodeEngine,
    tasks: Sequence[Any],
    sampling: SamplingParams | None,
    purpose: str,
    on_episode: Callable[[Episode], None] = lambda episode: None,
    *,
    facts: TaskFacts = NO_FACTS,
) -> tuple[EvaluationReport, list[Episode]]:
    """One attempt at each task; without `sampling` as the engine samples by itself.

    Episodes come back in the order of the tasks; `on_episode` hears of each as it finishes. `facts`: which
    tasks are one instance; without any, those that are the same but for their names.
    """
    episodes: list[Episode] = []
    async with aclosing(engine.run(tasks, purpose=purpose, sampling=sampling)) as running:
        async for episode in running:
            episodes.append(episode)
            on_episode(episode)
    place = {task_id_of(task, index): index for index, task in enumerate(tasks)}
    episodes.sort(key=lambda episode: place[episode.task_id])
    return report_on(episodes, facts), episodes


def report_on(episodes: Sequence[Episode], facts: TaskFacts = NO_FACTS) -> EvaluationReport:
    """The report of a set of finished episodes."""
    return report_of(results_on(episodes, facts))


def results_on(episodes: Iterable[Episode], facts: TaskFacts = NO_FACTS) -> list[Result]:
    """Results of finished episodes, with the facts of their tasks."""
    return facts.described([result_of(episode) for episode in episodes])
