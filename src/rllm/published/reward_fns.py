"""`rllm.eval.reward_fns.NAME.evaluate(task, episode)`: published evaluators, by our graders.

    evaluate(task, episode) ──► row of the task ──► GraderEvaluator ──► EvalOutput

`task` is a Task or its row; the right answer may be called `ground_truth`. A row without any right answer is
0 with the reason, as published evaluators have it.
"""

from collections.abc import Mapping
from typing import Any

from rllm.rewards.evaluators import GraderEvaluator
from rllm.rewards.extraction import last_assistant_text
from rllm.rewards.graders import grader_named
from rllm.types.episode import Episode
from rllm.types.evaluation import EvalOutput
from rllm.types.task import Task

SYSTEM_PROMPT = "Think about the question step by step, then end with the answer alone inside \\boxed{}."
_GOLD_FIELDS = ("ground_truth", "answer", "answers", "target", "tests", "choices", "instruction_id_list")


def extract_answer_text(episode: Episode) -> str:
    """The end of an episode."""
    return last_assistant_text(episode)


def evaluate_math(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("math", task, episode)


def evaluate_choice(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("choice", task, episode)


def evaluate_f1(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("f1", task, episode)


def evaluate_code(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("code", task, episode)


def evaluate_countdown(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("countdown", task, episode)


def evaluate_instructions(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("instructions", task, episode)


def evaluate_calls(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("calls", task, episode)


def evaluate_equality(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("equality", task, episode)


def evaluate_judge(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("judge", task, episode)


def evaluate_translation(task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    return _judge("translation", task, episode)


def _judge(grader: str, task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    row = dict(task.to_row() if isinstance(task, Task) else task)
    if not any(row.get(name) is not None for name in _GOLD_FIELDS) and "grading" not in row:
        return EvalOutput(reward=0.0, is_correct=False, metadata={"reason": "no_ground_truth"})
    if row.get("ground_truth") is not None:
        row.setdefault("answer", row["ground_truth"])
    if "nums" in row:
        row.setdefault("numbers", row["nums"])
    return GraderEvaluator(grader_named(grader)).evaluate(row, episode)
