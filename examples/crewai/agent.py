"""A storekeeper written with CrewAI: a crew of one agent with one task.

    question ──► model ⇄ stock(fruit) ──► answer

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

from typing import Any, Literal

from crewai import LLM, Agent, Crew
from crewai import Task as CrewTask
from crewai.tools import tool

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

STOCK = {"apples": 12, "pears": 7, "plums": 30}
MAX_CALLS = 4


@tool("stock")
def stock(fruit: Literal["apples", "pears", "plums"]) -> int:
    """How many pieces of a fruit are in the store."""
    return STOCK.get(fruit, 0)


def ask(question: str, model: str = "gpt-4.1-mini", **connection: Any) -> str:
    """`connection` is empty where the environment says which server to use."""
    storekeeper = Agent(
        role="storekeeper",
        goal="Look into the store, then answer.",
        backstory="You know where everything is.",
        tools=[stock],
        llm=LLM(model, provider="openai", max_tokens=200, **connection),
        max_iter=MAX_CALLS,
    )
    task = CrewTask(description=question, expected_output="How many there are.", agent=storekeeper)
    return Crew(agents=[storekeeper], tasks=[task], tracing=False).kickoff().raw


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    answer = ask(str(task.instruction), config.model, base_url=config.base_url, api_key="any")
    return Trajectory(output=answer)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return str(task["answer"]) in str(episode.trajectories[0].output)


if __name__ == "__main__":
    print(ask("How many apples are in the store?"))
