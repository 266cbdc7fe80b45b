"""`rllm agent`: who can act. The built-in agents, harnesses, and those that installed packages bring."""

import click

from rllm.build.agent_places import agent_description, agent_rows, register_agent, unregister_agent
from rllm.cli.command import Group, example, json_option, print_json
from rllm.cli.terminal import facts, out, print_next, print_sentence, table


@click.group("agent", cls=Group)
def command() -> None:
    """List agents, say what one of them takes, and give your own names."""


@command.command("list", epilog=example("rllm agent list", "rllm agent list --json"))
@json_option
def list_agents(as_json: bool) -> None:
    """List the built-in agents, the harnesses that ship, those of installed packages (entry points of the
    group `rllm.agents`), and those that were registered here."""
    rows = agent_rows()
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

    NAME is one of `rllm agent list`, package.module:NAME, file.py:NAME or harness:FILE.toml.
    """
    row = agent_description(name)
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
                *(("installs", package) for package in row.get("installs", ())),
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
    registered_place = register_agent(name, place)
    if as_json:
        print_json({"name": name, "place": registered_place})
        return
    print_sentence(out(), f"`{name}` is {registered_place}.")
    print_next(out(), [(["rllm", "agent", "info", name], "what it takes")])


@command.command("unregister", epilog=example("rllm agent unregister mine"))
@click.argument("name")
@json_option
def unregister(name: str, as_json: bool) -> None:
    """Forget a registered NAME; the file stays."""
    unregister_agent(name)
    if as_json:
        print_json({"unregistered": name})
        return
    out().print(f"`{name}` is forgotten.")
