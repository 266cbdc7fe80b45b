"""Each solver is paid for its own answer, the judge for the one that it picked."""

import rllm
from rllm.eval.types import EvalOutput, Signal
from rllm.rewards.countdown_reward import countdown_reward_fn
from rllm.types import Episode


@rllm.evaluator
def solver_judge_evaluator(task: dict, episode: Episode) -> EvalOutput:
    facts = {"target": task["target"], "nums": task["nums"]}
    paid = {}
    for trajectory in episode.trajectories:
        trajectory.reward = countdown_reward_fn(facts, trajectory.steps[-1].action).reward
        paid.setdefault(trajectory.name, []).append(trajectory.reward)
    is_correct = paid["judge"][0] == 1.0
    signals = [Signal(name=f"{name}_acc", value=sum(each) / len(each)) for name, each in paid.items()]
    return EvalOutput(reward=float(is_correct), is_correct=is_correct, signals=signals)
