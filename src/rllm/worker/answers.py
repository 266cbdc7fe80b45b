"""A worker without a program: its model is asked once, and answers as the output schema says.

purpose + output schema ──system──►
inputs as JSON          ──user────►  one chat completion under `response_format` ──► JSON text
                                         └ does not fit, and `repair`: one more turn of the conversation
"""

import json
from typing import Any

from rllm.agents.flow import AgentFlow
from rllm.contracts.answering import (
    answer_schema,
    checked_outputs,
    messages_for,
    read_answer,
    repair_message,
)
from rllm.contracts.contract import Contract
from rllm.errors import InferenceError, MissingExtraError
from rllm.types.messages import Message
from rllm.types.task import AgentConfig, Task


def answering_flow(contract: Contract) -> AgentFlow:
    """The program that asks the model for what the contract's agent is to give."""
    schema = answer_schema(contract)

    async def answer(task: Task, config: AgentConfig) -> str:
        messages = messages_for(contract, task.metadata)
        sent_schema = schema if config.metadata["sends_schema"] else None
        text = await _ask(config, messages, sent_schema)
        _, violation = checked_outputs(contract, read_answer(text), run_id_of(contract, task))
        if violation is None or not contract.constraints.repair:
            return text
        repair = [{"role": "assistant", "content": text}, repair_message(violation)]
        return await _ask(config, [*messages, *repair], sent_schema)

    return AgentFlow(answer, contract.id)


def run_id_of(contract: Contract, task: Task) -> str:
    """The `run_id` that the runtime fills in."""
    return str(task.metadata["run_id"] if contract.constraints.idempotency_key == "run_id" else task.id)


async def _ask(config: AgentConfig, messages: list[Message], schema: dict[str, Any] | None) -> str:
    try:
        import aiohttp
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "worker") from error
    body: dict[str, Any] = {"model": config.model, "messages": messages}
    if schema is not None:
        form = {"name": "outputs", "strict": True, "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    url = f"{config.base_url}/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
        text = await reply.text()
        if reply.status != 200:
            raise InferenceError(f"The model behind the worker answered {reply.status}: {text[:500]}")
        message = json.loads(text)["choices"][0]["message"]
        return message.get("content") or ""
