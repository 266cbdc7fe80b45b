"""The tables of `gateway.py`: what was measured in, what a reader sees beside the targets out."""

from typing import Any

from rich.console import Console
from rich.table import Table

MANY, MOST = 2_000, 16_000
"""Open requests."""
TRACES = 89_000
TIMES_FORWARDER = 3.0
CPU_MS, TIMES_MANY, TIMES_LITELLM, FIRST_MS, GIB = 1.5, 1.2, 20.0, 1.0, 1.0
"""The targets."""

Verdict = tuple[str, float, str, str, bool | None]
"""What, its figure, how that is written, the target, whether it is met: None where too little was asked."""


def show(measured: dict[str, Any]) -> None:
    console = Console(width=140)
    if "calls" in measured:
        console.print(_calls("as many calls as possible", measured["calls"]))
    if "paced" in measured:
        console.print(_calls("about 100 calls a second", measured["paced"]))
    if verdicts := _verdicts(measured):
        console.print(_targets(verdicts))
    console.print(
        f"{measured['cores']} cores; load {measured['load_before']:.1f} before and "
        f"{measured['load_after']:.1f} after; {measured['open_files']:,} open files allowed to a process."
    )


def _calls(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{title}: CPU ms of the process per call; ms of latency added to the upstream's")
    for name in (
        "answer",
        "at once",
        "upstream CPU",
        "forwarder CPU",
        "rLLM CPU",
        "LiteLLM CPU",
        "× less",
        "rLLM calls/s",
    ):
        table.add_column(name, justify="right")
    for name in ("upstream p50", "p99", "rLLM adds p50", "p99", "1st byte", "LiteLLM adds p50", "p99"):
        table.add_column(name, justify="right")
    for row in rows:
        bare, ours, theirs = row["bare"], row["rllm"], row.get("litellm")

        def added(who: dict[str, float] | None, key: str, bare: dict[str, float] = bare) -> str:
            return "–" if who is None else f"{who[key] - bare[key]:.1f}"

        table.add_row(
            "stream" if row["stream"] else "whole",
            str(row["at_once"]),
            f"{bare['cpu_ms']:.2f}",
            f"{row['forwarder']['cpu_ms']:.2f}",
            f"{ours['cpu_ms']:.2f}",
            "–" if theirs is None else f"{theirs['cpu_ms']:.1f}",
            "–" if theirs is None else f"{theirs['cpu_ms'] / ours['cpu_ms']:.1f}",
            f"{ours['calls_per_s']:.0f}",
            f"{bare['p50_ms']:.1f}",
            f"{bare['p99_ms']:.1f}",
            *(added(ours, key) for key in ("p50_ms", "p99_ms", "first_p50_ms")),
            *(added(theirs, key) for key in ("p50_ms", "p99_ms")),
        )
    return table


def _targets(verdicts: list[Verdict]) -> Table:
    table = Table(title="targets")
    for name in ("what", "measured", "target", "met"):
        table.add_column(name)
    for what, value, said, target, is_met in verdicts:
        table.add_row(what, said.format(value), target, {True: "yes", False: "NO", None: "–"}[is_met])
    return table


def _verdicts(measured: dict[str, Any]) -> list[Verdict]:
    found: list[Verdict] = []
    for row in measured.get("calls", ()):
        kind = "streamed" if row["stream"] else "whole"
        ours = row["rllm"]
        if row["at_once"] == 64:
            cpu = ours["cpu_ms"]
            found.append(
                (f"CPU of a captured call, {kind}, 64", cpu, "{:.2f} ms", f"≤ {CPU_MS} ms", cpu <= CPU_MS)
            )
            times = cpu / row["forwarder"]["cpu_ms"]
            turns = row["times_forwarder"]
            what = f"CPU beside the bare forwarder, {kind}, 64, medians of {len(turns)} turns"
            figure = f"{{:.2f}} × ({min(turns):.2f} to {max(turns):.2f})"
            target = f"≤ {TIMES_FORWARDER:.0f} ×"
            found.append((what, times, figure, target, times <= TIMES_FORWARDER))
        if theirs := row.get("litellm"):
            times = theirs["cpu_ms"] / ours["cpu_ms"]
            what = f"less CPU than LiteLLM, {kind}, {row['at_once']}"
            found.append((what, times, "{:.1f} ×", f"≥ {TIMES_LITELLM:.0f} ×", times >= TIMES_LITELLM))
        if row["stream"] and row["at_once"] == 1:
            first = ours["first_p50_ms"] - row["bare"]["first_p50_ms"]
            found.append(
                (
                    "first streamed byte after the upstream's",
                    first,
                    "{:.2f} ms",
                    f"≤ {FIRST_MS:.0f} ms",
                    first <= FIRST_MS,
                )
            )
    if "open" in measured:
        found += _open(measured["open"])
    if "memory" in measured:
        memory = measured["memory"]
        gib = memory["mib_at_89000"] / 1024
        how = f"extrapolated from {memory['traces']:,}" if memory["is_extrapolated"] else "measured"
        found.append(
            (f"memory at {TRACES:,} traces, {how}", gib, "{:.2f} GiB", f"≤ {GIB:.0f} GiB", gib <= GIB)
        )
    return found


def _open(measured: dict[str, Any]) -> list[Verdict]:
    few, many = (measured["many"][name]["cpu_ms"] for name in ("few", "many"))
    what = f"CPU of a call with {MANY:,} open, {many:.2f} ms, beside 64, {few:.2f} ms"
    found = [(what, many / few, "{:.2f} ×", f"≤ {TIMES_MANY} ×", many / few <= TIMES_MANY)]
    for row in measured["most"]:
        is_met = False if row["errors"] else row["at_once"] >= MOST or None
        what = f"{row['at_once']:,} open at once, {row['where']} ({row['rss_mib']:.0f} MiB)"
        found.append((what, row["errors"], "{} errors", f"0 of {MOST:,}", is_met))
    return found
