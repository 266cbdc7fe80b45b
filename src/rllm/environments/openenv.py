"""An environment behind an OpenEnv server: `openenv:URL`, such as `openenv:http://127.0.0.1:8000`.

    seed ──► reset ──WebSocket──► observation ──► text          the server's schema says what an action is:
    answer ──► its one field, or a JSON object ──► step ──────► observation, reward, done

Arguments follow a question mark: `openenv:http://127.0.0.1:8000?sessions=8&level=2`. `sessions`: episodes
that the server plays at a time (OpenEnv's own default is 1); `action` and `observation`: the field that an
answer fills, and the one that is shown; all others are given to each reset. Tasks are seeds, others in each
split.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from rllm.environments.base import BaseEnv, Moved, moved
from rllm.environments.world import World
from rllm.errors import ActionError, AgentError, ConfigError, MissingExtraError, SandboxError
from rllm.types.draws import draw_seed
from rllm.types.episode import Action
from rllm.types.names import name_arguments

SPLITS = ("train", "validation", "test")
_OPTIONS = ("action", "observation")
_KEYS = ("url", "seed", "reset", "schema", "task_id", *_OPTIONS)
_ANSWERING_S = 10.0
"""The time for a server to answer with its schema, before anything else is done."""
_MESSAGE_S = 600.0
"""The time of one message; the engine's own limit of a step is shorter."""
_FULL_WAIT_S = 0.2
"""Between two tries at a server whose sessions are all busy."""
_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n\s*```\s*", re.DOTALL)
_PYTHON = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


class OpenEnvEnv(BaseEnv):
    """One session of a server; the seed of its task is the one that each reset is given."""

    def __init__(
        self,
        url: str,
        schema: Mapping[str, Any],
        *,
        seed: int,
        reset: Mapping[str, Any] | None = None,
        action: str = "",
        observation: str = "",
    ) -> None:
        """`schema`: JSON schema of its actions."""
        self.url = url
        self._seed, self._reset = seed, dict(reset or {})
        self._fields = {name: each for name, each in schema["properties"].items() if name != "metadata"}
        self._action = action or _only_field(self._fields, schema.get("required", ()))
        self._observation = observation
        self._client: Any = None
        self._was_paid = False

    async def reset(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, seed: int | None = None
    ) -> tuple[str, dict[str, Any]]:
        await self.close()
        result = await self._admitted()
        self._was_paid = False
        return f"{self._text(result.observation)}{self._how}", {}

    async def step(self, action: Any) -> Moved:  # pyright: ignore[reportIncompatibleMethodOverride]
        payload = self._payload(action.action if isinstance(action, Action) else action)
        result = await self._ask(self._client.step(payload), payload)
        self._was_paid = self._was_paid or result.reward is not None
        # None is no reward yet; an episode that was never paid has none, which the engine refuses.
        reward: Any = 0.0 if result.reward is None and (self._was_paid or not result.done) else result.reward
        return moved(self._text(result.observation), reward, {}, terminated=bool(result.done))

    async def close(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "OpenEnvEnv":
        """A task of the world: `url`, `schema`, `seed`, and the options of the name."""
        if unknown := info.keys() - set(_KEYS):
            raise ConfigError(f"An OpenEnv task knows no {sorted(unknown)}; it has {', '.join(_KEYS)}.")
        options = {name: info[name] for name in ("reset", *_OPTIONS) if name in info}
        return OpenEnvEnv(info["url"], info["schema"], seed=info["seed"], **options)

    async def _admitted(self) -> Any:
        """The first observation, as soon as the server has a session for it."""
        try:
            from openenv.core.generic_client import GenericEnvClient
            from websockets.exceptions import ConnectionClosed
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "openenv", "openenv") from error
        while True:
            self._client = GenericEnvClient(
                base_url=self.url, message_timeout_s=_MESSAGE_S, mode="simulation"
            )
            try:
                return await self._client.reset(seed=self._seed, **self._reset)
            except (RuntimeError, ConnectionClosed) as error:
                # A full server says so and hangs up; which of the two is read first is chance.
                if isinstance(error, RuntimeError) and "(code: CAPACITY_REACHED)" not in str(error):
                    raise SandboxError(f"The OpenEnv server {self.url} cannot reset: {error}") from error
            except OSError as error:
                raise SandboxError(f"The OpenEnv server {self.url} is gone: {error}") from error
            await self.close()
            await asyncio.sleep(_FULL_WAIT_S)

    async def _ask(self, answer: Any, payload: dict[str, Any]) -> Any:
        from websockets.exceptions import ConnectionClosed

        try:
            return await answer
        except RuntimeError as error:
            if "(code: VALIDATION_ERROR)" in str(error):
                raise ActionError(f"The server takes no action {payload!r:.200}: {error!s:.500}") from error
            raise SandboxError(f"The OpenEnv server {self.url} failed: {error}") from error
        except (ConnectionClosed, OSError) as error:
            raise SandboxError(f"The OpenEnv server {self.url} is gone: {error!r}") from error

    def _payload(self, answer: Any) -> dict[str, Any]:
        """The action that an answer stands for. Raises ActionError for one that nobody can read."""
        if isinstance(answer, Mapping):
            return dict(answer)
        text = str(answer)
        kind = self._fields[self._action].get("type", "string") if self._action else "object"
        if kind == "string":
            return {self._action: text}
        fence = _FENCE.fullmatch(text)
        try:
            value = json.loads(fence[1] if fence else text)
        except ValueError as error:
            raise ActionError(f"{text!r:.200} is no JSON: {error}; {self._how.strip()}") from error
        if self._action:
            value = {self._action: value}
        if not isinstance(value, dict) or not all(
            isinstance(each, _PYTHON.get(self._fields.get(name, {}).get("type", ""), object))
            for name, each in value.items()
        ):
            raise ActionError(f"{text!r:.200} is no action; {self._how.strip()}")
        return value

    @property
    def _how(self) -> str:
        """The form of an answer that is not plain text."""
        if self._action:
            kind = self._fields[self._action].get("type", "string")
            return "" if kind == "string" else f"\n\nAnswer with {self._action} alone: {kind}."
        fields = {name: each.get("type", "any value") for name, each in self._fields.items()}
        return f"\n\nAnswer with a JSON object: {json.dumps(fields)}"

    def _text(self, observation: Any) -> str:
        if self._observation:
            if self._observation not in observation:
                raise AgentError(
                    f"{self.url} shows no field `{self._observation}`; it has {', '.join(observation)}."
                )
            observation = {self._observation: observation[self._observation]}
        values = list(observation.values()) if isinstance(observation, dict) else [observation]
        only = values[0] if len(values) == 1 else observation
        return only if isinstance(only, str) else json.dumps(only)


@lru_cache(maxsize=8)
def world_of(name: str) -> World:
    """The world of `openenv:URL`. Raises ConfigError where no OpenEnv server answers."""
    url, arguments = name_parts(name)
    schema = _schema(url)
    fields = {each for each in schema["properties"] if each != "metadata"}
    if arguments.get("action") not in (None, *fields):
        raise ConfigError(f"`{name}`: an action has {', '.join(sorted(fields))}; set `action` to one.")
    options = {key: str(arguments.pop(key)) for key in _OPTIONS if key in arguments}
    arguments.pop("sessions", None)
    return World(env_class=OpenEnvEnv, tasks=partial(_tasks, url, schema, options, arguments))


def sessions_of(name: str) -> int:
    """Episodes at a time, by the name."""
    value = name_parts(name)[1].get("sessions", 1)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"`{name}`: `sessions` is {value!r}; it must be a whole number, 1 or more.")
    return value


def name_parts(name: str) -> tuple[str, dict[str, Any]]:
    """(URL, arguments), a value being JSON, or else text. Raises ConfigError for one without a URL."""
    url, arguments = name_arguments(name.removeprefix("openenv:"))
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"`{name}` has no address; write openenv:http://HOST:PORT.")
    return url.rstrip("/"), arguments


def _tasks(
    url: str,
    schema: dict[str, Any],
    options: dict[str, str],
    arguments: dict[str, Any],
    split: str,
    count: int,
    *,
    start: int = 0,
) -> list[dict[str, Any]]:
    if split not in SPLITS:
        raise ConfigError(f"An OpenEnv server has no split `{split}`; there are {', '.join(SPLITS)}.")
    return [
        {
            "task_id": f"{split}-{number}",
            "url": url,
            "schema": schema,
            "reset": arguments,
            **options,
            # A third of all seeds for each split, so that none is in two.
            "seed": draw_seed(0, "openenv", number) % 2**29 * len(SPLITS) + SPLITS.index(split),
        }
        for number in range(start, start + count)
    ]


def _schema(url: str) -> dict[str, Any]:
    """JSON schema of the server's actions."""
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=_ANSWERING_S) as answer:
            schema = json.load(answer)["action"]
        _ = schema["properties"]
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"No OpenEnv server answers at {url}/schema ({error!r:.200}); start it, or correct the address."
        ) from error
    return schema


def _only_field(fields: Mapping[str, Any], required: Any) -> str:
    """The field that an answer fills by itself; empty where an action has several."""
    names = [name for name in required if name in fields] or list(fields)
    return names[0] if len(names) == 1 and fields[names[0]].get("type") in _PYTHON else ""
