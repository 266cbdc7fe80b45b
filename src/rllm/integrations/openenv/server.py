"""An environment of rLLM as an OpenEnv server: its sessions are played by OpenEnv's own client, and by ours.

{"seed": 7, "split": "test"} ──► task 7 of that split ──► reset ──► {"text": …}
{"answer": …} ──► step ──► {"text": …}, reward, done
"""
# pyright: reportMissingImports=false

import asyncio
import inspect
import json
import socket
import threading
from functools import partial
from typing import Any

from rllm.environments.base import BaseEnv, call_reset, unpack_reset, unpack_step
from rllm.environments.world import World
from rllm.errors import ActionError, MissingExtraError

try:
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import ValidationError
    from pydantic_core import PydanticCustomError
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "openenv", "openenv") from error

MAX_SEED = 1_000_000
"""Tasks that a split is asked for; a larger seed begins again."""


class TextAction(Action):
    """The action: what the agent does, as its environment reads it."""

    answer: str


class TextObservation(Observation):
    """The observation as text; messages are JSON."""

    text: str


class ServedEnvironment(Environment[TextAction, TextObservation, State]):
    """One session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, world: World, arguments: dict[str, Any]) -> None:
        super().__init__()
        self._world, self._arguments = world, arguments
        self._env: BaseEnv | None = None
        self._state = State()

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, split: str = "", **kwargs: Any
    ) -> TextObservation:
        """`seed` is the number of the task in `split`, and of what its environment draws."""
        number = (seed or 0) % MAX_SEED
        # Forgotten first: where the next one cannot be made, no episode is left that could be stepped.
        env, self._env = self._env, None
        if env is not None:
            await _result(env.close)
        arguments = {**self._arguments, **({"split": split} if split else {})}
        draw = partial(self._world.tasks, count=1, start=number, **arguments)
        (task,) = await asyncio.to_thread(draw)
        self._env = env = await asyncio.to_thread(self._world.env_class.from_dict, task)
        observation, _ = unpack_reset(env, await _result(call_reset, env, number))
        self._state = State(episode_id=episode_id, step_count=0)
        return TextObservation(text=_text(observation))

    async def step_async(
        self, action: TextAction, timeout_s: float | None = None, **kwargs: Any
    ) -> TextObservation:
        env = self._env
        if env is None:
            raise RuntimeError("There is no episode; call reset first.")
        try:
            step = unpack_step(env, await _result(env.step, action.answer))
        except ActionError as error:  # as for any other action that the schema refuses
            problem = PydanticCustomError("action", "{words}", {"words": str(error)})
            raise ValidationError.from_exception_data(
                "TextAction", [{"type": problem, "loc": ("answer",), "input": action.answer}]
            ) from error
        self._state.step_count += 1
        return TextObservation(text=_text(step.observation), reward=step.reward, done=step.done)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TextObservation:
        return asyncio.run(self.reset_async(seed, episode_id, **kwargs))

    def step(self, action: TextAction, timeout_s: float | None = None, **kwargs: Any) -> TextObservation:
        return asyncio.run(self.step_async(action, timeout_s))

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        env, self._env = self._env, None
        if env is None:
            return
        closing = threading.Thread(target=lambda: asyncio.run(_result(env.close)))
        closing.start()  # a loop of its own: OpenEnv calls this in its loop, and outside of it
        closing.join()


def environment_app(world: World, arguments: dict[str, Any], sessions: int) -> Any:
    """The ASGI application. `arguments`: of the world's tasks, with the `split` of a reset that names none;
    `sessions`: episodes that are played at a time."""
    return create_fastapi_app(
        lambda: ServedEnvironment(world, arguments), TextAction, TextObservation, sessions
    )


def serve(app: Any, listener: socket.socket) -> None:
    """Answer on a socket that listens, until a signal comes."""
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


async def _result(function: Any, *args: Any) -> Any:
    """The result of a method of an environment: async ones here, others in a thread, where they may block."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await asyncio.to_thread(function, *args)
    return await result if inspect.isawaitable(result) else result


def _text(observation: Any) -> str:
    return observation if isinstance(observation, str) else json.dumps(observation, default=str)
