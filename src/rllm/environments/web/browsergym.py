"""BrowserGym's own environments by their ids: `browsergym/miniwob.click-test`, and what else is installed.

    text such as click("12") ──► BrowserGym, in one thread for the whole process ──► goal, tree, error as text

BrowserGym pins its own Playwright, so it is installed in an environment of its own. That Playwright belongs
to one thread, in which all environments take turns. Benchmarks whose sites are servers are refused where the
variables that name these are not set.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

from rllm.environments.base import BaseEnv, Moved
from rllm.environments.gym_adapter import GymnasiumEnv
from rllm.environments.world import World
from rllm.errors import ConfigError

SERVERS = {
    "assistantbench": (),
    "miniwob": (),
    "visualwebarena": ("VWA_CLASSIFIEDS", "VWA_SHOPPING", "VWA_REDDIT", "VWA_WIKIPEDIA", "VWA_HOMEPAGE"),
    "webarena": (
        *("WA_SHOPPING", "WA_SHOPPING_ADMIN", "WA_REDDIT", "WA_GITLAB", "WA_WIKIPEDIA", "WA_MAP"),
        "WA_HOMEPAGE",
    ),
    "workarena": ("SNOW_INSTANCE_URL", "SNOW_INSTANCE_UNAME", "SNOW_INSTANCE_PWD"),
}
"""Benchmark -> the variables that name the servers of its sites."""
SPLITS = {"train": 0, "validation": 1, "test": 2}
"""Split -> the remainder of its seeds modulo the number of splits."""


class BrowserGymEnv(BaseEnv):
    """One environment of BrowserGym with a seed. `kwargs` are for `gymnasium.make`."""

    def __init__(self, name: str, seed: int, kwargs: dict[str, Any] | None = None) -> None:
        require_servers(name)
        self.name = name
        self.seed = seed
        self._kwargs = kwargs or {}
        self._env: GymnasiumEnv | None = None

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return _in_thread(self._reset)

    def step(self, action: Any) -> Moved:
        env = self._env
        assert env is not None, "an episode was begun"
        return _in_thread(lambda: env.step(action))

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            _in_thread(env.close)

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "BrowserGymEnv":
        """A task made by `browsergym_tasks`."""
        return BrowserGymEnv(info["name"], info["seed"], info.get("kwargs"))

    def _reset(self) -> tuple[Any, dict[str, Any]]:
        if self._env is None:
            self._env = GymnasiumEnv(_make(self.name, self._kwargs), describe=_describe)
        observation, _ = self._env.reset(seed=self.seed)
        return observation, {}


def require_servers(name: str) -> None:
    """Raises ConfigError for a benchmark that there is not, and one whose servers nobody has named."""
    family = name.partition(".")[0]
    if family not in SERVERS:
        raise ConfigError(f"BrowserGym has no `{name}`; its ids begin with {', '.join(SERVERS)}.")
    if missing := [each for each in SERVERS[family] if not os.environ.get(each)]:
        raise ConfigError(
            f"`browsergym/{name}` is played on servers of its own, which nothing here starts: set "
            f"{', '.join(missing)} to where they are. `web-shop`, `web-forum`, `web-code` and `web-office` "
            "ask the like of sites that ship with rllm."
        )


def _in_thread(work: Callable[[], Any]) -> Any:
    return _thread().submit(work).result()


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="browsergym")


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    family = name.partition(".")[0]
    try:
        import gymnasium

        importlib.import_module(f"browsergym.{family}")  # registers its ids
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`browsergym/{name}` needs `{error.name}`, in an environment of its own, because it pins "
            f"another Playwright: pip install browsergym-{family}"
        ) from error
    pages = importlib.util.find_spec("miniwob")
    if family == "miniwob" and pages is not None and pages.submodule_search_locations:
        folder = Path(pages.submodule_search_locations[0]) / "html" / "miniwob"
        os.environ.setdefault("MINIWOB_URL", f"{folder.as_uri()}/")
    if f"browsergym/{name}" not in gymnasium.registry:
        raise ConfigError(f"BrowserGym has no `{name}`.")
    return gymnasium.make(f"browsergym/{name}", disable_env_checker=True, **kwargs)


def _describe(observation: Any, env: Any) -> str:
    tree = importlib.import_module("browsergym.utils.obs").flatten_axtree_to_str(observation["axtree_object"])
    error = observation["last_action_error"]
    lines = [f"Goal: {observation['goal']}", *([f"Error: {error}"] if error else []), tree]
    return "\n".join(lines)


def browsergym_tasks(
    name: str, split: str, count: int, *, start: int = 0, **arguments: Any
) -> list[dict[str, Any]]:
    """`count` tasks from `start` on, each with another seed."""
    if split not in SPLITS:
        raise ConfigError(f"There is no split `{split}`; there are {', '.join(SPLITS)}.")
    seeds = [index * len(SPLITS) + SPLITS[split] for index in range(start, start + count)]
    return [
        {"task_id": f"browsergym/{name}/{seed}", "name": name, "seed": seed, "kwargs": arguments}
        for seed in seeds
    ]


def world_of(name: str) -> World:
    """The world of `browsergym/NAME`."""
    require_servers(name)
    return World(env_class=BrowserGymEnv, tasks=partial(browsergym_tasks, name))
