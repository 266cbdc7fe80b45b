"""`previous_response_id` and GET /v1/responses/ID with the OpenAI SDK: the ledger is what keeps them."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.inference.scripted import ScriptedClient

TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    answers = ["one", CALL, "three", "four", "five"]
    async with Gateway(
        LocalPolicy(ScriptedClient(answers), "m"), tmp_path, token=None, grace_s=1.0
    ) as gateway:
        yield gateway


def client_of(gateway: Gateway, session: str = "s") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/sessions/{session}/v1", api_key="any", max_retries=0, timeout=20
    )


async def test_a_conversation_goes_on_from_a_response_in_one_row_of_tokens(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        ask = client.responses.create
        first = await ask(model="m", input="go", instructions="rules", tools=[TOOL])
        second = await ask(
            model="m", input="on", instructions="rules", tools=[TOOL], previous_response_id=first.id
        )
        call = second.output[-1]
        assert call.type == "function_call"
        seen: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "a door"}]
        stream = await ask(
            model="m",
            input=seen,
            instructions="rules",
            tools=[TOOL],
            previous_response_id=second.id,
            stream=True,
        )
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        third = events[-1].response
        assert (third.output_text, third.previous_response_id) == ("three", second.id)
        fork = await ask(model="m", input="else", previous_response_id=first.id)
    records = gateway.ledger.traces("s")
    for before, after in itertools.pairwise(records[:3]):
        whole = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(whole)] == whole
    assert [message["role"] for message in records[2].messages] == [
        *("system", "user", "assistant", "user", "assistant", "tool")
    ]
    assert [message["content"] for message in records[3].messages] == ["go", "one", "else"], "other rules"
    assert fork.previous_response_id == first.id


async def test_a_response_is_retrieved_as_it_was_answered(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        first = await client.responses.create(
            model="m", input="go", instructions="rules", tools=[TOOL], metadata={"a": "b"}, temperature=0.5
        )
        await gateway.close()
    later = Gateway(gateway.policy, gateway.ledger.path.parent, token=None, grace_s=1.0)
    async with later, client_of(later) as again:
        kept = await again.responses.retrieve(first.id)
        on = await again.responses.create(model="m", input="on", previous_response_id=first.id)
        assert on.previous_response_id == first.id
        with pytest.raises(openai.APIStatusError, match="deleted"):
            await again.responses.delete(first.id)
    assert kept.to_dict() == first.to_dict()


async def test_what_is_not_kept_or_belongs_to_another_session_is_not_there(gateway: Gateway) -> None:
    async with client_of(gateway) as client, client_of(gateway, "other") as other:
        kept = await client.responses.create(model="m", input="go")
        unkept = await client.responses.create(model="m", input="go", store=False)
        chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        for who, name in ((other, kept.id), (client, unkept.id), (client, chat.id), (client, "resp_none")):
            with pytest.raises(openai.NotFoundError):
                await who.responses.retrieve(name)
            with pytest.raises(openai.BadRequestError) as refused:
                await who.responses.create(model="m", input="on", previous_response_id=name)
            assert refused.value.code == "previous_response_not_found"
        assert (await client.responses.retrieve(kept.id)).id == kept.id


async def test_embeddings_are_refused_with_a_sentence(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(openai.NotFoundError, match="embedding model"):
            await client.embeddings.create(model="m", input="x")
