"""What the graph ended with, graded as mathematics."""

import rllm
from rllm.eval.types import EvalOutput, Signal
from rllm.types import Episode


@rllm.evaluator
def langgraph_evaluator(task: dict, episode: Episode) -> EvalOutput:
    from rllm.rewards.math_utils.utils import extract_answer, grade_answer_mathd, grade_answer_sympy

    text = str(episode.artifacts.get("answer", ""))
    answer = extract_answer(text) or text
    truth = str(task["ground_truth"])
    is_correct = grade_answer_mathd(answer, truth) or grade_answer_sympy(answer, truth)
    return EvalOutput(
        reward=float(is_correct),
        is_correct=is_correct,
        signals=[Signal(name="answered", value=float(bool(text)))],
    )
