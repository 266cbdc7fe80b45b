"""Workflows on the built-in inference engine: concurrency changes no token."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.inference.local.client import LocalClient
from rllm.inference.local.waves import Waves
from rllm.inference.rollout_engine import RoleSettings
from rllm.models.builtin import create_model
from rllm.models.directory import LoadedModel, load_model
from rllm.types.budget import TokenBudget
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.messages import Message, SamplingParams
from rllm.workflows import Workflow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedModel]:
    root: Path = tmp_path_factory.mktemp("models")
    for seed in (5, 6):
        create_model(root / str(seed), "tiny", seed=seed)
    return [load_model(root / str(seed)) for seed in (5, 6)]


@asynccontextmanager
async def served(
    models: list[LoadedModel], *, lockstep: bool = False
) -> AsyncIterator[dict[str, LocalClient]]:
    clients = {
        name: LocalClient(model, num_slots=24, max_context=256, lockstep=lockstep)
        for name, model in zip(("small", "other"), models, strict=False)
    }
    try:
        yield clients
    finally:
        for client in clients.values():
            await client.close()


class Talks(Workflow):
    """Three speakers, two turns each, all at once; then a judge, of another policy if there is one."""

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
        said = await asyncio.gather(*(self.speak(task) for _ in range(3)))
        question: list[Message] = [{"role": "user", "content": " ".join(said)}]
        output = await self.rollout_engine.get_model_response(question, role="judge")
        step = Step.from_model_output(output, question, reward=1.0)
        self.commit(trajectory=Trajectory(name="judge", steps=[step]))

    async def speak(self, task: dict[str, Any]) -> str:
        talk: list[Message] = [{"role": "user", "content": task["question"]}]
        trajectory = Trajectory(name="speaker")
        for _ in range(2):
            output = await self.rollout_engine.get_model_response(talk, role="speaker")
            trajectory.steps.append(Step.from_model_output(output, talk))
            talk = [*trajectory.steps[-1].chat_completions, {"role": "user", "content": "and"}]
        self.commit(trajectory=trajectory)
        return trajectory.steps[-1].model_response


async def play(
    clients: dict[str, LocalClient], parallel: int, workflow: type[Workflow] = Talks, **options: Any
) -> dict[str, Episode]:
    engine = AgentWorkflowEngine(
        workflow,
        {},
        clients=clients,
        sampling_params=SamplingParams(max_tokens=3),
        n_parallel_tasks=parallel,
        seed=1,
        **options,
    )
    tasks = [{"question": f"{number}?"} for number in range(6)]
    async with aclosing(engine.run(tasks, group_size=2, purpose="train/1")) as episodes:
        return {episode.id: episode async for episode in episodes}


def steps_of(episode: Episode) -> list[Step]:
    """In an order that does not depend on who was first."""
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    return sorted(steps, key=lambda step: (step.prompt_ids, step.response_ids))


@pytest.mark.parametrize("lockstep", [False, True])
async def test_one_seed_samples_the_same_tokens_alone_or_among_sixty_four(
    models: list[LoadedModel], lockstep: bool
) -> None:
    async with served(models[:1], lockstep=lockstep) as clients:
        alone, crowded = await play(clients, 1), await play(clients, 64)
    assert alone.keys() == crowded.keys()
    assert len(alone) == 12
    for name, episode in alone.items():
        mine, theirs = steps_of(episode), steps_of(crowded[name])
        assert [step.prompt_ids for step in mine] == [step.prompt_ids for step in theirs]
        assert [step.response_ids for step in mine] == [step.response_ids for step in theirs]
        for step, other in zip(mine, theirs, strict=True):
            assert np.allclose(step.logprobs, other.logprobs, rtol=0.0, atol=1e-5)
        assert episode.metrics["unclaimed_calls"] == 0.0


class Delayed(Talks):
    """Waits before the judge, each attempt and each time as long as the test says."""

    delays_s: ClassVar[Iterator[float]] = iter(())

    async def speak(self, task: dict[str, Any]) -> str:
        said = await super().speak(task)
        await asyncio.sleep(next(self.delays_s))
        return said


async def test_in_waves_every_bit_is_the_same_whatever_else_attempts_wait_for(
    models: list[LoadedModel],
) -> None:
    """Two policies, seven attempts at a time, which come to their next call in another order each time."""
    roles = {"judge": RoleSettings(policy="other")}
    runs: list[list[Any]] = []
    for seed in (0, 1):
        Delayed.delays_s = map(random.Random(seed).uniform, repeat(0.0), repeat(0.005))
        async with served(models, lockstep=True) as clients:
            episodes = await play(clients, 7, workflow=Delayed, roles=roles, waves=Waves(clients))
        steps = {name: steps_of(episode) for name, episode in episodes.items()}
        runs.append([(name, step.response_ids, step.logprobs) for name in steps for step in steps[name]])
    assert len(runs[0]) == 12 * 7
    assert sorted(runs[0]) == sorted(runs[1])


class GivesUp(Talks):
    """Its speakers have no patience with the model; one of them asks what no context holds."""

    async def speak(self, task: dict[str, Any]) -> str:
        if task["question"] == "3?":
            await self.rollout_engine.get_model_response([{"role": "user", "content": "long " * 200}])
        with suppress(TimeoutError):
            await asyncio.wait_for(super().speak(task), 0.0005 if task["question"] == "4?" else None)
        return "?"


async def test_who_gives_up_or_fails_in_a_wave_does_not_hold_the_others(models: list[LoadedModel]) -> None:
    async with served(models, lockstep=True) as clients:
        async with asyncio.timeout(30):
            episodes = await play(clients, 5, workflow=GivesUp, waves=Waves(clients))
    ends = {name: episode.outcome for name, episode in episodes.items()}
    assert {outcome for name, outcome in ends.items() if name[0] != "3"} == {Outcome.SCORED}
    assert {outcome for name, outcome in ends.items() if name[0] == "3"} == {Outcome.TRUNCATED}


async def test_an_engine_that_ends_fails_the_calls_of_the_wave(models: list[LoadedModel]) -> None:
    async with served(models, lockstep=True) as clients:
        waves = Waves(clients)
        await clients["other"].close()
        roles = {"judge": RoleSettings(policy="other")}
        async with asyncio.timeout(30):
            episodes = await play(clients, 12, waves=waves, roles=roles, api_retries=0, retry_limit=1)
    assert {episode.outcome for episode in episodes.values()} == {Outcome.INFRASTRUCTURE_FAILURE}


async def test_attempts_and_solvers_differ_although_they_are_asked_the_same(
    models: list[LoadedModel],
) -> None:
    async with served(models[:1]) as clients:
        episodes = await play(clients, 64)
    first_answers = [
        tuple(trajectory.steps[0].response_ids)
        for name in ("0:0", "0:1")
        for trajectory in episodes[name].trajectories
        if trajectory.name == "speaker"
    ]
    assert len(set(first_answers)) == 6


async def test_two_models_answer_one_attempt_each_for_its_roles(models: list[LoadedModel]) -> None:
    async with served(models) as clients:
        clients["other"].publish(7)
        roles = {"judge": RoleSettings(policy="other", max_tokens=2)}
        episodes = await play(clients, 8, roles=roles)
        scores: dict[str, float] = {}
        for trajectory in episodes["0:0"].trajectories:
            step = trajectory.steps[0]
            assert step.policy_version == (7 if trajectory.name == "judge" else 0)
            assert len(step.response_ids) <= (2 if trajectory.name == "judge" else 3)
            client = clients["other" if trajectory.name == "judge" else "small"]
            scored = await client.score(step.prompt_ids + step.response_ids, len(step.prompt_ids))
            scores[trajectory.name] = float(np.abs(np.array(scored) - np.array(step.logprobs)).max())
    assert max(scores.values()) <= 1e-4
    assert set(scores) == {"speaker", "judge"}


async def test_the_budget_counts_real_tokens(models: list[LoadedModel]) -> None:
    async with served(models[:1]) as clients:
        episodes = await play(clients, 8, budget=TokenBudget(max_response_tokens=5))
    for episode in episodes.values():
        for trajectory in episode.trajectories:
            last, first = trajectory.steps[-1], trajectory.steps[0]
            assert len(last.prompt_ids) + len(last.response_ids) - len(first.prompt_ids) <= 5
    assert {str(episode.termination_reason) for episode in episodes.values()} == {
        "max_response_length_exceeded"
    }
