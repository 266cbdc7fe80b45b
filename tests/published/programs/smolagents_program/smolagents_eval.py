"""A plain number as a judgement."""

import rllm
from rllm.rewards.math_reward import RewardConfig, RewardMathFn
from rllm.types import Episode

REWARD = RewardMathFn(RewardConfig())


@rllm.evaluator
def smolagents_evaluator(task: dict, episode: Episode) -> float:
    return REWARD({"ground_truth": task["ground_truth"]}, f"\\boxed{{{episode.artifacts['answer']}}}").reward
