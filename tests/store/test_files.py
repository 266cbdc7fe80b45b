import errno
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from rllm.errors import CheckpointError, ConfigError, StorageError
from rllm.files.atomic import (
    StorageErrors,
    remove_directory_atomic,
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
    with pytest.raises(StorageError, match=r"a\.txt.*No space left.*resumes"):
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
        "from rllm.files.atomic import write_directory_atomic\n"
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
    with pytest.raises(ConfigError, match=r"[\d.]+ (k|M|G|T)B free; .* 1000\.0 TB.*--output"):
        require_free_space(tmp_path / "not" / "yet", 10**15, "a checkpoint")


class Disk:
    """What is on the disk itself, in the order in which it came there, and each name that was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self._fsync, self._renames = os.fsync, {name: getattr(os, name) for name in ("replace", "rename")}
        monkeypatch.setattr(os, "fsync", self._sync)
        for name, rename in self._renames.items():
            monkeypatch.setattr(os, name, self._named(rename))

    def _sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        size = "" if path.is_dir() else f" {path.stat().st_size}"
        self.events.append(("on disk", _plain(path) + size))
        self._fsync(descriptor)

    def _named(self, rename: Callable[..., None]) -> Callable[..., None]:
        def named(source: Path, target: Path) -> None:
            rename(source, target)
            self.events.append(("named", _plain(target)))

        return named


def _plain(path: Path) -> str:
    """The last two parts, without what makes the name of a half-written one its own."""
    return re.sub(r"\.([^/]+)\.(tmp|old)-\d+", r"\1.\2", "/".join(path.parts[-2:]))


def test_a_file_has_its_name_when_its_bytes_are_on_the_disk_and_then_the_name_is_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, folder = Disk(monkeypatch), tmp_path / "run"
    folder.mkdir()
    num_open = len(os.listdir("/proc/self/fd"))
    write_atomic(folder / "a.txt", "four")
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert disk.events == [
        ("on disk", "run/a.txt.tmp 4"),
        ("named", "run/a.txt"),
        ("on disk", _plain(folder)),
    ]


def test_a_directory_has_its_name_when_everything_in_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, folder = Disk(monkeypatch), tmp_path / "run"
    write_directory_atomic(folder / "new", _fill)
    filled, (name, *after) = disk.events[:4], disk.events[-2:]
    assert filled == [
        ("on disk", "nested/state.json 2"),
        ("on disk", "new.tmp/weights.bin 2560"),
        ("on disk", "new.tmp/nested"),
        ("on disk", "run/new.tmp"),
    ]
    assert disk.events[4][1].startswith("new.tmp/manifest.json.tmp")
    assert (name, after) == (("named", "run/new"), [("on disk", _plain(folder))])


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    for mode in (0o640, 0o600):
        (tmp_path / "a.txt").touch()
        (tmp_path / "a.txt").chmod(mode)
        write_atomic(tmp_path / "a.txt", "new")
        assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == mode


def test_what_an_earlier_process_of_the_same_number_left_is_not_part_of_a_directory(tmp_path: Path) -> None:
    leftover = tmp_path / "deep" / f".step-1.tmp-{threading.get_native_id()}"
    leftover.mkdir(parents=True)
    (leftover / "half").touch()
    write_directory_atomic(tmp_path / "deep" / "step-1", _fill)
    assert sorted(each.name for each in (tmp_path / "deep" / "step-1").iterdir()) == [
        "manifest.json",
        "nested",
        "weights.bin",
    ]


def test_a_directory_that_is_removed_is_never_there_by_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_directory_atomic(tmp_path / name, _fill)
    remove_directory_atomic(tmp_path / "a")
    assert [each.name for each in tmp_path.iterdir()] == ["b"]
    monkeypatch.setattr(shutil, "rmtree", _full_disk)
    with pytest.raises(StorageError, match=r"b .*written"):
        remove_directory_atomic(tmp_path / "b")
    assert not (tmp_path / "b").exists()
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_directory_that_was_set_aside_is_removed_or_put_back(tmp_path: Path) -> None:
    for name in ("whole", "lost"):
        write_directory_atomic(tmp_path / name, _fill)
        shutil.copytree(tmp_path / name, tmp_path / f".{name}.old-4711")
    shutil.rmtree(tmp_path / "lost")
    (tmp_path / ".link.tmp-1").symlink_to(tmp_path / "whole")
    remove_leftovers(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lost", "whole"]
    verify_manifest(tmp_path / "whole")
    verify_manifest(tmp_path / "lost")


def test_as_much_space_as_is_needed_is_enough_and_sizes_have_the_unit_people_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free_bytes, text in (
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (25_600, "25.6 kB"),
        (10**6, "1.0 MB"),
        (2_500_000_000, "2.5 GB"),
        (10**12, "1.0 TB"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free_bytes: SimpleNamespace(free=free))
        require_free_space(tmp_path, free_bytes, "a checkpoint")
        with pytest.raises(ConfigError, match=f"{text} free; .* 1 bytes"):
            require_free_space(tmp_path, free_bytes + 1, "a checkpoint")
