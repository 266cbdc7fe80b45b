"""Right or wrong."""

import rllm
from rllm.types import Episode


@rllm.evaluator
def google_adk_evaluator(task: dict, episode: Episode) -> bool:
    return str(task["ground_truth"]) in str(episode.artifacts["answer"])
