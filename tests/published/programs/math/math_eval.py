"""Its evaluator: the shared one for mathematics."""

from pathlib import Path

import rllm
from rllm.eval.reward_fns.math import evaluate
from rllm.eval.types import EvalOutput
from rllm.types import Episode, Task


@rllm.evaluator
def math_evaluator(task: Task | dict, episode: Episode) -> EvalOutput:
    if isinstance(task, dict):
        task = Task(id="", instruction="", metadata=task, dataset_dir=Path("."))
    return evaluate(task, episode)
