"""Any program as an agent: it gets a task and the address of a model, and talks to the model as it likes.

    @rllm.rollout                                  # or @rllm.rollout(name="solver"); sync or async
    def solve(task: Task, config: AgentConfig) -> Episode | Trajectory | None:
        client = OpenAI(base_url=config.base_url, api_key="EMPTY")
        client.chat.completions.create(model=config.model, messages=[...])

None: the episode is made from the calls that the gateway captured, one Step each. A program that returns its
own Steps says which call each of them is by the completion's id: `Step(id=response.id, ...)`.
"""

import inspect
from collections.abc import Callable
from typing import Any, SupportsIndex, overload

from rllm.agents.named import published_agent_successor
from rllm.errors import AgentError, ConfigError
from rllm.files.named_places import AGENT_PLACES
from rllm.types.call_budget import CallBudget
from rllm.types.callables import is_async, made_from, name_of, reduced, require_call
from rllm.types.episode import Episode, Trajectory
from rllm.types.names import object_named

ENTRY_POINTS = "rllm.agents"
_WANTED = "write it as `def solve(task: Task, config: AgentConfig)`"


class AgentFlow:
    """A program under a name. Called, it is the function that it was made from."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str = "",
        *,
        max_concurrent: int | None = None,
        prepare: Callable[[], object] | None = None,
        timeout_s: float = 600.0,
        budget: CallBudget | None = None,
    ) -> None:
        self.function = function
        self.name = name or name_of(function)
        self.max_concurrent = max_concurrent
        """At most so many run at the same time; None leaves it to the engine."""
        self.timeout_s = timeout_s
        """Seconds that one run may take, where nobody else says."""
        self.budget = budget or CallBudget()
        """The budget of the model calls of one run."""
        self.prepare = prepare
        """Called in a thread before the first task, to set up what all of them share; it may take long."""
        self.is_async = is_async(function)
        self.__doc__ = inspect.getdoc(function)
        self.__module__ = getattr(function, "__module__", __name__)
        require_call(function, self.name, ("task", "config"), "program", _WANTED)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def run(self, task: Any, config: Any) -> Any:
        """The result of the function: an Episode, a Trajectory or None; something to await if it is async."""
        return self.function(task, config)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return reduced(self, self.function, protocol)

    def __repr__(self) -> str:
        return f"AgentFlow({self.name!r})"


@overload
def rollout(function: Callable[..., Any]) -> AgentFlow: ...
@overload
def rollout(*, name: str = "", register: str = "") -> Callable[[Callable[..., Any]], AgentFlow]: ...
def rollout(
    function: Callable[..., Any] | None = None, *, name: str = "", register: str = ""
) -> AgentFlow | Callable[[Callable[..., Any]], AgentFlow]:
    """Make an agent of a function, sync or async. `name` is the role of its trajectories.

    `register`: keeps the place of the function under that name, as `rllm agent register` does.
    """

    def decorate(function: Callable[..., Any]) -> AgentFlow:
        if register:
            AGENT_PLACES.register_function(register, function)
        return AgentFlow(function, name)

    return decorate if function is None else decorate(function)


def as_flow(program: Any) -> AgentFlow:
    """The program: an AgentFlow, a function, a name, or an object or class with `run` or `arun`."""
    if isinstance(program, AgentFlow):
        return program
    if isinstance(program, str):
        return load_flow(program)
    if inspect.isclass(program):
        program = made_from(program)
    if getattr(program, "needs_env", False):
        raise ConfigError(
            f"{name_of(program)} wants to be given a sandbox (`needs_env`), which programs are not: what "
            "works in one is a command-line agent, `harness:FILE.toml` (docs/harnesses.md)."
        )
    entry = next((entry for each in ("arun", "run") if callable(entry := getattr(program, each, None))), None)
    if entry is None and not callable(program):
        raise ConfigError(
            f"{program!r:.200} (a {type(program).__name__}) is no program; {_WANTED}, or give an object "
            "with a method `run(task, config)` or `arun(task, config)`."
        )
    name = getattr(program, "name", "")
    return AgentFlow(
        entry or program,
        name if isinstance(name, str) and name else name_of(program),
        max_concurrent=getattr(program, "max_concurrent", None),
    )


def load_flow(name: str) -> AgentFlow:
    """The program of a name: a registered one, an entry point, `package.module:name` or `file.py:name`."""
    return as_flow(agent_object(name, "program"))


def agent_object(name: str, what: str) -> Any:
    """The object of a name, a registered one, an entry point or a place; `what` is it called in errors."""
    try:
        return object_named(AGENT_PLACES.place_of(name), group=ENTRY_POINTS, what=what)
    except ConfigError as error:
        successor = published_agent_successor(name)
        if not successor:
            raise
        raise ConfigError(f"There is no {what} `{name}`; {successor}") from error


def require_result(flow: AgentFlow, value: Any) -> Episode | Trajectory | None:
    """The result of the program. Raises AgentError for what it must not return."""
    if value is None or isinstance(value, Episode | Trajectory):
        return value
    raise AgentError(
        f"{flow.name} returned {value!r:.200} (a {type(value).__name__}); a program returns an Episode, "
        "a Trajectory, or None, for which the episode is made from the captured calls."
    )
