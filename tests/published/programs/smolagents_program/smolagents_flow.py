"""A CodeAgent with its own long system prompt."""

from smolagents import CodeAgent, LogLevel, OpenAIModel, tool

import rllm
from rllm.types import AgentConfig, Episode, Task, Trajectory


@tool
def multiply(a: int, b: int) -> int:
    """The product.

    Args:
        a: One factor.
        b: The other.
    """
    return a * b


@rllm.rollout(name="smolagents")
def smolagents_flow(task: Task, config: AgentConfig) -> Episode:
    model = OpenAIModel(model_id=config.model, api_base=config.base_url, api_key="EMPTY")
    agent = CodeAgent(tools=[multiply], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
    answer = agent.run(str(task.metadata["question"]))
    return Episode(trajectories=[Trajectory(name="smolagents")], artifacts={"answer": str(answer)})
