r"""Answers graded per second, and what it costs to grade them where they can be killed.

    rows ──► threads ──► grader ──► workers or sandboxes     wall clock; CPU of this process and its children
    rows ──────────────► the same check, bare in this process, which a hostile answer would take down

    python benchmarks/graders.py [--quick] [--json] [--only math code]
    python benchmarks/graders.py --calibration [--json]
    python benchmarks/graders.py --pairs [--json]

`--calibration` counts, over 500 answers that somebody wrote who had not read a grader, the wrong ones that
are paid and the right ones that are not: of each kind, under each reading, and by math-verify beside.
`--pairs` counts the same over the pairs of tests/rewards/corpus/pairs.

Every row is another one, so no cache of an answer helps. `math, formulas` is what has to go to a worker with
sympy; `math, mixed` is the mixture of right answers of school and competition sets: three of four are plain
numbers, which are decided in this process. Checks per second on two free cores are computed from the CPU that
a check takes, because a neighbour on the machine slows the clock down; the clock's figure stands beside it.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rllm.errors import ConfigError
from rllm.rewards.extraction import Reading
from rllm.rewards.grade import Grader
from rllm.rewards.graders import grader_named

CORES, THREADS = 2, 4
TARGETS = {"math, formulas": 500.0, "math, mixed": 500.0, "code": 150.0}
"""Checks per second on two cores."""

Row = tuple[str, Mapping[str, Any], float]
"""An answer, its task, and the score that it must get."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Contest:
    """One line of the table."""

    name: str
    grader: str
    rows: Callable[[int], list[Row]]
    bare: Callable[[str, Mapping[str, Any]], float]
    """The same check without workers: an answer and its task to a score."""
    count: int


def plain_rows(count: int) -> list[Row]:
    """Decimals as data sets have them, answered as a fraction or as written; every third answer is wrong."""
    rows: list[Row] = []
    for number in range(count):
        is_wrong = number % 3 == 2
        twentieths = 20 * number + 2 * (number % 7) + 1
        gold = f"{number}.{number % 7}5"
        said = rf"\frac{{{twentieths + is_wrong}}}{{20}}" if number % 2 or is_wrong else gold
        rows.append((rf"So it is $\boxed{{{said}}}$.", {"answer": gold}, float(not is_wrong)))
    return rows


def formula_rows(count: int) -> list[Row]:
    """Formulas that only their meaning tells apart; every third answer is wrong."""
    rows: list[Row] = []
    for number in range(count):
        a, b = number + 2, number % 11 + 1
        is_wrong = number % 3 == 2
        gold, said = (
            (f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b + is_wrong})"),
            (rf"\frac{{\sqrt{{{a}}}}}{{{a}}}", rf"\frac{{1}}{{\sqrt{{{a + is_wrong}}}}}"),
            (rf"{a}\pi+{b}", rf"{b + is_wrong}+\pi\cdot {a}"),
            (rf"{a}\sin^2 x", rf"{a}-{a + is_wrong}\cos^2 x"),
        )[number % 4]
        rows.append((rf"\boxed{{{said}}}", {"answer": gold}, 0.0 if is_wrong else 1.0))
    return rows


def mixed_rows(count: int) -> list[Row]:
    rows = [row for number, row in enumerate(plain_rows(count)) if number % 4] + formula_rows(count // 4)
    random.Random(0).shuffle(rows)
    return rows


def code_rows(count: int) -> list[Row]:
    """One function, three calls; every third program is wrong."""
    rows: list[Row] = []
    for number in range(count):
        is_wrong = number % 3 == 2
        program = f"def add(a, b):\n    return a + b + {number} + {int(is_wrong)}\n"
        tests = [{"args": [a, 2], "expected": a + 2 + number} for a in range(3)]
        rows.append((f"```python\n{program}```", {"function": "add", "tests": tests}, float(not is_wrong)))
    return rows


def bare_math(answer: str, task: Mapping[str, Any]) -> float:
    from rllm.rewards.math_symbols import check

    return float(
        check(task["answer"], answer.rpartition(r"\boxed{")[2].rstrip("$.").removesuffix("}"))["same"]
    )


def bare_code(answer: str, task: Mapping[str, Any]) -> float:
    names: dict[str, Any] = {}
    exec(answer.removeprefix("```python\n").removesuffix("```"), names)
    return float(all(names[task["function"]](*test["args"]) == test["expected"] for test in task["tests"]))


BLIND = Path(__file__).parent.parent / "tests/rewards/corpus/blind/blind_answers.jsonl"
GRADER_OF_KIND = {"math": "math", "numeric": "math", "choice": "choice", "exact": "exact"}


def blind_rows() -> list[dict[str, Any]]:
    """The blind answers, each with the task that data sets make of its gold."""
    rows = [json.loads(line) for line in BLIND.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        gold = row["gold"]
        if row["kind"] == "numeric" and "####" in gold:
            gold = gold.rpartition("####")[2].strip().replace(",", "")
        row["task"] = {"question": row["question"], "answer": gold} | (
            {"choices": row["choices"]} if row.get("choices") else {}
        )
    return rows


def calibration() -> list[dict[str, Any]]:
    """Of each reader and kind: how many wrong answers it pays, and how many right ones it does not.

    Under the strict reading the right answers are those that such a reading should pay.
    """
    rows, counted = blind_rows(), []
    for reading in Reading:
        for kind, name in GRADER_OF_KIND.items():
            grader = grader_named(name, reading=reading)
            graded = [(row, grader.grade(row["answer"], row["task"])) for row in rows if row["kind"] == kind]
            verdicts = [(row, grade.is_correct) for row, grade in graded]
            counted.append(
                _errors(str(reading), kind, verdicts, "strict" if reading is Reading.STRICT else "right")
            )
    for kind in ("math", "numeric"):
        verdicts = [(row, _math_verify_pays(row)) for row in rows if row["kind"] == kind]
        counted.append(_errors("math-verify", kind, verdicts, "right"))
    return counted


PAIRS = BLIND.parent.parent / "pairs"


def pair_calibration() -> list[dict[str, Any]]:
    """Of each file and kind of the pairs, under the lenient reading, and by math-verify beside."""
    counted: list[dict[str, Any]] = []
    for path in sorted(PAIRS.glob("*.jsonl")):
        rows = [pair_row(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        for kind in dict.fromkeys(row["kind"] for row in rows):
            grader = grader_named(kind, **({"reading": "lenient"} if kind in ("math", "choice") else {}))
            of_kind = [row for row in rows if row["kind"] == kind]
            verdicts = [(row, grader.grade(row["answer"], row["task"]).is_correct) for row in of_kind]
            counted.append(_errors(path.stem, kind, verdicts, "label"))
        math_rows = [row for row in rows if row["kind"] == "math"]
        verdicts = [(row, _math_verify_pays(row)) for row in math_rows]
        counted.append(_errors(f"{path.stem}, math-verify", "math", verdicts, "label"))
    return counted


def pair_row(pair: dict[str, Any]) -> dict[str, Any]:
    """The pair with its task, and its label as `right`."""
    if pair["kind"] == "code":
        task = pair["gold"]
    elif pair["kind"] == "schema":
        task = {"schema": pair["gold"]}
    else:
        task = {"answer": pair["gold"]} | {
            name: pair[name] for name in ("question", "choices") if name in pair
        }
    return {**pair, "task": task, "right": pair["label"]}


def _errors(
    reader: str, kind: str, verdicts: Sequence[tuple[dict[str, Any], bool]], right: str
) -> dict[str, Any]:
    return {
        "reader": reader,
        "kind": kind,
        "wrong": sum(not row["right"] for row, _ in verdicts),
        "false_positives": sum(is_paid and not row["right"] for row, is_paid in verdicts),
        "right": sum(row[right] for row, _ in verdicts),
        "false_negatives": sum(row[right] and not is_paid for row, is_paid in verdicts),
    }


def _math_verify_pays(row: Mapping[str, Any]) -> bool:
    from math_verify import parse, verify

    gold = row["task"]["answer"]
    is_marked = "$" in gold.replace(r"\$", "") or r"\boxed" in gold
    return bool(verify(parse(gold if is_marked else f"${gold}$"), parse(row["answer"])))


def show_calibration(counted: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="answers that were labelled before a grader saw them")
    for name in ("reader", "kind", "wrong ones paid", "right ones unpaid"):
        table.add_column(name, justify="left" if name in ("reader", "kind") else "right")
    for reader in dict.fromkeys(each["reader"] for each in counted):
        lines = [each for each in counted if each["reader"] == reader]
        names = ("wrong", "false_positives", "right", "false_negatives")
        total = {
            "reader": reader,
            "kind": "all",
            **{name: sum(each[name] for each in lines) for name in names},
        }
        for each in (*lines, total):
            share = each["false_negatives"] / each["right"]
            table.add_row(
                each["reader"],
                each["kind"],
                f"{each['false_positives']} of {each['wrong']}",
                f"{each['false_negatives']} of {each['right']} ({share:.1%})",
            )
    Console(width=100).print(table)


CONTESTS = (
    Contest(name="math, plain", grader="math", rows=plain_rows, bare=bare_math, count=4_000),
    Contest(name="math, formulas", grader="math", rows=formula_rows, bare=bare_math, count=800),
    Contest(name="math, mixed", grader="math", rows=mixed_rows, bare=bare_math, count=2_000),
    Contest(name="code", grader="code", rows=code_rows, bare=bare_code, count=400),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, one round")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--calibration", action="store_true", help="right and wrong verdicts instead of speed"
    )
    parser.add_argument("--only", nargs="+", default=[], help="names of graders")
    parser.add_argument("--pairs", action="store_true", help="the same of the pairs")
    arguments = parser.parse_args()
    if arguments.calibration or arguments.pairs:
        counted = pair_calibration() if arguments.pairs else calibration()
        print(json.dumps(counted, indent=2)) if arguments.json else show_calibration(counted)
        return
    measured: list[dict[str, Any]] = []
    for contest in CONTESTS:
        if arguments.only and contest.grader not in arguments.only:
            continue
        try:
            grader = grader_named(contest.grader)
        except ConfigError as error:
            measured.append({"name": contest.name, "skipped": str(error)})
            continue
        count = contest.count // 10 if arguments.quick else contest.count
        rounds = [measure(contest, grader, count) for _ in range(1 if arguments.quick else 3)]
        measured.append({"name": contest.name, **median_of(rounds)})
        grader.close()
    load = os.getloadavg()[0]
    print(json.dumps({"load": load, "graders": measured}, indent=2)) if arguments.json else show(
        measured, load
    )


def measure(contest: Contest, grader: Grader, count: int) -> dict[str, float]:
    """Seconds per check: through the grader from several threads and from one, and bare."""
    rows = contest.rows(count)
    with ThreadPoolExecutor(THREADS) as threads:
        graded(contest, grader, rows[: count // 4], threads.map)  # warm: workers are up and have read once
        many = timed(lambda: graded(contest, grader, rows, threads.map))
    alone = timed(lambda: graded(contest, grader, rows[: count // 2], map))
    for answer, task, _ in rows[: count // 4]:
        contest.bare(answer, task)
    bare = timed(lambda: [contest.bare(answer, task) for answer, task, _ in rows[: count // 2]])
    return {
        "checks_per_s": count / many["wall_s"],
        "cpu_ms": 1e3 * many["cpu_s"] / count,
        "alone_ms": 1e3 * alone["wall_s"] / (count // 2),
        "alone_cpu_ms": 1e3 * alone["cpu_s"] / (count // 2),
        "bare_ms": 1e3 * bare["cpu_s"] / (count // 2),
    }


def graded(contest: Contest, grader: Grader, rows: Sequence[Row], over: Callable[..., Any]) -> None:
    """Every row; a score that is not the right one ends the benchmark."""
    for row, grade in zip(rows, over(lambda row: grader.grade(row[0], row[1]), rows), strict=True):
        if grade.score != row[2]:
            raise SystemExit(f"{contest.name}: {row[0]!r} to {row[1]} got {grade}, not {row[2]}")


def timed(work: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), cpu_s()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_s() - cpu}


def cpu_s() -> float:
    """Of this process and of all that came of it, those that live and those that were waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _living_children_s()


def _living_children_s() -> float:
    """Linux only; elsewhere what workers compute is not seen, and the clock's figure is the one to read."""
    ticks = 0
    todo = [os.getpid()]
    while todo:
        process = todo.pop()
        for thread in Path(f"/proc/{process}/task").glob("*"):
            try:
                children = [int(child) for child in (thread / "children").read_text().split()]
            except OSError:
                continue  # it ended while we looked
            todo += children
            for child in children:
                try:
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    middle = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return middle | {
        "two_cores_per_s": CORES * 1e3 / middle["cpu_ms"] if middle["cpu_ms"] else 0.0,
        "overhead_ms": middle["alone_cpu_ms"] - middle["bare_ms"],
    }


def show(measured: list[dict[str, Any]], load: float) -> None:
    table = Table(title=f"graders: warm, {THREADS} threads, {CORES} workers; load {load:.1f}")
    for name in ("grader", "checks/s by the clock", "CPU ms a check", "checks/s on two free cores", "target"):
        table.add_column(name, justify="left" if name == "grader" else "right")
    for name in ("one at a time, ms", "CPU ms", "bare, ms", "overhead, ms"):
        table.add_column(name, justify="right")
    for row in measured:
        if "skipped" in row:
            table.add_row(row["name"], row["skipped"])
            continue
        target = TARGETS.get(row["name"])
        table.add_row(
            row["name"],
            f"{row['checks_per_s']:,.0f}",
            f"{row['cpu_ms']:.2f}",
            f"{row['two_cores_per_s']:,.0f}",
            ""
            if target is None
            else f"{target:.0f}, {'met' if row['two_cores_per_s'] >= target else 'MISSED'}",
            f"{row['alone_ms']:.2f}",
            f"{row['alone_cpu_ms']:.2f}",
            f"{row['bare_ms']:.2f}",
            f"{row['overhead_ms']:.2f}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
