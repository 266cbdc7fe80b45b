"""Whether the product is in the answer."""

import rllm
from rllm.experimental.eval.types import EvalOutput
from rllm.types import Episode


@rllm.evaluator
def strands_evaluator(task: dict, episode: Episode) -> EvalOutput:
    is_correct = str(task["ground_truth"]) in str(episode.artifacts["answer"])
    return EvalOutput(reward=1.0 if is_correct else 0.0, is_correct=is_correct)
