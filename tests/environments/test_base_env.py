"""What an environment returns is checked once, and the message names the class, the method and the value."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymFrozenLake
from hypothesis import given
from hypothesis import strategies as st

from rllm.environments.base import CUT_OFF, BaseEnv, call_reset, unpack_reset, unpack_step
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.environments.gym_adapter import GymnasiumEnv
from rllm.environments.tool import ToolEnvironment
from rllm.errors import AgentError, RewardError


class Echo(BaseEnv):
    """Says what it was told; counts what it was asked."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        return "hello", {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        return action, 0.0, False, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Echo":
        return Echo()


class SeedlessEcho(Echo):
    """As environments were written before Gymnasium: `reset` takes nothing."""

    def reset(self) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
        return "hello", {"seedless": True}


def test_the_index_of_an_environment_can_be_set_without_a_constructor() -> None:
    first, second = Echo(), Echo()
    assert first.idx is None
    first.idx = 3
    assert (first.idx, second.idx) == (3, None)


def test_an_environment_is_multithread_safe_unless_it_says_otherwise_and_closes_twice() -> None:
    assert Echo.is_multithread_safe() is True
    env = Echo()
    env.close()
    env.close()


def test_a_four_tuple_may_say_that_a_limit_ended_the_episode() -> None:
    for done, cut_off in [(True, True), (True, False), (False, True)]:
        result = unpack_step(Echo(), ("ice", 1.0, done, {CUT_OFF: cut_off}))
        assert (result.done, result.truncated) == (done, done and cut_off)


def test_every_built_in_environment_steps_with_four_values() -> None:
    """As published training loops unpack them."""
    lake = FrozenLakeEnv(desc=["SF", "HG"], max_steps=1)
    wordy = ToolEnvironment({"question": "?"}, tools=[], max_steps=1)
    wrapped = GymnasiumEnv(
        GymFrozenLake(desc=["SF", "HG"], is_slippery=False), describe=lambda state, gym: str(state)
    )
    for env, action, cut_off in [(lake, "Right", True), (wordy, "4", False), (wrapped, 2, False)]:
        env.reset()
        _, _, done, info = env.step(action)
        assert (done, info.get(CUT_OFF, False)) == (env is not wrapped, cut_off)


def test_a_four_tuple_without_the_key_is_not_truncated() -> None:
    result = unpack_step(Echo(), ("ice", 1, True, {"k": 1}))
    assert (result.observation, result.reward, result.done, result.truncated) == ("ice", 1.0, True, False)
    assert result.info == {"k": 1}
    assert type(result.reward) is float


@pytest.mark.parametrize(
    ("terminated", "truncated", "done", "cut_off"),
    [
        (False, False, False, False),
        (True, False, True, False),
        (False, True, True, True),
        (True, True, True, False),
        (np.True_, np.False_, True, False),
    ],
)
def test_a_five_tuple_tells_an_end_from_a_limit(
    terminated: Any, truncated: Any, done: bool, cut_off: bool
) -> None:
    result = unpack_step(Echo(), ("ice", 0.0, terminated, truncated, {}))
    assert (result.done, result.truncated) == (done, cut_off)
    assert type(result.done) is type(result.truncated) is bool


def test_a_step_of_the_wrong_shape_is_refused_by_class_method_and_value(subtests: pytest.Subtests) -> None:
    for value in [
        None,
        "ice",
        ["ice", 0.0, False, {}],
        ("ice", 0.0, False),
        ("ice", 0.0, False, False, {}, 1),
        ("ice", 0.0, "no", {}),
        ("ice", 0.0, None, {}),
        ("ice", 0.0, False, 0, {}),
        ("ice", 0.0, False, None),
        ("ice", 0.0, False, False, [1]),
    ]:
        with subtests.test(value=value):
            with pytest.raises(AgentError, match=r"^Echo\.step returned ") as caught:
                unpack_step(Echo(), value)
            assert "return a tuple" in str(caught.value) or "must be" in str(caught.value)


def test_a_reward_that_is_no_finite_number_is_an_error_and_never_a_zero(subtests: pytest.Subtests) -> None:
    for reward in [
        None,
        float("nan"),
        float("inf"),
        -float("inf"),
        "1.0",
        [1.0],
        np.array(1.0),
        np.float32("nan"),
        1j,
        Decimal(1),
        10**400,
        object(),
    ]:
        for width in (4, 5):
            with subtests.test(reward=reward, width=width):
                flags = (False,) * (width - 3)
                with pytest.raises(RewardError, match=r"^Echo\.step returned .* reward; .*finite"):
                    unpack_step(Echo(), ("ice", reward, *flags, {}))


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(True, 1.0), (np.True_, 1.0), (np.float32(0.5), 0.5), (np.int64(-2), -2.0), (Fraction(1, 4), 0.25)],
)
def test_every_kind_of_real_number_becomes_a_float(reward: Any, expected: float) -> None:
    assert unpack_step(Echo(), ("ice", reward, False, {})).reward == expected


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_finite_reward_passes_unchanged(reward: float) -> None:
    assert unpack_step(Echo(), ("ice", reward, False, {})).reward == reward


def test_a_seed_reaches_the_reset_that_takes_one() -> None:
    env = Echo()
    assert unpack_reset(env, call_reset(env, 7)) == ("hello", {})
    unpack_reset(env, call_reset(env, None))
    assert env.seeds == [7, None]


def test_an_environment_from_before_seeds_is_reset_without_one() -> None:
    seedless = SeedlessEcho()
    assert unpack_reset(seedless, call_reset(seedless, 7)) == ("hello", {"seedless": True})


@pytest.mark.parametrize("value", [None, "hello", ("hello",), ("hello", None), ["hello", {}]])
def test_a_reset_of_the_wrong_shape_is_refused(value: Any) -> None:
    class Broken(Echo):
        def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
            return value

    with pytest.raises(AgentError, match=r"^Broken\.reset .*\(observation, info\)"):
        unpack_reset(Broken(), call_reset(Broken(), None))


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(AgentError) as caught:
        unpack_step(Echo(), "x" * 10_000)
    assert len(str(caught.value)) < 500
