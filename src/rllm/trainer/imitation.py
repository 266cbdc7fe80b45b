"""Has imitation come to what it imitates?

    the expert's answers ──► ExpertClient ──► the run's agent and environment ──► its success ──┐
    the model after the warm start, sampled ──► its success ────────────────────────────────────┴──► a warning

What imitation has not learned is never sampled, so rewards do not bring it out: a run that goes on from there
spends its steps on nothing.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rllm.config.schema import WarmStartConfig
from rllm.eval.evaluate import EvaluationReport
from rllm.types.episode import Episode, Outcome

log = logging.getLogger(__name__)

NUM_TASKS = 128
"""Held-out tasks that the expert plays at most."""
MIN_SHARE = 0.5
"""The share of the expert's success that its imitator has to reach."""
MIN_ATTEMPTS = 32
"""Number of equal rewards before they say anything."""
PlayExpert = Callable[[Sequence[Any]], Awaitable[EvaluationReport]]
"""tasks -> what the expert comes to, with its noise, at those that it has an answer to."""


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
