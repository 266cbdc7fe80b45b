"""A storekeeper written with AutoGen: an AssistantAgent that calls its tool until it can answer.

    question ──► model ⇄ stock(fruit) ──► answer

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

import asyncio
from typing import Any, Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

STOCK = {"apples": 12, "pears": 7, "plums": 30}
MAX_CALLS = 4
ANY_MODEL = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    structured_output=True,
    family=ModelFamily.UNKNOWN,
)
"""AutoGen refuses names that it does not know, unless it is told what the model can do."""


async def stock(fruit: Literal["apples", "pears", "plums"]) -> int:
    """How many pieces of a fruit are in the store."""
    return STOCK.get(fruit, 0)


async def ask(question: str, model: str = "gpt-4.1-mini", **connection: Any) -> str | None:
    """`connection` is empty where the environment says which server to use."""
    client = OpenAIChatCompletionClient(
        model=model, model_info=ANY_MODEL, max_tokens=200, parallel_tool_calls=False, **connection
    )
    storekeeper = AssistantAgent(
        "storekeeper",
        model_client=client,
        tools=[stock],
        system_message="Look into the store, then answer.",
        max_tool_iterations=MAX_CALLS,
    )
    try:
        said = (await storekeeper.run(task=question)).messages[-1]
    finally:
        await client.close()
    return said.content if isinstance(said, TextMessage) else None  # else: what its tool said last


@rllm.rollout
async def solve(task: Task, config: AgentConfig) -> Trajectory:
    answer = await ask(str(task.instruction), config.model, base_url=config.base_url, api_key="any")
    return Trajectory(output=answer)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return str(task["answer"]) in str(episode.trajectories[0].output)


if __name__ == "__main__":
    print(asyncio.run(ask("How many apples are in the store?")))
