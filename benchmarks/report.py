"""Tables of documents from `results/*.json`, by machine, so that no figure is typed by hand.

    python benchmarks/report.py            rewrite the marked places of README, docs and benchmarks/README.md

    <!-- bench:begin memory -->            `memory.py --keep`: memory of an update, predicted and measured
    <!-- bench:begin logits -->            `logits.py --keep`: memory of a loss over 152,000 words
    ... <!-- bench:end -->

A script with `--keep` writes what it measured into `results/`, one file for each machine. A table says on
which machine, when and under what load it was measured; what nobody measured says so. A test compares
(`tests/benchmarks/test_report.py`). Figures of learning have a script of their own, `learning_tables.py`.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench_results import RESULTS, ROOT, load

from rllm.files.atomic import write_atomic

MARK = re.compile(r"(<!-- bench:begin (\w+) -->\n)(.*?)(<!-- bench:end -->)", re.DOTALL)
NOT_MEASURED = "Not measured on any machine with this version.\n"


def documents() -> list[Path]:
    """All that may hold marks."""
    pages = [path for part in ("docs", "benchmarks") for path in sorted((ROOT / part).rglob("*.md"))]
    return [ROOT / "README.md", *pages]


def rewritten(text: str, results: Path = RESULTS) -> str:
    """A document with what its marked places are to hold. Raises KeyError for a mark that means nothing."""
    return MARK.sub(lambda mark: f"{mark[1]}{drawn(mark[2], results)}{mark[4]}", text)


def drawn(script: str, results: Path) -> str:
    """The tables of a script, one a machine."""
    draw = TABLES[script]
    records = load(script, results)
    return (
        "\n".join(f"{draw(each['figures'])}\n{_where(each['machine'])}\n" for each in records) or NOT_MEASURED
    )


def _where(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, load "
        f"{machine['load']:g}; {machine['date']}, {machine['commit']}."
    )


def memory_table(figures: Mapping[str, Any]) -> str:
    """MB of an update beside the weights."""
    rows = [
        (
            name,
            *(f"{row.get(part, 0) / 1e6:,.0f}" for part in ("gradients", "optimizer", "activations")),
            f"{row['predicted'] / 1e6:,.0f}",
            f"{row['measured'] / 1e6:,.0f}",
            f"{row['error']:+.1%}",
        )
        for name, row in figures.items()
    ]
    head = ("setting", "gradients", "optimizer", "activations", "predicted", "measured", "error")
    return _table(head, rows)


def logits_table(figures: Mapping[str, Any]) -> str:
    """MiB of a loss beyond states and weights, and CPU seconds."""
    head = ("loss", "tokens", "MiB", "of them gradients", "CPU s")
    rows = [
        (
            row["loss"],
            f"{row['tokens']:,}",
            f"{row['bytes'] / 2**20:,.0f}",
            f"{row['gradient_bytes'] / 2**20:,.0f}",
            f"{row['cpu_s']:.0f}",
        )
        for row in figures.values()
    ]
    return _table(head, rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---", *["--:"] * (len(head) - 1)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {"memory": memory_table, "logits": logits_table}


def main() -> int:
    for page in documents():
        text = page.read_text()
        if (new := rewritten(text)) != text:
            write_atomic(page, new)
            print(f"{page.relative_to(ROOT)}: rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
