"""Any Gymnasium environment can be played once its observations are text."""

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymFrozenLake

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments import GymnasiumEnv, check_env
from rllm.environments.base import unpack_step
from rllm.errors import AgentError, ConfigError
from rllm.inference.scripted import ScriptedClient
from rllm.types import Action
from rllm.types.episode import Outcome


class Parrot(gymnasium.Env[str, str]):
    """A world of text that repeats what it hears and tires after two steps."""

    def __init__(self, greeting: str = "hello") -> None:
        self.observation_space = gymnasium.spaces.Text(100)
        self.action_space = gymnasium.spaces.Text(100)
        self.greeting = greeting
        self.num_steps = 0
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.num_steps = 0
        return self.greeting, {"lucky": self.np_random.integers(100), "where": {"place": np.zeros(2)}}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        return action, np.float32(0.5), False, self.num_steps == 2, {}  # type: ignore[return-value]

    def close(self) -> None:
        self.closed = True


def test_a_text_environment_needs_nothing_but_the_wrapper() -> None:
    env = GymnasiumEnv(Parrot())
    observation, info = env.reset(seed=1)
    assert observation == "hello"
    assert info["where"] == {"place": [0.0, 0.0]}
    assert type(info["lucky"]) is int
    first, second = (unpack_step(env, env.step(Action("polly"))) for _ in range(2))
    assert (first.observation, first.reward, first.done) == ("polly", 0.5, False)
    assert (second.done, second.truncated) == (True, True)


def test_a_wrapped_environment_keeps_the_contract() -> None:
    check_env(GymnasiumEnv(Parrot()), "polly")


def test_the_seed_reaches_gymnasium() -> None:
    env = GymnasiumEnv(Parrot())
    assert env.reset(seed=4)[1] == env.reset(seed=4)[1]
    assert len({env.reset(seed=seed)[1]["lucky"] for seed in range(20)}) > 5


def test_numbers_become_words_and_words_become_actions() -> None:
    env = GymnasiumEnv(
        GymFrozenLake(desc=["SF", "HG"], is_slippery=False),
        describe=lambda state, gym: f"cell {state} of {gym.observation_space.n}",
        parse=["left", "down", "right", "up"].index,
    )
    assert env.reset(seed=0)[0] == "cell 0 of 4"
    assert env.step("right")[0] == "cell 1 of 4"
    observation, reward, done, _ = env.step(Action("down"))
    assert (observation, reward, done) == ("cell 3 of 4", 1, True)
    check_env(env, "right")


async def test_an_answer_that_nobody_can_read_is_the_policys_failure() -> None:
    """Neither the environment's, nor tried again: the model wrote it."""
    moves = ["left", "down", "right", "up"]
    for parse, answer, words in [
        (moves.index, "sideways", r"`parse` cannot read the answer 'sideways'.*ValueError"),
        (int, "7", r"FrozenLakeEnv cannot act by 7, which is not in its action space Discrete\(4\)"),
        (None, "right", "cannot act by 'right'"),
    ]:

        class Lake(GymnasiumEnv):
            @staticmethod
            def from_dict(info: dict[str, Any]) -> "Lake":
                gym = GymFrozenLake(desc=["SF", "HG"], is_slippery=False)
                return Lake(gym, describe=lambda state, gym: f"cell {state}", parse=parse)  # noqa: B023

        client = ScriptedClient(lambda messages: answer)  # noqa: B023
        engine = AgentExecutionEngine(ConversationAgent, Lake, rollout_engine=client, max_failed_fraction=0.0)
        (trajectory,) = await engine.execute_tasks([{"task_id": "t"}])
        assert (trajectory.outcome, trajectory.reward) == (Outcome.POLICY_FAILURE, None)
        error = trajectory.info["error"]
        assert (error["type"], error["place"]) == ("ActionError", "environment")
        assert re.search(words, error["message"]), error["message"]
        assert engine.counts.retries == 0


async def test_what_breaks_at_a_good_action_is_the_environments_failure() -> None:
    class Broken(Parrot):
        def step(self, action: str) -> Any:
            raise OSError("gone")

    class Env(GymnasiumEnv):
        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Env":
            return Env(Broken())

    engine = AgentExecutionEngine(
        ConversationAgent, Env, rollout_engine=ScriptedClient(lambda messages: "hi"), retry_wait_s=0.0
    )
    (trajectory,) = await engine.execute_tasks([{"task_id": "t"}])
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_FAILURE


def test_an_observation_that_is_no_text_is_refused_with_the_mend() -> None:
    env = GymnasiumEnv(GymFrozenLake(desc=["SF", "HG"]))
    with pytest.raises(AgentError, match=r"FrozenLakeEnv\.reset .*observation 0 .* `describe"):
        env.reset(seed=0)


def test_closing_the_wrapper_closes_what_it_owns() -> None:
    parrot = Parrot()
    GymnasiumEnv(parrot).close()
    assert parrot.closed


def test_a_registered_text_environment_is_built_from_a_task() -> None:
    gymnasium.register("rllm-tests/Parrot-v0", Parrot)
    task = {"task_id": "parrot-0", "env_id": "rllm-tests/Parrot-v0", "kwargs": {"greeting": "ahoy"}}
    env = GymnasiumEnv.from_dict(task)
    assert env.reset()[0] == "ahoy"
    env.close()
    gymnasium.registry.pop("rllm-tests/Parrot-v0")


@pytest.mark.parametrize(("task", "named"), [({}, "env_id"), ({"env_id": "x", "sise": 4}, "sise")])
def test_a_task_that_cannot_be_built_is_refused(task: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GymnasiumEnv.from_dict(task)
