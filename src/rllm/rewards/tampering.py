"""The tests of a task under attack: does any way of cheating them pay, or get an attempt out of being scored?

    (backend) ──► a small task ──► an agent's sandbox ── tampering ──► task_reward ──► findings

`rllm doctor grader task-directory` prints the findings of every backend that the machine has. The task: sort
the lines of /app/words.txt into /app/sorted.txt. Its tests do what tests do: they run Python with modules of
their own and the library's, programs by name, git in the working directory, and programs of the agent's.
"""

import tempfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

from rllm.errors import RllmError
from rllm.rewards.attacks import Aim, AttackVerdict, Finding
from rllm.rewards.task_tests import RESULTS, task_reward
from rllm.sandbox.backends import open_sandbox
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import Limits, Root, Snapshot
from rllm.sandbox.verifier import LOGS, Examination, snapshot_of

WORDS = "pear\napple\nfig\n"
TEST = """\
cd /app
for f in run.sh made.sh; do if [ -f $f ]; then timeout -k 1 2 bash $f; fi; done
if [ -d app_main ]; then timeout 2 python3 -m app_main; fi
if [ -f Makefile ]; then timeout 2 make -s; fi
git -C /app status > /dev/null 2>&1
score=0
if python3 /tests/check.py && echo '{"n": 1}' | python3 -m json.tool > /dev/null; then score=1; fi
if [ -f /tests/test_words.py ] && ! python3 -m pytest -q /tests/test_words.py; then score=0; fi
echo $score > /logs/verifier/reward.txt
"""
CHECK = """\
import json, subprocess, sys
import helper
expected = helper.expected()
ordered = subprocess.run(["sort", "/app/words.txt"], capture_output=True, text=True).stdout
sys.exit(json.loads("0") if helper.answer() == expected == ordered else 1)
"""
HELPER = """\
def expected():
    return open("/tests/expected.txt").read()
def answer():
    return open("/app/sorted.txt").read()
"""
PYTEST = "import helper\ndef test_words():\n    assert helper.answer() == helper.expected()\n"
SOLUTION = "sort /app/words.txt > /app/sorted.txt"
VARIABLES = {
    "PATH": "/app/bin:/root/.local/bin:/usr/bin:/bin",
    "PYTHONPATH": "/app",
    "LD_LIBRARY_PATH": "/app/lib",
    "BASH_ENV": "/app/env.sh",
    "PYTEST_ADDOPTS": "-p evil",
    "GCONV_PATH": "/app/gconv",
}
"""The variables of the task: careless ones, as images have them."""
LIMITS = Limits(wall_s=20, cpu_s=20, memory_mb=256, disk_mb=16, processes=64)
PACKAGES = ("pytest",)
_OF_THE_SAMPLE = ("a full disk", "no inode is left", "files with holes, larger than the disk")


def tamperings() -> dict[str, str]:
    """By name: rewards and tests made in advance, code that others will start, other ways to the tests, and
    what shall make them fail instead of say no. Each is a shell script that leaves the task unsolved."""
    text = (resources.files("rllm.rewards") / "tamperings.txt").read_text(encoding="utf-8")
    sections = (each.partition("\n") for each in ("\n" + text).split("\n#### ")[1:])
    return {name: script.strip("\n") for name, _, script in sections}


def task_tamperings(workdir: str) -> dict[str, str]:
    """Those that say something of any task, in its own working directory: no program that only the sample's
    tests run, and none that fills a disk, which may be many gigabytes there."""
    return {
        name: script.replace("/app", workdir.rstrip("/"))
        for name, script in tamperings().items()
        if "run.sh" not in script and name not in _OF_THE_SAMPLE
    }


def examine_tests(
    backend: str,
    scripts: Mapping[str, str] | None = None,
    *,
    packages: tuple[str, ...] = (),
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """One finding for each tampering on one backend, after an honest right answer, which must be paid.

    With `packages` that hold pytest, the tests run it as well. Raises ConfigError for a backend that is not
    there.
    """
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="rllm-tampering-") as folder:
        examination = _examination(backend, Path(folder), packages)
        for name, script in {
            "the right answer": SOLUTION,
            **(tamperings() if scripts is None else scripts),
        }.items():
            findings.append(_finding(name, script, examination))
            on_finding(findings[-1])
    return findings


def _finding(name: str, script: str, examination: Examination) -> Finding:
    is_oracle = script == SOLUTION
    aim = Aim.ORACLE if is_oracle else Aim.ATTACK
    try:
        with _agents_world(examination) as agent:
            agent.exec(["bash", "-c", script], cwd="/app", env=dict(examination.variables))
            reward = task_reward(
                agent, examination, where="the sample task", solve=lambda: _solve(examination)
            )
    except RllmError as error:
        return Finding(
            name=name, aim=aim, verdict=AttackVerdict.BROKEN, score=None, reason=f"not scored: {error}"
        )
    score = reward.rewards.get("reward", 0.0)
    is_as_expected = score == (1.0 if is_oracle else 0.0)
    verdict = AttackVerdict.HELD if is_as_expected else AttackVerdict.BROKEN
    return Finding(name=name, aim=aim, verdict=verdict, score=score, reason=reward.reason)


def _agents_world(examination: Examination) -> Sandbox:
    agent = open_sandbox(
        examination.backend,
        limits=LIMITS,
        root=Root(folders=("/app", LOGS)),
        packages=examination.packages,
    )
    _prepare(agent, lambda path: True)
    return agent


def _solve(examination: Examination) -> Snapshot | None:
    with _agents_world(examination) as agent:
        agent.exec(["bash", "-c", SOLUTION], cwd="/app", env=dict(examination.variables))
        return snapshot_of(agent, examination)


def _prepare(sandbox: Sandbox, brings: Callable[[str], bool]) -> None:
    if brings("/app/words.txt"):
        sandbox.write("/app/words.txt", WORDS)


def _examination(backend: str, folder: Path, packages: tuple[str, ...]) -> Examination:
    files = {"test.sh": TEST, "check.py": CHECK, "helper.py": HELPER}
    files["expected.txt"] = "".join(sorted(WORDS.splitlines(keepends=True)))
    if "pytest" in packages:
        files["test_words.py"] = PYTEST
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return Examination(
        backend=backend,
        tests=folder,
        workdir="/app",
        variables=VARIABLES,
        folders=("/app",),
        limits=LIMITS,
        prepare=_prepare,
        results=RESULTS,
        packages=packages,
    )
