"""`rllm worker graph`: which worker calls which, as their contracts and workflows say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.text import Text
from rich.tree import Tree

from rllm.build.actors import actor_named
from rllm.build.workers import actor_of
from rllm.cli.command import example, json_option, print_json
from rllm.cli.terminal import out
from rllm.contracts.contract import Contract
from rllm.contracts.worker_file import read_contract
from rllm.errors import ConfigError

POLICY = "the policy"
MAX_DEPTH = 32


@click.command("graph", epilog=example("rllm worker graph", "rllm worker graph flow.py:MyWorkflow --json"))
@click.argument("names", metavar="[FILE|FOLDER|WORKFLOW]...", nargs=-1)
@json_option
def command(names: tuple[str, ...], as_json: bool) -> None:
    """Draw which worker calls which.

    Of worker.md files, those in a folder (the current one by default), or a workflow's class as file.py:NAME.
    """
    calls: dict[str, dict[str, Contract]] = {}
    contracts: dict[str, Contract] = {}
    for name in names or (".",):
        for caller, contract, callees in _callers(name):
            calls[caller] = callees
            if contract is not None:
                contracts[caller] = contract
    for callee in [each for callees in calls.values() for each in callees.values()]:
        _visit(callee, calls, contracts)
    if as_json:
        print_json({"workers": [_node(*each) for each in contracts.items()], "calls": _edges(calls)})
        return
    roots = _roots(calls)
    if not roots:
        out().print("There is no worker.md file here.")
    for name in roots:
        out().print(_tree(Tree(_label(name, name, contracts.get(name))), name, calls, (name,)))


def _callers(name: str) -> list[tuple[str, Contract | None, dict[str, Contract]]]:
    """Callers that a word of the command names: (id, contract, callees by name)."""
    path = Path(name)
    if path.is_dir():
        paths = sorted({*path.rglob("worker.md"), *path.rglob("*.worker.md")})
    elif path.suffix == ".md":
        paths = [path]
    else:
        actor = actor_named(name)
        if actor.workflow is None:
            raise ConfigError(
                f"`{name}` is no workflow, so it calls no worker; name a file, folder or class."
            )
        return [(actor.name, None, _called_by(actor))]
    contracts = [read_contract(each) for each in paths]
    return [(each.id, each, _callees(each)) for each in contracts]


def _callees(contract: Contract) -> dict[str, Contract]:
    if not contract.binding.workflow:
        return {}
    return _called_by(actor_of(contract.binding, beside=Path(contract.source).parent, what=contract.source))


def _called_by(actor: Any) -> dict[str, Contract]:
    from rllm.worker.steps import called_by

    return called_by(actor)


def _visit(contract: Contract, calls: dict[str, dict[str, Contract]], contracts: dict[str, Contract]) -> None:
    if contract.id not in contracts:
        contracts[contract.id] = contract
        calls[contract.id] = _callees(contract)
        for callee in calls[contract.id].values():
            _visit(callee, calls, contracts)


def _roots(calls: Mapping[str, Mapping[str, Contract]]) -> list[str]:
    """Callers whom nobody calls; of a circle that nobody else enters, its first."""
    callee_ids = {each.id for callees in calls.values() for each in callees.values()}
    roots: list[str] = []
    drawn_names: set[str] = set()
    for name in sorted(calls, key=lambda each: each in callee_ids):
        if name not in drawn_names:
            roots.append(name)
            open_names = [name]
            while open_names:
                caller = open_names.pop()
                if caller not in drawn_names:
                    drawn_names.add(caller)
                    open_names += [each.id for each in calls.get(caller, {}).values()]
    return roots


def _done_by(contract: Contract) -> str:
    binding = contract.binding
    if not binding.is_bound:
        return POLICY
    return ", ".join(filter(None, (binding.actor, binding.model)))


def _node(name: str, contract: Contract) -> dict[str, Any]:
    return {"id": name, "source": contract.source, "done_by": _done_by(contract)}


def _edges(calls: Mapping[str, Mapping[str, Contract]]) -> list[dict[str, Any]]:
    return [
        {
            "caller": caller,
            "name": name,
            "worker": contract.id,
            "policy": not contract.binding.is_bound,
            "timeout_seconds": contract.constraints.timeout_seconds,
            "max_attempts": contract.constraints.max_attempts,
        }
        for caller, callees in calls.items()
        for name, contract in callees.items()
    ]


def _label(name: str, title: str, contract: Contract | None) -> Text:
    text = Text(title, style="bold")
    if title != name:
        text.append(f" = {name}", style="")
    if contract is not None:
        limits = contract.constraints
        text.append(
            f"  {_done_by(contract)}, {limits.timeout_seconds:g} s, {limits.max_attempts} attempts", "dim"
        )
    return text


def _tree(
    tree: Tree, caller: str, calls: Mapping[str, Mapping[str, Contract]], path: tuple[str, ...]
) -> Tree:
    for title, contract in calls.get(caller, {}).items():
        branch = tree.add(_label(contract.id, title, contract))
        if contract.id in path:
            branch.add(Text("a circle: refused when it is run", style="red"))
        elif len(path) < MAX_DEPTH:
            _tree(branch, contract.id, calls, (*path, contract.id))
    return tree
