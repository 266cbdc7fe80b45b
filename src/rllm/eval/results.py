"""The result of an episode: the few numbers that its report is made of.

Episode (messages, ids, log-probabilities) ──► Result ──► report

Episodes are in the store; ten thousand Results are a few megabytes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.engine.rollout import GRADE
from rllm.environments.judging import GRADER_KEYS, GraderFailure
from rllm.environments.world import task_content
from rllm.store.episodes import EpisodeStore
from rllm.types.episode import CUT_THOUGHT, Episode, Outcome, Step, ending
from rllm.types.messages import FinishReason, Message
from rllm.types.task import EpisodeId, Task

CATEGORY = "category"
"""Field of a task that a report is also given by."""
AGAIN = (Outcome.INFRASTRUCTURE_FAILURE, Outcome.CANCELLED)
"""Attempts that say nothing of the model: a resumed evaluation makes them again."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Result:
    """One attempt at one task."""

    episode: EpisodeId
    outcome: Outcome
    is_correct: bool
    reward: float
    roles: int = 1
    """The number of paid roles, each paid in its own way; `reward` is their sum."""
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model_s: float = 0.0
    """Seconds that the model was waited for, all turns together."""
    category: str = ""
    extracted: str | None = None
    """The answer that the grader extracted; None where there was none, or nobody extracts one."""
    reason: str = ""
    """The grader's reason, or the failure."""
    is_cut_off: bool = False
    """Whether an answer ran into `max_tokens`."""
    ending: str = ""
    """The way in which it ended; see `rllm.types.episode.ending`."""
    has_cut_thought: bool = False
    """Whether a thought was closed for the model, or ended with the room for its answer."""
    is_unjudged: bool = False
    """Whether it failed because its judge could not judge it."""
    readings: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Whether it is right under each reading; empty where its grader has none."""
    instance: str = ""
    """The task's instance, up to what changes nothing: tasks with one instance are not independent."""
    asked: str = ""
    """Hash of what was asked, where two evaluations are to be compared: equal ids may be other tasks."""

    @property
    def worth(self) -> float:
        """The worth of the attempt: its reward, and of several roles, whose pay does not add up, its
        success."""
        return self.reward if self.roles == 1 else float(self.is_correct)

    @property
    def has_failed(self) -> bool:
        return self.outcome not in (Outcome.SCORED, Outcome.TRUNCATED)


def result_of(episode: Episode) -> Result:
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    grade = next(
        (each.info[GRADE] for each in episode.trajectories if GRADE in each.info),
        episode.info.get("evaluation", {}),  # what the evaluator of a program said
    )
    error = next((each.info["error"] for each in episode.trajectories if "error" in each.info), {})
    task = row_of(episode.task)
    return Result(
        episode=episode.episode_id,
        outcome=episode.outcome or Outcome.INFRASTRUCTURE_FAILURE,
        is_correct=episode.is_correct,
        reward=episode.reward,
        roles=len(episode.trajectories),
        turns=len(steps),
        prompt_tokens=sum(_tokens(step, "prompt_tokens", step.prompt_ids) for step in steps),
        completion_tokens=sum(_tokens(step, "completion_tokens", step.response_ids) for step in steps),
        model_s=sum(step.timings.get("model_s", 0.0) for step in steps),
        category=str(task.get(CATEGORY, "")),
        instance=instance_hash(task_content(task)) if task else episode.task_id,
        extracted=grade.get("extracted"),
        reason=str(grade.get("reason") or error.get("message") or error.get("type") or ""),
        readings=grade.get("readings") or {},
        is_cut_off=any(
            step.model_output is not None and step.model_output.finish_reason is FinishReason.LENGTH
            for step in steps
        ),
        ending=ending(episode.outcome, episode.termination_reason),
        has_cut_thought=any(step.info.get(CUT_THOUGHT) for step in steps),
        is_unjudged=error.get("type") == GraderFailure.__name__,
    )


def instance_hash(identity: str) -> str:
    """Short, however long what a task asks is."""
    return hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def row_of(task: Any) -> Mapping[str, Any]:
    """The data of a task, whatever holds it."""
    return task.to_row() if isinstance(task, Task) else task if isinstance(task, Mapping) else {}


def newest_episodes(store: EpisodeStore, way: str) -> Iterator[Episode]:
    """Every attempt once: of one that failed and was made again, the newest. Those that failed come last.

    What is in memory is one episode, and those that failed.
    """
    failures: dict[EpisodeId, Episode] = {}
    # In the order of saving. Only failures are made again, so an attempt that did not fail is the newest.
    for episode in store.episodes(way):
        if episode.outcome is None or episode.outcome in AGAIN:
            failures[episode.episode_id] = episode
        else:
            failures.pop(episode.episode_id, None)
            yield episode
    yield from failures.values()


def asked_of(task: Any) -> str:
    """Hash of what makes a task what it is: what is right of a question, however it is put and whoever judges
    it; else all that its world is made with."""
    row = task if isinstance(task, Mapping) else {}
    grading = row.get("grading") or {
        name: value
        for name, value in row.items()
        if name not in (*GRADER_KEYS, "oracle") and not is_for_show(name)
    }
    return hashlib.blake2b(
        json.dumps(grading, sort_keys=True, default=str).encode(), digest_size=8
    ).hexdigest()


def is_for_show(name: str) -> bool:
    """Whether a key of a task, such as `show_rules`, says how the task is shown and not what it is."""
    return name.startswith("show_")


def answer_of(episode: Episode) -> str:
    """The last answer of the model; empty where it said nothing."""
    responses = [step.model_response for trajectory in episode.trajectories for step in trajectory.steps]
    return responses[-1] if responses else ""


def asked_before_answer(episode: Episode) -> list[Message]:
    """The whole conversation up to what the model said last."""
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    messages = list(steps[-1].chat_completions) if steps else []
    return messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages


def prompt_of(episode: Episode) -> list[Message]:
    """The messages that the model was sent first."""
    first = next((step for trajectory in episode.trajectories for step in trajectory.steps), None)
    if first is None:
        return []
    messages = list(first.chat_completions)
    return messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages


def _tokens(step: Step, name: str, ids: list[int]) -> int:
    """As the server counted them; as many as there are ids, where it did not."""
    return int(step.usage.get(name, 0)) or len(ids)
