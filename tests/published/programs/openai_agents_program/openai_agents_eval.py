"""The reward function of 2025 on what the agent ended with."""

import rllm
from rllm.rewards.reward_fn import math_reward_fn
from rllm.types import Episode


@rllm.evaluator
def openai_agents_evaluator(task: dict, episode: Episode):
    output = math_reward_fn(task, str(episode.artifacts["answer"]))
    return output.reward, output.is_correct
