"""`rllm cluster`: what nodes a running cluster has, and whether a run may work on all of them."""

from dataclasses import asdict

import click
from rich.text import Text

from rllm.cli.command import Group, example, json_option, print_json
from rllm.cli.terminal import facts, out, print_sentence, table
from rllm.config.cluster import ClusterConfig
from rllm.errors import ClusterError
from rllm.trainer.cluster import ClusterReport, cluster_named

RAY = "ray"
ADDRESS = click.option(
    "--address",
    default="auto",
    show_default=True,
    metavar="HOST:PORT",
    help="The cluster, as `cluster.address`; `auto` is the one that this machine is a node of.",
)


@click.group("cluster", cls=Group)
def command() -> None:
    """Show the nodes of a Ray cluster, and whether they fit together."""


@command.command("status", epilog=example("rllm cluster status --address 10.0.0.1:6379 --json"))
@ADDRESS
@json_option
def status(address: str, as_json: bool) -> None:
    """List the nodes that are alive, with what they have."""
    _print(_report(address, 0), as_json)


@command.command("check", epilog=example("rllm cluster check --address 10.0.0.1:6379 --broadcast-mb 256"))
@ADDRESS
@click.option(
    "--broadcast-mb",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Megabytes to send to every node at once, as the weights of a run are.",
)
@json_option
def check(address: str, broadcast_mb: int, as_json: bool) -> None:
    """Ask every node for its versions, its clock and this directory, and send a block of bytes to all.

    The exit code is 1 where a run would be refused.
    """
    report = _report(address, broadcast_mb)
    _print(report, as_json)
    if report.problems:
        raise ClusterError(f"{len(report.problems)} of what was looked at does not fit; see above.")


def _report(address: str, broadcast_mb: int) -> ClusterReport:
    return cluster_named(RAY).report(ClusterConfig(kind=RAY, address=address), broadcast_mb=broadcast_mb)


def _print(report: ClusterReport, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report))
        return
    console = out()
    numbers = ("CPUs", "GPUs", "memory GB", "object store MB", "clock off by s", "fetch s")
    nodes = table("node", "host", *numbers, "this directory", right=numbers)
    for each in report.nodes:
        nodes.add_row(
            each.address,
            each.host,
            f"{each.cpus:g}",
            f"{each.gpus:g}",
            f"{each.memory_gb:.1f}",
            f"{each.object_store_mb:.0f}",
            _number(each.clock_skew_s),
            _number(each.fetch_s),
            "–" if each.sees_directory is None else "readable" if each.sees_directory else "not readable",
        )
    console.print(nodes)
    console.print(facts((name, version) for name, version in report.versions.items() if version))
    if report.broadcast_mb_per_s is not None:
        console.print(
            f"Broadcast: {report.broadcast_mb:g} MB to {len(report.nodes)} nodes at "
            f"{report.broadcast_mb_per_s:,.0f} MB/s over all."
        )
    for problem in report.problems:
        print_sentence(console, Text(problem, style="red"))
    for remark in report.remarks:
        print_sentence(console, Text(remark, style="dim"))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
