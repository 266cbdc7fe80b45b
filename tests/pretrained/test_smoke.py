"""The real pretrained model in a few seconds: its weights are read, it answers, it is scored and trained."""

import asyncio
from pathlib import Path

from rllm.inference.local.client import LocalClient
from rllm.models.directory import load_model
from rllm.types.messages import SamplingParams


def test_it_knows_a_sum(smollm2: Path) -> None:
    async def answer() -> str:
        client = LocalClient(load_model(smollm2), num_slots=1, max_context=128)
        try:
            question = [{"role": "user", "content": "What is 7 + 5? Answer with a number."}]
            return (
                await client.get_model_response(question, SamplingParams(max_tokens=8, temperature=0.0))
            ).text
        finally:
            await client.close()

    assert asyncio.run(answer()).startswith("7 + 5 = 12")
