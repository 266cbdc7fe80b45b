"""A server of OpenEnv for tests: guess the seed's last digit, with faults by number."""

from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    digit: int


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._digit, self._fault = 0, ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, fault: str = "") -> Hint:
        self._digit, self._fault = (seed or 0) % 10, fault
        return Hint(hint=f"The last digit of {seed}?")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        if self._fault == "raise":
            raise KeyError("a bug of the environment")
        if self._fault == "unpaid":
            return Hint(hint="Over.", done=True)
        if action.digit == self._digit:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="Too high." if action.digit > self._digit else "Too low.")

    @property
    def state(self) -> State:
        return State()


def app(sessions: int) -> Any:
    return create_fastapi_app(GuessEnvironment, Guess, Hint, sessions)
