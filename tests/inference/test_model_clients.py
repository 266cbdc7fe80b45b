"""What holds for every model client, on real objects: the scripted one, the built-in engine, and servers."""

import inspect
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from rllm.inference.anthropic import AnthropicClient
from rllm.inference.client import ModelClient
from rllm.inference.fleet import Fleet
from rllm.inference.local.client import LocalClient
from rllm.inference.openai import OpenAIClient
from rllm.inference.scripted import CodepointTokenizer, ScriptedClient
from rllm.inference.vllm import VLLMClient
from rllm.models.directory import load_model
from rllm.types.messages import FinishReason, Message, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
import fake_upstream as fake

SAMPLING = SamplingParams(max_tokens=4, seed=3)


async def by_ids(asked: Any) -> Any:
    """Four ids for any prompt of ids."""
    choice = {
        "finish_reason": "length",
        "prompt_token_ids": asked.body["prompt"],
        "token_ids": [5, 6, 7, 8],
        "logprobs": {"token_logprobs": [-1.0] * 4},
    }
    return await fake.body(orjson.dumps({"id": "c", "choices": [choice]}))(asked)


@pytest.mark.parametrize("make", [OpenAIClient, AnthropicClient, VLLMClient, VLLMClient.connect])
def test_clients_of_servers_wait_alike_where_nobody_says_how_long(make: Any) -> None:
    defaults = {name: each.default for name, each in inspect.signature(make).parameters.items()}
    waits = defaults["timeout_s"], defaults["connect_timeout_s"], defaults["max_connections"]
    assert waits == (600.0, 30.0, 0)
    assert defaults.get("sends_seeds", True)
    assert not defaults.get("processed_logprobs", False)
    assert inspect.signature(Fleet).parameters["patience_s"].default == 600.0


@pytest.fixture(params=["scripted", "local", "vllm", "openai"])
async def client(request: pytest.FixtureRequest, model_dir: Path) -> AsyncIterator[ModelClient]:
    async with fake.FakeUpstream(answer="Up") as server:
        made: ModelClient
        match request.param:
            case "scripted":
                made = ScriptedClient(lambda messages: "Up")
            case "local":
                made = LocalClient(load_model(model_dir), num_slots=4, max_context=256)
            case "vllm":
                server.default = by_ids
                made = VLLMClient(server.url, model_dir)
            case _:
                made = OpenAIClient(server.url, tokenizer=CodepointTokenizer())
        yield made
        await made.close()


def more(messages: list[Message], answer: str) -> list[Message]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "and now?"}]


async def test_a_session_answers_turn_by_turn(client: ModelClient) -> None:
    messages: list[Message] = [{"role": "user", "content": "where to?"}]
    async with client.session(("task", 0)) as session:
        first = await session.respond(messages, SAMPLING)
        second = await session.respond(more(messages, first.text), SAMPLING)
    for output in (first, second):
        assert len(output.completion_ids) == len(output.logprobs) == len(output.policy_versions) > 0
        assert output.usage["completion_tokens"] == len(output.completion_ids)
    sampled = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(sampled)] == sampled, "nothing that was sampled is encoded again"


async def test_prompt_tokens_is_the_length_of_what_is_sent_and_asking_changes_nothing(
    client: ModelClient,
) -> None:
    messages: list[Message] = [{"role": "user", "content": "where to?"}]
    async with client.session(("task", 0)) as session:
        for _ in range(3):
            session.prompt_tokens([{"role": "user", "content": "something else"}])
            expected = session.prompt_tokens(messages)
            assert session.prompt_tokens(messages) == expected
            output = await session.respond(messages, SAMPLING)
            # The fake server's own template is a few characters shorter than the tokenizer's here.
            unlike = 2 * len(messages) if isinstance(client, OpenAIClient) else 0
            assert 0 <= expected - len(output.prompt_ids) <= unlike
            messages = more(messages, output.text)


async def test_one_answer_outside_of_any_conversation(client: ModelClient) -> None:
    output = await client.get_model_response([{"role": "user", "content": "where to?"}], SAMPLING)
    assert output.prompt_ids
    assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_every_sessions_end_can_be_said_twice(client: ModelClient) -> None:
    session = client.session(("task", 0))
    session.close()
    session.close()
