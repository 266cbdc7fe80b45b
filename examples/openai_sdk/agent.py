"""A storekeeper written with the plain OpenAI SDK, three times: blocking, async, and streamed.

    question ──► model ⇄ stock(fruit) ──► answer

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI, LengthFinishReasonError, OpenAI

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

STOCK = {"apples": 12, "pears": 7, "plums": 30}
TOOL = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "How many pieces of a fruit are in the store.",
        "parameters": {
            "type": "object",
            "properties": {"fruit": {"type": "string", "enum": list(STOCK)}},
            "required": ["fruit"],
            "additionalProperties": False,
        },
    },
}
MAX_TURNS = 4


def request(model: str, messages: list[Any]) -> dict[str, Any]:
    """The first turn has to look; later ones may."""
    tool_choice = "auto" if any(message["role"] == "tool" for message in messages) else "required"
    return {
        "model": model,
        "messages": [{"role": "system", "content": "Look into the store, then answer."}, *messages],
        "tools": [TOOL],
        "tool_choice": tool_choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }


def after(message: Any, messages: list[Any]) -> bool:
    """Whether the model wants to go on: its calls are answered then."""
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        fruit = json.loads(call.function.arguments).get("fruit", "")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(STOCK.get(fruit, 0))})
    return bool(message.tool_calls)


def ask(client: OpenAI, question: str, model: str = "gpt-4.1-mini", *, stream: bool = False) -> str | None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        if stream:
            try:
                with client.chat.completions.stream(**request(model, messages)) as events:
                    reply = events.get_final_completion()
            except LengthFinishReasonError:  # how the SDK says that a streamed answer was cut off
                return None
        else:
            reply = client.chat.completions.create(**request(model, messages))
        if not after(reply.choices[0].message, messages):
            return reply.choices[0].message.content
    return None


async def ask_async(client: AsyncOpenAI, question: str, model: str = "gpt-4.1-mini") -> str | None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(**request(model, messages))
        if not after(reply.choices[0].message, messages):
            return reply.choices[0].message.content
    return None


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    client = OpenAI(base_url=config.base_url, api_key="any")
    return Trajectory(output=ask(client, str(task.instruction), config.model))


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return str(task["answer"]) in str(episode.trajectories[0].output)


if __name__ == "__main__":
    question = "How many apples are in the store?"
    print("blocking:", ask(OpenAI(), question))
    print("async:", asyncio.run(ask_async(AsyncOpenAI(), question)))
    print("streamed:", ask(OpenAI(), question, stream=True))
