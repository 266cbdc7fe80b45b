"""The model server is killed with -9, again and again, and environments fail as well: counts are exact."""

import asyncio
import hashlib
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.rollout import RolloutKey
from rllm.environments.base import BaseEnv
from rllm.environments.frozenlake import FrozenLakeEnv, lake_tasks
from rllm.types.episode import Episode, Outcome
from rllm.types.task import EpisodeId

sys.path.insert(0, str(Path(__file__).parent))
import model_server as model

FAILURES = 0.3
RETRY_LIMIT = 3
NUM_KILLS = 3
SEED = 5


class Server:
    """The server's process. It comes back on the port that it had."""

    def __init__(self) -> None:
        self.port = 0
        self.url = ""

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(model.__file__), str(self.port), stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "it did not start"
        self.port = int(line)
        self.url = f"http://127.0.0.1:{self.port}/v1"

    async def kill(self) -> None:
        self._process.kill()
        await self._process.communicate()


class BrittleLake(BaseEnv):
    """FrozenLake on a machine that is lost in `FAILURES` of all tries, at the reset or at the first move."""

    tries: ClassVar[Counter[str]] = Counter()
    num_open = 0
    lock = threading.Lock()

    def __init__(self, task: dict[str, Any]) -> None:
        task_id = task["task_id"]
        with self.lock:
            self.tries[task_id] += 1
            BrittleLake.num_open += 1
            self._fails_at = failure(task_id, self.tries[task_id])
        self._lake = FrozenLakeEnv.from_dict(task)

    def reset(self, seed: int | None = None) -> Any:
        if self._fails_at == "reset":
            raise ConnectionError("the machine is gone")
        return self._lake.reset(seed)

    def step(self, action: Any) -> Any:
        if self._fails_at == "step":
            raise ConnectionError("the machine is gone")
        return self._lake.step(action)

    def close(self) -> None:
        with self.lock:
            BrittleLake.num_open -= 1

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "BrittleLake":
        return BrittleLake(info)


def failure(task_id: str, number: int) -> str:
    """Where the try of this number fails; empty for one that does not."""
    digest = hashlib.blake2b(f"{task_id}/{number}".encode(), digest_size=4).digest()
    if digest[0] / 256 >= FAILURES:
        return ""
    return "reset" if digest[1] % 2 else "step"


def expected_tries(task: dict[str, Any]) -> tuple[int, bool]:
    """How many tries an episode takes, and whether the last one fails as well."""
    for number in range(1, RETRY_LIMIT + 1):
        if not failure(task["task_id"], number):
            return number, False
    return RETRY_LIMIT, True


def played_alone(task: dict[str, Any]) -> tuple[list[str], list[float]]:
    """What was said and paid in an episode, by the environment, the agent and the server's own function."""
    agent, env = FrozenLakeAgent(), FrozenLakeEnv.from_dict(task)
    key = RolloutKey(seed=SEED, episode=EpisodeId(task_id=task["task_id"]))
    observation, info = env.reset()
    agent.update_from_env(observation, 0.0, False, info)
    said: list[str] = []
    paid: list[float] = []
    done = False
    while not done:
        seed = key.draw(len(said), "sample") % 2**63
        text, _, _ = model.answer_to(agent.chat_completions, seed)
        action = agent.update_from_model(text)
        observation, reward, done, info = env.step(action)
        agent.update_from_env(observation, reward, done, info)
        said.append(text)
        paid.append(reward)
    return said, paid


async def played_while_the_server_dies(
    tasks: list[dict[str, Any]], num_parallel: int
) -> tuple[list[Episode], AgentExecutionEngine]:
    server = Server()
    await server.start()
    episodes: list[Episode] = []
    kills = [len(tasks) * (2 * number + 1) // (2 * NUM_KILLS) for number in range(NUM_KILLS)]

    one_at_a_time = asyncio.Lock()

    async def restart() -> None:
        async with one_at_a_time:
            await server.kill()
            await server.start()

    restarts: list[asyncio.Task[None]] = []
    try:
        async with AgentExecutionEngine(
            FrozenLakeAgent,
            BrittleLake,
            engine_name="openai",
            rollout_engine_args={"base_url": server.url, "connect_timeout_s": 60.0},
            n_parallel_agents=num_parallel,
            max_steps=8,
            api_retries=1_000,
            retry_limit=RETRY_LIMIT,
            retry_wait_s=0.02,
            max_workers=4,
            seed=SEED,
        ) as engine:
            async for episode in engine.run(tasks):
                episodes.append(episode)
                engine.counts.check()
                if kills and len(episodes) >= kills[0]:
                    kills.pop(0)
                    restarts.append(asyncio.create_task(restart()))
            await asyncio.gather(*restarts)
    finally:
        await server.kill()
    return episodes, engine


@pytest.mark.parametrize(
    ("num_episodes", "num_parallel", "limit_s"),
    [
        pytest.param(250, 50, 300.0),
        pytest.param(10_000, 1_000, 3_000.0, marks=pytest.mark.slow),
    ],
)
async def test_nothing_is_lost_or_doubled_when_the_model_server_is_killed_three_times(
    num_episodes: int, num_parallel: int, limit_s: float
) -> None:
    BrittleLake.tries.clear()
    tasks = lake_tasks("train", num_episodes)
    async with asyncio.timeout(limit_s):
        episodes, engine = await played_while_the_server_dies(tasks, num_parallel)

    assert Counter(episode.task_id for episode in episodes) == Counter(task["task_id"] for task in tasks)
    expected = {task["task_id"]: expected_tries(task) for task in tasks}
    assert BrittleLake.tries == Counter({task_id: tries for task_id, (tries, _) in expected.items()})
    counts = engine.counts
    assert counts.retries == sum(tries - 1 for tries, _ in expected.values())
    num_failed = sum(failed for _, failed in expected.values())
    assert counts.by_outcome[Outcome.INFRASTRUCTURE_FAILURE] == num_failed > 0
    assert counts.by_outcome[Outcome.CANCELLED] == counts.by_outcome[Outcome.POLICY_FAILURE] == 0
    assert (counts.submitted, counts.in_flight) == (num_episodes, 0)
    assert counts.call_retries > 0, "nobody was talking to the server when it was killed"
    assert BrittleLake.num_open == 0

    by_task = {episode.task_id: episode for episode in episodes}
    for task in tasks:
        episode = by_task[task["task_id"]]
        steps = episode.trajectories[0].steps
        if expected[task["task_id"]][1]:
            assert episode.outcome is Outcome.INFRASTRUCTURE_FAILURE
            assert episode.trajectories[0].reward is None
            continue
        said, paid = played_alone(task)
        assert [step.model_response for step in steps] == said, "as if nothing had happened"
        assert [step.reward for step in steps] == paid
        assert all(step.response_ids == [*map(ord, step.model_response), 0] for step in steps)
        assert all(len(step.logprobs) == len(step.response_ids) for step in steps)
