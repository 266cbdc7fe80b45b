"""Has imitation come to what it imitates?

    the expert's answers ──► ExpertClient ──► the run's agent and environment ──► its success ──┐
    the model after the warm start, sampled ──► its success ────────────────────────────────────┴──► a warning

What imitation has not learned is never sampled, so rewards do not bring it out: a run that goes on from there
spends its steps on nothing.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rllm.config.schema import TrainConfig, WarmStartConfig
from rllm.eval.evaluate import EvaluationReport, evaluate
from rllm.inference.scripted import ScriptedClient, ScriptedSession, message_text
from rllm.trainer.agents import Player
from rllm.trainer.warm_start import Demonstrate
from rllm.types.draws import draw_seed
from rllm.types.episode import Episode, Outcome
from rllm.types.task import Task, row_of, task_id_of

log = logging.getLogger(__name__)

NUM_TASKS = 128
"""Held-out tasks that the expert plays at most."""
MIN_SHARE = 0.5
"""The share of the expert's success that its imitator has to reach."""
MIN_ATTEMPTS = 32
"""Number of equal rewards before they say anything."""
PlayExpert = Callable[[Sequence[Any]], Awaitable[EvaluationReport]]
"""tasks -> what the expert comes to, with its noise, at those that it has an answer to."""


class ExpertClient(ScriptedClient):
    """Gives the answers of one demonstration of each task, as a model would; the last one again where the
    environment goes on."""

    def __init__(self, answers: Mapping[str, list[str]], max_turns: int) -> None:
        super().__init__([])
        self._answers = answers
        self._max_turns = max_turns

    def session(self, order: tuple[str, int]) -> ScriptedSession:
        answers = self._answers[order[0]]
        return ScriptedClient([*answers, *answers[-1:] * self._max_turns]).session(order)


def expert_player(config: TrainConfig, demonstrate: Demonstrate, player: Player) -> PlayExpert:
    """Plays the expert of the warm start in the environment that the run trains in."""

    async def play(tasks: Sequence[Any]) -> EvaluationReport:
        answers = {
            task_id_of(task, position): _answers(config, demonstrate, task, position)
            for position, task in enumerate(tasks)
        }
        tasks_with_answers = [
            task for position, task in enumerate(tasks) if answers[task_id_of(task, position)]
        ]
        client = ExpertClient(answers, config.rollout.max_turns)
        report, _ = await evaluate(player.engine(config, client), tasks_with_answers, None, "expert")
        return report

    return play


def _answers(
    config: TrainConfig, demonstrate: Demonstrate, task: Task | Mapping[str, Any], position: int
) -> list[str]:
    rng = np.random.default_rng(draw_seed(config.seed, "expert", position))
    row = row_of(task)
    answers = [answer for _, answer in demonstrate(row, config.warm_start.noise, rng)]
    return [answer if isinstance(answer, str) else message_text(answer) for answer in answers]


async def warn_of_stalled_imitation(
    report: EvaluationReport,
    episodes: Sequence[Episode],
    play: PlayExpert | None,
    tasks: Sequence[Any],
    warm: WarmStartConfig,
) -> None:
    """Say so where the model, sampled, surely comes to less than half of its expert's success, or, of an
    expert whom nobody can play, where all attempts were paid the same.

    `report`, `episodes`: of the model after the warm start. Surely: by both 95 % intervals.
    """
    mend = (
        f"Stop, and raise `warm_start.steps`, which is {warm.steps}, or change `warm_start.learning_rate`, "
        f"which is {warm.learning_rate:g}."
    )
    if play is None:
        rewards = [each.reward for each in episodes if each.outcome is Outcome.SCORED]
        if len(rewards) >= MIN_ATTEMPTS and min(rewards) == max(rewards):
            log.warning(
                "All %d attempts after the warm start were paid %g, so there is nothing to compare. %s",
                len(rewards),
                rewards[0],
                mend,
            )
        return
    expert = await play(tasks[:NUM_TASKS])
    if report.success_interval[1] < MIN_SHARE * expert.success_interval[0]:
        log.warning(
            "The warm start has stalled: the model succeeds in %.1f %% of its attempts, the expert that it "
            "imitates in %.1f %%. What was not learned is never sampled, so rewards hardly bring it out. %s",
            100 * report.success,
            100 * expert.success,
            mend,
        )
