"""A session's budget of turns, tokens, seconds and cost, held call by call, also after a restart."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rllm.errors import RequestRefused
from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.inference.scripted import ScriptedClient
from rllm.types.call_budget import CallBudget
from rllm.types.messages import Message
from rllm.types.wire import CallStatus

Serve = Callable[..., Any]
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def client_of(session: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key="x")


async def test_calls_beyond_the_turns_are_refused_and_no_client_tries_them_again(serve: Serve) -> None:
    gateway: Gateway = await serve()
    session = gateway.open_session("s", budget=CallBudget(turns=2))
    async with client_of(session) as client:
        for _ in range(2):
            await client.chat.completions.create(**BODY)
        with pytest.raises(openai.PermissionDeniedError, match=r"turns: 2 of 2") as refusal:
            await client.chat.completions.create(**BODY)
    assert refusal.value.code == "turns_budget_exhausted"
    assert refusal.value.response.headers["x-should-retry"] == "false"
    async with anthropic.AsyncAnthropic(base_url=session.root_url, api_key="x") as claude:
        with pytest.raises(anthropic.PermissionDeniedError, match="is used up"):
            await claude.messages.create(**BODY, max_tokens=9)
        with pytest.raises(anthropic.PermissionDeniedError, match="is used up"):
            async with claude.messages.stream(**BODY, max_tokens=9) as stream:
                await stream.get_final_message()
    assert len(gateway.policy.requests) == 2
    assert [each.status for each in session.traces()] == [CallStatus.OK] * 2 + [CallStatus.ERROR] * 3


@pytest.mark.parametrize(
    ("limits", "num_calls"),
    [({"turns": 5}, 5), ({"tokens": 30}, 10), ({"cost": 1e-4, "prompt_price": 10}, 4)],
)
async def test_calls_side_by_side_do_not_pass_a_limit_together(
    limits: dict[str, Any], num_calls: int, serve: Serve
) -> None:
    """Three tokens are read and three sampled in each call; cost is known once a call has been answered."""
    gateway: Gateway = await serve()
    session = gateway.open_session("s", budget=CallBudget(**limits))
    body = BODY | {"max_tokens": 3}
    async with client_of(session) as client:

        async def ask() -> bool:
            try:
                await client.chat.completions.create(**body)
            except openai.PermissionDeniedError:
                return False
            return True

        calls = [ask() for _ in range(12)]
        answered = [await each for each in calls] if "cost" in limits else await asyncio.gather(*calls)
    assert sum(answered) == num_calls == len(gateway.policy.requests)


async def test_answers_are_cut_off_at_the_last_token(tmp_path: Path) -> None:
    """Whatever was asked for, and for the session; nobody sampled a token more than the budget has."""

    def long(messages: Sequence[Message]) -> str:
        return "word " * 40

    policy = LocalPolicy(ScriptedClient(long), "scripted")
    async with Gateway(policy, tmp_path / "ledger") as gateway:
        for number, (sampling, asked) in enumerate(
            [({}, {}), ({"max_tokens": 30}, {}), ({}, {"max_tokens": 30})]
        ):
            session = gateway.open_session(f"s{number}", sampling=sampling, budget=CallBudget(tokens=70))
            async with client_of(session) as client:
                calls = [client.chat.completions.create(**BODY, **asked) for _ in range(5)]
                await asyncio.gather(*calls, return_exceptions=True)
            records = [each for each in session.traces() if each.status is CallStatus.OK]
            assert sum(len(each.completion_ids) for each in records) == 70
            assert records[-1].finish_reason == "length"


async def test_a_call_that_fails_gives_its_share_back(serve: Serve, scripted: Any) -> None:
    errors = [RequestRefused("no"), RequestRefused("no"), None]
    gateway: Gateway = await serve(lambda request: scripted.Say(error=errors.pop(0)))
    session = gateway.open_session("s", budget=CallBudget(turns=1, tokens=10))
    async with client_of(session) as client:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**BODY)
        await client.chat.completions.create(**BODY)


async def test_a_call_on_its_way_is_cut_off_when_the_time_is_up(serve: Serve, scripted: Any) -> None:
    holds = [None, asyncio.Event()]
    gateway: Gateway = await serve(lambda request: scripted.Say(hold=holds.pop(0)))
    session = gateway.open_session("s", budget=CallBudget(seconds=3))
    async with client_of(session) as client:
        await client.chat.completions.create(**BODY)
        for _ in range(2):
            with pytest.raises(openai.PermissionDeniedError, match="seconds"):
                await client.chat.completions.create(**BODY)
    assert gateway.policy.cancelled == 1


async def test_a_restarted_gateway_goes_on_counting(serve: Serve, tmp_path: Path) -> None:
    budget = CallBudget(turns=3, tokens=100, cost=1.0, completion_price=1.0)
    before: Gateway = await serve()
    async with client_of(before.open_session("s", budget=budget)) as client:
        for _ in range(2):
            await client.chat.completions.create(**BODY)
    await before.close()
    after: Gateway = await serve(require_session=True)
    async with openai.AsyncOpenAI(
        base_url=f"{after.url}/k/{after.token}/sessions/s/v1", api_key="x"
    ) as client:
        await client.chat.completions.create(**BODY)
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(**BODY)
    used = after.sessions.get("s").budget
    assert used is not None
    assert (used.turns, used.tokens, used.cost) == (3, 9, pytest.approx(9e-6))


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"turns": -1}, "`budget.turns` is -1"),
        ({"tokens": 1.5}, "whole number"),
        ({"seconds": float("inf")}, "finite"),
        ({"cost": 1.0}, "no token has a price"),
        ({"prompt_price": 1.0}, "no `cost` limits anything"),
    ],
)
async def test_limits_that_make_no_sense_are_refused(
    limits: dict[str, Any], problem: str, serve: Serve
) -> None:
    gateway: Gateway = await serve()
    with pytest.raises(RequestRefused, match=problem):
        gateway.open_session("s", budget=CallBudget(**limits))
