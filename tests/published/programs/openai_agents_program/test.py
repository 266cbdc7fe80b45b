"""The evaluator on what an agent may end with."""

import pytest
from openai_agents_eval import openai_agents_evaluator
from openai_agents_flow import multiply

from rllm.types import Episode, Trajectory

TASK = {"question": "34 * 25?", "ground_truth": "850"}


@pytest.mark.parametrize(("answer", "reward"), [(r"\boxed{850}", 1.0), (r"\boxed{851}", 0.0), ("", 0.0)])
def test_a_product_is_paid(answer, reward):
    episode = Episode(trajectories=[Trajectory(name="x")], artifacts={"answer": answer})
    assert openai_agents_evaluator.evaluate(TASK, episode).reward == reward


def test_the_schema_of_the_tool_is_strict():
    assert set(multiply.params_json_schema["required"]) == {"a", "b"}
