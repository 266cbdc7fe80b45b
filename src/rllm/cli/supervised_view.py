"""The view of a run that learns from rows: what it measured before and after, and how far it has got."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from rllm.cli.command import print_json
from rllm.cli.terminal import FittingTable, facts, out, table
from rllm.store.run_directory import RunDirectory
from rllm.tracking.console import readable_seconds
from rllm.trainer.machine import machines_of
from rllm.view.run_facts import RunFacts


def show_supervised(directory: RunDirectory, run_facts: RunFacts, state: Text, as_json: bool) -> None:
    """Print such a run for `rllm runs show`."""
    config, summary = directory.config(), directory.summary()
    if as_json:
        machines = directory.machines()
        print_json({**run_facts.to_dict(), "machines": machines, "summary": summary, "config": config})
        return
    console = out()
    console.print(Text.assemble((str(directory.path), "bold"), "  ", state), soft_wrap=True)
    data = config.get("data", {})
    rows: list[tuple[str, str | Text]] = [
        ("kind", f"rllm {run_facts.kind}"),
        ("data", str(data.get("dataset") or data.get("run") or "from Python")),
        ("model", f"{config['model']['path']} on {config['model']['device']}"),
        ("training", f"{run_facts.steps:,} of {run_facts.total_steps:,} updates"),
        ("seed", str(run_facts.seed)),
    ]
    if summary is not None:
        rows.append(("work", readable_seconds(summary["wall_s"])))
    console.print(facts([*rows, *machine_rows(directory)]))
    if run_facts.reports:
        console.print(f"\nBefore and after{measured_on(summary or {})}", style="bold")
        console.print(reports_table(run_facts.reports, config))


def machine_rows(directory: RunDirectory) -> list[tuple[str, str]]:
    """A row for each machine, or choice of kernels, that the run was computed with."""
    return [("machine", each.line()) for each in machines_of(directory)]


def measured_on(summary: Mapping[str, Any]) -> str:
    return f", on {summary['measured_on']}" if "measured_on" in summary else ""


def reports_table(reports: Mapping[str, Any], config: Mapping[str, Any]) -> FittingTable:
    """A table of the measurements before and, where the run has got so far, after.

    `kl` estimates a divergence where the reference wrote the answers, so not for answers from a file.
    """
    from_file = not config.get("data", {}).get("run")
    names = [name for name, value in reports["before"].items() if isinstance(value, int | float)]
    losses = table(
        "", *(name.replace("_", " ") for name in names), right=[each.replace("_", " ") for each in names]
    )
    for label in ("before", "after"):
        if label in reports:
            losses.add_row(
                label,
                *(
                    "–" if name == "kl" and from_file else _number(name, reports[label][name])
                    for name in names
                ),
            )
    return losses


def _number(name: str, value: float) -> str:
    share = name.endswith(("accuracy", "frac", "success"))
    return f"{value:.1%}" if share else f"{value:,.4f}"
