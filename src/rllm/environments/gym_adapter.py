"""Any Gymnasium environment as one of ours: observations become text, answers become its actions.

what the agent says ──► parse ──► gymnasium.Env.step ──► describe ──► what the agent reads
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rllm.environments.base import BaseEnv, Moved, moved, unpack_step
from rllm.errors import ActionError, AgentError, ConfigError
from rllm.types.episode import Action

if TYPE_CHECKING:
    import gymnasium


class GymnasiumEnv(BaseEnv):
    """Wraps `env`, which it owns from then on: `close` closes it.

    `describe(observation, env)` puts an observation into words; without it the observation itself must be
    text. `parse(action)` makes the Gymnasium action out of what the agent did; without it the action is
    passed on as it is. What `parse` raises is the policy's failure: it wrote what nobody can read.
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

    def step(self, action: Any) -> Moved:
        gym_action = self._parse_action(action.action if isinstance(action, Action) else action)
        try:
            result = self.env.step(gym_action)
        except Exception as error:
            # An error on a legal action is the environment's own fault, and no failure of the policy.
            if self.env.action_space.contains(gym_action):
                raise
            raise ActionError(
                f"{self._source} cannot act by {gym_action!r:.200}, which is not in its action space "
                f"{self.env.action_space}: {type(error).__name__}: {error}"
            ) from error
        observation, reward, terminated, truncated, info = result
        step_result = unpack_step(
            self, (self._text("step", observation), reward, terminated, truncated, _plain(info))
        )
        return moved(
            step_result.observation,
            step_result.reward,
            step_result.info,
            terminated=step_result.done and not step_result.truncated,
            truncated=step_result.truncated,
        )

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

    @property
    def _source(self) -> str:
        return type(self.env.unwrapped).__name__

    def _parse_action(self, action: Any) -> Any:
        if self._parse is None:
            return action
        try:
            return self._parse(action)
        except (AgentError, ConfigError):
            raise
        except Exception as error:
            raise ActionError(
                f"`parse` cannot read the answer {action!r:.200} as an action of {self._source}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _text(self, method: str, observation: Any) -> str:
        text = observation if self._describe is None else self._describe(observation, self.env)
        if isinstance(text, str):
            return text
        raise AgentError(
            f"{self._source}.{method} gave the observation {text!r} (a {type(text).__name__}), but agents "
            "read text; give GymnasiumEnv a `describe(observation, env)` that returns a str."
        )


def _plain(value: Any) -> Any:
    """NumPy values as Python ones: what a Gymnasium environment reports must survive JSON."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
