"""Tasks whose world is a container image in the form of published ones; skipped without an engine."""

import contextlib
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.data.swe_rows import SWETask
from rllm.environments.swe.ready_worlds import ReadyWorlds
from rllm.environments.swe.swe import SWEEnv
from rllm.errors import ConfigError, RllmError
from rllm.rewards.swe_world import SWEWorld
from rllm.sandbox.docker_api import engine

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
from container_image import make_image
from swe_projects import HIDDEN, LIMITS, repository, row, run_git

TEST_PATCH = "".join(
    [
        "diff --git a/tests/test_add.py b/tests/test_add.py\nnew file mode 100644\n",
        "--- /dev/null\n+++ b/tests/test_add.py\n@@ -0,0 +1,5 @@\n",
        *(f"+{line}\n" for line in HIDDEN.splitlines()),
    ]
)
CONDA = "/opt/miniconda3/envs/testbed/bin/python"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """A row of SWE-bench and one of R2E-Gym, each with its image."""
    try:
        api = engine()
    except RllmError as error:
        pytest.skip(f"docker: {error}")
    folder = tmp_path_factory.mktemp("image")
    source, commit = repository(folder)
    run_git(source, "checkout", "-q", "-b", "work", commit)  # the later commit stays, as in published images
    (source / "calc.egg-info").mkdir()
    (source / "calc.egg-info" / "PKG-INFO").write_text("Name: calc\n")
    tests = folder / "r2e_tests"
    tests.mkdir()
    (tests / "test_add.py").write_text(HIDDEN)
    name = f"localhost/rllm-test-{uuid.uuid4().hex[:8]}"
    files = {"/testbed": source, "/r2e_tests": tests, "/testbed/run_tests.sh": tests / "test_add.py"}
    make_image(name, files, {CONDA: "/usr/bin/python3", "/testbed/.venv/bin/python": "/usr/bin/python3"})
    classic = row(source, image=f"{name}:latest", test_patch=TEST_PATCH, base_commit=commit)
    del classic["source"], classic["test_files"]
    r2e = classic | {
        "form": "r2e-gym",
        "instance_id": "calc__r2e",
        "test_files": {"r2e_tests/test_add.py": HIDDEN},
        "FAIL_TO_PASS": ["r2e_tests/test_add.py::test_add"],
    }
    del r2e["test_patch"]
    yield {"swe-bench": classic, "r2e-gym": r2e}
    with contextlib.suppress(RllmError):
        api.call("DELETE", f"/images/{name}", force="1")


def bash(command: str) -> str:
    return f"<function=execute_bash>\n<parameter=command>{command}</parameter>\n</function>"


@pytest.mark.parametrize("form", ["swe-bench", "r2e-gym"])
def test_an_issue_is_mended_in_the_image_of_its_row(form: str, rows: dict[str, dict[str, Any]]) -> None:
    env = SWEEnv(entry=rows[form], backend="docker", max_steps=9)
    try:
        env.reset()
        looks = "python -c 'import calc; print(calc.add(1, 2))'; git log --all --oneline | wc -l"
        shown, *_ = env.step(bash(looks))
        assert shown.split()[:2] == ["-1", "1"], "the image's Python, and one commit"
        shown, *_ = env.step(bash("git fsck --lost-found --no-reflogs; grep -r secret .git"))
        assert "dangling" not in shown
        assert "secret" not in shown
        if form == "r2e-gym":
            shown, *_ = env.step(bash("cat /r2e_tests/* run_tests.sh"))
            assert shown.count("No such file") == 2
        env.step(bash("sed -i 's/a - b/a + b/' calc/__init__.py; echo x > .venv/bin/x; git commit -qam mine"))
        _, reward, done, info = env.step("<function=finish>\n</function>")
    finally:
        env.close()
    assert (reward, done) == (1.0, True), info
    assert info["patch"].count("diff --git") == 1
    assert "+    return a + b" in info["patch"]


def test_an_image_pays_nothing_for_nothing(rows: dict[str, dict[str, Any]]) -> None:
    env = SWEEnv(entry=rows["swe-bench"], backend="docker", max_steps=9)
    try:
        env.reset()
        env.step(bash("echo 'def test_add(): pass' > tests/test_add.py; echo > conftest.py; chmod 777 /opt"))
        _, reward, _, info = env.step("<function=finish>\n</function>")
    finally:
        env.close()
    assert (reward, info["is_correct"]) == (0.0, False)


def test_worlds_of_two_images_are_never_taken_for_each_other(rows: dict[str, dict[str, Any]]) -> None:
    worlds = [SWEWorld.of(SWETask.from_row(each), backend="docker", limits=LIMITS) for each in rows.values()]
    ready = ReadyWorlds()
    opened = [ready.open(world) for world in (*worlds, *worlds)]
    try:
        assert [each.exec("ls /testbed/run_tests.sh").exit_code for each in opened] == [0, 2, 0, 2]
    finally:
        for world, sandbox in zip((*worlds, *worlds), opened, strict=True):
            ready.close(world, sandbox)


def test_what_no_image_can_be_used_for_is_refused_by_name(rows: dict[str, dict[str, Any]]) -> None:
    missing = rows["swe-bench"] | {"image": "nobody/nothing:1"}
    with pytest.raises(ConfigError, match="docker pull nobody/nothing:1"):
        SWEEnv(entry=missing, backend="docker").reset()
