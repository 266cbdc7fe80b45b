"""Evaluations ──► rows to learn from.

    store.sqlite ──newest attempt each──► facts of attempt and task ──filter, select──► rows
        sft: conversations of attempts   preferences: a better and a worse answer   tasks: the tasks

Attempts that infrastructure failed say nothing and are left out. What counts of a task, such as how many of
its attempts are right, is counted over all evaluations that are given.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rllm.data.curation import CleanRows, PastConversation, RowKind, preference_rows, sft_row
from rllm.data.row_filter import RowFilter
from rllm.errors import ConfigError
from rllm.eval.pass_at_k import pass_at_k
from rllm.eval.plan import require_evaluation
from rllm.eval.results import Result, newest_episodes, result_of, row_of
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode, Trajectory

ATTEMPT_FIELDS = (
    "task_id", "attempt", "reward", "is_correct", "turns", "prompt_tokens", "completion_tokens", "category",
    "extracted", "reason", "task",
)  # fmt: skip
TASK_FIELDS = ("n", "n_correct", "solved", "avg", "best", "worst")
"""The fields of all attempts at a task: how many, how many right, whether any; rewards."""
_AT_K = re.compile(r"\b(pass|avg|best)@(\d{1,4})\b")


class AttemptChoice(StrEnum):
    """The attempts at a task that become rows."""

    CORRECT = "correct"
    BEST = "best"
    SHORTEST = "shortest"
    """The shortest of the right attempts, by tokens written."""
    ALL = "all"


@dataclass(kw_only=True, slots=True, frozen=True)
class Curation:
    """The attempts that become rows, and of which kind."""

    kind: RowKind = RowKind.SFT
    select: AttemptChoice = AttemptChoice.CORRECT
    expression: str = ""
    """A filter over the fields of attempts and of their tasks; empty keeps all."""
    max_per_task: int = 0
    """0 sets no limit."""
    min_reward: float | None = None
    metric: str = "reward"
    """The measure that `avg`, `best`, `worst` and their like are of: `reward` or `is_correct`."""
    trajectory: str = ""
    """The role whose conversations are taken; empty takes all."""


@dataclass(kw_only=True, slots=True)
class _Attempt:
    result: Result
    task: Mapping[str, Any]
    conversations: list[PastConversation]


class EvaluationExport:
    """Attempts of evaluations as rows. `counts` says what became of them."""

    def __init__(self, directories: Sequence[Path], curation: Curation) -> None:
        """Raises ConfigError for what is no evaluation and for a filter that cannot be read."""
        if curation.max_per_task < 0:
            raise ConfigError(
                f"`max_per_task` is {curation.max_per_task}; it must be 0, for no limit, or more."
            )
        self._runs = [RunDirectory.read(each) for each in directories]
        for run in self._runs:
            require_evaluation(run.config(), run.path)
        self.counts: Counter[str] = Counter()
        """`attempts`, `failed`, `filtered`, `tasks`, `rows`, `double`; texts that were `masked`."""
        self._curation = curation
        self._keep = _filter_of(curation.expression)
        self._clean = CleanRows()

    def rows(self) -> Iterator[dict[str, Any]]:
        """In the order of tasks."""
        by_task: dict[str, list[_Attempt]] = {}
        for attempt in self._attempts():
            by_task.setdefault(attempt.result.episode.task_id, []).append(attempt)
        for attempts in by_task.values():
            facts_of_task = _task_facts([each.result for each in attempts], self._curation)
            selection = [each for each in attempts if self._is_kept(each, facts_of_task)]
            self.counts["filtered"] += len(attempts) - len(selection)
            self.counts["tasks"] += bool(selection)
            for row, about in self._rows_of(selection):
                clean_row = self._clean.clean(row)
                self.counts["double" if clean_row is None else "rows"] += 1
                if clean_row is not None:
                    yield {**clean_row, "run": about}
        self.counts["masked"] = self._clean.num_masked

    def _attempts(self) -> Iterator[_Attempt]:
        for run in self._runs:
            with EpisodeStore.open(run.store_path, read_only=True) as store:
                for way in store.phases():
                    for episode in newest_episodes(store, way):
                        self.counts["attempts"] += 1
                        result = result_of(episode)
                        if result.has_failed:
                            self.counts["failed"] += 1
                            continue
                        yield _Attempt(
                            result=result,
                            task=row_of(episode.task),
                            conversations=self._conversations(episode),
                        )

    def _is_kept(self, attempt: _Attempt, facts_of_task: Mapping[str, Any]) -> bool:
        least = self._curation.min_reward
        if least is not None and attempt.result.reward < least:
            return False
        return self._keep({**_facts(attempt), **facts_of_task})

    def _rows_of(self, attempts: list[_Attempt]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The rows, each with what it was made of."""
        if not attempts:
            return
        limit = self._curation.max_per_task or None
        if self._curation.kind is RowKind.TASKS:
            yield dict(attempts[0].task), {"task_id": attempts[0].result.episode.task_id}
        elif self._curation.kind is RowKind.PREFERENCES:
            pairs = preference_rows(talk for each in attempts for talk in each.conversations)
            for row, better, worse in list(pairs)[:limit]:
                yield row, {"chosen": better.about, "rejected": worse.about}
        else:
            for attempt in _selected(attempts, self._curation.select)[:limit]:
                for talk in attempt.conversations:
                    yield sft_row(talk), dict(talk.about)

    def _conversations(self, episode: Episode) -> list[PastConversation]:
        return [
            PastConversation(
                messages=messages,
                is_right=episode.is_correct,
                score=trajectory.reward if trajectory.reward is not None else episode.reward,
                about={
                    "task_id": episode.task_id,
                    "attempt": episode.rollout_idx,
                    "role": trajectory.name,
                    "reward": trajectory.reward,
                },
            )
            for trajectory in episode.trajectories
            if self._curation.trajectory in ("", trajectory.name)
            for messages in _whole_conversations(trajectory)
        ]


def _whole_conversations(trajectory: Trajectory) -> Iterator[list[dict[str, Any]]]:
    """Each as long as it became: one whose next step does not go on with it ends there."""
    for step, following in zip(trajectory.steps, [*trajectory.steps[1:], None], strict=True):
        messages = [dict(each) for each in step.chat_completions]
        if messages and messages[-1].get("role") != "assistant":
            messages.append({"role": "assistant", "content": step.model_response})
        goes_on = following is not None and list(following.chat_completions[: len(messages)]) == messages
        if messages and not goes_on:
            yield messages


def _selected(attempts: list[_Attempt], select: AttemptChoice) -> list[_Attempt]:
    right = [each for each in attempts if each.result.is_correct]
    match select:
        case AttemptChoice.ALL:
            return attempts
        case AttemptChoice.CORRECT:
            return right
        case AttemptChoice.BEST:
            return [max(attempts, key=lambda each: each.result.worth)]
        case AttemptChoice.SHORTEST:
            return sorted(right, key=lambda each: each.result.completion_tokens)[:1]


def _facts(attempt: _Attempt) -> dict[str, Any]:
    result = attempt.result
    names = ("is_correct", "turns", "prompt_tokens", "completion_tokens", "category", "extracted", "reason")
    return {
        "task_id": result.episode.task_id,
        "attempt": result.episode.attempt,
        "reward": result.worth,
        "task": attempt.task,
        **{name: getattr(result, name) for name in names},
    }


def _task_facts(results: list[Result], curation: Curation) -> dict[str, Any]:
    is_reward = curation.metric == "reward"
    rewards = [each.worth if is_reward else float(each.is_correct) for each in results]
    num_correct = sum(each.is_correct for each in results)
    facts: dict[str, Any] = {
        "n": len(results),
        "n_correct": num_correct,
        "solved": num_correct > 0,
        "avg": sum(rewards) / len(rewards),
        "best": max(rewards),
        "worst": min(rewards),
    }
    for name, digits in set(_AT_K.findall(curation.expression)):
        k = int(digits)
        if not 1 <= k <= len(results):
            facts[f"{name}_at_{k}"] = None  # nobody knows: null is neither above nor below anything
        elif name == "pass":
            facts[f"{name}_at_{k}"] = pass_at_k(len(results), num_correct, k)
        else:
            first = rewards[:k]
            facts[f"{name}_at_{k}"] = max(first) if name == "best" else sum(first) / k
    return facts


def _filter_of(expression: str) -> Callable[[Mapping[str, Any]], bool]:
    """`pass@4` is written as a name that the language has."""
    if not expression.strip():
        return lambda row: True
    at_k = [f"{name}_at_{int(k)}" for name, k in _AT_K.findall(expression)]
    text = _AT_K.sub(lambda match: f"{match[1]}_at_{int(match[2])}", expression)
    return RowFilter(text, (*ATTEMPT_FIELDS, *TASK_FIELDS, *dict.fromkeys(at_k)))
