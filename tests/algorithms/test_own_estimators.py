"""What an estimator of the user's may see, and the three forms of what it gives back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.estimators import sees_attempts
from rllm.algorithms.grouping import GroupingCounts, group_advantages
from rllm.config.algorithm import AlgorithmConfig
from rllm.errors import ConfigError
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Step, Trajectory, TrajectoryGroup
from rllm.types.sample import NOT_SAMPLED

SEEING = """
import numpy as np
from rllm.algorithms.advantages import ByToken

def lengths(attempts, context):
    return [context.step * each.num_tokens + context.config.pass_k for each in attempts]

def turns(attempts):
    return [np.arange(each.num_turns) + 1.0 for each in attempts]

def tokens(attempts):
    assert all(sum(each.num_tokens_K) == each.num_tokens for each in attempts)
    assert {(each.role, each.task_id) for each in attempts} == {("solver", "t")}
    return ByToken([np.arange(each.num_tokens) + 1.0 for each in attempts])

def one_short(attempts):
    return ByToken([np.ones(each.num_tokens - 1) for each in attempts])

def ragged(rewards_G, context):
    return [np.ones(2)] * len(rewards_G)

def half_finite(attempts):
    return [np.array([1.0, np.nan])[: each.num_turns] for each in attempts]

def alone(attempts):
    assert all(len(each.returns_K) == len(each.turn_rewards_K) == each.num_turns == 1 for each in attempts)
    return [float(each.returns_K[0]) for each in attempts]

def nothing(attempts):
    return None

def mixed(attempts):
    return [1.0, [2.0]]

def complex_numbers(rewards_G):
    return rewards_G * 1j

def texts(rewards_G):
    return [str(each) for each in rewards_G]

def boxed(rewards_G):
    return np.array([1.0, "2.0"], dtype=object)

def three(attempts, context, more):
    return 0
"""


@pytest.fixture
def seeing(tmp_path: Path) -> str:
    path = tmp_path / "seeing.py"
    path.write_text(SEEING)
    return str(path)


def _played() -> dict[tuple[str, str], TrajectoryGroup]:
    """Two attempts: two turns of 2 and 1 tokens, the first of which a grammar forced, and one turn of 2."""
    steps = [
        Step(prompt_ids=[1], response_ids=[5, 6], logprobs=[0.0, -1.0], policy_versions=[NOT_SAMPLED, 0]),
        Step(prompt_ids=[1, 5, 6, 2], response_ids=[7], logprobs=[-1.0], policy_versions=[0]),
    ]
    other = [Step(prompt_ids=[1], response_ids=[8, 9], logprobs=[-1.0, -2.0], policy_versions=[0, 0])]
    trajectories = [
        Trajectory(uid="first", name="solver", steps=steps, reward=1.0),
        Trajectory(uid="second", name="solver", steps=other, reward=0.0),
    ]
    return {("t", "solver"): TrajectoryGroup(task_id="t", role="solver", trajectories=trajectories)}


def _advantages_by(name: str, **options: Any) -> dict[str, list[Any]]:
    found = group_advantages(_played(), lambda role: name, GroupingCounts(), **options)
    return {uid: [np.asarray(turn).tolist() for turn in turns] for uid, turns in found.items()}


def test_ones_own_estimator_sees_attempts_configuration_and_step(seeing: str) -> None:
    context = AlgorithmContext(config=AlgorithmConfig(pass_k=7), step=3)
    found = _advantages_by(f"{seeing}:lengths", context=context)
    assert found == {"first": [3 * 2 + 7.0] * 2, "second": [3 * 2 + 7.0]}


def test_ones_own_estimator_may_credit_turns_and_tokens(seeing: str) -> None:
    assert _advantages_by(f"{seeing}:turns") == {"first": [1.0, 2.0], "second": [1.0]}
    by_token = _advantages_by(f"{seeing}:tokens", weight_of=lambda role: 10.0)
    assert by_token == {"first": [[0.0, 10.0], [20.0]], "second": [[10.0, 20.0]]}
    given = group_advantages(_played(), lambda role: f"{seeing}:tokens", GroupingCounts())
    (trajectory, _) = _played()["t", "solver"].trajectories
    (row,) = trajectory_rows(trajectory, "t", 0, 0, given["first"])
    assert row.advantages_T.tolist() == [0.0, 0.0, 1.0, 0.0, 2.0]
    with pytest.raises(ConfigError, match=r"`algorithm.credit`.*'turn'"):
        _advantages_by(f"{seeing}:tokens", credit="turn")


def test_ones_own_estimator_also_sees_an_attempt_that_is_alone(seeing: str) -> None:
    groups = _played()
    del groups["t", "solver"].trajectories[1]
    advantages = group_advantages(groups, lambda role: f"{seeing}:turns", GroupingCounts())
    assert [float(each) for each in advantages["first"]] == [1.0, 2.0]


def test_where_turns_are_credited_each_is_an_attempt_of_one_turn(seeing: str) -> None:
    advantages = _advantages_by(f"{seeing}:alone", credit="turn")
    assert {uid: len(turns) for uid, turns in advantages.items()} == {"first": 2, "second": 1}


def test_a_function_that_does_not_name_its_arguments_is_one_of_rewards() -> None:
    assert not sees_attempts(max)


def test_what_is_none_of_the_three_forms_is_refused(seeing: str) -> None:
    for name in (
        "half_finite",
        "one_short",
        "ragged",
        "mixed",
        "nothing",
        "complex_numbers",
        "texts",
        "boxed",
    ):
        with pytest.raises(ConfigError, match=rf"seeing.py:{name} .*finite"):
            _advantages_by(f"{seeing}:{name}")
    with pytest.raises(ConfigError, match=r"three .*\(attempts, context\)"):
        _advantages_by(f"{seeing}:three")
