"""A storekeeper written with Pydantic AI: a tool to look with, and an answer that is a typed value.

    question ──► model ⇄ stock(fruit) ──► Count(fruit, pieces)

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

Fruit = Literal["apples", "pears", "plums"]
STOCK = {"apples": 12, "pears": 7, "plums": 30}
MAX_CALLS = 4


class Count(BaseModel):
    """The answer: how many pieces of which fruit there are."""

    fruit: Fruit
    pieces: int


def stock(fruit: Fruit) -> int:
    """How many pieces of a fruit are in the store."""
    return STOCK[fruit]


def ask(question: str, model: str = "gpt-4.1-mini", **connection: Any) -> Count | None:
    """`connection` is empty where the environment says which server to use."""
    storekeeper = Agent(
        OpenAIChatModel(model, provider=OpenAIProvider(**connection)),
        system_prompt="Look into the store, then answer.",
        tools=[stock],
        output_type=Count,
        model_settings={"max_tokens": 200, "parallel_tool_calls": False},
    )
    try:
        return storekeeper.run_sync(question, usage_limits=UsageLimits(request_limit=MAX_CALLS)).output
    except (UsageLimitExceeded, UnexpectedModelBehavior):  # it never came to an answer of that type
        return None


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    answer = ask(str(task.instruction), config.model, base_url=config.base_url, api_key="any")
    return Trajectory(output=None if answer is None else answer.pieces)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return episode.trajectories[0].output == task["answer"]


if __name__ == "__main__":
    print(ask("How many apples are in the store?"))
