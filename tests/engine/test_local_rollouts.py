"""The execution engine on the built-in inference engine: what concurrency may not change."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.frozenlake import FrozenLakeEnv, lake_tasks
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import create_model
from rllm.models.directory import LoadedModel, load_model
from rllm.types.episode import Episode
from rllm.types.messages import SamplingParams


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = tmp_path_factory.mktemp("models") / "tiny"
    create_model(directory, "tiny", seed=5)
    return load_model(directory)


@asynccontextmanager
async def _client(loaded: LoadedModel, *, lockstep: bool) -> AsyncIterator[LocalClient]:
    client = LocalClient(loaded, num_slots=24, max_context=256, lockstep=lockstep)
    try:
        yield client
    finally:
        await client.close()


async def _play(client: LocalClient, parallel: int, num_tasks: int = 12) -> dict[str, Episode]:
    engine = AgentExecutionEngine(
        FrozenLakeAgent,
        FrozenLakeEnv,
        rollout_engine=client,
        sampling_params=SamplingParams(max_tokens=4),
        n_parallel_agents=parallel,
        max_steps=4,
        seed=1,
    )
    async with aclosing(engine.run(lake_tasks("train", num_tasks), group_size=2, purpose="x")) as episodes:
        return {episode.id: episode async for episode in episodes}


@pytest.mark.parametrize("lockstep", [False, True])
async def test_one_seed_gives_one_result_alone_or_among_sixty_four(
    loaded: LoadedModel, lockstep: bool
) -> None:
    async with _client(loaded, lockstep=lockstep) as client:
        alone, crowded = await _play(client, 1), await _play(client, 64)
    assert alone.keys() == crowded.keys()
    gap = 0.0
    for name, episode in alone.items():
        mine, theirs = episode.trajectories[0].steps, crowded[name].trajectories[0].steps
        assert [step.response_ids for step in mine] == [step.response_ids for step in theirs]
        assert [step.prompt_ids for step in mine] == [step.prompt_ids for step in theirs]
        for step, other in zip(mine, theirs, strict=True):
            gap = max(gap, float(np.abs(np.array(step.logprobs) - np.array(other.logprobs)).max()))
    assert gap <= 1e-5


async def test_under_lockstep_two_runs_are_equal_to_the_last_bit(loaded: LoadedModel) -> None:
    results = []
    for _ in range(2):
        async with _client(loaded, lockstep=True) as client:
            results.append(await _play(client, 16))
    first, second = (
        {name: [step.logprobs for step in each.trajectories[0].steps] for name, each in result.items()}
        for result in results
    )
    assert first == second


@pytest.mark.parametrize("lockstep", [False, True])
async def test_breaking_out_gives_every_slot_back(loaded: LoadedModel, lockstep: bool) -> None:
    async with _client(loaded, lockstep=lockstep) as client:
        engine = AgentExecutionEngine(
            FrozenLakeAgent,
            FrozenLakeEnv,
            rollout_engine=client,
            sampling_params=SamplingParams(max_tokens=8),
            n_parallel_agents=64,
        )
        async with aclosing(engine.run(lake_tasks("train", 40))) as episodes:
            async for _ in episodes:
                break
        assert engine.counts.in_flight == 0
        # The engine is of use afterwards: nobody holds its slots, or keeps its barrier waiting.
        assert len(await _play(client, 64, num_tasks=3)) == 6
        assert client.engine.num_in_flight == 0


async def test_what_waits_for_a_slot_says_how_long(loaded: LoadedModel) -> None:
    client = LocalClient(loaded, num_slots=1, max_context=256, lockstep=False)
    try:
        episodes = await _play(client, parallel=6, num_tasks=3)
    finally:
        await client.close()
    steps = [step for each in episodes.values() for role in each.trajectories for step in role.steps]
    assert all(0.0 < step.timings["queue_s"] <= step.timings["model_s"] for step in steps)
    outputs = [step.model_output for step in steps if step.model_output is not None]
    longest = max(outputs, key=lambda each: each.queue_s)
    assert longest.queue_s > longest.latency_s / 2, "five of six conversations wait for the only slot"
