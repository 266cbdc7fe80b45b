"""The reward function in its published call form."""

import pytest

from rllm.rewards.countdown_reward import countdown_reward_fn

TASK = {"target": 24, "nums": [4, 6], "ground_truth": {"target": 24, "numbers": [4, 6]}}


@pytest.mark.parametrize(
    ("answer", "is_correct"),
    [("<answer>4 * 6</answer>", True), ("<answer>4 + 6</answer>", False), ("<answer>24</answer>", False)],
)
def test_an_expression_is_paid_that_comes_to_the_target(answer, is_correct):
    output = countdown_reward_fn(TASK, answer)
    assert output.is_correct is is_correct
    assert (output.reward == 1.0) is is_correct
