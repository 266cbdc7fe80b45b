"""The evaluator on what an agent may end with."""

import pytest
from strands_eval import strands_evaluator
from strands_flow import multiply

from rllm.types import Episode, Trajectory

TASK = {"question": "34 * 25?", "ground_truth": "850"}


@pytest.mark.parametrize(("answer", "reward"), [("850", 1.0), ("851", 0.0), ("", 0.0)])
def test_a_product_is_paid(answer, reward):
    episode = Episode(trajectories=[Trajectory(name="x")], artifacts={"answer": answer})
    assert strands_evaluator.evaluate(TASK, episode).reward == reward


def test_the_tool_multiplies():
    assert multiply(34, 25) == 850
