"""check_env says all that is wrong with an environment, and nothing about one that keeps the contract."""

import asyncio
import itertools
import math
from typing import Any

import numpy as np
import pytest

from rllm.environments import BaseEnv, FrozenLakeEnv, check_env
from rllm.environments.checks import lost_in_json
from rllm.errors import AgentError


class Sound(BaseEnv):
    """Keeps the contract; the classes below break it in one place each."""

    first: Any = "hello"
    reset_info: Any = {}  # noqa: RUF012  read only
    result: Any = ("bye", 1.0, True, {"k": [1, None]})

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return self.first, self.reset_info

    def step(self, action: Any) -> Any:
        return self.result

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Sound":
        return Sound()


def complaints(env: Any) -> str:
    with pytest.raises(AgentError) as caught:
        check_env(env, "go")
    return str(caught.value)


def broken(**attributes: Any) -> Sound:
    return type("Broken", (Sound,), attributes)()


def test_a_sound_environment_passes() -> None:
    check_env(Sound(), "go")


def test_frozenlake_passes(subtests: pytest.Subtests) -> None:
    for action in ("Right", "nonsense", None):
        for is_slippery in (False, True):
            with subtests.test(action=action, is_slippery=is_slippery):
                check_env(FrozenLakeEnv(is_slippery=is_slippery), action, seed=5)


def test_each_broken_promise_is_named(subtests: pytest.Subtests) -> None:
    for attributes, complaint in [
        ({"result": ("bye", None, True, {})}, "Broken.step returned None"),
        ({"result": ("bye", float("nan"), True, {})}, "as the reward"),
        ({"result": ("bye", 1.0, {})}, "Broken.step returned ('bye', 1.0, {})"),
        ({"reset_info": None}, "Broken.reset returned"),
        ({"first": np.zeros(3)}, "the observation of reset() cannot be stored as JSON"),
        ({"reset_info": {"k": object()}}, "the info of reset() cannot be stored as JSON"),
        ({"result": ("bye", 1.0, True, {1: "k"})}, "the info of step() comes back from JSON as"),
        ({"result": ("bye", 1.0, True, {"k": (1, 2)})}, "use lists instead of tuples"),
        ({"is_multithread_safe": staticmethod(lambda: None)}, "is_multithread_safe() returned None"),
        ({"idx": property(lambda self: 0, lambda self, value: None)}, "idx is 0 after it was set to 7"),
    ]:
        with subtests.test(attributes=attributes, complaint=complaint):
            message = complaints(broken(**attributes))
            assert complaint in message
            assert message.startswith("Broken breaks the contract in 1 place(s):")


def test_an_environment_that_ignores_the_seed_is_named_with_both_values() -> None:
    count = itertools.count()
    message = complaints(broken(reset=lambda self, seed=None: (f"draw {next(count)}", {})))
    assert "with seed 0: 'draw 0' and 'draw 1'" in message


def test_state_that_survives_a_reset_is_found() -> None:
    count = itertools.count()
    message = complaints(broken(step=lambda self, action: ("bye", float(next(count)), False, {})))
    assert "reward of step()" in message


def test_all_problems_are_listed_at_once() -> None:
    message = complaints(broken(first=b"bytes", reset_info={"k": {1}}, result=None))
    assert message.startswith("Broken breaks the contract in 3 place(s):")
    assert [line[:4] for line in message.splitlines()[1:]] == ["  - "] * 3


def test_what_is_no_environment_at_all_is_told_what_to_derive_from() -> None:
    assert "rllm.environments.BaseEnv" in complaints(object())


def test_an_exception_of_the_environment_keeps_its_own_traceback() -> None:
    def step(self: Sound, action: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        check_env(broken(step=step), "go")


def test_what_json_keeps_is_not_lost(subtests: pytest.Subtests) -> None:
    for value in ("text", 1, 0.5, None, True, [1, "a"], {"a": {"b": []}}):
        with subtests.test(value=value):
            assert lost_in_json(value) is None


def test_what_json_changes_is_lost(subtests: pytest.Subtests) -> None:
    for value in ((1, 2), {1: 2}, {"a": (1,)}, {1, 2}, b"x", float("nan"), np.int64(1)):
        with subtests.test(value=value):
            assert lost_in_json(value) is not None


def test_an_async_environment_is_checked_in_a_loop_of_its_own() -> None:
    class Async(BaseEnv):
        async def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
            await asyncio.sleep(0)
            self.loop = asyncio.get_running_loop()
            return "start", {}

        async def step(self, action: Any) -> Any:  # type: ignore[override]
            assert asyncio.get_running_loop() is self.loop
            return "end", math.nan, True, {}

        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Async":
            return Async()

    with pytest.raises(AgentError, match=r"Async.step returned nan"):
        check_env(Async(), "go")
