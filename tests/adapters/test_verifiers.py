"""Environments of verifiers, played by the real package: rewards, limits, and whose failure is whose."""

import asyncio
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verifiers")

import verifiers as vf

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.build.program_player import local_policy
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.tasks import benchmark_world
from rllm.gateway.server import Gateway
from rllm.inference.scripted import ScriptedClient
from rllm.integrations.task_programs import task_program
from rllm.integrations.verifiers.offered import as_environment
from rllm.types.call_budget import CallBudget
from rllm.types.episode import Outcome, TerminationReason


def right(messages: Sequence[Any]) -> str:
    """The sum that was asked for."""
    return str(int(re.findall(r"(\d+) \+ 1 =", messages[-1]["content"])[-1]) + 1)


def wrong(messages: Sequence[Any]) -> str:
    return "no"


async def test_its_rubric_pays_and_every_call_has_its_tokens(play: Any) -> None:
    program = task_program("verifiers:vf_sums?max_turns=1")
    paid, unpaid = [await play(program, program.tasks("test", 1), each) for each in (right, wrong)]
    assert [episode.trajectories[0].reward for episode in (*paid, *unpaid)] == [1.0, 0.0]
    assert [episode.is_correct for episode in (*paid, *unpaid)] == [True, False]
    assert paid[0].outcome is Outcome.SCORED
    assert paid[0].trajectories[0].signals["length"] == 4.0
    (step,) = paid[0].trajectories[0].steps
    assert step.model_response == "1001"
    assert len(step.response_ids) == len(step.logprobs) == len(step.policy_versions) > 0
    assert "Give the number alone." in step.chat_completions[0]["content"]


async def test_turns_are_those_of_the_environment(play: Any) -> None:
    program = task_program("verifiers:vf_sums")
    (episode,) = await play(program, program.tasks("test", 1), wrong)
    assert len(episode.trajectories[0].steps) == 2
    assert episode.trajectories[0].steps[1].chat_completions[-2]["content"] == "Again."
    assert (episode.outcome, episode.termination_reason) == (
        Outcome.TRUNCATED,
        TerminationReason.MAX_TURNS_EXCEEDED,
    )
    assert episode.trajectories[0].reward == 0.0


@pytest.mark.parametrize(
    ("fault", "error", "tries"),
    [
        ("scorer", "ZeroDivisionError", 1),
        ("none", "finite number", 1),
        ("environment", "a bug of the environment", 1),
        ("sandbox", "the sandbox is gone", 2),
    ],
)
async def test_a_failure_of_the_environment_is_never_a_zero(
    play: Any, fault: str, error: str, tries: int
) -> None:
    program = task_program(f"verifiers:vf_sums?fault={fault}")
    whole, broken = await play(program, program.tasks("test", 2), right, retry_limit=2)
    assert (whole.trajectories[0].reward, broken.trajectories[0].reward) == (1.0, None)
    assert broken.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert error in broken.info["error"]["message"]
    assert broken.info["tries"] == tries


async def test_limits_of_the_environment_and_of_the_run_cut_an_episode_off(play: Any) -> None:
    slow = task_program("verifiers:vf_sums?fault=slow&timeout_seconds=0.3")
    whole, late = await play(slow, slow.tasks("test", 2), right)
    assert whole.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert (late.outcome, late.termination_reason) == (Outcome.TRUNCATED, TerminationReason.TIMEOUT)
    program = task_program("verifiers:vf_sums")
    (once,) = await play(program, program.tasks("test", 1), right, budget=CallBudget(turns=1))
    assert (once.outcome, len(once.trajectories[0].steps)) == (Outcome.TRUNCATED, 1)
    assert once.trajectories[0].reward == 1.0


async def test_an_empty_answer_is_the_policys_failure(play: Any) -> None:
    program = task_program("verifiers:vf_sums")
    (episode,) = await play(program, program.tasks("test", 1), lambda messages: "")
    assert episode.outcome is Outcome.POLICY_FAILURE


async def test_rollouts_run_side_by_side(play: Any) -> None:
    program = task_program("verifiers:vf_sums?num_test=64")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    episodes = await play(program, program.tasks("test"), right)
    ticking.cancel()
    assert [episode.trajectories[0].reward for episode in episodes] == [1.0] * 64
    assert ticks > 64, "the engine's loop runs on"


def test_splits_share_no_row_and_ids_stay() -> None:
    program = task_program("verifiers:vf_sums")
    train, test = program.tasks("train"), program.tasks("test")
    assert [len(train), len(test)] == [30, 4]
    assert len({task.id for task in [*train, *test]}) == 34
    assert program.tasks("test", 2)[1].id == "vf_sums-test-1"
    for name in ("verifiers:vf_sums?num_test=0", "verifiers:vf_sums?num_test=30&fault=same"):
        halves = task_program(name)
        train, test = halves.tasks("train"), halves.tasks("test")
        assert [len(train), len(test)] == [28, 2]
        assert not {task.instruction for task in train} & {task.instruction for task in test}


def test_the_handlers_of_signals_stay_those_of_the_run() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    task_program("verifiers:vf_sums?num_test=5")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("verifiers:not-installed", "Install its package"),
        ("verifiers:vf_sums?numtrain=3", "numtrain"),
        ("verifiers:vf_sums?fault=group", "whole groups"),
        ("verifiers:", "names nothing"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        task_program(name)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="train, test"):
        task_program("verifiers:vf_sums").tasks("validation")


async def test_verifiers_own_evaluation_plays_an_environment_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a gateway, as `rllm serve model` opens one, with verifiers' OpenAI client."""
    spec = benchmark_named("frozenlake")
    world = benchmark_world(spec)
    tasks = world.tasks("test", 3, **spec.task)
    environment = as_environment(FrozenLakeEnv, tasks[1:], tasks[:2], agent_class=FrozenLakeAgent)
    turns = {
        observation: answer
        for task in tasks
        for observation, answer in world.expert({})(task, 0.0, np.random.default_rng(0))
    }

    def expert(messages: Sequence[Any]) -> str:
        board = max(turns, key=lambda each: messages[-1]["content"].rfind(each))
        return turns[board]

    async def reward_of(script: Any) -> list[float]:
        policy = local_policy(ScriptedClient(script), "m")
        async with Gateway(policy, tmp_path / script.__name__) as gateway:
            monkeypatch.setenv("RLLM_KEY", gateway.token or "")
            client = vf.types.ClientConfig(api_base_url=f"{gateway.url}/v1", api_key_var="RLLM_KEY")
            outputs = await environment.evaluate(client, "m", {"max_tokens": 16})
        return [each["reward"] for each in outputs["outputs"]]

    assert await reward_of(expert) == [1.0, 1.0]
    assert await reward_of(wrong) == [0.0, 0.0]
