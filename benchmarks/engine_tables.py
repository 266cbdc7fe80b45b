"""The tables of `engine.py`: what was measured in, what a reader sees beside the targets out."""

from typing import Any

from rich.console import Console
from rich.table import Table

CPU_US = {"in_process": 100.0, "http": 600.0}
FLAT, LAG_MS, KB_PER_LIVE, MEDIANS = 1.3, 50.0, 50.0, 1.3
"""The targets: most at the largest size beside the smallest; …; batch with a slow episode, in medians."""
TITLES = {"in_process": "a model in the same process", "http": "a model server over HTTP"}

Verdict = tuple[str, str, str, bool]
"""What, its figure, the target, whether it is met."""


def show(measured: dict[str, Any]) -> None:
    console = Console(width=150)
    verdicts: list[Verdict] = []
    for part, title in TITLES.items():
        if part in measured:
            console.print(_sizes(title, measured[part]))
            verdicts += _verdicts(part, measured[part])
    if "tail" in measured:
        console.print(_tail(measured["tail"]))
        medians = measured["tail"]["oversampled"]["medians"]
        what = "a batch of 64 with one episode 50 times slower, oversampled"
        verdicts.append((what, f"{medians:.2f} medians", f"≤ {MEDIANS}", medians <= MEDIANS))
    table = Table(title="targets")
    for name in ("what", "measured", "target", "met"):
        table.add_column(name)
    for what, figure, target, is_met in verdicts:
        table.add_row(what, figure, target, "yes" if is_met else "NO")
    console.print(table)
    console.print(
        f"{measured['cores']} cores; load {measured['load_before']:.1f} before and "
        f"{measured['load_after']:.1f} after. Lag is told twice: by the clock | by what the loop's own "
        "thread computed meanwhile."
    )


def engine_us(row: dict[str, Any]) -> float:
    """CPU of a turn that is neither the agent's, the environment's nor the model's."""
    return row["fast"]["engine"]["cpu_us_per_turn"] - row["fast"]["bare"]["cpu_us_per_turn"]


def _sizes(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{title}: five-step trajectories; CPU µs of the whole process per turn")
    for name in ("at once", "rLLM traj/s", "CPU µs", "bare loop", "engine's", "verifiers traj/s", "CPU µs"):
        table.add_column(name, justify="right")
    for name in ("× less", "kB a live one", "verifiers'", "constant time: CPU µs", "lag p50", "lag p99 ms"):
        table.add_column(name, justify="right")
    for row in rows:
        fast, constant = row["fast"], row["constant"]["engine"]
        ours, peer = fast["engine"], fast.get("peer")
        table.add_row(
            f"{row['at_once']:,}",
            f"{ours['trajectories_per_s']:,.0f}",
            f"{ours['cpu_us_per_turn']:.0f}",
            f"{fast['bare']['cpu_us_per_turn']:.0f}",
            f"{engine_us(row):.0f}",
            "–" if peer is None else f"{peer['trajectories_per_s']:,.0f}",
            "–" if peer is None else f"{peer['cpu_us_per_turn']:,.0f}",
            "–" if peer is None else f"{peer['cpu_us_per_turn'] / ours['cpu_us_per_turn']:.1f}",
            f"{constant['kb_per_live']:.0f}",
            "–" if peer is None else f"{peer['kb_per_live']:.0f}",
            f"{constant['cpu_us_per_turn']:.0f}",
            f"{constant['lag_p50_ms']:.1f}",
            f"{constant['lag_p99_ms']:.0f} | {constant['lag_computed_p99_ms']:.0f}",
        )
    return table


def _tail(tail: dict[str, Any]) -> Table:
    table = Table(title="a batch of 64, 16 tasks × 4 attempts")
    for name in ("", "batch s", "in medians of an episode", "cancelled"):
        table.add_column(name, justify="right")
    for name, words in (
        ("even", "all alike"),
        ("plain", "one 50 times slower"),
        ("oversampled", "… and 1.25 times as many started"),
    ):
        row = tail[name]
        table.add_row(words, f"{row['batch_s']:.2f}", f"{row['medians']:.2f}", f"{row['cancelled']:.0f}")
    return table


def _verdicts(part: str, rows: list[dict[str, Any]]) -> list[Verdict]:
    found: list[Verdict] = []
    where, limit = TITLES[part], CPU_US[part]
    for row in rows:
        # In process the engine's own share is meant; over HTTP the whole turn, client included.
        cpu = engine_us(row) if part == "in_process" else row["fast"]["engine"]["cpu_us_per_turn"]
        what = f"CPU of a turn, {where}, {row['at_once']:,} at once"
        found.append((what, f"{cpu:.0f} µs", f"≤ {limit:.0f} µs", cpu <= limit))
        constant = row["constant"]["engine"]
        lag = constant["lag_p99_ms"]
        found.append(
            (f"loop lag p99, {row['at_once']:,}", f"{lag:.0f} ms", f"≤ {LAG_MS:.0f} ms", lag <= LAG_MS)
        )
    (few, most), kb = (rows[0], rows[-1]), rows[-1]["constant"]["engine"]["kb_per_live"]
    times = most["fast"]["engine"]["cpu_us_per_turn"] / few["fast"]["engine"]["cpu_us_per_turn"]
    what = f"CPU of a turn at {most['at_once']:,} beside {few['at_once']:,}"
    found.append((what, f"{times:.2f} ×", f"≤ {FLAT} ×", times <= FLAT))
    what = f"memory of a live trajectory, {most['at_once']:,}, without its tokens"
    found.append((what, f"{kb:.0f} kB", f"≤ {KB_PER_LIVE:.0f} kB", kb <= KB_PER_LIVE))
    return found
