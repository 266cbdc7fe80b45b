"""All agents: built-in ones, harnesses, those of installed packages, and those that were registered here."""

import importlib
import inspect
from importlib import metadata
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.agents.flow import ENTRY_POINTS, AgentFlow
from rllm.agents.named import AGENTS, agent_named
from rllm.build.actors import is_place
from rllm.environments.harness.spec import PREFIX, harness_named, shipped_names
from rllm.errors import ConfigError
from rllm.files.named_places import AGENT_PLACES
from rllm.types.names import object_named
from rllm.workflows.workflow import Workflow

BUILT_IN = "built in"
HARNESS = "harness: a command-line agent in the sandbox of its task"
AGENT = "agent: plays in an environment"
PROGRAM = "program: a function of a task and a configuration"
WORKFLOW = "workflow: the agents of one attempt, and the order in which they speak"


def agent_rows() -> list[dict[str, Any]]:
    """`name`, `comes_from` and `summary` of each."""
    return [*(_built_in(name) for name in AGENTS), *_harnesses(), *_of_packages(), *_registered()]


def agent_description(name: str) -> dict[str, Any]:
    """`kind`, `defined_in`, `arguments` and `description` of the agent, program, workflow or harness of that
    name; of a harness also what it `installs`."""
    if name.startswith(PREFIX):
        return _harness_description(name)
    return _description(name, agent_named(name) if name in AGENTS else agent_object_named(name))


def register_agent(name: str, place: str) -> str:
    """Keep `place`, file.py:NAME, under a name, for --agent; the place as it is kept.

    It is loaded now, so that a wrong place is found now.
    """
    if name in AGENTS or name in {each.name for each in metadata.entry_points(group=ENTRY_POINTS)}:
        raise ConfigError(f"`{name}` is an agent already; choose another name.")
    if not is_place(place):
        raise ConfigError(f"`{place}` says no place; write file.py:NAME or package.module:NAME.")
    _description(place, agent_object_named(place))
    return AGENT_PLACES.register(name, place)


def unregister_agent(name: str) -> None:
    AGENT_PLACES.unregister(name)


def _registered() -> list[dict[str, Any]]:
    return [
        {"name": name, "comes_from": "registered", "summary": place}
        for name, place in sorted(AGENT_PLACES.all().items())
    ]


def _built_in(name: str) -> dict[str, Any]:
    agent = agent_named(name)
    return {"name": name, "comes_from": BUILT_IN, "summary": _first_paragraph(agent)}


def _harnesses() -> list[dict[str, Any]]:
    return [
        {"name": f"{PREFIX}{name}", "comes_from": "harness", "summary": harness_named(name).about}
        for name in shipped_names()
    ]


def _harness_description(name: str) -> dict[str, Any]:
    where = name.removeprefix(PREFIX)
    spec = harness_named(where)
    return {
        "name": name,
        "kind": HARNESS,
        "defined_in": where if where.endswith(".toml") else f"rllm.environments.harness.shipped:{where}.toml",
        "arguments": {},
        "installs": [*spec.pip, *spec.build, *spec.npm, *spec.copy],
        "description": spec.about,
    }


def _of_packages() -> list[dict[str, Any]]:
    """Not imported: one that is broken must not hide the others."""
    rows: list[dict[str, Any]] = []
    for each in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        package = each.dist.name if each.dist else "?"
        rows.append({"name": each.name, "comes_from": package, "summary": each.value})
    return rows


def agent_object_named(name: str) -> Any:
    """Raises ConfigError with the nearest name among all that there are."""
    name = AGENT_PLACES.place_of(name)
    installed_names = {each.name for each in metadata.entry_points(group=ENTRY_POINTS)}
    if ":" not in name and not name.endswith(".py") and name not in installed_names:
        return agent_named(name)
    return object_named(name, group=ENTRY_POINTS, what="agent")


def _description(name: str, agent: Any) -> dict[str, Any]:
    is_agent = inspect.isclass(agent) and issubclass(agent, BaseAgent)
    if not is_agent and not callable(agent):
        raise ConfigError(
            f"`{name}` is {agent!r:.80}; an agent is a class derived from BaseAgent, or a function."
        )
    is_workflow = inspect.isclass(agent) and issubclass(agent, Workflow)
    what = agent.function if isinstance(agent, AgentFlow) else agent
    return {
        "name": name,
        "kind": AGENT if is_agent else WORKFLOW if is_workflow else PROGRAM,
        "defined_in": name
        if is_place(name)
        else f"{what.__module__}:{getattr(what, '__qualname__', type(what).__name__)}",
        "arguments": _arguments(agent) if is_agent else {},
        "description": inspect.getdoc(what) or "",
    }


def _arguments(agent: Any) -> dict[str, str]:
    """Name -> default as it is written, or `(needed)`."""
    parameters = inspect.signature(agent).parameters.values()
    return {
        each.name: "(needed)" if each.default is inspect.Parameter.empty else repr(each.default)
        for each in parameters
        if each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }


def _first_paragraph(agent: type[BaseAgent]) -> str:
    own = agent.__doc__ or importlib.import_module(agent.__module__).__doc__ or ""
    return " ".join(own.strip().partition("\n\n")[0].split())
