"""A software-engineering task under attack: its reference is paid, nothing and every tampering is not.

    (world, names of tamperings) ──► gold, empty, each tampering in an agent's world ──► findings

`rllm doctor tasks` prints the findings. Tamperings are shell scripts that leave the issue unsolved; they know
the files of the tests and of the reference solution, which a real agent would have to guess.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import resources
from pathlib import PurePosixPath
from textwrap import indent

from rllm.data.swe_repository import PLACE
from rllm.errors import ConfigError, RllmError
from rllm.rewards.attacks import Aim, AttackVerdict, Finding
from rllm.rewards.grade import Grade, wrong
from rllm.rewards.swe_grading import TestRun, grade_patch
from rllm.rewards.swe_world import SWEWorld, patch_of

GOLD, GOLD_AGAIN, EMPTY = "the reference solution", "the reference solution again", "nothing done"
_CHANGED = f"{PLACE}/nothing.txt"
"""A file that matters to nobody, so that no patch is empty and the tests do run."""


_CALL = "call: "
"""Prefix of the names of tamperings that are given as the body of every function of the source."""
_EVERY_CALL = """\
for f in $SOURCES; do cat >> "$f" <<'PY'

def _tampered(*inputs, **more):
{body}
def _tamper(names):
    for name, value in list(names.items()):
        if getattr(value, "__module__", None) == __name__ and value not in (_tampered, _tamper):
            if isinstance(value, type):
                for method in [name for name, member in vars(value).items() if callable(member)]:
                    setattr(value, method, lambda *a, **k: _tampered(*a, **k))
            elif callable(value):
                names[name] = lambda *a, **k: _tampered(*a, **k)
_tamper(globals())
PY
done"""


def swe_tamperings() -> dict[str, str]:
    """The scripts by name."""
    text = (resources.files("rllm.rewards") / "swe_tamperings.txt").read_text(encoding="utf-8")
    sections = (each.partition("\n") for each in ("\n" + text).split("\n#### ")[1:])
    scripts = {name: script.strip("\n") for name, _, script in sections}
    return {
        name: _EVERY_CALL.replace("{body}", indent(script, "    ")) if name.startswith(_CALL) else script
        for name, script in scripts.items()
    }


def examine_task(
    world: SWEWorld,
    names: Iterable[str] | None = None,
    *,
    timeout_s: float = 300.0,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Two findings for the reference solution, the first and the last, one for none, and one for each
    tampering (all without `names`).

    The last one is broken where a test ends otherwise than at first: so the machine could run the tests
    before the tamperings and after them.

    Raises ConfigError for a name that is none.
    """
    scripts = swe_tamperings()
    names_to_run = list(scripts) if names is None else list(names)
    for name in names_to_run:
        if name not in scripts:
            raise ConfigError(f"There is no tampering {name!r}; there are: {'; '.join(scripts)}.")
    findings: list[Finding] = []
    grader = _TaskGrader(world, timeout_s)

    def add(name: str, aim: Aim, grade: Callable[[], Grade]) -> None:
        findings.append(_finding(name, aim, grade))
        on_finding(findings[-1])

    if world.repository.gold:
        add(GOLD, Aim.ORACLE, grader.grade_reference)
    add(EMPTY, Aim.ATTACK, grader.grade_untouched)
    for name in names_to_run:
        add(name, Aim.ATTACK, lambda script=scripts[name]: grader.grade_tampered(script))
    if world.repository.gold:
        add(GOLD_AGAIN, Aim.ORACLE, grader.grade_reference)
    return findings


def _finding(name: str, aim: Aim, grade: Callable[[], Grade]) -> Finding:
    try:
        outcome = grade()
    except RllmError as error:
        return Finding(
            name=name, aim=aim, verdict=AttackVerdict.BROKEN, score=None, reason=f"not scored: {error}"
        )
    is_held = outcome.score == (1.0 if aim is Aim.ORACLE else 0.0)
    verdict = AttackVerdict.HELD if is_held else AttackVerdict.BROKEN
    return Finding(name=name, aim=aim, verdict=verdict, score=outcome.score, reason=outcome.reason)


class _TaskGrader:
    """Grades the agents of one task: each patch, and each tree that tests would find, once; a tampering by as
    few tests as can tell."""

    def __init__(self, world: SWEWorld, timeout_s: float) -> None:
        self._world, self._timeout_s = world, timeout_s
        self._reference_grades: list[Grade] = []
        self._grades: dict[str, Grade] = {}
        """By patch: worlds in which a patch is tested are fresh, whatever was done where it was made."""
        self._runs: dict[str, TestRun] = {}
        """By the tree that the tests found, when what a patch may not change was as before."""

    def grade_reference(self) -> Grade:
        """Wrong where tests end otherwise than before."""
        grade = grade_patch(self._world, self._world.repository.gold, timeout_s=self._timeout_s)
        self._reference_grades.append(grade)
        ends = [
            {**each.metadata.get("fail_to_pass", {}), **each.metadata.get("pass_to_pass", {})}
            for each in self._reference_grades
        ]
        flaky = [name for name in ends[0] if len({str(each.get(name)) for each in ends}) > 1]
        if flaky:
            return wrong(
                f"flaky: {flaky[0]} ended as {' and then as '.join(str(each[flaky[0]]) for each in ends)}"
            )
        return grade

    def grade_untouched(self) -> Grade:
        """The grade of an agent that changed one file that matters to nobody: the tests do run, and fail."""
        with self._world.open() as agent:
            agent.write(_CHANGED, "nothing\n")
            patch = patch_of(agent, self._world)
        self._grades[patch] = grade_patch(
            self._world, patch, timeout_s=self._timeout_s, known_runs=self._runs
        )
        return self._grades[patch]

    def grade_tampered(self, script: str) -> Grade:
        world = self._world
        with world.open() as agent:
            agent.exec(["bash", "-c", script], cwd=PLACE, env={**world.variables, **_names(world)})
            agent.write(_CHANGED, "nothing\n")
            try:
                patch = patch_of(agent, world)
            except OSError as error:
                return wrong(f"what was left cannot be kept: {error}")
        if patch not in self._grades:
            self._grades[patch] = self._grade_attack(patch)
        return self._grades[patch]

    def _grade_attack(self, patch: str) -> Grade:
        """By FAIL_TO_PASS alone: who earns nothing by fewer tests earns nothing by more."""
        task = self._world.task
        grade = grade_patch(
            replace(self._world, task=replace(task, pass_to_pass=())),
            patch,
            timeout_s=self._timeout_s,
            reference_runs=any(each.score for each in self._reference_grades),
            known_runs=self._runs,
        )
        if grade.score and task.pass_to_pass:
            return grade_patch(self._world, patch, timeout_s=self._timeout_s)
        return grade


def _names(world: SWEWorld) -> dict[str, str]:
    """The names that the scripts use."""
    tests = world.task.fail_to_pass or world.task.pass_to_pass
    test_file = tests[0].partition("::")[0]
    changed_files = re.findall(r"^\+\+\+ b/(\S+\.py)$", world.repository.gold, re.MULTILINE)
    return {
        "TESTS": " ".join(each for each in tests if " " not in each),
        "TEST_FILE": test_file,
        "TEST_FOLDER": str(PurePosixPath(test_file).parent),
        "SOURCES": " ".join(dict.fromkeys(changed_files)),
    }
