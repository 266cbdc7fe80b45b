"""Programs with the real SDK, against the real gateway."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from rllm.engine.traced import TracedEngine
from rllm.errors import InferenceError
from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.inference.scripted import CodepointTokenizer, ScriptedAnswer, ScriptedClient
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.messages import SamplingParams
from rllm.types.task import AgentConfig, Task

Play = Callable[..., Any]


def echo(messages: Any) -> str:
    """The last question again; a scripted client is told the whole prompt as text."""
    return str(messages[0]["content"]).rpartition("user:")[2].removesuffix("assistant:")


@pytest.fixture
async def play(tmp_path: Path) -> AsyncIterator[Play]:
    """Episodes of a program on a scripted model."""
    async with AsyncExitStack() as stack:

        async def playing(
            program: Any, client: ScriptedClient, count: int = 1, **options: Any
        ) -> list[Episode]:
            gateway = await stack.enter_async_context(
                Gateway(LocalPolicy(client, "scripted"), tmp_path / "ledger", require_session=True)
            )
            engine = await stack.enter_async_context(
                TracedEngine(program, lambda task, episode: 1.0, gateway, model="scripted")
            )
            rows = [{"id": f"t{number}", "question": f"question {number}"} for number in range(count)]
            async with aclosing(engine.run(rows, **options)) as running:
                episodes = [episode async for episode in running]
            return sorted(episodes, key=lambda each: each.task_id)

        yield playing


async def test_two_conversations_at_a_time_are_two_rows_of_exactly_the_sampled_tokens(play: Play) -> None:
    async def solve(task: Task, config: AgentConfig) -> None:
        async with AsyncOpenAI(base_url=config.base_url, api_key="any") as client:

            async def talk(name: str) -> None:
                messages: list[Any] = []
                for turn in range(3):
                    messages.append({"role": "user", "content": f"{name} {turn}"})
                    reply = await client.chat.completions.create(model=config.model, messages=messages)
                    messages.append({"role": "assistant", "content": reply.choices[0].message.content})

            await asyncio.gather(talk("first"), talk("second"))

    (episode,) = await play(solve, ScriptedClient(echo))
    (trajectory,) = episode.trajectories
    assert len(trajectory.steps) == 6
    rows = trajectory_rows(trajectory, "t", 0, 0, 1.0)
    assert len(rows) == 2
    assert sum(row.num_trainable for row in rows) == sum(len(step.response_ids) for step in trajectory.steps)
    decoded = sorted(CodepointTokenizer().decode(row.token_ids_T.tolist()) for row in rows)
    assert decoded[0].count("first") == 6
    assert decoded[1].count("second") == 6
    assert "second" not in decoded[0]


async def test_blocking_programs_return_their_own_steps_by_completion_id(play: Play) -> None:
    def solve(task: Task, config: AgentConfig) -> Trajectory:
        with OpenAI(base_url=config.base_url, api_key="any") as client:
            messages: list[Any] = [{"role": "user", "content": str(task.instruction)}]
            unused = client.chat.completions.create(model=config.model, messages=messages)
            kept = client.chat.completions.create(model=config.model, messages=messages)
            assert unused.id != kept.id
            return Trajectory(steps=[Step(id=kept.id, action=kept.choices[0].message.content)])

    episodes = await play(solve, ScriptedClient(echo), 8)
    for number, episode in enumerate(episodes):
        (step,) = episode.trajectories[0].steps
        assert f"question {number}" in step.action
        assert step.action in CodepointTokenizer().decode(step.response_ids)
        assert len(episode.info["unclaimed_calls"]) == 1


async def test_the_sampling_of_the_run_wins_over_the_program(play: Play) -> None:
    def solve(task: Task, config: AgentConfig) -> None:
        with OpenAI(base_url=config.base_url, api_key="any") as client:
            client.chat.completions.create(
                model=config.model,
                messages=[{"role": "user", "content": "q"}],
                temperature=0.1,
                top_p=0.5,
                max_tokens=50,
            )

    client = ScriptedClient(echo)
    await play(solve, client, sampling=SamplingParams(temperature=0.7, max_tokens=3))
    (sampling,) = client.samplings
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.7, 1.0, 3)


async def test_an_engine_that_fails_is_no_fault_of_the_program(play: Play) -> None:
    def solve(task: Task, config: AgentConfig) -> None:
        with OpenAI(base_url=config.base_url, api_key="any", max_retries=0) as client:
            client.chat.completions.create(model=config.model, messages=[{"role": "user", "content": "q"}])

    answers = [InferenceError("died"), InferenceError("died again"), "fine"]
    (episode,) = await play(solve, ScriptedClient(answers))
    assert (episode.outcome, episode.info["tries"]) == (Outcome.SCORED, 3)
    assert episode.trajectories[0].steps[0].model_response == "fine"


async def test_a_streamed_answer_that_breaks_off_is_tried_again(play: Play) -> None:
    def solve(task: Task, config: AgentConfig) -> None:
        with OpenAI(base_url=config.base_url, api_key="any", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "q"}]
            for _ in client.chat.completions.create(model=config.model, messages=messages, stream=True):
                continue

    answers = [ScriptedAnswer(text="a long answer that breaks", fail_after=2), "whole"]
    (episode,) = await play(solve, ScriptedClient(answers))
    assert (episode.outcome, episode.info["tries"]) == (Outcome.SCORED, 2)
    assert episode.trajectories[0].steps[0].model_response == "whole"
    assert json.dumps(episode.task)
