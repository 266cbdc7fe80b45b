"""A storekeeper written with the Google Agent Development Kit, whose models come through LiteLLM.

    question ──► model ⇄ stock(fruit) ──► answer

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

import asyncio
from typing import Any, Literal

from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.agents.run_config import RunConfig
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

STOCK = {"apples": 12, "pears": 7, "plums": 30}
MAX_CALLS = 4


def stock(fruit: Literal["apples", "pears", "plums"]) -> int:
    """How many pieces of a fruit are in the store."""
    return STOCK.get(fruit, 0)


async def ask(question: str, model: str = "gpt-4.1-mini", **connection: Any) -> str | None:
    """`connection` is empty where the environment says which server to use."""
    storekeeper = LlmAgent(
        name="storekeeper",
        model=LiteLlm(f"openai/{model}", **connection),
        instruction="Look into the store, then answer.",
        tools=[stock],
        generate_content_config=types.GenerateContentConfig(max_output_tokens=200),
    )
    runner = InMemoryRunner(storekeeper, app_name="store")
    session = await runner.session_service.create_session(app_name="store", user_id="customer")
    answer: str | None = None
    try:
        async for event in runner.run_async(
            user_id="customer",
            session_id=session.id,
            new_message=types.UserContent(question),
            run_config=RunConfig(max_llm_calls=MAX_CALLS),
        ):
            if event.is_final_response() and event.content and event.content.parts:
                answer = event.content.parts[0].text
    except LlmCallsLimitExceededError:  # it called tools until the last turn
        return None
    return answer


@rllm.rollout
async def solve(task: Task, config: AgentConfig) -> Trajectory:
    answer = await ask(str(task.instruction), config.model, api_base=config.base_url, api_key="any")
    return Trajectory(output=answer)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return str(task["answer"]) in str(episode.trajectories[0].output)


if __name__ == "__main__":
    print(asyncio.run(ask("How many apples are in the store?")))
