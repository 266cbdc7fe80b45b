"""The published browser environment: BrowserGym's own, by the `env_id` of a row."""

from typing import Any

from rllm.environments.web.browsergym import BrowserGymEnv, require_servers
from rllm.errors import ConfigError

_PREFIX = "browsergym/"


class BrowserTaskEnv(BrowserGymEnv):
    """`BrowserGymEnv(env_id="browsergym/miniwob.click-test")`; further arguments go to `gymnasium.make`.

    Raises ConfigError for an id whose benchmark, or whose servers, are not here.
    """

    def __init__(self, env_id: str, seed: int = 0, **kwargs: Any) -> None:
        name = env_id.removeprefix(_PREFIX)
        require_servers(name)
        super().__init__(name, seed, kwargs)

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "BrowserTaskEnv":
        """From a row with `env_id`; `task_id`, `uid` and `idx` only name it."""
        if "env_id" not in info:
            raise ConfigError(
                f"A row for BrowserGymEnv needs `env_id`, such as {_PREFIX}miniwob.click-test; it has "
                f"{', '.join(info) or 'nothing'}."
            )
        return BrowserTaskEnv(**{key: value for key, value in info.items() if key not in _ROW_NAMES})


_ROW_NAMES = frozenset(("task_id", "uid", "idx", "index", "data_source"))
