"""A grader by name: one answer graded, or the grader itself attacked.

NAME, task, answer ──► the grader ──► score, is_correct, extracted, reason, metadata
NAME ──► a sample task and its oracle ──► rllm.rewards.attacks ──► held, noted or broken
"""

import inspect
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rllm.errors import ConfigError, RewardError, RllmError
from rllm.rewards.attacks import AttackVerdict, Finding, attacks_on, examine, sample_named
from rllm.rewards.grade import Grade, Grader
from rllm.rewards.graders import grader_named, option_names
from rllm.rewards.tampering import examine_tests
from rllm.sandbox import BACKENDS, Root, open_sandbox
from rllm.types.callables import made_from
from rllm.types.names import object_named

ENTRY_POINTS = "rllm.graders"
_OTHER_USER = {"root": "a plain user", "a plain user": "root"}


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskInHand:
    """A task and the right answer to it."""

    task: dict[str, Any]
    oracle: str


@dataclass(kw_only=True, slots=True, frozen=True)
class AttackReport:
    """Findings of one grader, or of the tests of a task on each sandbox backend."""

    by_target: Mapping[str, Sequence[Finding]]
    not_run: Mapping[str, str]
    """Omitted target -> the reason."""
    user: str = ""
    """Whose rights the attacks had."""

    @property
    def is_sound(self) -> bool:
        verdicts = [each.verdict for findings in self.by_target.values() for each in findings]
        return AttackVerdict.BROKEN not in verdicts


def grade_answer(
    name: str, options: Mapping[str, Any], answer: str, task: dict[str, Any], task_path: str
) -> dict[str, Any]:
    """The grade as plain values. Raises RewardError for a grader that fails, naming `task_path`."""
    grader = load_grader(name, options)
    try:
        return asdict(_grade(grader, name, answer, task, task_path))
    finally:
        grader.close()


def attack_grader(
    name: str, options: Mapping[str, Any], in_hand: TaskInHand | None, *, limit_s: float
) -> AttackReport:
    """Attack a grader on `in_hand`, or on the sample task of its name."""
    if in_hand is not None:
        task, oracle, almost = in_hand.task, in_hand.oracle, ""
    else:
        sample = sample_named(name)
        task, oracle, almost = sample.task, sample.oracle, sample.almost
        options = {**sample.options, **options}
    grader = load_grader(name, options)
    try:
        attacks = attacks_on(task, oracle, almost=almost, is_code=grader.name == "code")
        return AttackReport(by_target={name: examine(grader, attacks, task, limit_s=limit_s)}, not_run={})
    finally:
        grader.close()


def attack_task_tests() -> AttackReport:
    """The tests of a task under attack, on each backend of this machine."""
    user = "root" if os.geteuid() == 0 else "a plain user"
    by_backend: dict[str, Sequence[Finding]] = {}
    not_run = {"the other user": f"this was run as {user}; run it as {_OTHER_USER[user]} as well"}
    for backend in BACKENDS:
        why = _why_not(backend)
        if why is None:
            by_backend[backend] = examine_tests(backend)
        else:
            not_run[backend] = why
    return AttackReport(by_target=by_backend, not_run=not_run, user=user)


def _why_not(backend: str) -> str | None:
    """The reason that a backend has no writable root here; None where it has."""
    try:
        open_sandbox(backend, root=Root()).close()
    except RllmError as error:
        return str(error)
    return None


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


def load_grader(name: str, options: Mapping[str, Any]) -> Grader:
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
