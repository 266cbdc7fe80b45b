"""A storekeeper written with the OpenAI Agents SDK, through both of its model classes.

    question ──► Responses API or Chat Completions API ⇄ stock(fruit) ──► answer

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

STOCK = {"apples": 12, "pears": 7, "plums": 30}
MAX_TURNS = 4


@function_tool
def stock(fruit: Literal["apples", "pears", "plums"]) -> int:
    """How many pieces of a fruit are in the store."""
    return STOCK[fruit]


async def ask(
    question: str,
    model: str = "gpt-4.1-mini",
    model_class: Any = OpenAIResponsesModel,
    **connection: Any,
) -> str | None:
    """`connection` is empty where the environment says which server to use."""
    storekeeper = Agent(
        name="storekeeper",
        instructions="Look into the store, then answer.",
        tools=[stock],
        model=model_class(model, AsyncOpenAI(**connection)),
        # Required in the first turn alone: the SDK resets it after a call.
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200),
    )
    try:
        done = await Runner.run(
            storekeeper, question, max_turns=MAX_TURNS, run_config=RunConfig(tracing_disabled=True)
        )
    except AgentsException:  # tools until the last turn, or an answer that was cut off
        return None
    return done.final_output


@rllm.rollout
async def solve(task: Task, config: AgentConfig) -> Trajectory:
    answer = await ask(str(task.instruction), config.model, base_url=config.base_url, api_key="any")
    return Trajectory(output=answer)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return str(task["answer"]) in str(episode.trajectories[0].output)


if __name__ == "__main__":
    for model_class in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        print(asyncio.run(ask("How many apples are in the store?", model_class=model_class)))
