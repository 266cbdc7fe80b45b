"""A storekeeper written with LiteLLM, three times: chat completions, the same streamed, and messages.

    question ──► model ⇄ stock(fruit) ──► answer

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

import json
from typing import Any

import litellm

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


def reply(messages: list[Any], *, stream: bool, **connection: Any) -> Any:
    """The first turn has to look; later ones may."""
    has_looked = any(message["role"] == "tool" for message in messages)
    answer = litellm.completion(
        messages=[{"role": "system", "content": "Look into the store, then answer."}, *messages],
        tools=[TOOL],
        tool_choice="auto" if has_looked else "required",
        parallel_tool_calls=False,
        max_tokens=200,
        stream=stream,
        **connection,
    )
    whole: Any = litellm.stream_chunk_builder(list(answer)) if stream else answer
    return whole.choices[0].message


def ask(
    question: str, model: str = "openai/gpt-4.1-mini", *, stream: bool = False, **connection: Any
) -> str | None:
    """`connection` is empty where the environment says which server to use."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        message = reply(messages, stream=stream, model=model, **connection)
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            fruit = json.loads(call.function.arguments).get("fruit", "")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(STOCK.get(fruit, 0))})
        if not message.tool_calls:
            return message.content
    return None


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    connection = {"api_base": config.base_url, "api_key": "any"}
    return Trajectory(output=ask(str(task.instruction), f"openai/{config.model}", **connection))


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return str(task["answer"]) in str(episode.trajectories[0].output)


if __name__ == "__main__":
    question = "How many apples are in the store?"
    print("chat:", ask(question))
    print("streamed:", ask(question, stream=True))
    print("messages:", ask(question, "anthropic/claude-sonnet-4-5"))
