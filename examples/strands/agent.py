"""A storekeeper written with Strands Agents: a tool to look with, and an answer that is a typed value.

    question ──► model ⇄ stock(fruit) ──► Count(fruit, pieces)

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

from typing import Any, Literal

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException, StructuredOutputException

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

Fruit = Literal["apples", "pears", "plums"]
STOCK = {"apples": 12, "pears": 7, "plums": 30}
MAX_TURNS = 4


class Count(BaseModel):
    """The answer: how many pieces of which fruit there are."""

    fruit: Fruit
    pieces: int


@tool
def stock(fruit: Fruit) -> int:
    """How many pieces of a fruit are in the store."""
    return STOCK[fruit]


def ask(question: str, model: str = "gpt-4.1-mini", **connection: Any) -> Count | None:
    """`connection` is empty where the environment says which server to use."""
    storekeeper = Agent(
        model=OpenAIModel(client_args=connection, model_id=model),
        system_prompt="Look into the store, then answer.",
        tools=[stock],
        callback_handler=None,
    )
    try:
        done = storekeeper(question, structured_output_model=Count, limits={"turns": MAX_TURNS})
    except (StructuredOutputException, MaxTokensReachedException):  # it never came to such an answer
        return None
    return done.structured_output if isinstance(done.structured_output, Count) else None


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    answer = ask(str(task.instruction), config.model, base_url=config.base_url, api_key="any")
    return Trajectory(output=None if answer is None else answer.pieces)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return episode.trajectories[0].output == task["answer"]


if __name__ == "__main__":
    print(ask("How many apples are in the store?"))
