"""What a batch of episodes came to, beside its rewards: did anything work, what became of its calls?"""

from collections import Counter
from collections.abc import Sequence

from rllm.algorithms.grouping import LEARNABLE
from rllm.errors import AgentError, InferenceError
from rllm.types.episode import Episode, Outcome, TerminationReason

CALL_COUNTS = ("calls", "unclaimed_calls", "partial_calls", "failed_calls", "abandoned_threads")
"""Metrics of an episode that a step adds up."""


def require_one_that_did_not_fail(episodes: Sequence[Episode], max_context: int) -> None:
    """Raises AgentError, or InferenceError where the engine was to blame, when every episode failed.

    There is nothing to learn then, and most likely nothing ever will be: a bug, or a server that is gone.
    """
    if not episodes or any(episode.outcome in LEARNABLE for episode in episodes):
        return
    causes = Counter(_cause_of(episode) for episode in episodes)
    (cause, count) = causes.most_common(1)[0]
    longer = TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    if all(episode.termination_reason is longer for episode in episodes):
        raise AgentError(
            f"All {len(episodes)} conversations outgrew the context: raise `inference.max_context`, which is "
            f"{max_context}, or ask for less. The first said: {cause}"
        )
    message = f"All {len(episodes)} episodes failed, {count} of them with {cause}"
    if any(episode.outcome is Outcome.POLICY_FAILURE for episode in episodes):
        raise AgentError(f"{message} Mend it and start again: the run goes on from its last checkpoint.")
    raise InferenceError(f"{message} Start again when it is back: the run goes on from its last checkpoint.")


def _cause_of(episode: Episode) -> str:
    """Type and message, and the line of code where it is known."""
    infos = (episode.info, *(trajectory.info for trajectory in episode.trajectories))
    error = next((info["error"] for info in infos if "error" in info), {})
    lines = [line.strip() for line in error.get("traceback", "").splitlines() if "  File " in line]
    where = f" ({lines[-1]})" if lines else ""
    return f"{error.get('type', 'no cause on record')}: {error.get('message', '')}{where}."


def call_counts(episodes: Sequence[Episode]) -> dict[str, int]:
    """What became of the model calls of programs; nothing for episodes of agents, whose calls are steps."""
    return {
        name: int(sum(episode.metrics.get(name, 0.0) for episode in episodes))
        for name in CALL_COUNTS
        if any(name in episode.metrics for episode in episodes)
    }
