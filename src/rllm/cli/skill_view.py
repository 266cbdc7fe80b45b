"""A run's summary in words: its tasks and what was learned; `train` and `runs show` print it.

summary ──► print_success: what it is of, a table, baselines, skill, warnings, kinds
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from rllm.cli.terminal import print_sentence, success_table, table
from rllm.eval.skill import Measure, SkillVerdict
from rllm.eval.task_facts import MIN_DISTINCT
from rllm.eval.words import baselines_sentence, compared_sentence, endings_text, instances_sentence
from rllm.tracking.alarms import AlarmEvent

_STYLES = {
    SkillVerdict.GAINED: "bold green",
    SkillVerdict.NO_DIFFERENCE: "bold yellow",
    SkillVerdict.LOST: "bold red",
}
_SENTENCES = {
    SkillVerdict.GAINED: "Skill was gained.",
    SkillVerdict.NO_DIFFERENCE: "No difference is seen: the interval covers 0.",
    SkillVerdict.LOST: "It does worse than that.",
}


def heading(tasks: Mapping[str, Any]) -> str:
    """The heading of the numbers. `tasks`: that part of a summary."""
    distinct = f"{tasks['distinct']} distinct"
    if round(tasks["effective_size"]) < tasks["distinct"]:
        distinct += f", effective size {tasks['effective_size']:.0f}"
    return f"Success on {tasks['reported']} {tasks['title']} ({distinct}), with 95 % intervals"


def print_success(
    console: Console, reports: Mapping[str, Any], summary: Mapping[str, Any], labels: Mapping[str, str]
) -> None:
    """Success in each of `reports`, and what was gained where the run is finished. A summary that an earlier
    version wrote has no more than its reports."""
    has_tasks = "tasks" in summary
    console.print(
        f"\n{heading(summary['tasks']) if has_tasks else 'Success, with 95 % intervals'}", style="bold"
    )
    console.print(success_table({label: reports.get(name) for name, label in labels.items()}))
    for line in _endings(reports, labels):
        print_sentence(console, Text(line, style="dim"))
    if steps := summary.get("ended_early_after"):
        console.print(f"Ended early, after {steps} steps: evaluations between showed no gain any more.")
    if has_tasks:
        print_skill(console, summary, labels["before"])


def _endings(reports: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """The ways in which the episodes of each report ended; nothing of reports of an earlier version."""
    lines: list[str] = []
    for name, label in labels.items():
        ways = {way: (reports.get(name) or {}).get(f"{way}_report", {}) for way in ("sampled", "greedy")}
        parts = [
            f"{way} {endings_text(each['endings'])}" for way, each in ways.items() if each.get("endings")
        ]
        if parts:
            lines.append(f"{label} ended: {'; '.join(parts)}.")
    return lines


def print_skill(console: Console, summary: Mapping[str, Any], start: str) -> None:
    """Print the gain over what needs no skill. `start`: the name of the model before reinforcement."""
    if baselines := summary["baselines"]:
        print_sentence(console, Text(baselines_sentence(baselines)))
    if skill := summary["skill"]:
        print_sentence(console, _skill(skill, start))
    if line := compared_sentence(summary["tasks"]):
        print_sentence(console, Text(line, style="dim"))
    for line in warnings(summary, start):
        print_sentence(console, Text(line, style="yellow"))
    if len(summary["kinds"]) > 1:
        console.print(_kinds(summary, start))


def print_alarms(console: Console, alarms: Sequence[AlarmEvent]) -> None:
    """Print the critical alarms of a run."""
    if alarms:
        console.print("\nAlarms", style="bold red")
    for alarm in alarms:
        print_sentence(console, Text(str(alarm), style="red"))


def warnings(summary: Mapping[str, Any], start: str) -> list[str]:
    """Facts that a reader would otherwise overlook."""
    tasks, lines = summary["tasks"], list[str]()
    if tasks["trained_on"] == tasks["reported"]:
        lines.append(
            "All of these tasks are trained on, so this says nothing of tasks that the model has not met; "
            "give tasks that are held out."
        )
    elif tasks["trained_on"]:
        lines.append(
            f"{tasks['trained_on']} of the {tasks['reported']} tasks are trained on and count here as well; "
            "take them out of either."
        )
    if tasks["distinct"] < MIN_DISTINCT:
        lines.append(instances_sentence(tasks))
    is_success = summary["skill"].get("measure") == Measure.SUCCESS
    lines += [
        f"{each['kind']} became worse than {start}: {_value(each['before'], is_success)} → "
        f"{_value(each['after'], is_success)}, {_change(each, is_success)}."
        for each in summary["kinds"]
        if each["verdict"] == SkillVerdict.LOST and each["kind"]
    ]
    return lines


def _skill(skill: Mapping[str, Any], start: str) -> Text:
    is_success, verdict = skill["measure"] == Measure.SUCCESS, SkillVerdict(skill["verdict"])
    reference = skill["references"][skill["reference"]]
    return Text.assemble(
        "Skill ",
        (_change(skill, is_success), _STYLES[verdict]),
        (
            f": trained, sampled, over {_name(skill['reference'], start)} "
            f"({_value(reference['value'], is_success)}), the best of those without this training. "
            f"{_SENTENCES[verdict]}",
            "dim",
        ),
    )


def _kinds(summary: Mapping[str, Any], start: str) -> Any:
    rows = table("kind", "tasks", f"{start}, sampled", "trained, sampled", "difference", right=("tasks",))
    is_success = summary["skill"].get("measure") == Measure.SUCCESS
    for each in summary["kinds"]:
        rows.add_row(
            Text(each["kind"]),
            str(each["tasks"]),
            _value(each["before"], is_success),
            _value(each["after"], is_success),
            Text(
                _change(each, is_success), style=_STYLES[SkillVerdict(each["verdict"])].removeprefix("bold ")
            ),
        )
    return rows


def _name(reference: str, start: str) -> str:
    return reference.replace("before", start, 1) if reference.startswith("before,") else f"`{reference}`"


def _value(value: float, is_success: bool) -> str:
    return f"{value:.1%}" if is_success else f"{value:.3g}"


def _change(skill: Mapping[str, Any], is_success: bool) -> str:
    (low, high), difference = skill["interval"], skill["difference"]
    if is_success:
        return f"{100 * difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{difference:+.3g} of return [{low:+.3g}, {high:+.3g}]"
