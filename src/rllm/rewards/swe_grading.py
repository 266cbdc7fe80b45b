"""Grades a patch by tests that its author never saw, in a world where nobody was before.

    patch ──► a fresh world: the repository and its environment ──► rewards/programs/swe_tests.py
                  the patch; tests and what steers them as they were; the hidden tests; pytest
          ◄── report.json, sealed ──► FAIL_TO_PASS and PASS_TO_PASS, each test ──► Grade

A patch that is empty or does not apply is a score of 0 with its reason. So is one with which the tests do not
run to their end, if they do with the reference solution (or, where a row has none, without any patch): where
they do not either, the row or this machine is at fault, which is an error and never a score.
"""

import hashlib
import hmac
import json
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from rllm.data.swe_repository import PLACE
from rllm.data.swe_rows import SWETask
from rllm.errors import RewardError
from rllm.rewards.grade import Grade, right, wrong
from rllm.rewards.runner_logs import (
    PYTHON_RUNNERS,
    FailingTest,
    Runner,
    canary_of,
    reporting_words,
    results_of,
    runner_of,
    with_short_names,
)
from rllm.rewards.swe_world import GIT, SWEWorld
from rllm.rewards.swebench import CaseStatus, PatchVerdict, Resolution, verdict_of
from rllm.sandbox.types import Status
from rllm.sandbox.verifier import TESTS, Examination, Examined, examine

STEERING = (
    *(r"conftest\.py", r"\.?pytest\.ini", r"\.?pytest\.toml", r"tox\.ini", r"setup\.cfg", r"pyproject\.toml"),
    *(r"sitecustomize\.py", r"usercustomize\.py", r"pytest\.py", r".*\.pth", r".*\.py[co]", r"\.coveragerc"),
    *(
        r"package\.json",
        r"(?:jest|vitest|vite|babel)\.config\..*",
        r"vitest\.workspace\..*",
        r"\.babelrc.*",
        r"\.npmrc",
        r"\.taprc",
    ),
    *(r"go\.mod", r"go\.work", r"Cargo\.toml", r"\.proverc"),
)
"""Names of files, in any folder, that are again as they were before the patch when the tests run. So are
files of tests; but none of those that the reference solution changes."""
APPLY = (
    "git apply --verbose {patch}",
    "git apply --verbose --3way {patch}",
    "git apply --verbose --reject {patch}",
    "patch --unified --batch --forward --fuzz=5 -p1 -i {patch}",
)
"""Tried in this order, as the published harness does; the tree is put back between them."""
NO_PATCH, NOT_APPLIED = "the patch is empty", "the patch does not apply"
_REPORT = "report.json"
_CUT_OFF = "the tests did not run to their end"
_MOST_REPORT_BYTES = 32 << 20
_EXCEEDED = (Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.OUTPUT_LIMIT, Status.KILLED)
_ENDED_BY = "the tests ended by {}"
_LIMIT_FAULTS = tuple(_ENDED_BY.format(status) for status in _EXCEEDED if status is not Status.KILLED)
_INSIDE_GIT = re.compile(
    r"^(?:---|\+\+\+|rename \w+|copy \w+|diff --git) .*?(?:^|[\s/\"])\.git(?:/|\s|$)", re.MULTILINE
)


@dataclass(kw_only=True, slots=True, frozen=True)
class TestRun:
    """The results of hidden tests on a patch."""

    __test__ = False  # no test of pytest's

    statuses: dict[str, CaseStatus]
    """By every name that a test goes by."""
    counts: Mapping[CaseStatus, int] = field(default_factory=dict[CaseStatus, int])
    """The counts of tests, each once."""
    fault: str = ""
    """The reason that there are none: the patch does not apply, or the run did not come to its end."""
    is_forged: bool = False
    """A test that must fail has passed, or was an expected failure: the patch changed how tests are run."""
    twins: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Test -> its status, its plain copy's and its twin's, which must fail where the test passes."""
    log: str = ""
    """The end of what the run printed."""
    tree: str = ""
    """A hash of the repository as the tests found it, where one was asked for and they came to their end."""
    draw: str = ""
    """Seed of what is drawn for the run: names, and which check of a test its twin inverts."""


def grade_patch(
    world: SWEWorld,
    patch: str,
    *,
    timeout_s: float = 300.0,
    reference_runs: bool = False,
    known_runs: dict[str, TestRun] | None = None,
) -> Grade:
    """1 for an issue that is resolved in full, else 0, with the status of each test in its metadata.

    `reference_runs`: the tests are known to run to their end on the reference solution, so that they need not
    be run on it where they do not on the patch. `known_runs`: see `run_tests`. Raises RewardError where the
    row's own solution does not bring its tests to their end either, SandboxError where a sandbox fails.
    """
    if not patch.strip():
        return wrong(NO_PATCH)
    if _INSIDE_GIT.search(patch):
        return wrong("the patch reaches into .git", patch)
    test_run = run_tests(world, patch, timeout_s=timeout_s, known_runs=known_runs)
    if test_run.fault and test_run.fault not in _LIMIT_FAULTS:
        # A machine without memory for a moment cuts tests off as well: only a patch does it twice.
        test_run = run_tests(world, patch, timeout_s=timeout_s, known_runs=known_runs)
    if test_run.fault == NOT_APPLIED:
        return wrong(NOT_APPLIED, patch)
    if test_run.fault:
        if not reference_runs:
            _reference_run(world, test_run, timeout_s)
        return wrong(test_run.fault, patch, log=test_run.log)
    if test_run.is_forged:
        return wrong("the patch changes how tests are run: one that must fail did not", patch)
    grade = _grade_of(world.task, test_run, patch)
    doubts = _doubts(world.task, test_run) if grade.score else {}
    if doubts:
        # Some are so with the reference solution as well: skipped here, or with a twin that says nothing.
        ends_alike = _doubts(world.task, _reference_run(world, test_run, timeout_s)).items()
        doubts = dict(doubts.items() - ends_alike)
    return wrong(next(iter(doubts.values())), patch) if doubts else grade


def _doubts(task: SWETask, test_run: TestRun) -> dict[str, str]:
    """Test -> the reason that its passing is not proven by the run alone."""
    doubts = {
        test: f"the twin of {test}, which must fail, ended as {twin}, and a copy as {plain}"
        for test, (status, plain, twin) in sorted(test_run.twins.items())
        if status == CaseStatus.PASSED and (plain, twin) != (CaseStatus.PASSED, CaseStatus.FAILED)
    }
    statuses = test_run.statuses | _short_names(test_run.statuses)
    for test in (*task.fail_to_pass, *task.pass_to_pass):
        if statuses.get(test) in (CaseStatus.SKIPPED, CaseStatus.XFAIL):
            doubts[test] = f"{test} ended as {statuses[test]}, and not so with the reference solution"
    return doubts


def run_tests(
    world: SWEWorld,
    patch: str,
    *,
    timeout_s: float = 300.0,
    with_hidden: bool = True,
    known_runs: dict[str, TestRun] | None = None,
    draw: str = "",
) -> TestRun:
    """The row's tests on a patch, which may be empty, in a fresh world.

    Without `with_hidden` they are those that the repository has with the patch: what the patch changes of
    them holds, and nothing is there to find out that it lies. `known_runs`: earlier runs by the tree that
    tests found. Where they would find one of those, that run is returned; else this one is added. `draw`:
    that of an earlier run, whose twins this one gets as well.
    """
    secret, draw = secrets.token_hex(16), draw or secrets.token_hex(16)
    runner = runner_of(world.task.test_command, world.task.instance_id)
    hidden_paths = [*world.repository.hidden_files, *_paths_of(world.task.test_patch)]
    canary = canary_of(runner, hidden_paths) if with_hidden else None
    with tempfile.TemporaryDirectory(prefix="rllm-swe-tests-") as folder:
        known_trees = None if known_runs is None else list(known_runs)
        facts = {"hidden": with_hidden, "known_trees": known_trees, "draw": draw}
        _write_tests(Path(folder), world, patch, runner, canary, facts)
        examination = examine(_examination(world, Path(folder), timeout_s, secret), None)
    has_canary = canary is not None or (with_hidden and runner is Runner.PYTEST)
    test_run = replace(_read(examination, secret, runner, canary, has_canary=has_canary), draw=draw)
    if known_runs is None:
        return test_run
    # Of a known tree nothing was run and only its hash is reported: the earlier run stands for it.
    return known_runs.setdefault(test_run.tree, test_run) if test_run.tree else test_run


def _grade_of(task: SWETask, test_run: TestRun, patch: str) -> Grade:
    statuses = test_run.statuses | _short_names(test_run.statuses)
    verdict = verdict_of(
        statuses, task.fail_to_pass, task.pass_to_pass, fail_only=task.eval_type == "fail_only"
    )
    details: dict[str, Any] = {
        "resolution": str(verdict.resolution),
        "fail_to_pass": {name: str(statuses.get(name, "missing")) for name in task.fail_to_pass},
        "pass_to_pass": {name: str(statuses.get(name, "missing")) for name in task.pass_to_pass},
    }
    if verdict.resolution is Resolution.FULL:
        return right("resolved: full", patch, **details)
    return wrong(_why(verdict), patch, **details, log=test_run.log)


def _why(verdict: PatchVerdict) -> str:
    return f"resolved: {verdict.resolution}; failing: {', '.join(verdict.failing[:3])}"


def _short_names(statuses: dict[str, CaseStatus]) -> dict[str, CaseStatus]:
    """R2E-Gym names a test `Class.test`, without its file; a name that two tests have is left out."""
    names: dict[str, CaseStatus | None] = {}
    for name, status in statuses.items():
        short = ".".join(name.split("::")[1:])
        names[short] = None if short in names else status
    return {name: status for name, status in names.items() if status is not None and name}


def _reference_run(world: SWEWorld, test_run: TestRun, timeout_s: float) -> TestRun:
    """Run the same tests on the reference solution. Raises RewardError where they do not run to their end."""
    reference = run_tests(world, world.repository.gold, timeout_s=timeout_s, draw=test_run.draw)
    if reference.fault or reference.is_forged:
        fault = reference.fault or "a test that must fail does not"
        raise RewardError(
            f"{world.task.instance_id}: its tests do not run to their end, with its own solution or with a "
            f"patch: {fault}. {reference.log[-500:]} (with the patch: {test_run.fault})"
        )
    return reference


def _write_tests(
    folder: Path,
    world: SWEWorld,
    patch: str,
    runner: Runner,
    canary: FailingTest | None,
    facts: Mapping[str, Any],
) -> None:
    """`facts`: whether there are `hidden` tests, `known_trees`, `draw`."""
    task, exempt = world.task, _paths_of(world.repository.gold)
    is_pytest = runner is Runner.PYTEST
    plan = {
        **facts,
        "fail_to_pass": task.fail_to_pass,
        "ids": [*task.fail_to_pass, *task.pass_to_pass],
        "runner": runner,
        "is_python": runner in PYTHON_RUNNERS,
        "words": _pytest_words(task)
        if is_pytest
        else reporting_words(runner, task.test_command, canary.path if canary else ""),
        "canary": asdict(canary) if canary else None,
        "files": world.repository.hidden_files if facts["hidden"] else {},
        "apply": [each.format(patch=f"{TESTS}/model.patch") for each in APPLY],
        "steering": STEERING,
        "exempt": exempt,
        "tests": [*_paths_of(task.test_patch), *world.repository.hidden_files],
    }
    (folder / "plan.json").write_text(json.dumps(plan), "utf-8")
    (folder / "model.patch").write_bytes(patch.encode("utf-8", "surrogateescape"))
    (folder / "test.patch").write_bytes(task.test_patch.encode("utf-8", "surrogateescape"))
    for name in ("swe_tests.py", "swe_twins.py"):
        program = resources.files("rllm.rewards.programs") / name
        (folder / name).write_text(program.read_text("utf-8"), "utf-8")


def _examination(world: SWEWorld, tests: Path, timeout_s: float, secret: str) -> Examination:
    environment = world.environment
    return Examination(
        backend=world.backend,
        tests=tests,
        command=(environment.python, f"{TESTS}/swe_tests.py"),
        workdir=PLACE,
        variables={"PYTHONPATH": f"{PLACE}:{PLACE}/src"},
        own_variables=GIT | {"PATH": world.variables["PATH"]},
        folders=("/opt/venv",) if environment.has_venv else (),
        limits=replace(world.limits, wall_s=timeout_s, cpu_s=timeout_s, output_kb=16_384),
        layers=world.layers,
        prepare=lambda sandbox, brings: None,
        results=(_REPORT,),
        packages=environment.packages,
        image=world.image or None,
        stdin=f"{secret}\n",
        most_result_bytes=_MOST_REPORT_BYTES,
    )


def _pytest_words(task: SWETask) -> list[str]:
    """The options that a row's test command gives pytest, which it calls."""
    words = list(task.test_command)
    programs = [word.rsplit("/")[-1] in ("pytest", "py.test") for word in words]
    return words[programs.index(True) + 1 :]


def _paths_of(patch: str) -> list[str]:
    return sorted(set(re.findall(r"^diff --git a/\S+ b/(\S+)", patch, re.MULTILINE)))


def _read(
    examination: Examined, secret: str, runner: Runner, canary: FailingTest | None, *, has_canary: bool
) -> TestRun:
    test_run = examination.test_run
    log = "" if test_run is None else (test_run.stdout + test_run.stderr)[-2000:]
    if test_run is None:
        return TestRun(statuses={}, fault=examination.refusal)
    if test_run.status in _EXCEEDED:
        return TestRun(statuses={}, fault=_ENDED_BY.format(test_run.status), log=log)
    report = _open_seal(examination.results.get(_REPORT, b""), secret)
    if report is None:
        fault = examination.faults.get(_REPORT, _CUT_OFF)
        return TestRun(statuses={}, fault=fault, log=log)
    if report.get("fault"):
        return TestRun(statuses={}, fault=report["fault"], log=log)
    if "known_tree" in report:
        return TestRun(statuses={}, tree=report["known_tree"])
    if runner in PYTHON_RUNNERS:
        names: dict[str, list[str]] = report.get("names", {})
        ends = [((name, *names.get(name, ())), CaseStatus(end)) for name, end in report["tests"].items()]
        canary_status = report["canary"]
    else:
        log_results = results_of(runner, report["log"], PLACE)
        if log_results is None:
            return TestRun(statuses={}, fault=_CUT_OFF, log=report["log"][-2000:])
        ends, canary_status = log_results, ""
    statuses = with_short_names(ends)
    if runner not in PYTHON_RUNNERS and canary is not None:
        canary_status = next((statuses[each] for each in statuses if canary.is_named(each)), "")
    if has_canary and not canary_status:
        is_cut_off = runner in PYTHON_RUNNERS
        return TestRun(statuses={}, fault=_CUT_OFF if is_cut_off else "the tests were not all run", log=log)
    # A test with several names counts once, under the whole name that comes first.
    counts = Counter(statuses[whole] for whole in {names[0] for names, _ in ends})
    is_forged = has_canary and canary_status not in (CaseStatus.FAILED, CaseStatus.ERROR)
    return TestRun(
        statuses=statuses,
        counts=counts,
        is_forged=is_forged,
        twins=report.get("twins", {}),
        log=log,
        tree=report.get("tree", ""),
    )


def _open_seal(sealed_bytes: bytes, secret: str) -> dict[str, Any] | None:
    """The report, if it is the one of the process that was told the secret."""
    try:
        outer = json.loads(sealed_bytes)
        text, seal = outer["report"], outer["seal"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(text, str) or not isinstance(seal, str):
        return None
    expected = hashlib.blake2b(text.encode(), key=secret.encode()).hexdigest()
    return json.loads(text) if hmac.compare_digest(seal, expected) else None
