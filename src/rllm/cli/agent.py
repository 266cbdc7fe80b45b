"""`rllm agent`: who can act. The built-in agents, and those that installed packages bring."""

import importlib
import inspect
from importlib import metadata
from typing import Any

import click

from rllm.agents.base import BaseAgent
from rllm.agents.flow import ENTRY_POINTS, AgentFlow
from rllm.agents.named import AGENTS, agent_named
from rllm.build.actors import is_place
from rllm.cli.command import Group, example, json_option, print_json
from rllm.cli.terminal import facts, out, print_next, print_sentence, table
from rllm.config.names import object_named
from rllm.data.named_places import AGENT_PLACES
from rllm.errors import ConfigError
from rllm.workflows.workflow import Workflow

BUILT_IN = "built in"
AGENT = "agent: plays in an environment"
PROGRAM = "program: a function of a task and a configuration"
WORKFLOW = "workflow: the agents of one attempt, and the order in which they speak"


@click.group("agent", cls=Group)
def command() -> None:
    """List agents, say what one of them takes, and give your own names."""


@command.command("list", epilog=example("rllm agent list", "rllm agent list --json"))
@json_option
def list_agents(as_json: bool) -> None:
    """List the built-in agents, those of installed packages (entry points of the group `rllm.agents`), and
    those that were registered here."""
    rows = [*(_built_in(name) for name in AGENTS), *_of_packages(), *_registered()]
    if as_json:
        print_json({"agents": rows})
        return
    agents_table = table("name", "comes from", "what it does", prose=("what it does",))
    for row in rows:
        agents_table.add_row(row["name"], row["comes_from"], row["summary"])
    out().print(agents_table)
    print_next(
        out(),
        [
            (["rllm", "agent", "info", rows[0]["name"]], "what one of them takes"),
            (["rllm", "eval", "gsm8k", "--agent", "my_agent.py:MyAgent", "--model", "NAME"], "use your own"),
        ],
    )


@command.command("info", epilog=example("rllm agent info tool", "rllm agent info my_agent.py:MyAgent --json"))
@click.argument("name")
@json_option
def info(name: str, as_json: bool) -> None:
    """Say what an agent does, and which arguments it takes with their defaults.

    NAME is one of `rllm agent list`, package.module:NAME or file.py:NAME.
    """
    agent = agent_named(name) if name in AGENTS else agent_found(name)
    row = _description(name, agent)
    if as_json:
        print_json(row)
        return
    console = out()
    console.print(name, style="bold")
    console.print(
        facts(
            [
                ("kind", row["kind"]),
                ("defined in", row["defined_in"]),
                *((f"agent_args.{key}", value) for key, value in row["arguments"].items()),
            ]
        )
    )
    print_sentence(console, f"\n{row['description']}")


@command.command("register", epilog=example("rllm agent register mine my_agent.py:solve"))
@click.argument("name")
@click.argument("place", metavar="FILE.py:NAME")
@json_option
def register(name: str, place: str, as_json: bool) -> None:
    """Keep an agent or program of yours under a NAME, for --agent of other commands.

    It is loaded now, so that a wrong place is found now. A file is kept by its whole path.
    """
    if name in AGENTS or name in {each.name for each in metadata.entry_points(group=ENTRY_POINTS)}:
        raise ConfigError(f"`{name}` is an agent already; choose another name.")
    if not is_place(place):
        raise ConfigError(f"`{place}` says no place; write file.py:NAME or package.module:NAME.")
    _description(place, agent_found(place))
    kept = AGENT_PLACES.register(name, place)
    if as_json:
        print_json({"name": name, "place": kept})
        return
    print_sentence(out(), f"`{name}` is {kept}.")
    print_next(out(), [(["rllm", "agent", "info", name], "what it takes")])


@command.command("unregister", epilog=example("rllm agent unregister mine"))
@click.argument("name")
@json_option
def unregister(name: str, as_json: bool) -> None:
    """Forget a registered NAME; the file stays."""
    AGENT_PLACES.unregister(name)
    if as_json:
        print_json({"unregistered": name})
        return
    out().print(f"`{name}` is forgotten.")


def _registered() -> list[dict[str, Any]]:
    return [
        {"name": name, "comes_from": "registered", "summary": place}
        for name, place in sorted(AGENT_PLACES.all().items())
    ]


def _built_in(name: str) -> dict[str, Any]:
    agent = agent_named(name)
    return {"name": name, "comes_from": BUILT_IN, "summary": _first_paragraph(agent)}


def _of_packages() -> list[dict[str, Any]]:
    """Not imported: one that is broken must not hide the others."""
    rows: list[dict[str, Any]] = []
    for each in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        package = each.dist.name if each.dist else "?"
        rows.append({"name": each.name, "comes_from": package, "summary": each.value})
    return rows


def agent_found(name: str) -> Any:
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
