"""Directories of a cache: made once, whole or not at all, whoever else makes them at the same time."""

import fcntl
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rllm.sandbox.made_once import made_once, remove_parts, remove_tree


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_filled_once_and_then_left_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "deep" / "made"
    with made_once(target) as part:
        assert part is not None
        assert list(part.iterdir()) == []
        assert not target.exists()  # nobody sees half of it
        (part / "file").write_text("whole")
    with made_once(target) as part:
        assert part is None
    assert (target / "file").read_text() == "whole"
    assert sorted(each.name for each in target.parent.iterdir()) == ["made", "made.lock"]
    assert _mode(target.parent / "made.lock") == 0o600


def test_where_the_block_raises_nothing_stays_and_the_next_makes_it(tmp_path: Path) -> None:
    target = tmp_path / "made"

    def fail() -> None:
        with made_once(target) as part:
            assert part is not None
            (part / "file").write_text("half")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        fail()
    assert [each.name for each in tmp_path.iterdir()] == ["made.lock"]
    with made_once(target) as part:
        assert part is not None
        assert list(part.iterdir()) == []
    assert target.is_dir()


def test_who_comes_while_it_is_made_waits_and_gets_what_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, waits, flock = tmp_path / "made", threading.Event(), fcntl.flock

    def flock_and_tell(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and threading.current_thread() is not threading.main_thread():
            waits.set()
        flock(descriptor, operation)

    def second() -> Path | None:
        with made_once(target) as part:
            return part

    monkeypatch.setattr(fcntl, "flock", flock_and_tell)
    with ThreadPoolExecutor(1) as thread:
        with made_once(target) as part:
            assert part is not None
            (part / "file").write_text("first")
            answer = thread.submit(second)
            assert waits.wait(10)
            assert part.is_dir()  # what is being made is nobody's leftover
        assert answer.result(10) is None
    assert (target / "file").read_text() == "first"


def test_what_a_process_that_is_gone_left_half_made_is_removed_by_the_next(tmp_path: Path) -> None:
    for name in ("other", "made"):
        (tmp_path / f".part-{name}").mkdir()
        (tmp_path / f".part-{name}" / "file").write_text("half")
    with made_once(tmp_path / "made") as part:
        assert part is not None
        assert list(part.iterdir()) == []
        assert not (tmp_path / ".part-other").exists()
        remove_parts(tmp_path)
        assert part.is_dir()
    (tmp_path / ".part-other").mkdir()
    with made_once(tmp_path / "made") as part:
        assert part is None
    remove_parts(tmp_path)
    remove_parts(tmp_path)  # whoever looks keeps no lock
    assert sorted(each.name for each in tmp_path.iterdir()) == ["made", "made.lock", "other.lock"]


def test_directories_that_nobody_may_enter_are_opened_and_links_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, part = tmp_path / "outside", tmp_path / "part"
    outside.mkdir(mode=0o755)
    outside.chmod(0o755)
    (part / "closed").mkdir(parents=True)
    (part / "link").symlink_to(outside)
    (part / "closed").chmod(0o500)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # root enters and removes whatever the mode
        remove_tree(part)
        assert (_mode(part / "closed"), _mode(outside)) == (0o700, 0o755)
    remove_tree(part)
    assert not part.exists()
    assert outside.is_dir()
    remove_tree(part)  # what is not there is no error
