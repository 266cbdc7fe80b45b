"""A storekeeper written with the Anthropic SDK: tool_use blocks come, tool_result blocks go.

    question ──► Messages API ⇄ stock(fruit) ──► answer

Only the last lines know of rLLM: `ANTHROPIC_BASE_URL=… ANTHROPIC_API_KEY=… python agent.py` is captured.
"""

from typing import Any

from anthropic import Anthropic

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

STOCK = {"apples": 12, "pears": 7, "plums": 30}
TOOL = {
    "name": "stock",
    "description": "How many pieces of a fruit are in the store.",
    "input_schema": {
        "type": "object",
        "properties": {"fruit": {"type": "string", "enum": list(STOCK)}},
        "required": ["fruit"],
        "additionalProperties": False,
    },
}
MAX_TURNS = 4


def request(model: str, messages: list[Any]) -> dict[str, Any]:
    """The first turn has to look; later ones may."""
    return {
        "model": model,
        "max_tokens": 200,
        "system": "Look into the store, then answer.",
        "messages": messages,
        "tools": [TOOL],
        "tool_choice": {"type": "any" if len(messages) == 1 else "auto", "disable_parallel_tool_use": True},
    }


def ask(
    client: Anthropic, question: str, model: str = "claude-haiku-4-5", *, stream: bool = False
) -> str | None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        if stream:
            with client.messages.stream(**request(model, messages)) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**request(model, messages))
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": str(STOCK.get(str(block.input.get("fruit")), 0)),
            }
            for block in reply.content
            if block.type == "tool_use"
        ]
        if not results:
            return "".join(block.text for block in reply.content if block.type == "text")
        messages.append({"role": "user", "content": results})
    return None


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    client = Anthropic(base_url=config.base_url.removesuffix("/v1"), api_key="any")  # it adds /v1 itself
    return Trajectory(output=ask(client, str(task.instruction), config.model))


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return str(task["answer"]) in str(episode.trajectories[0].output)


if __name__ == "__main__":
    print("whole:", ask(Anthropic(), "How many apples are in the store?"))
    print("streamed:", ask(Anthropic(), "How many apples are in the store?", stream=True))
