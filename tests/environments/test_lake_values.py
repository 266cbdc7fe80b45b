"""What policies come to on a lake, exactly: against Gymnasium's own table, by hand, and by playing."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymFrozenLake

from rllm.environments.frozenlake import WORLD, FrozenLakeEnv, lake_tasks
from rllm.environments.lake_values import MOVES, expected_return
from rllm.eval.catalogue import benchmark_named
from rllm.eval.tasks import benchmark_world

UNIFORM = (0.25, 0.25, 0.25, 0.25)


def chance(rows: list[str], is_slippery: bool, num_steps: int, policy: Any) -> float:
    """The same by recursion over what Gymnasium's table says of this very map; `policy`: None plays best."""
    table: Any = GymFrozenLake(desc=rows, is_slippery=is_slippery).P

    @cache
    def value(state: int, left: int) -> float:
        if left == 0:
            return 0.0
        moves = [
            sum(
                probability * (reward + (0.0 if done else value(after, left - 1)))
                for probability, after, reward, done in table[state][move]
            )
            for move in range(4)
        ]
        if policy is None:
            return max(moves)
        return sum(weight * each for weight, each in zip(policy, moves, strict=True))

    return value(0, num_steps)


def test_returns_are_those_of_gymnasiums_table(subtests: pytest.Subtests) -> None:
    for is_slippery in (False, True):
        for policy in (None, UNIFORM, (0.0, 0.5, 0.5, 0.0), (0.0, 0.0, 1.0, 0.0)):
            with subtests.test(is_slippery=is_slippery, policy=policy):
                for task in lake_tasks("validation", 12, size=[3, 4, 5], max_steps=9):
                    rows = FrozenLakeEnv.from_dict(task).desc
                    ours = expected_return(rows, is_slippery, 9, policy)
                    assert ours == pytest.approx(chance(list(rows), is_slippery, 9, policy), abs=1e-12)


def test_a_lake_that_one_can_work_out_by_hand() -> None:
    rows = ("SF", "HG")
    assert expected_return(rows, False, 2) == 1.0
    assert expected_return(rows, False, 1) == 0.0
    assert expected_return(rows, False, 2, UNIFORM) == pytest.approx(1 / 16)
    assert expected_return(rows, False, 9, (0.0, 1.0, 0.0, 0.0)) == 0.0


def test_random_play_on_slippery_ice_comes_to_what_was_computed() -> None:
    env = FrozenLakeEnv(["SFF", "FFF", "FFG"], is_slippery=True, max_steps=12)
    rng = np.random.default_rng(0)
    arrived = 0.0
    for seed in range(2000):
        env.reset(seed=seed)
        done = False
        while not done:
            _, reward, done, _ = env.step(MOVES[rng.integers(4)])
            arrived += reward
    exact = expected_return(env.desc, True, 12, UNIFORM)
    assert abs(arrived / 2000 - exact) < 4 * (exact * (1 - exact) / 2000) ** 0.5


def test_baselines_are_there_for_every_task_and_none_beats_the_optimum() -> None:
    for is_slippery in (False, True):
        tasks = lake_tasks("test", 20, size=[4, 5], max_steps=14, is_slippery=is_slippery)
        returns = WORLD.baselines(tasks) if WORLD.baselines is not None else {}
        assert {"optimum", "random", "always Right", "always Down", "Down or Right"} <= set(returns)
        assert all(len(each) == len(tasks) for each in returns.values())
        for each in returns.values():
            assert all(0.0 <= one <= best for one, best in zip(each, returns["optimum"], strict=True))
        assert is_slippery == (min(returns["optimum"]) < 1.0)


def test_slippery_lakes_are_a_benchmark_whose_best_return_is_known() -> None:
    spec = benchmark_named("frozenlake-slippery")
    world = benchmark_world(spec)
    tasks = world.tasks("validation", 256, **spec.task)
    assert len({world.identity(task) for task in tasks}) == 256
    assert {world.kind(task) for task in tasks} == {"4x4", "5x5"}
    returns = world.baselines(tasks[:64]) if world.baselines is not None else {}
    means = {policy: float(np.mean(each)) for policy, each in returns.items()}
    assert 0.6 < means.pop("optimum") < 0.8
    assert max(means.values()) < 0.25
