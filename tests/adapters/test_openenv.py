"""Servers of OpenEnv, played through the real client, and our environments, played by OpenEnv's own."""

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("openenv")

import numpy as np
import openenv_guess
import uvicorn
from openenv.core.generic_client import GenericEnvClient

from rllm.agents.conversation import ConversationAgent
from rllm.build.served import environment_server
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.openenv import OpenEnvEnv, world_of
from rllm.errors import ConfigError, RewardError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.tasks import benchmark_world
from rllm.inference.scripted import Script, ScriptedClient
from rllm.integrations.openenv.server import environment_app
from rllm.types.episode import Episode, Outcome


@pytest.fixture
def start() -> Iterator[Callable[[Any], str]]:
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start_server(app: Any) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start_server
    for server, thread in servers:
        server.should_exit = True
        thread.join()


async def play(name: str, script: Script, count: int = 2, **options: Any) -> list[Episode]:
    engine = AgentExecutionEngine(
        ConversationAgent,
        OpenEnvEnv,
        rollout_engine=ScriptedClient(script),
        n_parallel_agents=options.pop("parallel", 4),
        max_steps=4,
        retry_limit=1,
        stored=True,
        **options,
    )
    tasks = world_of(name).tasks("test", count)
    episodes = [episode async for episode in engine.run(tasks)]
    return sorted(episodes, key=lambda episode: episode.task_id)


def right(messages: Sequence[Any]) -> str:
    return re.findall(r"digit of (\d+)", messages[-1]["content"])[-1][-1]


async def test_an_episode_is_reset_by_its_seed_and_paid_by_the_server(start: Any) -> None:
    episodes = await play(f"openenv:{start(openenv_guess.app(4))}", right)
    assert [episode.trajectories[0].reward for episode in episodes] == [1.0, 1.0]
    assert [episode.is_correct for episode in episodes] == [True, True]
    (step,) = episodes[0].trajectories[0].steps
    assert len(step.response_ids) == len(step.logprobs) > 0
    assert "Answer with digit alone: integer." in step.chat_completions[0]["content"]


async def test_a_full_server_is_waited_for(start: Any) -> None:
    url = start(openenv_guess.app(1))
    episodes = await play(f"openenv:{url}", right, 6, parallel=3)
    assert [episode.outcome for episode in episodes] == [Outcome.SCORED] * 6


async def test_what_the_policy_wrote_is_its_failure_and_what_the_server_does_is_not(start: Any) -> None:
    url = start(openenv_guess.app(4))
    for answer in ("seven", "7.5", '{"digit": 7, "more": 1}'):
        (episode,) = await play(f"openenv:{url}", lambda messages, answer=answer: answer, 1)
        assert episode.outcome is Outcome.POLICY_FAILURE, answer
    (episode,) = await play(f"openenv:{url}?fault=raise", lambda messages: "1", 1)
    assert episode.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert episode.trajectories[0].reward is None
    assert "a bug of the environment" in episode.trajectories[0].info["error"]["message"]
    with pytest.raises(RewardError):  # a broken contract of all episodes ends a run
        await play(f"openenv:{url}?fault=unpaid", lambda messages: "1", 1)


def test_splits_share_no_seed(start: Any) -> None:
    world = world_of(f"openenv:{start(openenv_guess.app(1))}?level=2")
    seeds = {split: {task["seed"] for task in world.tasks(split, 200)} for split in ("train", "test")}
    assert not seeds["train"] & seeds["test"]
    assert world.tasks("train", 3)[2] == world.tasks("train", 1, start=2)[0]
    assert world.tasks("train", 1)[0]["reset"] == {"level": 2}


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        world_of(f"openenv:http://127.0.0.1:{port}")
    for name, words in {"openenv:nowhere": "HOST:PORT", "openenv:http://x?sessions=0": "sessions"}.items():
        with pytest.raises(ConfigError, match=words):
            benchmark_named(name)


async def test_our_environments_are_played_by_openenvs_own_client(start: Any) -> None:
    spec = benchmark_named("frozenlake")
    world = benchmark_world(spec)
    url = start(environment_app(world, {"split": "train", **spec.task}, 4))
    (task,) = world.tasks("test", 1, start=5, **spec.task)
    own = world.env_class.from_dict(task)
    expected, _ = own.reset(5)
    turns = world.expert({})(task, 0.0, np.random.default_rng(0))
    async with GenericEnvClient(base_url=url) as client:
        shown = await client.reset(seed=5, split="test")
        assert shown.observation == {"text": expected}
        for _, answer in turns:
            result = await client.step({"answer": answer})
        assert (result.reward, result.done) == (1.0, True)
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            await client.step({"wrong": "field"})


async def test_our_own_adapter_plays_them_too(start: Any) -> None:
    spec = benchmark_named("arithmetic")
    url = start(environment_app(benchmark_world(spec), {"split": "test", **spec.task}, 4))

    def answer(messages: Sequence[Any]) -> str:
        text = re.findall(r"([\d +*-]+) =", messages[-1]["content"])[-1]
        sign = -1 if "-" in text else 1
        first, second = (int(each) for each in re.findall(r"\d+", text))
        return str(first + sign * second)

    episodes = await play(f"openenv:{url}", answer, 3)
    assert [episode.trajectories[0].reward for episode in episodes] == [1.0] * 3


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--port"):
            environment_server("frozenlake", host="127.0.0.1", port=port, sessions=1)
