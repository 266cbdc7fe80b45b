"""The evaluator on what an agent may end with."""

import pytest
from langgraph_eval import langgraph_evaluator
from langgraph_flow import multiply

from rllm.types import Episode, Trajectory

TASK = {"question": "34 * 25?", "ground_truth": "850"}


@pytest.mark.parametrize(("answer", "reward"), [(r"\boxed{850}", 1.0), (r"\boxed{851}", 0.0), ("", 0.0)])
def test_a_product_is_paid(answer, reward):
    episode = Episode(trajectories=[Trajectory(name="x")], artifacts={"answer": answer})
    assert langgraph_evaluator.evaluate(TASK, episode).reward == reward


def test_the_tool_multiplies():
    assert multiply.invoke({"a": 34, "b": 25}) == 850
