"""A storekeeper written with smolagents: a ToolCallingAgent, which must call a tool in every step.

    question ──► model ⇄ stock(fruit) ──► final_answer(answer)

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

from typing import Any

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

STOCK = {"apples": 12, "pears": 7, "plums": 30}
MAX_STEPS = 3
PROMPT = "Look into the store, then give the final answer."
"""Instead of the default one, whose 2,400 tokens are more than a tiny model reads."""


@tool
def stock(fruit: str) -> int:
    """How many pieces of a fruit are in the store.

    Args:
        fruit: Which one.
    """
    return STOCK.get(fruit, 0)


def ask(question: str, model: str = "gpt-4.1-mini", **connection: Any) -> Any:
    """`connection` is empty where the environment says which server to use."""
    storekeeper = ToolCallingAgent(
        tools=[stock],
        model=OpenAIModel(model, max_tokens=200, **connection),
        max_steps=MAX_STEPS,
        verbosity_level=LogLevel.OFF,
    )
    storekeeper.prompt_templates["system_prompt"] = PROMPT
    return storekeeper.run(question)


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    answer = ask(str(task.instruction), config.model, api_base=config.base_url, api_key="any")
    return Trajectory(output=answer)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return str(task["answer"]) in str(episode.trajectories[0].output)


if __name__ == "__main__":
    print(ask("How many apples are in the store?"))
