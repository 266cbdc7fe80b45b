import errno
import json
import os
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rllm.errors import CheckpointError, ConfigError, StorageError
from rllm.store.files import (
    StorageErrors,
    remove_leftovers,
    require_free_space,
    verify_manifest,
    write_atomic,
    write_directory_atomic,
)


def _fill(directory: Path) -> None:
    (directory / "weights.bin").write_bytes(bytes(range(256)) * 10)
    (directory / "nested").mkdir()
    (directory / "nested" / "state.json").write_text("{}")


def _full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.txt", "first")
    write_atomic(tmp_path / "a.txt", b"second")
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "second"


def test_threads_that_write_one_file_at_a_time_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are written before one of them is put in place."""
    barrier = threading.Barrier(2, timeout=10)
    sync = os.fsync

    def meet(descriptor: int) -> None:
        sync(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            barrier.wait()

    monkeypatch.setattr(os, "fsync", meet)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda text: write_atomic(tmp_path / "a.txt", text), ("one", "two")))
    assert (tmp_path / "a.txt").read_text() in ("one", "two")
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_a_full_disk_leaves_the_old_file_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomic(tmp_path / "a.txt", "old")
    monkeypatch.setattr(os, "fsync", _full_disk)
    with pytest.raises(StorageError, match=r"a\.txt.*No space left.*run resumes"):
        write_atomic(tmp_path / "a.txt", "new")
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_really_full_device_is_a_storage_error() -> None:
    with (
        pytest.raises(StorageError, match="No space left"),
        StorageErrors(Path("/dev/full")),
        open("/dev/full", "w") as file,
    ):
        file.write("x")


@pytest.mark.parametrize(
    "words",
    [
        'IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
        "Error while serializing: I/O error: No space left on device (os error 28)",
    ],
)
def test_a_full_disk_is_recognised_in_the_words_of_a_rust_library(words: str) -> None:
    with pytest.raises(StorageError, match=r"No space left.*free space"), StorageErrors(Path("model")):
        raise RuntimeError(words)


def test_errors_of_another_kind_pass_unchanged() -> None:
    for error in (FileNotFoundError(errno.ENOENT, "gone"), RuntimeError("exit code: 28"), KeyError("x")):
        with pytest.raises(type(error)), StorageErrors(Path("model")):
            raise error


def test_a_file_size_limit_stops_a_directory_and_leaves_nothing(tmp_path: Path, spawn) -> None:
    child = spawn(
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from rllm.store.files import write_directory_atomic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "fill = lambda d: (d / 'weights.bin').write_bytes(bytes(5000))\n"
        "write_directory_atomic(Path(sys.argv[1]), fill)\n",
        tmp_path / "step-1",
    )
    output, _ = child.communicate()
    assert "StorageError" in output
    assert "ulimit -f" in output
    assert list(tmp_path.iterdir()) == []


def test_a_directory_arrives_with_a_manifest_of_every_file(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    write_directory_atomic(target, _fill)
    verify_manifest(target)
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"]
    assert '"nested/state.json"' in (target / "manifest.json").read_text()


def test_a_directory_that_exists_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    write_directory_atomic(target, lambda path: (path / "old").touch())
    write_directory_atomic(target, lambda path: (path / "new").touch())
    assert sorted(each.name for each in target.iterdir()) == ["manifest.json", "new"]
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"]


def test_a_fill_that_fails_leaves_the_directory_before_it(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    write_directory_atomic(target, _fill)

    def fail(path: Path) -> None:
        (path / "half").touch()
        raise KeyError("no such tensor")

    with pytest.raises(KeyError, match="no such tensor"):
        write_directory_atomic(target, fail)
    verify_manifest(target)
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"]


def test_a_fill_may_not_write_the_manifest_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"manifest\.json"):
        write_directory_atomic(tmp_path / "step-1", lambda path: (path / "manifest.json").touch())


def _drop_hash(directory: Path, name: str) -> None:
    """Leave one file of several without its sha256."""
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["files"][name]["sha256"]
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda path: (path / "weights.bin").write_bytes(b"short"), "`weights.bin` has 5 bytes .* 2560"),
        (lambda path: (path / "weights.bin").write_bytes(bytes(2560)), "`weights.bin` .*sha256"),
        (lambda path: (path / "nested" / "state.json").unlink(), "`nested/state.json` is missing"),
        (lambda path: (path / "manifest.json").unlink(), "`manifest.json` is missing"),
        (lambda path: (path / "manifest.json").write_text('{"fil'), "`manifest.json` cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[]"), "`manifest.json` cannot be read"),
        (lambda path: (path / "manifest.json").write_text('{"files": {"a": {}}}'), "`manifest.json` lacks"),
        (lambda path: _drop_hash(path, "nested/state.json"), "`manifest.json` lacks"),
        (shutil.rmtree, "is not a directory"),
    ],
)
def test_damage_is_named_with_its_file(tmp_path: Path, damage, complaint: str) -> None:
    write_directory_atomic(tmp_path / "step-1", _fill)
    damage(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=complaint):
        verify_manifest(tmp_path / "step-1")


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    write_directory_atomic(tmp_path / "step-1", _fill)
    (tmp_path / ".step-2.tmp-4711").mkdir()
    (tmp_path / ".step-2.tmp-4711" / "half").touch()
    (tmp_path / ".a.txt.tmp-4711").touch()
    (tmp_path / ".hidden").touch()
    remove_leftovers(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".hidden", "step-1"]
    remove_leftovers(tmp_path / "absent")


def test_a_process_killed_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    write_directory_atomic(tmp_path / "step-1", _fill)
    (tmp_path / "step-1").rename(tmp_path / ".step-1.old-4711")
    remove_leftovers(tmp_path)
    verify_manifest(tmp_path / "step-1")


def test_too_little_space_is_refused_before_work_starts(tmp_path: Path) -> None:
    require_free_space(tmp_path / "not" / "yet", 1, "a checkpoint")
    with pytest.raises(
        ConfigError, match=r"has [\d.]+ (k|M|G|T)B free; a checkpoint needs 1000\.0 TB.*--output"
    ):
        require_free_space(tmp_path / "not" / "yet", 10**15, "a checkpoint")
