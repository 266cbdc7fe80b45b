"""Files that honest work leaves, many, deep and large, go out of a sandbox and whole into the next one."""

from collections.abc import Callable
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


def opened(backend: str, layer: str) -> Sandbox:
    return open_sandbox(backend, limits=LIMITS, root=Root(layers=(layer,), folders=("/app",)))


def moved(backend: str, layer: str, work: str, look: str, *, scope: Scope = CHANGES) -> str:
    """What `look` prints in a second sandbox that has the files of one in which `work` was run."""
    with opened(backend, layer) as first, opened(backend, layer) as second:
        assert first.exec(work).exit_code == 0
        left = first.snapshot(scope)
        assert left.left_out == ()
        second.restore(left)
        return second.exec(look).stdout


def test_a_thousand_files_in_new_folders_are_more_than_one_process_may_open(backend: str, layer: str) -> None:
    work = "cd /app; for n in $(seq 1000); do mkdir $n; echo $n > $n/file; done"
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
