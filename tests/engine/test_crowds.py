"""Thousands of rollouts at once leave the event loop, and the process, as they should be."""

import asyncio
import gc
from contextlib import aclosing
from typing import Any

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.garbage_collection import rare_full_collections
from rllm.engine.turnstile import Turnstile
from rllm.environments.base import BaseEnv
from rllm.inference.scripted import ScriptedClient


async def test_a_turnstile_lets_so_many_through_an_iteration_in_the_order_they_came() -> None:
    turnstile = Turnstile(most=3)
    passed: list[tuple[int, int]] = []
    iteration = 0

    async def rollout(number: int) -> None:
        await turnstile.wait_to_pass()
        passed.append((iteration, number))

    rollouts = [asyncio.create_task(rollout(number)) for number in range(10)]
    while not all(each.done() for each in rollouts):
        await asyncio.sleep(0)
        iteration += 1
    assert [number for _, number in passed] == list(range(10))
    per_iteration = [sum(when == each for when, _ in passed) for each in range(iteration + 1)]
    assert max(per_iteration) == 3


async def test_somebody_who_no_longer_waits_takes_nobodys_place() -> None:
    turnstile = Turnstile(most=1)
    first, gone, last = (asyncio.create_task(turnstile.wait_to_pass()) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(first, last)
    assert gone.cancelled()


def test_full_collections_are_rare_until_the_last_of_several_engines_is_done() -> None:
    own = gc.get_threshold()
    first, second = rare_full_collections(), rare_full_collections()
    first.__enter__()
    rare = gc.get_threshold()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == rare
    second.__exit__(None, None, None)
    assert rare != own
    assert gc.get_threshold() == own


class TwoSteps(BaseEnv):
    """Over after two steps, whatever is done."""

    def __init__(self) -> None:
        self.steps = 0

    def reset(self) -> tuple[str, dict[str, Any]]:
        return "go", {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.steps += 1
        return "on", 1.0, self.steps == 2, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "TwoSteps":
        return TwoSteps()


async def test_an_engine_gives_the_collector_back_also_when_it_is_left_early() -> None:
    own = gc.get_threshold()
    engine = AgentExecutionEngine(
        ConversationAgent, TwoSteps, rollout_engine=ScriptedClient(["on"] * 100), n_parallel_agents=4
    )
    async with aclosing(engine.run([{"task_id": str(number)} for number in range(20)])) as episodes:
        async for _ in episodes:
            assert gc.get_threshold() != own
            break
    assert gc.get_threshold() == own
