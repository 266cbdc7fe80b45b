"""Any Gymnasium environment as one of ours: observations become text, answers become its actions.

what the agent says ──► parse ──► gymnasium.Env.step ──► describe ──► what the agent reads
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rllm.environments.base import BaseEnv
from rllm.errors import AgentError, ConfigError
from rllm.types.episode import Action

if TYPE_CHECKING:
    import gymnasium


class GymnasiumEnv(BaseEnv):
    """Wraps `env`, which it owns from then on: `close` closes it.

    `describe(observation, env)` puts an observation into words; without it the observation itself must be
    text. `parse(action)` makes the Gymnasium action out of what the agent did; without it the action is
    passed on as it is.
    """

    def __init__(
        self,
        env: "gymnasium.Env[Any, Any]",
        *,
        describe: Callable[[Any, Any], str] | None = None,
        parse: Callable[[Any], Any] | None = None,
    ) -> None:
        self.env = env
        self._describe = describe
        self._parse = parse

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed)
        return self._text("reset", observation), _plain(info)

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        said = action.action if isinstance(action, Action) else action
        gym_action = said if self._parse is None else self._parse(said)
        observation, reward, terminated, truncated, info = self.env.step(gym_action)
        # Whether the reward is a finite number is for the rollout to say, which names the class that gave it.
        return self._text("step", observation), cast("float", reward), terminated, truncated, _plain(info)

    def close(self) -> None:
        self.env.close()

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "GymnasiumEnv":
        """{"env_id": a registered id, "kwargs": constructor arguments}, for environments that speak text.

        Others need `describe` and `parse`: derive a class whose `from_dict` passes them.
        """
        if unknown := sorted(info.keys() - {"task_id", "env_id", "kwargs"}):
            raise ConfigError(
                f"GymnasiumEnv does not know {unknown}; a task may hold `task_id`, `env_id` and `kwargs`."
            )
        if "env_id" not in info:
            raise ConfigError("A task for GymnasiumEnv needs `env_id`, the name that gymnasium.make knows.")
        import gymnasium  # heavy: only who plays a registered environment waits for it

        return GymnasiumEnv(gymnasium.make(info["env_id"], **info.get("kwargs", {})))

    def _text(self, method: str, observation: Any) -> str:
        text = observation if self._describe is None else self._describe(observation, self.env)
        if isinstance(text, str):
            return text
        source = type(self.env.unwrapped).__name__
        raise AgentError(
            f"{source}.{method} gave the observation {text!r} (a {type(text).__name__}), but agents read "
            "text; give GymnasiumEnv a `describe(observation, env)` that returns a str."
        )


def _plain(value: Any) -> Any:
    """NumPy values as Python ones: what a Gymnasium environment reports must survive JSON."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
