"""An agent with a function tool, through the Chat Completions model of the SDK."""

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

import rllm
from rllm.types import AgentConfig, Episode, Task, Trajectory


@function_tool
def multiply(a: int, b: int) -> int:
    """The product."""
    return a * b


@rllm.rollout(name="openai-agents")
async def openai_agents_flow(task: Task, config: AgentConfig) -> Episode:
    client = AsyncOpenAI(base_url=config.base_url, api_key="EMPTY")
    agent = Agent(
        name="calculator",
        instructions="Use the tool, then answer.",
        tools=[multiply],
        model=OpenAIChatCompletionsModel(model=config.model, openai_client=client),
    )
    answer = ""
    try:
        done = await Runner.run(
            agent,
            str(task.metadata["question"]),
            max_turns=3,
            run_config=RunConfig(tracing_disabled=True),
        )
        answer = str(done.final_output)
    except AgentsException:
        pass
    finally:
        await client.close()
    return Episode(trajectories=[Trajectory(name="openai-agents")], artifacts={"answer": answer})
