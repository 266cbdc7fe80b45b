"""The workflow engine: attempts share nothing, all is counted, and nothing stays open."""

import asyncio
import random
import sys
import threading
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.environments.base import BaseEnv
from rllm.errors import InferenceError
from rllm.inference import ScriptedAnswer, ScriptedClient
from rllm.inference.rollout_engine import RoleSettings
from rllm.types.episode import Outcome, TerminationEvent, TerminationReason
from rllm.types.messages import Message
from rllm.workflows import Workflow

sys.path.insert(0, str(Path(__file__).parent))
from small_workflows import TASKS, Asks, engine_of, episodes_of, four


async def test_counts_conserve_whatever_goes_wrong() -> None:
    dice = random.Random(3)
    faults: list[Exception | None] = [
        *(None, None, None),
        ValueError("policy"),
        OSError("infrastructure"),
        TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED),
        TerminationEvent(TerminationReason.ENV_DONE),
    ]

    def script(messages: Sequence[Message]) -> str | Exception:
        return InferenceError("away") if dice.random() < 0.2 else "4"

    def trouble(task: Any) -> None:
        fault = dice.choice(faults)
        if fault is not None:
            raise fault

    engine = engine_of(Asks, ScriptedClient(script), {"trouble": trouble}, api_retries=1, n_parallel_tasks=7)
    episodes = await episodes_of(engine, [{"question": f"{number}?"} for number in range(60)], group_size=2)
    assert len({episode.id for episode in episodes}) == len(episodes) == engine.counts.submitted == 120
    assert engine.counts.in_flight == 0
    assert sum(engine.counts.by_outcome.values()) == 120
    for outcome in Outcome:
        assert engine.counts.by_outcome[outcome] == sum(episode.outcome is outcome for episode in episodes)
    seen = {episode.outcome for episode in episodes}
    assert seen == set(Outcome) - {Outcome.CANCELLED}
    for episode in episodes:
        failed = episode.outcome in (Outcome.POLICY_FAILURE, Outcome.INFRASTRUCTURE_FAILURE)
        assert all((each.reward is None) is failed for each in episode.trajectories)
        assert failed is ("error" in episode.info)
    assert len(asyncio.all_tasks()) == 1


async def test_attempts_share_nothing() -> None:
    class Leaky(Workflow):
        def __init__(self, rollout_engine: Any, bag: list[str], **kwargs: Any) -> None:
            super().__init__(rollout_engine, **kwargs)
            self.bag = bag

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            assert "seen" not in task
            assert self.bag == []
            self.bag.append(uid)
            task["seen"] = uid
            task["list"].append(uid)
            await self.rollout_engine.get_model_response([{"role": "user", "content": uid}])
            assert task["list"] == [uid]
            assert len(self.rollout_engine.calls) == 1

    tasks = [{"task_id": str(number), "list": []} for number in range(10)]
    episodes = await episodes_of(engine_of(Leaky, args={"bag": []}), tasks, group_size=2)
    assert {episode.outcome for episode in episodes} == {Outcome.SCORED}
    assert all(task["list"] == [] and "seen" not in task for task in tasks)


async def test_breaking_out_ends_every_call_and_thread() -> None:
    client = ScriptedClient(lambda messages: ScriptedAnswer(text="4", wait_for=asyncio.Event().wait))
    first = ScriptedClient(four)

    class Some(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            role = "quick" if uid == "t0:0" else "slow"
            await asyncio.gather(
                *(
                    self.rollout_engine.get_model_response([{"role": "user", "content": str(k)}], role=role)
                    for k in range(3)
                )
            )

    engine = AgentWorkflowEngine(
        Some, {}, clients={"a": client, "b": first}, roles={"quick": RoleSettings(policy="b")}
    )
    async with aclosing(engine.run(TASKS)) as episodes:
        async for _ in episodes:
            break
    assert (client.in_flight, engine.counts.in_flight) == (0, 0)
    assert engine.counts.by_outcome[Outcome.CANCELLED] == 3
    engine.counts.check()
    assert len(asyncio.all_tasks()) == 1


async def test_an_attempt_that_is_cancelled_as_it_closes_closes_and_answers_nobody_afterwards() -> None:
    events: list[str] = []
    closing, may_close = asyncio.Event(), asyncio.Event()
    flows: list[Workflow] = []

    class Slow(BaseEnv):
        async def close(self) -> None:  # type: ignore[override]
            closing.set()
            await may_close.wait()
            events.append("closed")

        def reset(self, seed: int | None = None) -> Any:
            raise NotImplementedError

        def step(self, action: Any) -> Any:
            raise NotImplementedError

        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Slow":
            raise NotImplementedError

    class Visits(Asks):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.env = Slow()
            flows.append(self)

    async def play() -> None:
        await episodes_of(engine_of(Visits), TASKS[:1])
        events.append("an episode")

    running = asyncio.create_task(play())
    async with asyncio.timeout(20.0):
        await closing.wait()
        running.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (running.done(), events) == (False, [])
        may_close.set()
        await asyncio.wait({running})
        assert (running.cancelled(), events) == (True, ["closed"])
        hangs = {"trouble": lambda task: asyncio.Event().wait()}
        running = asyncio.create_task(episodes_of(engine_of(Visits, args=hangs), TASKS[:1]))
        while len(flows) < 2:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
        await engine_of(Visits).initialize_pool()
        for flow in flows:
            with pytest.raises(InferenceError):
                await flow.rollout_engine.get_model_response([{"role": "user", "content": "?"}])
    assert events == ["closed"] * 3


async def test_whoever_looks_on_sees_the_turns_of_a_workflow() -> None:
    may_end = asyncio.Event()

    engine = engine_of(Asks, args={"trouble": lambda task: may_end.wait()})
    running = asyncio.create_task(episodes_of(engine, TASKS[:1]))
    async with asyncio.timeout(20.0):
        while not engine.counts.turns:
            await asyncio.sleep(0)
        (live,) = engine.live()
        assert (live.turn, live.waits_for, engine.counts.turns) == (1, "workflow", 1)
        may_end.set()
        await running


async def test_a_sibling_that_is_left_behind_ends_with_its_attempt() -> None:
    client = ScriptedClient(lambda messages: ScriptedAnswer(text="4", wait_for=asyncio.Event().wait))

    class LeavesOne(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            ask = self.rollout_engine.get_model_response([{"role": "user", "content": "?"}])
            self.left = asyncio.create_task(ask)
            while not client.in_flight:
                await asyncio.sleep(0)
            raise ValueError("x")

    await episodes_of(engine_of(LeavesOne, client))
    assert client.in_flight == 0
    assert len(asyncio.all_tasks()) == 1


async def test_work_in_threads_does_not_hold_up_the_loop_and_has_a_limit() -> None:
    release = threading.Event()

    class Blocks(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            assert await self.run_in_executor(lambda a, *, b: a + b, 1, b=2) == 3
            if task["task_id"] == "t0":
                await self.run_in_executor(release.wait)

    engine = engine_of(Blocks, step_timeout_s=1.0, retry_limit=1)
    try:
        episodes = {episode.task_id: episode for episode in await episodes_of(engine)}
    finally:
        release.set()
    assert episodes["t0"].outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert {episodes[name].outcome for name in ("t1", "t2", "t3")} == {Outcome.SCORED}
