"""The workflow with a model that says what the test tells it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from train import SolverJudgeWorkflow

from rllm.engine.rollout.rollout_engine import ModelOutput, RolloutEngine


class Parrot(RolloutEngine):
    def __init__(self, words):
        self.words = list(words)

    async def get_model_response(self, messages, **kwargs):
        text = self.words.pop(0)
        return ModelOutput(text=text, content=text)


def test_each_solver_is_paid_for_its_own_answer():
    engine = Parrot([r"\boxed{4}", r"\boxed{5}", "the first"])
    with ThreadPoolExecutor() as executor:
        workflow = SolverJudgeWorkflow(rollout_engine=engine, executor=executor)
        task = {"question": "3 + 1?", "ground_truth": "4"}
        episode = asyncio.run(workflow.run(task, "sum-3:0"))
    assert [each.name for each in episode.trajectories] == ["solver", "solver", "judge"]
    assert [each.reward for each in episode.trajectories] == [1.0, 0.0, 1.0]
    assert episode.is_correct
