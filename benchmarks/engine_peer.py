"""The peer's side of `engine.py`: `MultiTurnEnv.generate` of verifiers 0.2.1, in an environment of its own.

    engine_peer.py '{"way": "peer", "at_once": 64, "episodes": 256, "model_s": 0.0, "url": ""}'

0.2.1 is the last release whose rollouts run in the process itself; from 0.3 on each is a program of its own
behind a proxy. `url` empty: a client of ours answers in this process, otherwise its own OpenAI client asks.
"""

import asyncio
import json
import logging
import os
import resource
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset
from engine_probe import ANSWER, SYSTEM, TURNS, LoopLag, Measured, observation
from verifiers.clients import Client, OpenAIChatCompletionsClient
from verifiers.types import ClientConfig, Response, ResponseMessage, ResponseTokens, Usage

PROMPT_IDS = list(range(100, 228))


class Corridor(vf.MultiTurnEnv):
    """Five turns, whatever is said."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": observation(len(state["trajectory"]))}]


class ConstantClient(Client[Any, Any, Any, Any]):
    """Always the same answer, always after the same time."""

    def __init__(self, model_s: float) -> None:
        super().__init__(None)
        self.model_s = model_s

    def setup_client(self, config: ClientConfig) -> None:
        return None

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def get_native_response(self, prompt: Any, *arguments: Any, **named: Any) -> None:
        await asyncio.sleep(self.model_s)

    async def raise_from_native_response(self, response: None) -> None:
        """It is always valid."""

    async def from_native_response(self, response: None) -> Response:
        tokens = ResponseTokens(
            prompt_ids=PROMPT_IDS,
            prompt_mask=[0] * len(PROMPT_IDS),
            completion_ids=[5, 6],
            completion_mask=[1, 1],
            completion_logprobs=[-0.5, -0.1],
        )
        return Response(
            id="constant",
            created=0,
            model="constant",
            usage=Usage(prompt_tokens=128, reasoning_tokens=0, completion_tokens=2, total_tokens=130),
            message=ResponseMessage(content=ANSWER, finish_reason="stop", is_truncated=False, tokens=tokens),
        )

    async def close(self) -> None:
        """Nothing to close."""


async def paid(**state: Any) -> float:
    return 1.0


async def measure(wanted: dict[str, Any]) -> dict[str, Any]:
    episodes, at_once = wanted["episodes"], wanted["at_once"]
    rows = [{"question": observation(0), "answer": ""} for _ in range(max(episodes, 64))]
    env = Corridor(
        max_turns=TURNS,
        dataset=Dataset.from_list(rows),
        system_prompt=SYSTEM,
        rubric=vf.Rubric(funcs=[paid]),
    )
    client: Any = ConstantClient(wanted["model_s"])
    if wanted["url"]:
        os.environ["CONSTANT_KEY"] = "none"
        config = ClientConfig(api_base_url=wanted["url"], api_key_var="CONSTANT_KEY", max_retries=0)
        client = OpenAIChatCompletionsClient(config)

    async def run(count: int, at_once: int) -> None:
        outputs = await env.generate(
            env.get_dataset(n=count),
            client=client,
            model="constant",
            sampling_args={"max_tokens": 16, "temperature": 1.0},
            max_concurrent=at_once,
            independent_scoring=True,
            on_start=lambda raw, filtered: None,
            on_progress=lambda outputs, new, metadata: None,
        )
        assert len(outputs["outputs"]) == count
        for output in outputs["outputs"]:
            assert output["error"] is None, output["error"]
            assert output["metrics"]["num_turns"] == TURNS

    await run(64, 64)
    async with LoopLag() as lag:
        with Measured(episodes, at_once, lag) as measured:
            await run(episodes, at_once)
    await client.close()
    return measured.said


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.disable(logging.WARNING)
    print(json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
