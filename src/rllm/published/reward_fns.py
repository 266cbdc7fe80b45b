"""`rllm.eval.reward_fns.NAME.evaluate(task, episode)`: published evaluators, by our graders.

    evaluate(task, episode) ──► row of the task ──► GraderEvaluator ──► EvalOutput

`task` is a Task or its row; the right answer may be called `ground_truth`. A row without any right answer is
0 with the reason, as published evaluators have it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from rllm.rewards.evaluators import GraderEvaluator
from rllm.rewards.extraction import last_assistant_text
from rllm.rewards.graders import grader_named
from rllm.types.episode import Episode
from rllm.types.evaluation import EvalOutput
from rllm.types.task import Task, row_of

SYSTEM_PROMPT = "Think about the question step by step, then end with the answer alone inside \\boxed{}."
_GOLD_FIELDS = (
    *("ground_truth", "answer", "answers", "target", "tests", "choices", "instruction_id_list"),
    *("rubric", "calls"),
)


def extract_answer_text(episode: Episode) -> str:
    """The end of an episode."""
    return last_assistant_text(episode)


def _evaluate(grader: str, task: Task | Mapping[str, Any], episode: Episode) -> EvalOutput:
    """The verdict of the grader of that name."""
    row = row_of(task)
    if not any(row.get(name) is not None for name in _GOLD_FIELDS) and "grading" not in row:
        return EvalOutput(reward=0.0, is_correct=False, metadata={"reason": "no_ground_truth"})
    return GraderEvaluator(grader_named(grader)).evaluate(row, episode)


evaluate_math = partial(_evaluate, "math")
evaluate_choice = partial(_evaluate, "choice")
evaluate_f1 = partial(_evaluate, "f1")
evaluate_code = partial(_evaluate, "code")
evaluate_countdown = partial(_evaluate, "countdown")
evaluate_instructions = partial(_evaluate, "instructions")
evaluate_calls = partial(_evaluate, "calls")
evaluate_equality = partial(_evaluate, "equality")
evaluate_judge = partial(_evaluate, "judge")
evaluate_translation = partial(_evaluate, "translation")
