"""Tables as a notebook shows them."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """HTML of an open table. Every cell is text, whatever stands in it."""

    def row(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(each, "td") for each in rows)
    head = f"<p>{escape(title)}</p>" if title else ""
    return f"{head}<table>{row(columns, 'th')}{body}</table>"


def percent(value: float | None, interval: Sequence[float] | None = None) -> str:
    """`93.4 % [90.1, 95.8]`, of rates between 0 and 1."""
    if value is None:
        return "–"
    return f"{value:.1%}" + (f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else "")
