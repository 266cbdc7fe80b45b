import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rllm.agents.base import BaseAgent
from rllm.environments.base import BaseEnv
from rllm.types.episode import Action, Step, Trajectory


class EchoAgent(BaseAgent):
    """Shows the observation and acts by the whole answer. `trouble`: what to raise at "hook:call number"."""

    def __init__(self, trouble: dict[str, Exception] | None = None) -> None:
        self.trouble = trouble or {}
        self.reset()

    def reset(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._trajectory = Trajectory()
        self._calls: dict[str, int] = {}

    def _stumble(self, hook: str) -> None:
        self._calls[hook] = self._calls.get(hook, 0) + 1
        if (error := self.trouble.get(f"{hook}:{self._calls[hook]}")) is not None:
            raise error

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        self._stumble("messages")
        return self._messages

    @property
    def trajectory(self) -> Trajectory:
        return self._trajectory

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        self._stumble("env")
        if not done:
            self._messages.append({"role": "user", "content": str(observation)})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self._stumble("model")
        self._messages.append({"role": "assistant", "content": response})
        self._trajectory.steps.append(
            Step(chat_completions=list(self._messages), model_response=response, action=response)
        )
        self._stumble("model_after")
        return Action(response)


class World:
    """What all environments of one test have in common: what happened to them, and what is to go wrong."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: list[ScriptedEnv] = []
        self.release = threading.Event()
        """Environments that hang go on when it is set."""

    @property
    def num_open(self) -> int:
        with self.lock:
            return sum(env.num_closed == 0 for env in self.made)


class ScriptedEnv(BaseEnv):
    """Counts turns and pays 1 at the last. `trouble`: an exception or "hang" at "reset", "step:2"."""

    world: World

    def __init__(self, turns: int = 2, trouble: dict[str, Any] | None = None, name: str = "") -> None:
        self.turns, self.trouble, self.name = turns, trouble or {}, name
        self.turn = 0
        self.num_closed = 0
        self.threads: set[str] = set()
        self.actions: list[Any] = []
        with self.world.lock:
            self.world.made.append(self)
        self._meet("make")

    def _meet(self, place: str) -> None:
        self.threads.add(threading.current_thread().name)
        fate = self.trouble.get(place)
        if fate == "hang":
            self.world.release.wait()
        elif isinstance(fate, BaseException):
            raise fate

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._meet("reset")
        self.seed = seed
        return f"{self.name} turn 0", {}

    def step(self, action: Any) -> Any:
        self.turn += 1
        self.actions.append(action)
        self._meet(f"step:{self.turn}")
        answer = self.trouble.get(f"answer:{self.turn}")
        over = self.turn >= self.turns
        return answer or (f"{self.name} turn {self.turn}", float(over), over, {})

    def close(self) -> None:
        self.num_closed += 1
        self._meet("close")

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "ScriptedEnv":
        raise NotImplementedError


@pytest.fixture
def agent_class() -> type[BaseAgent]:
    return EchoAgent


@pytest.fixture
def world() -> Iterator[World]:
    """Lets go, at the end of the test, of every thread that still hangs."""
    world = World()
    yield world
    world.release.set()


@pytest.fixture
def env_class(world: World) -> type[BaseEnv]:
    """An environment class of this test's own world; a task's `trouble` says in which try what goes wrong."""

    class Env(ScriptedEnv):
        pass

    Env.world = world
    tries: dict[str, int] = {}

    def from_dict(info: dict[str, Any]) -> ScriptedEnv:
        name = str(info.get("task_id", ""))
        with world.lock:
            tries[name] = tries.get(name, 0) + 1
            number = tries[name]
        trouble = info.get("trouble", {})
        return Env(info.get("turns", 2), trouble.get(number, {}), name)

    Env.from_dict = staticmethod(from_dict)  # type: ignore[method-assign]
    return Env


@pytest.fixture
def settled() -> Callable[[Callable[[], bool]], Any]:
    """Let the loop and the threads run until a condition holds."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20.0):
            while not condition():
                await asyncio.sleep(0)

    return wait


@pytest.fixture
async def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the test's loop on by seconds; programs and environments have loops and threads of
    their own."""
    loop = asyncio.get_running_loop()
    real_time_s, added_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real_time_s() + added_s)

    def add(seconds: float) -> None:
        nonlocal added_s
        added_s += seconds
        loop.call_soon(lambda: None)  # what is due now is not waited for

    return add


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets go, at the end of the test, of every thread that still hangs."""
    event = threading.Event()
    yield event
    event.set()
