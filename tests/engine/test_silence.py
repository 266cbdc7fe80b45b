"""What programs and engines leave open is closed in its own loop, so that nobody reads of it afterwards."""

import subprocess
import sys

from rllm.agents.conversation import ConversationAgent
from rllm.engine import AgentExecutionEngine
from rllm.environments import SingleTurnEnvironment
from rllm.inference.scripted import ScriptedClient

PROGRAMS = """
import asyncio, gc, tempfile
from contextlib import aclosing
from pathlib import Path

from openai import AsyncOpenAI

from rllm.engine.traced import TracedEngine
from rllm.inference.scripted import ScriptedClient
from rllm.build.program_player import gateway_before, local_policy


async def solve(task, config):
    client = AsyncOpenAI(base_url=config.base_url, api_key="x")
    client.itself = client  # collected late, as what ends in a cycle is
    await client.chat.completions.create(
        model=config.model, messages=[{"role": "user", "content": "hi"}]
    )


def solve_in_a_loop_of_its_own(task, config):
    asyncio.run(solve(task, config))


async def play(program):
    policy = local_policy(ScriptedClient(lambda messages: "go"), "m")
    with tempfile.TemporaryDirectory() as folder:
        async with gateway_before(policy, Path(folder) / "gateway") as gateway:
            async with TracedEngine(program, lambda task, episode: 1.0, gateway, model="m") as engine:
                async with aclosing(engine.run([{"task_id": str(n)} for n in range(8)])) as episodes:
                    outcomes = [episode.outcome async for episode in episodes]
            gc.collect()
            await asyncio.sleep(0.1)
    assert outcomes == ["scored"] * 8, outcomes


for program in (solve, solve_in_a_loop_of_its_own):
    asyncio.run(play(program))
"""

ENGINE = """
import asyncio, gc

from aiohttp import web

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.single_turn import SingleTurnEnvironment

ANSWER = {"id": "x", "choices": [{"index": 0, "finish_reason": "stop",
          "message": {"role": "assistant", "content": "4"}}], "usage": {}}


async def main():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", lambda request: answer())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    place = {"base_url": f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "api_key": "k", "model": "m"}
    engine = AgentExecutionEngine(
        ConversationAgent,
        SingleTurnEnvironment,
        env_args={"reward_fn": lambda task, answer: 1.0},
        engine_name="openai",
        rollout_engine_args=place,
    )
    for _ in range(2):  # never closed, and used again
        (trajectory,) = await engine.execute_tasks([{"task_id": "t", "question": "2+2?"}])
        assert trajectory.outcome == "scored", trajectory.info
    await runner.cleanup()


async def answer():
    return web.json_response(ANSWER)


asyncio.run(main())
gc.collect()
"""


def test_clients_that_programs_and_engines_leave_open_end_in_silence() -> None:
    for script in (PROGRAMS, ENGINE):
        ended = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", script],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        for words in ("Event loop is closed", "Unclosed", "never retrieved", "Traceback"):
            assert words not in ended.stderr, ended.stderr


async def test_connections_of_a_client_that_the_engine_made_are_given_back_when_nothing_runs() -> None:
    released = list[int]()

    class Client(ScriptedClient):
        async def release(self) -> None:
            released.append(len(engine.rollouts))

    engine = AgentExecutionEngine(
        ConversationAgent,
        SingleTurnEnvironment,
        env_args={"reward_fn": lambda task, answer: 1.0},
        rollout_engine=Client(lambda _: "4"),
    )
    tasks = [{"task_id": str(place), "question": "2+2?"} for place in range(3)]
    await engine.execute_tasks(tasks)
    assert not released, "it is the caller's"
    engine.owns_client = True
    await engine.execute_tasks(tasks)
    assert released == [0]
