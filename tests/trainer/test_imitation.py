"""A warm start that came to nothing is said when it ends: a run that goes on from there learns nothing."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.build.agent_player import AgentPlayer
from rllm.build.configs import training_config
from rllm.build.experts import expert_player
from rllm.build.training import build_run
from rllm.config.loader import load_config
from rllm.config.schema import WarmStartConfig
from rllm.environments.frozenlake import FrozenLakeEnv, demonstration, lake_tasks
from rllm.environments.worlds import world_named
from rllm.trainer.imitation import MIN_ATTEMPTS, NUM_TASKS, warn_of_stalled_imitation
from rllm.types.episode import Episode, Outcome, Trajectory

CALCULATOR = ("task.environment_args.server=in-process",)


@pytest.mark.parametrize(("noise", "success"), [(0.0, 1.0), (1.0, 0.0)])
async def test_an_expert_that_calls_tools_comes_to_what_its_noise_leaves(
    noise: float, success: float, tmp_path: Path
) -> None:
    config = training_config("calculator", None, (*CALCULATOR, f"warm_start.noise={noise}"))
    run = build_run(config, tmp_path)
    assert run.expert is not None
    play = run.expert.play
    assert play is not None
    tasks = world_named("calculator").tasks("validation", 6, **config.task.environment_args)
    assert (await play(tasks)).success == success


async def test_an_expert_whose_world_moves_otherwise_is_played_to_its_last_turn() -> None:
    """On slippery ice the same words lead elsewhere: the demonstration may be over before the walk is."""
    config = load_config({"warm_start": {"noise": 0.0}, "rollout": {"max_turns": 20}})
    player = AgentPlayer(agent_class=FrozenLakeAgent, env_class=FrozenLakeEnv)

    def expert(task: dict[str, Any], noise: float, rng: np.random.Generator) -> Any:
        return demonstration(task, noise=noise, rng=rng)

    tasks = lake_tasks("validation", 12, size=4, is_slippery=True, max_steps=20)
    report = await expert_player(config, expert, player)(tasks)
    assert (report.attempted, report.failed) == (12, 0)


def _trained(tmp_path: Path, noise: float, num_tasks: int = 24) -> None:
    changes = (
        "steps=0",
        "threads=1",
        "task.environment_args.size=4",
        "warm_start.steps=1",
        f"warm_start.noise={noise}",
        "warm_start.episodes_per_step=4",
        "warm_start.learning_rate=1e-5",
        "warm_start.expert_args={strolls=false, sight=99}",
        f"evaluation.num_tasks={num_tasks}",
        "evaluation.split=validation",
        "evaluation.every_steps=0",
        "rollout.max_turns=8",
    )
    build_run(training_config("frozenlake", None, changes, 0), tmp_path / f"run-{noise}-{num_tasks}").train()


@pytest.mark.parametrize(("high", "expected"), [(0.39, ["12.5 %", "87.5 %"]), (0.4, [])])
async def test_less_than_half_of_an_expert_is_told_where_both_intervals_say_so(
    caplog: pytest.LogCaptureFixture, high: float, expected: list[str]
) -> None:
    report: Any = SimpleNamespace(success=0.125, success_interval=(0.05, high))
    num_tasks: list[int] = []

    async def play(tasks: Sequence[Any]) -> Any:
        num_tasks.append(len(tasks))
        return SimpleNamespace(success=0.875, success_interval=(0.8, 0.95))

    await warn_of_stalled_imitation(report, [], play, range(5000), WarmStartConfig())
    assert num_tasks == [NUM_TASKS]
    assert re.findall(r"[\d.]+ %", caplog.text) == expected


@pytest.mark.parametrize(
    ("rewards", "num_failed", "is_told"),
    [
        ([0.5] * MIN_ATTEMPTS, 0, True),
        ([0.5] * (MIN_ATTEMPTS - 1), 0, False),
        ([0.5] * (MIN_ATTEMPTS - 1), 1, False),  # what failed was not paid
        ([0.5] * MIN_ATTEMPTS, 3, True),
        ([0.5] * MIN_ATTEMPTS + [1.0], 0, False),
    ],
)
async def test_equal_rewards_are_told_of_attempts_enough(
    caplog: pytest.LogCaptureFixture, rewards: list[float], num_failed: int, is_told: bool
) -> None:
    episodes = [
        Episode(outcome=Outcome.SCORED, trajectories=[Trajectory(name="agent", reward=each)])
        for each in rewards
    ]
    failed = [Episode(outcome=Outcome.INFRASTRUCTURE_FAILURE)] * num_failed
    report: Any = None
    await warn_of_stalled_imitation(report, [*failed, *episodes], None, [], WarmStartConfig())
    assert bool(caplog.records) == is_told
    if is_told:
        assert f"{len(rewards)} attempts" in caplog.text


def test_a_warm_start_that_stays_far_below_its_expert_names_the_keys_to_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _trained(tmp_path, noise=0.0, num_tasks=4)
    assert not caplog.records, "four attempts are too few to tell"
    _trained(tmp_path, noise=0.0)
    (line,) = (each.getMessage() for each in caplog.records)
    assert "0.0 %" in line
    assert "`warm_start.steps`, which is 1" in line
    assert "`warm_start.learning_rate`, which is 1e-05" in line


def test_a_model_that_is_as_good_as_its_expert_is_not_remarked_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _trained(tmp_path, noise=1.0)
    assert not caplog.records


def test_where_no_expert_can_be_played_equal_rewards_are_remarked_on(
    letters: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A workflow: nobody knows what its expert would be paid."""

    class Unpaid(letters.PairWorkflow):
        async def say(self, role: str, question: str) -> Trajectory:
            return replace(await super().say(role, question), reward=0.0)

    tasks = [
        {"task_id": f"{letter}-{number}", "letter": letter} for number in range(4) for letter in "ABCDEFGH"
    ]
    changes = {"steps": 0, "warm_start": {"steps": 1}, "evaluation": {"num_tasks": 32, "every_steps": 0}}
    for name, workflow in (("paid", letters.PairWorkflow), ("unpaid", Unpaid)):
        letters.make_pair_trainer(
            tmp_path / name, changes, workflow_class=workflow, val_dataset=tasks, validation_dataset=None
        ).train()
        lines = [each.getMessage() for each in caplog.records]
        assert [line[:58] for line in lines] == (
            ["All 32 attempts after the warm start were paid 0, so there"] if name == "unpaid" else []
        )
