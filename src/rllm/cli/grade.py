"""`rllm grade`: a task and an answer in, what a grader says of it out.

NAME, TASK.json, ANSWER ──► the grader ──► score, is_correct, extracted, reason, metadata
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from rllm.build.graders import grade_answer
from rllm.cli.command import example, json_option, print_json
from rllm.cli.terminal import facts, out, print_next
from rllm.errors import ConfigError

STDIN = "-"
SHOWN_CHARS = 2_000
"""The length of the extracted answer."""

options_option = click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the grader, such as score=share: JSON, or else text. Repeatable.",
)


@click.command(
    "grade",
    epilog=example(
        'rllm grade math --task task.json --answer answer.txt           task.json: {"answer": "42"}',
        "rllm grade code --task row.json --answer - --json < answer     a row of HumanEval, MBPP, APPS, …",
        "rllm grade code --task row.json --answer a.py --option score=share --option timeout_s=5",
        "rllm grade my_file.py:MyGrader --task task.json --answer a.txt",
    ),
)
@click.argument("name")
@click.option("--task", "task_path", required=True, metavar="FILE", help="The task: one JSON object.")
@click.option(
    "--answer", "answer_path", required=True, metavar="FILE", help="What a model wrote; - is stdin."
)
@options_option
@json_option
def command(name: str, task_path: str, answer_path: str, options: Sequence[str], as_json: bool) -> None:
    """Grade one answer, and say why.

    NAME is a built-in grader, or file.py:Class for one of your own. Whatever the score is, the exit code is
    0; 1 says that the grader itself failed, or that the task cannot be graded.
    """
    task, answer = read_task(task_path), read_text(answer_path)
    grade = grade_answer(name, options_of(options), answer, task, task_path)
    if as_json:
        print_json({"grader": name, **grade})
        return
    console = out()
    console.print(facts(_facts(grade)))
    print_next(console, [(["rllm", "doctor", "grader", name], "attack the grader itself")])


def options_of(assignments: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words as options. Raises ConfigError for a word without =."""
    options: dict[str, Any] = {}
    for word in assignments:
        key, separator, value = word.partition("=")
        if not separator or not key:
            raise ConfigError(f"`--option {word}` has no value; write --option key=value.")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def read_task(path: str) -> dict[str, Any]:
    """Raises ConfigError for a file that is no JSON object."""
    try:
        task = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The task {path} is no JSON: {error}. A task is one JSON object.") from error
    if not isinstance(task, dict):
        raise ConfigError(f"The task {path} holds {task!r:.80}; it must be one JSON object.")
    return task


def read_text(path: str) -> str:
    """The file, or stdin for -, whatever its bytes are. Raises ConfigError where it cannot be read."""
    if path == STDIN:
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    try:
        return Path(path).read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _facts(grade: Mapping[str, Any]) -> list[tuple[str, str | Text]]:
    style = "green" if grade["is_correct"] else "red"
    extraction = "nothing" if grade["extracted"] is None else grade["extracted"]
    if len(extraction) > SHOWN_CHARS:
        extraction = f"{extraction[:SHOWN_CHARS]}… ({len(extraction)} characters)"
    return [
        ("score", Text(f"{grade['score']:g}", style=style)),
        ("correct", "yes" if grade["is_correct"] else "no"),
        ("reason", grade["reason"]),
        ("taken for the answer", extraction),
        *((key, _as_text(value)) for key, value in grade["metadata"].items()),
    ]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
