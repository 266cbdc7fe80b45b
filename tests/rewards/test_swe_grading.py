"""Patches for a tiny project, graded by hidden tests in a real sandbox; and what a repository is made of."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rllm.data.swe_repository import PLACE, repository_of
from rllm.data.swe_rows import SWETask
from rllm.errors import ConfigError, RewardError
from rllm.rewards.swe_grading import grade_patch
from rllm.rewards.swe_world import SWEWorld, patch_of

sys.path.insert(0, str(Path(__file__).parent))
from swe_projects import (
    HIDDEN,
    LIMITS,
    PATCH,
    forging_line,
    project,
    repository,
    row,
    run_git,
    usable_backend,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLM_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def world(home: Path, tmp_path_factory: pytest.TempPathFactory) -> SWEWorld:
    source, commit = repository(tmp_path_factory.mktemp("source"))
    task = SWETask.from_row(row(source, base_commit=commit))
    return SWEWorld.of(task, backend=usable_backend(), limits=LIMITS)


def test_the_reference_solves_its_task_and_every_test_is_reported(world: SWEWorld) -> None:
    grade = grade_patch(world, world.repository.gold)
    assert (grade.score, grade.reason) == (1.0, "resolved: full")
    assert grade.metadata["fail_to_pass"] == {"tests/test_add.py::test_add": "PASSED"}
    assert grade.metadata["pass_to_pass"] == {"tests/test_old.py::test_twice": "PASSED"}


def test_a_wrong_patch_says_which_tests_fail(world: SWEWorld) -> None:
    grade = grade_patch(world, PATCH.replace("a + b", "a + b + 1"))
    assert grade.score == 0.0
    assert "tests/test_add.py::test_add" in grade.reason
    assert grade.metadata["pass_to_pass"] == {"tests/test_old.py::test_twice": "PASSED"}


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("", "the patch is empty"),
        (" \n", "the patch is empty"),
        ("diff --git a/.git/hooks/x b/.git/hooks/x\n", "the patch reaches into .git"),
    ],
)
def test_what_is_no_patch_of_the_project_earns_nothing(world: SWEWorld, patch: str, reason: str) -> None:
    grade = grade_patch(world, patch)
    assert (grade.score, grade.reason) == (0.0, reason)


def test_a_patch_that_does_not_apply_earns_nothing(world: SWEWorld) -> None:
    grade = grade_patch(world, PATCH.replace("return a - b", "return a / b"))
    assert (grade.score, grade.reason) == (0.0, "the patch does not apply")


def test_a_patch_that_ends_the_run_is_at_fault_where_the_reference_does_not(world: SWEWorld) -> None:
    forged = "open('/logs/verifier/report.json', 'w').write('{}')\n+    __import__('os')._exit(0)"
    patch = PATCH.replace("return a + b", forged).replace("+1,6", "+1,7")
    grade = grade_patch(world, patch)
    assert (grade.score, grade.reason) == (0.0, "the tests did not run to their end")


def test_no_caller_of_a_patch_has_a_variable_that_seals_a_report(world: SWEWorld) -> None:
    forging = forging_line([*world.task.fail_to_pass, *world.task.pass_to_pass])
    grade = grade_patch(world, PATCH.replace("return a + b", forging))
    assert grade.score == 0.0
    assert "tests/test_add.py::test_add" in grade.reason


def test_a_row_whose_own_solution_ends_the_run_is_an_error_and_no_score(world: SWEWorld) -> None:
    exits = "import os\n\nos._exit(3)\n"
    task = SWETask.from_row(world.task.to_row() | {"test_files": {"tests/test_add.py": exits}})
    broken = SWEWorld.of(task, backend=world.backend, limits=LIMITS)
    with pytest.raises(RewardError, match=r"calc__calc-1: .*tests .*end"):
        grade_patch(broken, PATCH)


def test_the_patch_is_what_changed_in_the_repository_and_nothing_else(world: SWEWorld) -> None:
    script = """
    git log --all --format=%s; git reflog; git fsck --lost-found
    sed -i 's/a - b/a + b/' calc/__init__.py
    git commit -qam mine; echo evil > /usr/bin/git; printf 'x = 1\\n' > new.py; rm tests/test_old.py
    mkdir -p inner/.git __pycache__; echo > inner/.git/HEAD; ln -s /etc/passwd link; echo > __pycache__/a.pyc
    """
    with world.open() as agent:
        ran = agent.exec(["bash", "-c", script], cwd="/testbed", env=world.variables)
        assert ran.stdout == "base\n"
        patch = patch_of(agent, world)
    changed = {line.split(" b/")[1] for line in patch.splitlines() if line.startswith("diff --git")}
    assert changed == {"calc/__init__.py", "new.py", "tests/test_old.py", "link"}
    grade = grade_patch(world, patch)
    assert grade.score == 1.0, grade


def test_a_bundle_and_a_directory_give_the_same_tree_as_the_clone(home: Path, tmp_path: Path) -> None:
    source, commit = repository(tmp_path)
    bundle = tmp_path / "calc.bundle"
    run_git(source, "bundle", "create", "-q", str(bundle), "--all")
    # Of one branch alone there is no HEAD in it; of a detached HEAD alone no branch.
    run_git(source, "bundle", "create", "-q", str(tmp_path / "branch.bundle"), "main")
    run_git(source, "checkout", "-q", "--detach")
    run_git(source, "bundle", "create", "-q", str(tmp_path / "head.bundle"), "HEAD")
    plain = project(tmp_path / "plain")
    subprocess.run(
        ["tar", "-czf", str(tmp_path / "calc.tar.gz"), "-C", str(plain.parent), plain.name], check=True
    )
    rows = [
        row(source, base_commit=commit),
        row(bundle, base_commit=commit[:12]),
        row(tmp_path / "branch.bundle", base_commit=commit),
        row(tmp_path / "head.bundle", base_commit=commit),
        row(plain),
        row(tmp_path / "calc.tar.gz"),
    ]
    made = [repository_of(SWETask.from_row(each)) for each in rows]
    commits = [
        subprocess.run(
            "git -C layer/testbed log --all --format=%T",
            shell=True,
            cwd=each.path,
            check=True,
            capture_output=True,
        ).stdout
        for each in made
    ]
    assert len(set(commits)) == 1
    assert len({each.path for each in made}) == 6
    assert repository_of(SWETask.from_row(rows[0])).path == made[0].path


def test_a_patch_that_makes_the_bug_is_reversed_and_its_tests_are_hidden(home: Path, tmp_path: Path) -> None:
    source = project(tmp_path)
    (source / "calc" / "__init__.py").write_text(
        (source / "calc" / "__init__.py").read_text().replace("-", "+")
    )
    (source / "tests" / "test_add.py").write_text(HIDDEN)
    bug = PATCH.replace("-    return a - b\n+    return a + b", "-    return a + b\n+    return a - b")
    made = repository_of(
        SWETask.from_row(row(source, patch="", bug_patch=bug, test_files=None, base_commit=None))
    )
    assert made.hidden_files == {"tests/test_add.py": HIDDEN}
    assert "+    return a + b" in made.gold
    assert not (made.layer / "testbed/tests/test_add.py").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": None}, "no `source`"),
        ({"source": "/nowhere/at/all"}, "is not there"),
        ({"base_commit": "0" * 40}, "not among the commits"),
        ({"patch": PATCH.replace("The sum", "x")}, "`patch` does not apply"),
        ({"bug_patch": PATCH.replace("The sum", "x")}, "`bug_patch` does not apply"),
    ],
)
def test_a_row_that_cannot_be_made_is_refused_and_leaves_nothing(
    home: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source, commit = repository(tmp_path)
    kept = sorted(home.rglob("facts.json"))
    with pytest.raises(ConfigError, match=message) as caught:
        repository_of(SWETask.from_row(row(source, base_commit=commit) | change))
    assert "calc__calc-1" in str(caught.value)
    assert sorted(home.rglob("facts.json")) == kept
    assert not list(home.rglob(".part-*"))


def test_a_source_that_cannot_be_read_is_refused(home: Path, tmp_path: Path) -> None:
    for name in ("broken.tar.gz", "broken.zip"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 nothing of the kind")
        with pytest.raises(ConfigError, match=f"calc__calc-1: .*`source` .*{name} .*read"):
            repository_of(SWETask.from_row(row(tmp_path / name)))
    source = project(tmp_path)
    os.mkfifo(source / "pipe")
    with pytest.raises(ConfigError, match=r"calc__calc-1: .*`source` .*named pipe"):
        repository_of(SWETask.from_row(row(source)))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"directory .*git bundle"):
        repository_of(SWETask.from_row(row(tmp_path / "notes.txt")))


def test_submodules_and_pointers_of_lfs_are_refused(home: Path, tmp_path: Path) -> None:
    source, _ = repository(tmp_path)
    (source / "data.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    run_git(source, "add", "-A")
    run_git(source, "commit", "-q", "-m", "lfs")
    head = run_git(source, "rev-parse", "HEAD").strip()
    with pytest.raises(ConfigError, match=r"data\.bin .*git-lfs"):
        repository_of(SWETask.from_row(row(source, base_commit=head, patch="")))
    run_git(source, "update-index", "--add", "--cacheinfo", f"160000,{head},lib/inner")
    run_git(source, "commit", "-q", "-m", "submodule")
    head = run_git(source, "rev-parse", "HEAD").strip()
    with pytest.raises(ConfigError, match="submodule lib/inner"):
        repository_of(SWETask.from_row(row(source, base_commit=head, patch="")))


def test_no_file_outside_of_the_tree_is_read_or_removed(home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "mine" / "test_secret.py"
    outside.parent.mkdir()
    outside.write_text("secret = 1\n")
    source = project(tmp_path)
    (source / "linked").symlink_to(outside.parent)
    ids = ["linked/test_secret.py::test", "../mine/test_secret.py::test", f"{outside}::test"]
    files = {"linked/test_secret.py": "secret = 1\n"}
    for tests in (None, files):
        made = repository_of(SWETask.from_row(row(source, FAIL_TO_PASS=ids, test_files=tests)))
        assert made.hidden_files == (tests or {})
    assert outside.read_text() == "secret = 1\n"


@pytest.mark.slow
def test_install_steps_make_a_virtual_environment_once_or_are_refused(home: Path, tmp_path: Path) -> None:
    """Wheels come from pip's index, so this needs one."""
    source = project(tmp_path)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n\n'
        '[project]\nname = "calc"\nversion = "1"\ndependencies = ["iniconfig"]\n\n'
        '[tool.setuptools]\npackages = ["calc"]\n'
    )
    hidden = "import importlib.metadata\nimport iniconfig\n" + HIDDEN
    fields: dict[str, Any] = {"test_files": {"tests/test_add.py": hidden}}
    task = SWETask.from_row(row(source, install=["python -m pip install -e ."], **fields))
    backend, limits = usable_backend(), replace(LIMITS, disk_mb=512, memory_mb=1024)
    made = SWEWorld.of(task, backend=backend, limits=limits)
    with made.open() as agent:
        ran = agent.exec("which python; python -m pytest -q", cwd="/testbed", env=made.variables)
        assert ran.stdout.startswith("/opt/venv/bin/python\n"), ran
        assert "1 passed" in ran.stdout
        assert patch_of(agent, made) == ""
    assert grade_patch(made, made.repository.gold).score == 1.0
    assert SWEWorld.of(task, backend=backend, limits=limits).environment.path == made.environment.path
    kept = sorted(home.glob("swe/environments/*/layer"))
    for step, message in (("exit 3", "`exit 3` ended with error"), ("pip install not-a-package-x", "wheels")):
        with pytest.raises(ConfigError, match=message):
            SWEWorld.of(SWETask.from_row(row(source, install=[step])), backend=backend, limits=limits)
    with pytest.raises(ConfigError, match=r"asks for Python 2\.7"):
        SWEWorld.of(SWETask.from_row(row(source, python="2.7")), backend=backend, limits=limits)
    assert sorted(home.glob("swe/environments/*/layer")) == kept


def new_file(path: str, text: str) -> str:
    lines = text.splitlines()
    return f"--- /dev/null\n+++ {path}\n@@ -0,0 +1,{len(lines)} @@\n" + "".join(
        f"+{line}\n" for line in lines
    )


def git_file(path: str, text: str) -> str:
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
    return head + new_file(f"b/{path}", text)


FORGING = """\
cat > /tests/swe_tests.py <<'PY'
import hashlib, json, sys
names = [each for each in json.load(open("/tests/plan.json"))["files"]]
tests = {"tests/test_add.py::test_add": "PASSED", "tests/test_old.py::test_twice": "PASSED"}
text = json.dumps({"code": 0, "canary": "FAILED", "tests": tests})
seal = hashlib.blake2b(text.encode(), key=sys.stdin.readline().strip().encode()).hexdigest()
json.dump({"seal": seal, "report": text}, open("/logs/verifier/report.json", "w"))
PY
cat
"""
FILTER = '[filter "x"]\n\tclean = sh /testbed/evil.sh\n'
TOUCHED = PATCH.replace("a + b", "a - b  # touched").replace("The sum", "A sum")
"""A line that is not there: git refuses it, and `patch` takes it."""
FILTERED = git_file("evil.sh", FORGING) + git_file(".gitattributes", "* filter=x\n") + TOUCHED


@pytest.mark.parametrize(
    "end",
    [
        new_file('"b/\\056git/config"', FILTER),
        new_file('"b/calc/\\056git/config"', FILTER),
        "Index: b/.git/config\n0a1,2\n> [filter]\n> x\n",
        "--- a/evil.sh\n+++ b/evil.sh\n0a\n!touch /tests/swe_tests.py\n.\nw\n",
    ],
)
def test_no_way_to_write_a_patch_reaches_what_git_reads(world: SWEWorld, end: str) -> None:
    """git refuses such paths, and `patch`, which comes after it, does not: a filter of git's settings would
    run with the tests' rights before them."""
    grade = grade_patch(world, FILTERED + end)
    assert grade.score == 0.0, grade


def test_an_expected_failure_of_the_test_that_must_fail_is_a_forgery(world: SWEWorld) -> None:
    lines = "+import builtins, pytest\n+builtins.AssertionError = pytest.xfail.Exception\n"
    bad = PATCH.replace("a + b", "a - b").replace(" def add(a, b):", f"{lines} def add(a, b):", 1)
    bad = bad.replace("+1,6 @@", "+1,8 @@")
    grade = grade_patch(world, bad)
    assert (grade.score, "must fail" in grade.reason) == (0.0, True), grade


def test_tests_of_any_name_that_a_row_names_are_as_they_were(home: Path, tmp_path: Path) -> None:
    source = project(tmp_path)
    (source / "checks").mkdir()
    check = "from calc import twice\n\n\ndef test_thrice():\n    assert twice(3) == 6\n"
    (source / "checks" / "verify_calc.py").write_text(check)
    ids = ["tests/test_old.py::test_twice", "checks/verify_calc.py::test_thrice"]
    made = SWEWorld.of(
        SWETask.from_row(row(source, PASS_TO_PASS=ids)), backend=usable_backend(), limits=LIMITS
    )
    assert grade_patch(made, PATCH).score == 1.0
    breaks = PATCH.replace("@@ -1,6 +1,6 @@", "@@ -1,7 +1,7 @@") + "-    return 2 * a\n+    return 4\n"
    hunk = "@@ -4,2 +4,2 @@\n def test_thrice():\n-    assert twice(3) == 6\n+    pass\n"
    softened = f"--- a/checks/verify_calc.py\n+++ b/checks/verify_calc.py\n{hunk}"
    grade = grade_patch(made, breaks + softened)
    assert (grade.score, grade.metadata["pass_to_pass"][ids[1]]) == (0.0, "FAILED"), grade


def test_what_an_agents_own_ignore_rules_hide_is_in_the_patch(world: SWEWorld) -> None:
    with world.open() as agent:
        agent.exec(
            "echo build/ > .gitignore; git add .gitignore; mkdir -p calc/build build .tool; "
            "echo x=1 > calc/build/new.py; echo '/deep.py' > calc/.gitignore; echo y=1 > calc/deep.py; "
            "echo '*' > .tool/.gitignore; echo cache > .tool/cache",
            cwd=PLACE,
        )
        patch = patch_of(agent, world)
    assert "+++ b/calc/build/new.py" in patch
    assert "+++ b/calc/deep.py" in patch
    assert "+++ b/calc/.gitignore" in patch
    assert ".tool" not in patch, "a folder that hides itself is a tool's, such as a cache or an environment"


def test_what_the_repository_itself_ignores_stays_out_of_the_patch_unless_an_agent_brings_it_in(
    home: Path, tmp_path: Path
) -> None:
    source = project(tmp_path)
    (source / ".gitignore").write_text("data/\n*.log\n")
    world = SWEWorld.of(SWETask.from_row(row(source)), backend=usable_backend(), limits=LIMITS)
    with world.open() as agent:
        agent.exec("mkdir data; echo 1 > data/x.csv; echo 1 > run.log", cwd=PLACE)
        assert patch_of(agent, world) == ""
        agent.exec("echo '*.log' > .gitignore", cwd=PLACE)
        patch = patch_of(agent, world)
    assert "+++ b/data/x.csv" in patch
    assert "run.log" not in patch


NESTED = (
    'python3 -c \'import os\nfor n in range(3000):\n    os.mkdir("d")\n    os.chdir("d")\nopen("f", "w")\''
)


@pytest.mark.parametrize("work", [NESTED, pytest.param("truncate -s 500M hole", marks=pytest.mark.slow)])
def test_a_patch_beside_thousands_of_nested_folders_or_a_large_hole_is_paid(
    world: SWEWorld, work: str
) -> None:
    # As `SWEEnv` has them: git holds a file in memory.
    world = replace(world, limits=replace(world.limits, memory_mb=2048, disk_mb=1024))
    with world.open() as agent:
        done = agent.exec(f"sed -i s/a.-.b/a+b/ calc/__init__.py; {work}", cwd=PLACE)
        assert done.exit_code == 0, done.stderr
        start_s = time.monotonic()
        patch = patch_of(agent, world)
        assert time.monotonic() - start_s < 60
    assert grade_patch(world, patch).score == 1.0
