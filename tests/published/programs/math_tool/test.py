"""Calls, results, an answer: agent and environment by hand."""

import json

from rllm.agents import ToolAgent
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.rewards.reward_fn import math_reward_fn
from rllm.tools.tool_base import Tool, ToolOutput


class Doubling(Tool):
    NAME = "double"
    DESCRIPTION = "Twice a number."

    def __init__(self, name=NAME, description=DESCRIPTION):
        super().__init__(name=name, description=description)

    @property
    def json(self):
        number = {"type": "number"}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": {"x": number}, "required": ["x"]},
            },
        }

    def forward(self, x):
        return ToolOutput(name=self.name, output=2 * x)


def test_an_agent_calls_a_tool_and_answers():
    agent = ToolAgent(tool_map={"double": Doubling}, parser_name="qwen", system_prompt="Call.")
    task = {"question": "Twice 21?", "ground_truth": "42"}
    env = ToolEnvironment(task=task, tool_map={"double": Doubling}, reward_fn=math_reward_fn)
    observation, info = env.reset()
    agent.reset()
    agent.update_from_env(observation, 0.0, False, info)
    call = json.dumps({"name": "double", "arguments": {"x": 21}})
    action = agent.update_from_model(f"<tool_call>\n{call}\n</tool_call>")
    observation, reward, done, info = env.step(action.action)
    assert (reward, done) == (0.0, False)
    assert list(observation["tool_outputs"].values()) == ["42"]
    agent.update_from_env(observation, reward, done, info)
    action = agent.update_from_model(r"It is \boxed{42}.")
    observation, reward, done, info = env.step(action.action)
    assert (reward, done) == (1.0, True)
