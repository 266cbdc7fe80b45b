"""The published call forms of the mathematics reward."""

from rllm.agents.math_agent import MathAgent
from rllm.rewards.math_reward import RewardConfig, RewardMathFn
from rllm.rewards.math_utils.utils import extract_answer, grade_answer_mathd, grade_answer_sympy


def test_answers_are_compared_as_mathematics():
    assert grade_answer_sympy(r"\frac{1}{2}", "0.5")
    assert grade_answer_mathd("49", "49")
    assert extract_answer(r"So \boxed{49}.") == "49"
    reward = RewardMathFn(RewardConfig(correct_reward=2.0))
    assert reward({"ground_truth": "49"}, r"So \boxed{49}.").reward == 2.0


def test_earlier_thoughts_are_left_out_of_what_follows():
    agent = MathAgent(accumulate_thinking=False)
    agent.reset()
    agent.update_from_env({"question": "7 squared?"}, 0.0, False, {})
    assert "7 squared?" in agent.chat_completions[-1]["content"]
    agent.update_from_model(r"<think>seven times seven</think>It is \boxed{49}.")
    agent.update_from_env({"feedback": "Are you sure?"}, 0.0, False, {})
    assert "seven times" not in str(agent.chat_completions)
    assert r"\boxed{49}" in agent.chat_completions[-2]["content"]
