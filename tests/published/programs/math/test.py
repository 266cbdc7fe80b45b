"""The evaluator pays what the flow ends with."""

import pytest
from math_eval import math_evaluator

from rllm.types import Episode, Step, Trajectory


def episode_of(text):
    step = Step(chat_completions=[{"role": "assistant", "content": text}], model_response=text, action=text)
    return Episode(trajectories=[Trajectory(name="math", steps=[step])], artifacts={"answer": text})


@pytest.mark.parametrize(("text", "reward"), [(r"It is \boxed{4}.", 1.0), (r"It is \boxed{5}.", 0.0)])
def test_a_right_answer_is_paid(text, reward):
    output = math_evaluator.evaluate({"question": "3 + 1?", "ground_truth": "4"}, episode_of(text))
    assert output.reward == reward
    assert output.is_correct is (reward == 1.0)
