"""rLLM's side of `engine.py`: one run of the engine, or of what is there without it, and one line of JSON.

    engine_rllm.py '{"way": "engine", "at_once": 1024, "episodes": 4096, "model_s": 0.5, "url": ""}'

`way`: `engine` is AgentExecutionEngine; `bare` is the same agent, environment and model in a plain loop, one
asyncio task a trajectory and the environment called on the spot. What lies between the two is the engine's.
`tail` is a batch of 64 in which one episode takes 50 times as long, with and without oversampling.
`url` empty: the model answers in this process, after `model_s`. Its ids are lists that all answers share, so
memory per live trajectory is what it takes without its tokens. Otherwise `engine` asks through OpenAIClient,
`bare` through aiohttp alone.
"""

import asyncio
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

from engine_probe import ANSWER, SYSTEM, TURNS, LoopLag, Measured, observation

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.base import BaseEnv, StepResult, call_reset, unpack_reset, unpack_step
from rllm.types.episode import Outcome, Trajectory
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams

PROMPT_IDS = list(range(100, 228))
ANSWER_IDS = [5, 6]
LOGPROBS = [-0.5, -0.1]
VERSIONS = [0, 0]
BATCH, GROUP, SLOWER, OVERSAMPLING = 64, 4, 50, 1.25
"""Of the batch with a slow episode."""
USAGE = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": len(ANSWER_IDS)}


class Corridor(BaseEnv):
    """Five steps, whatever is done."""

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, seed: int | None = None) -> tuple[list[Message], dict[str, Any]]:
        self.turn = 0
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": observation(0)},
        ], {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        over = self.turn >= TURNS
        return observation(self.turn), float(over), over, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Corridor":
        return Corridor()


class ConstantModel:
    """Always the same answer, always after the same time."""

    def __init__(self, model_s: float, slow: tuple[str, int] | None = None) -> None:
        """`slow` is the one conversation in which every answer takes SLOWER times as long."""
        self.model_s = model_s
        self.slow = slow
        self.live = self.most_live = 0

    def session(self, order: tuple[str, int]) -> "ConstantSession":
        self.live += 1
        self.most_live = max(self.live, self.most_live)
        return ConstantSession(self, self.model_s * (SLOWER if order == self.slow else 1))

    async def get_model_response(
        self, messages: Sequence[Message], sampling: SamplingParams = SamplingParams()
    ) -> ModelOutput:
        async with self.session(("", 0)) as session:
            return await session.respond(messages, sampling)

    async def close(self) -> None:
        """Nothing to close."""


class ConstantSession:
    def __init__(self, model: ConstantModel, model_s: float) -> None:
        self._model: ConstantModel | None = model
        self._model_s = model_s

    async def respond(self, messages: Sequence[Message], sampling: SamplingParams) -> ModelOutput:
        assert self._model is not None, "a closed session is asked"
        await asyncio.sleep(self._model_s)
        return ModelOutput(
            text=ANSWER,
            content=ANSWER,
            prompt_ids=PROMPT_IDS,
            completion_ids=ANSWER_IDS,
            logprobs=LOGPROBS,
            policy_versions=VERSIONS,
            finish_reason=FinishReason.STOP,
            usage=USAGE,
        )

    def prompt_tokens(self, messages: Sequence[Message]) -> int:
        return len(PROMPT_IDS)

    def close(self) -> None:
        if self._model is not None:
            self._model.live -= 1
            self._model = None

    async def __aenter__(self) -> "ConstantSession":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


class BareHttp:
    """What any client does at least: JSON out, JSON in, over aiohttp's pool. It is its own session."""

    def __init__(self, url: str) -> None:
        import aiohttp

        self._url = f"{url}/chat/completions"
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    def session(self, order: tuple[str, int]) -> "BareHttp":
        return self

    async def respond(self, messages: Sequence[Message], sampling: SamplingParams) -> ModelOutput:
        body = {"model": "constant", "messages": list(messages), "seed": sampling.seed}
        async with self._http.post(self._url, json=body) as response:
            said = await response.json()
        choice = said["choices"][0]
        return ModelOutput(
            text=choice["message"]["content"],
            prompt_ids=said["prompt_token_ids"],
            completion_ids=choice["token_ids"],
            logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
            usage=said["usage"],
        )

    async def close(self) -> None:
        await self._http.close()

    async def __aenter__(self) -> "BareHttp":
        return self

    async def __aexit__(self, *error: object) -> None:
        """It stays open."""


async def run_engine(client: Any, episodes: int, at_once: int) -> None:
    engine = AgentExecutionEngine(
        ConversationAgent, Corridor, rollout_engine=client, n_parallel_agents=at_once, max_steps=TURNS + 1
    )
    tasks = [{"task_id": str(number)} for number in range(episodes)]
    async with aclosing(engine.run(tasks)) as running:
        async for episode in running:
            assert episode.outcome is Outcome.SCORED, episode.trajectories[0].info
            assert len(episode.trajectories[0].steps) == TURNS
    engine.counts.check()


async def run_bare(client: Any, episodes: int, at_once: int) -> None:
    async def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            trajectory = await bare_trajectory(client, number)
            assert len(trajectory.steps) == TURNS

    numbers = iter(range(episodes))
    async with asyncio.TaskGroup() as workers:
        for _ in range(at_once):
            workers.create_task(work(numbers))


async def bare_trajectory(client: Any, number: int) -> Trajectory:
    agent, env = ConversationAgent(), Corridor()
    first, info = unpack_reset(env, call_reset(env, number))
    result = StepResult(observation=first, reward=0.0, done=False, truncated=False, info=info)
    async with client.session((str(number), 0)) as session:
        while not result.done:
            agent.update_from_env(result.observation, result.reward, result.done, result.info)
            output = await session.respond(agent.chat_completions, SamplingParams(seed=number))
            action = agent.update_from_model(output.text)
            agent.trajectory.steps[-1].record_output(output)
            result = unpack_step(env, env.step(action.action))
    return agent.trajectory


async def measure(wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted["way"] == "tail":
        return await tail(wanted["model_s"])
    episodes, at_once = wanted["episodes"], wanted["at_once"]
    run = {"engine": run_engine, "bare": run_bare}[wanted["way"]]
    client = client_for(wanted["way"], wanted["url"], wanted["model_s"])
    await run(client, 64, 64)  # what is made once is made now
    async with LoopLag() as lag:
        with Measured(episodes, at_once, lag) as measured:
            await run(client, episodes, at_once)
    await client.close()
    return measured.said


def client_for(way: str, url: str, model_s: float) -> Any:
    if not url:
        return ConstantModel(model_s)
    if way == "bare":
        return BareHttp(url)
    from rllm.inference.openai import OpenAIClient

    return OpenAIClient(url, "constant", api_key="none")


async def tail(model_s: float) -> dict[str, Any]:
    """How long a batch takes in which one episode is slow, in medians of how long an episode takes."""
    said: dict[str, Any] = {}
    for name, oversampling in (("even", 1.0), ("plain", 1.0), ("oversampled", OVERSAMPLING)):
        slow = None if name == "even" else ("0", 0)
        engine = AgentExecutionEngine(
            ConversationAgent,
            Corridor,
            rollout_engine=ConstantModel(model_s, slow),
            n_parallel_agents=2 * BATCH,
            max_steps=TURNS + 1,
        )
        tasks = [{"task_id": str(number)} for number in range(BATCH // GROUP)]
        started, took_s = time.perf_counter(), list[float]()
        async with aclosing(engine.run(tasks, group_size=GROUP, oversampling=oversampling)) as running:
            async for episode in running:
                took_s.append(episode.trajectories[0].info["duration_s"])
        wall_s = time.perf_counter() - started
        assert len(took_s) == BATCH
        engine.counts.check()
        said[name] = {
            "batch_s": wall_s,
            "medians": wall_s / statistics.median(took_s),
            "cancelled": engine.counts.by_outcome[Outcome.CANCELLED],
        }
    return said


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
