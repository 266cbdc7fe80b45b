"""A Strands agent, which streams every answer."""

import contextlib

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException

import rllm
from rllm.types import AgentConfig, Episode, Task, Trajectory


@tool
def multiply(a: int, b: int) -> int:
    """The product."""
    return a * b


@rllm.rollout(name="strands")
async def strands_flow(task: Task, config: AgentConfig) -> Episode:
    model = OpenAIModel(client_args={"base_url": config.base_url, "api_key": "EMPTY"}, model_id=config.model)
    agent = Agent(
        model=model, system_prompt="Use the tool, then answer.", tools=[multiply], callback_handler=None
    )
    answer = ""
    with contextlib.suppress(MaxTokensReachedException):
        answer = str(await agent.invoke_async(str(task.metadata["question"])))
    return Episode(trajectories=[Trajectory(name="strands")], artifacts={"answer": answer})
