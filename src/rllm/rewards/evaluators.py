"""A grader as the judge of an episode.

    (task row, episode) ──► last text of the episode ──► Grader ──► EvalOutput(reward, is_correct, signals)
                   └ the grader's fields: of the row itself, or of its `grading`

What a grader refuses is refused here as well: a RewardError, never a zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rllm.rewards.extraction import last_assistant_text
from rllm.rewards.grade import Grader
from rllm.types.episode import Episode
from rllm.types.evaluation import EvalOutput, Signal


class GraderEvaluator:
    """Judges what an episode ends with by a grader; what `as_evaluator("math")` is made of."""

    def __init__(self, grader: Grader) -> None:
        self.grader = grader
        self.name = grader.name

    def evaluate(self, task: Mapping[str, Any], episode: Episode) -> EvalOutput:
        """Raises RewardError where the row, the grader or an episode without an answer is at fault."""
        fields = with_own_names(grading_fields(task), self.name)
        grade = self.grader.grade(last_assistant_text(episode), fields)
        signals = grade.metadata.get("signals", {})
        rest = {name: value for name, value in grade.metadata.items() if name != "signals"}
        return EvalOutput(
            reward=grade.score,
            is_correct=grade.is_correct,
            signals=[Signal(name, value) for name, value in signals.items()],
            metadata={"grader": self.name, "extracted": grade.extracted, "reason": grade.reason, **rest},
        )


def grading_fields(task: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a task that a grader reads: the row, and on top of it what stands under `grading`."""
    grading = task.get("grading")
    return {**task, **grading} if isinstance(grading, Mapping) else task


def with_own_names(row: Mapping[str, Any], grader: str) -> Mapping[str, Any]:
    """The row of a published program with what the grader reads under the names that it reads.

    `ground_truth` is the right answer, any of several, or the calls that are right; `nums` are `numbers`. The
    row's own fields stay as they are. The code grader reads `ground_truth` itself.
    """
    own: dict[str, Any] = {"numbers": row["nums"]} if row.get("nums") is not None else {}
    truth = row.get("ground_truth")
    if grader == "calls" and truth is not None:
        own["calls"] = _calls(truth)
    elif grader != "code" and truth is not None:
        own["answers" if isinstance(truth, list | tuple) else "answer"] = truth
    return {**own, **row} if own else row


def _calls(truth: Any) -> Any:
    """`[{"name": …, "arguments": {…}}]` with the values that count as right; any other form as it is."""
    if not isinstance(truth, Sequence) or isinstance(truth, str):
        return truth
    return [
        {each["name"]: {name: [value] for name, value in (each.get("arguments") or {}).items()}}
        if isinstance(each, Mapping) and "name" in each
        else each
        for each in truth
    ]
