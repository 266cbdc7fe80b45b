"""`rllm grade`: a task and an answer in, what a grader says of it out.

NAME, TASK.json, ANSWER ──► the grader ──► score, is_correct, extracted, reason, metadata
"""

import inspect
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from rllm.cli.command import example, json_option, print_json
from rllm.cli.terminal import facts, out, print_next
from rllm.config.callables import made_from
from rllm.config.names import object_named
from rllm.errors import ConfigError, RewardError, RllmError
from rllm.rewards.grade import Grade, Grader
from rllm.rewards.graders import grader_named, option_names

ENTRY_POINTS = "rllm.graders"
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
    grader = load_grader(name, options_of(options))
    try:
        grade = _grade(grader, name, answer, task, task_path)
    finally:
        grader.close()
    if as_json:
        print_json({"grader": name, **asdict(grade)})
        return
    console = out()
    console.print(facts(_facts(grade)))
    print_next(console, [(["rllm", "doctor", "grader", name], "attack the grader itself")])


def _grade(grader: Grader, name: str, answer: str, task: dict[str, Any], task_path: str) -> Grade:
    """Raises RewardError for a grader of the user's that raises, or returns no Grade."""
    mend = f"mend {name}: it must return a Grade for any text (rllm.rewards.grade.right and wrong make one)."
    try:
        grade: object = grader.grade(answer, task)
    except RllmError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardError(
            f"The grader {name} failed on the task {task_path} with {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno} in {place.name}); {mend}"
        ) from error
    if not isinstance(grade, Grade):
        raise RewardError(
            f"The grader {name} returned {grade!r:.80} (a {type(grade).__name__}) for the task {task_path}; "
            f"{mend}"
        )
    return grade


def load_grader(name: str, options: dict[str, Any]) -> Grader:
    """A built-in grader, or one by file.py:Class or package.module:Class. Raises ConfigError."""
    if ":" not in name and not name.endswith(".py"):
        return grader_named(name, **options)
    grader = object_named(name, group=ENTRY_POINTS, what="grader")
    if inspect.isclass(grader) or (callable(grader) and not hasattr(grader, "grade")):
        for option in options:
            if option not in option_names(grader):
                raise ConfigError(f"The grader {name} has no option `{option}`.")
        grader = grader(**options) if options else made_from(grader) if inspect.isclass(grader) else grader()
    if not isinstance(grader, Grader):
        raise ConfigError(
            f"{name} is {grader!r:.80} (a {type(grader).__name__}), no grader; it needs `name`, "
            "`task_fields`, `grade(answer, task)` and `close()` (rllm.rewards.grade.Grader)."
        )
    return grader


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


def _facts(grade: Grade) -> list[tuple[str, str | Text]]:
    style = "green" if grade.is_correct else "red"
    extraction = "nothing" if grade.extracted is None else grade.extracted
    if len(extraction) > SHOWN_CHARS:
        extraction = f"{extraction[:SHOWN_CHARS]}… ({len(extraction)} characters)"
    return [
        ("score", Text(f"{grade.score:g}", style=style)),
        ("correct", "yes" if grade.is_correct else "no"),
        ("reason", grade.reason),
        ("taken for the answer", extraction),
        *((key, _as_text(value)) for key, value in grade.metadata.items()),
    ]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
