"""Files that honest work leaves, many, deep and large, go out of a sandbox and whole into the next one."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rllm.sandbox import Limits, Root, Sandbox, Scope, open_sandbox
from rllm.sandbox.verifier import NOT_KEPT

LIMITS = Limits(wall_s=30, cpu_s=20, memory_mb=256, disk_mb=48, processes=32)
CHANGES = Scope(folders=("/app",), changes=True)


@pytest.fixture(params=["bubblewrap", "unshare"])
def backend(request: pytest.FixtureRequest, need: Callable[[str], str]) -> str:
    return need(request.param)


@pytest.fixture
def layer(tmp_path: Path) -> str:
    (tmp_path / "layer/app").mkdir(parents=True)
    (tmp_path / "layer/app/there").write_text("there\n")
    tmp_path.chmod(0o755)
    return str(tmp_path / "layer")


def opened(backend: str, layer: str, limits: Limits = LIMITS) -> Sandbox:
    return open_sandbox(backend, limits=limits, root=Root(layers=(layer,), folders=("/app",)))


def moved(
    backend: str, layer: str, work: str, look: str, *, scope: Scope = CHANGES, limits: Limits = LIMITS
) -> str:
    """What `look` prints in a second sandbox that has the files of one in which `work` was run."""
    with opened(backend, layer, limits) as first, opened(backend, layer, limits) as second:
        done = first.exec(work)
        assert done.exit_code == 0, done.stderr
        left = first.snapshot(scope)
        assert left.left_out == ()
        second.restore(left)
        done = second.exec(look)
        assert done.exit_code == 0, done.stderr
        return done.stdout


def test_a_thousand_files_in_new_folders_are_more_than_one_process_may_open(backend: str, layer: str) -> None:
    work = "cd /app; mkdir $(seq 1000); for n in $(seq 1000); do echo $n > $n/file; done"
    assert moved(backend, layer, work, "cat /app/*/file | wc -l") == "1000\n"


def test_a_thousand_removed_files_are_removed(backend: str, layer: str) -> None:
    for number in range(1000):
        (Path(layer) / f"app/gone-{number}").mkdir()
        (Path(layer) / f"app/gone-{number}/file").write_text("old\n")
    assert moved(backend, layer, "rm -r /app/gone-*", "ls /app") == "there\n"


def test_a_snapshot_of_everything_holds_a_thousand_files_at_the_top(backend: str, layer: str) -> None:
    work = "for n in $(seq 1000); do echo $n > /top-$n; done"
    scope = Scope(left_out=NOT_KEPT)
    assert moved(backend, layer, work, "cat /top-* | wc -l", scope=scope) == "1000\n"


DEEP = (
    'python3 -c \'import os\nos.chdir("/app")\nfor n in range(3000):\n    os.mkdir("d")\n    os.chdir("d")\n'
    '    open("file", "w").write(str(n))\''
)
LOOK_DEEP = (
    'python3 -c \'import os\nos.chdir("/app")\nfor n in range(3000):\n    os.chdir("d")\n'
    '    assert open("file").read() == str(n)\nprint(os.listdir("."))\''
)


@pytest.mark.parametrize("changes", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_three_thousand_nested_folders(backend: str, layer: str, changes: bool) -> None:
    scope = Scope(folders=("/app",), changes=changes)
    limits = replace(LIMITS, disk_mb=128)
    assert moved(backend, layer, DEEP, LOOK_DEEP, scope=scope, limits=limits) == "['file']\n"


def test_nested_folders_of_a_layer_are_removed(backend: str, layer: str) -> None:
    deep = Path(layer) / "app/deep"
    deep.mkdir()
    for _ in range(30):  # as deep as a path of this machine may be
        deep = deep / ("d" * 100)
        deep.mkdir()
    assert moved(backend, layer, "rm -r /app/deep", "ls /app") == "there\n"


def test_a_file_with_holes_is_moved_as_one(backend: str, layer: str) -> None:
    limits = replace(LIMITS, disk_mb=600)
    work = "cd /app; truncate -s 500M hole; echo end >> hole; truncate -s 100M empty"
    start_s = time.monotonic()
    look = "cd /app; tail -c 4 hole; stat -c %s hole empty; du -sm . | cut -f 1"
    assert moved(backend, layer, work, look, limits=limits) == "end\n524288004\n104857600\n1\n"
    assert time.monotonic() - start_s < 10
