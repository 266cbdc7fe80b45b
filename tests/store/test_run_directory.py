import errno
import fcntl
import os
import signal
import stat
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from rllm.errors import ConfigError, RunInUseError, StorageError
from rllm.files import locks
from rllm.store.run_directory import RunDirectory, runs_under

HOLD = (
    "import sys\n"
    "from pathlib import Path\n"
    "from rllm.store.run_directory import RunDirectory\n"
    "run = RunDirectory.create_or_open(Path(sys.argv[1]))\n"
)


def test_a_second_writer_is_told_who_holds_the_run(tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        assert run.writer_pid == os.getpid()
        next_free = os.dup(0)
        os.close(next_free)
        with pytest.raises(RunInUseError, match=f"run .*process {os.getpid()}"):
            RunDirectory.create_or_open(tmp_path / "run")
        reused = os.dup(0)
        os.close(reused)
        assert reused == next_free, "no file is left open"
    assert run.writer_pid is None
    RunDirectory.create_or_open(tmp_path / "run").close()


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path, spawn) -> None:
    child = spawn(HOLD + "print('held', flush=True); sys.stdin.read()", tmp_path / "run")
    assert child.stdout.readline() == "held\n"
    with pytest.raises(RunInUseError, match=str(child.pid)):
        RunDirectory.create_or_open(tmp_path / "run")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        assert run.writer_pid == os.getpid()


def test_a_process_that_has_the_number_of_a_killed_writer_is_not_taken_for_it(tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        run.write_config({})
    (tmp_path / "run" / "lock").write_text(f"{os.getpid()}\n")  # as kill -9 leaves it; this process is alive
    assert RunDirectory.read(tmp_path / "run").writer_pid is None


def test_a_disk_without_locks_is_refused_to_a_writer_and_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        run.write_config({})
    (tmp_path / "run" / "lock").write_text("7\n")
    reader = RunDirectory.read(tmp_path / "run")

    def refuse(code: int) -> None:
        def lock(descriptor: int, operation: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "flock", lock)

    for code in (errno.ENOLCK, errno.ENOTSUP):
        refuse(code)
        with pytest.raises(ConfigError, match="without locks"):
            RunDirectory.create_or_open(tmp_path / "run")
        assert reader.writer_pid is None
    refuse(errno.EINTR)
    with pytest.raises(OSError, match=os.strerror(errno.EINTR)):
        reader.writer_pid  # noqa: B018  another error is no answer
    with pytest.raises((StorageError, OSError), match=os.strerror(errno.EINTR)):
        RunDirectory.create_or_open(tmp_path / "run")


def test_asking_who_writes_takes_nothing_from_the_writer(tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        run.write_config({})
        reader = RunDirectory.read(tmp_path / "run")
        assert [reader.writer_pid for _ in range(3)] == [os.getpid()] * 3
        with pytest.raises(RunInUseError):
            RunDirectory.create_or_open(tmp_path / "run")


def test_a_writer_waits_for_a_reader_that_is_just_asking(tmp_path: Path) -> None:
    RunDirectory.create_or_open(tmp_path / "run").close()
    with ThreadPoolExecutor(1) as thread:
        with (tmp_path / "run" / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            opening = thread.submit(RunDirectory.create_or_open, tmp_path / "run")
        opening.result().close()


def test_a_child_that_was_forked_while_a_reader_asked_turns_no_writer_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has a copy of the reader's file, and with it any lock that the reader has not let go of."""
    RunDirectory.create_or_open(tmp_path / "run").close()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "lock").write_text(f"{os.getpid()}\n")  # as kill -9 leaves it
    reader, copies, lock = RunDirectory.read(tmp_path / "run"), list[int](), fcntl.flock

    def lock_and_fork(descriptor: int, operation: int) -> None:
        lock(descriptor, operation)
        if operation & fcntl.LOCK_SH:
            copies.append(os.dup(descriptor))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", lock_and_fork)
        assert reader.writer_pid is None
    assert copies
    with (tmp_path / "run" / "lock").open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for each in copies:
        os.close(each)


@pytest.mark.parametrize("first", ["run.close()", "pass"])
def test_a_forked_worker_does_not_keep_the_lock_of_its_killed_writer(
    tmp_path: Path, spawn, first: str
) -> None:
    """Whether it closes what it has inherited or knows nothing of it."""
    child = spawn(
        HOLD + "import os, time\n"
        "worker = os.fork()\n"
        "if worker == 0:\n"
        f"    {first}\n"
        "    print('forked', os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "os.waitpid(worker, 0)\n",
        tmp_path / "run",
    )
    worker = int(child.stdout.readline().split()[1])
    with pytest.raises(RunInUseError):
        RunDirectory.create_or_open(tmp_path / "run")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    try:
        RunDirectory.create_or_open(tmp_path / "run").close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_run_in_progress_can_be_read(tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as writer:
        assert writer.config() == {}
        writer.write_config({"seed": 1})
        reader = RunDirectory.read(tmp_path / "run")
        assert reader.config() == {"seed": 1}
        assert (reader.metrics_path.name, reader.model_path.name) == ("metrics.jsonl", "model")
        assert reader.summary() is None
        assert reader.machines() == []
        writer.write_summary({"success": 0.5})
        assert reader.summary() == {"success": 0.5}
        with pytest.raises(ConfigError, match="opened for reading"):
            reader.write_summary({})


def test_of_many_runs_with_almost_that_name_three_are_named(tmp_path: Path) -> None:
    for number in range(6):
        with RunDirectory.create_or_open(tmp_path / f"lake-{number}") as run:
            run.write_config({})
    with pytest.raises(ConfigError) as refusal:
        RunDirectory.read(tmp_path / "lake-x")
    assert sum(f"lake-{number}" in str(refusal.value) for number in range(6)) == 3


def test_opening_clears_what_a_killed_writer_left_half_written(tmp_path: Path) -> None:
    RunDirectory.create_or_open(tmp_path / "run").close()
    (tmp_path / "run" / "checkpoints" / ".step-2.tmp-4711").mkdir(parents=True)
    (tmp_path / "run" / ".config.json.tmp-4711").touch()
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        assert list(run.checkpoints_path.iterdir()) == []
        assert [each.name for each in run.path.iterdir() if each.name.startswith(".")] == []


def test_a_directory_of_something_else_is_not_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex.*--output"):
        RunDirectory.create_or_open(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        RunDirectory.create_or_open(tmp_path / "thesis.tex")
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


def test_reading_what_is_no_run_names_what_is_missing_and_what_was_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exist.*no runs"):
        RunDirectory.read(tmp_path / "lake-1")
    with RunDirectory.create_or_open(tmp_path / "lake-2") as run:
        run.write_config({})
    with pytest.raises(ConfigError, match=r"mean .*lake-2\?"):
        RunDirectory.read(tmp_path / "lake-1")
    with pytest.raises(ConfigError, match="first: lake-2"):
        RunDirectory.read(tmp_path / "zzzzzzzz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no `config\.json`"):
        RunDirectory.read(tmp_path / "empty")


def test_broken_json_in_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"seed"')
    with pytest.raises(ConfigError, match=r"config\.json .*JSON"):
        RunDirectory.read(tmp_path).config()


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    for age_s, name in enumerate(["new", "middle", "old"]):
        with RunDirectory.create_or_open(tmp_path / name) as run:
            run.write_config({})
        os.utime(run.config_path, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "no run").mkdir()
    (tmp_path / "link to nothing").symlink_to("nothing")
    (tmp_path / "circle").symlink_to("circle")
    assert [run.name for run in runs_under(tmp_path)] == ["new", "middle", "old"]
    assert runs_under(tmp_path / "absent") == []


def test_what_a_run_keeps_has_a_place_of_its_own_in_its_directory(tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        pass
    names = [name for name in dir(RunDirectory) if name.endswith("_path")]
    places = {getattr(run, name) for name in names}
    assert len(places) == len(names) >= 5
    assert {each.parent for each in places} == {tmp_path / "run"}


def test_a_run_that_is_refused_leaves_no_directory_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refused"), RunDirectory.create_or_open(tmp_path / "runs" / "a"):
        raise ConfigError("refused")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "b").mkdir()

    def refuse(run: RunDirectory) -> None:
        (run.path / "samples" / "first").mkdir(parents=True)
        raise ConfigError("refused")

    with pytest.raises(ConfigError, match="refused"), RunDirectory.create_or_open(tmp_path / "runs/a") as run:
        refuse(run)
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["b"]


@pytest.mark.parametrize("place", ["notes/run", "runs/deep/" + "x" * 300])
def test_a_place_where_no_directory_can_be_is_refused_and_nothing_is_left(tmp_path: Path, place: str) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match=r"--output|is a file"):
        RunDirectory.create_or_open(tmp_path / place)
    assert [each.name for each in tmp_path.iterdir()] == ["notes"]


def test_only_the_owner_may_look_into_a_run(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for path in (tmp_path / "new", tmp_path / "empty"):
            if path.name == "empty":
                path.mkdir()
            RunDirectory.create_or_open(path).close()
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        path.chmod(0o750)  # the owner may open it to others
        RunDirectory.create_or_open(path).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o750
    finally:
        os.umask(before)


def test_a_run_without_its_config_is_not_cleared_away_when_it_is_refused(tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        run.write_config({"seed": 1})
        run.checkpoints_path.mkdir()
    run.config_path.unlink()
    with pytest.raises(ConfigError, match="refused"), RunDirectory.create_or_open(tmp_path / "run"):
        raise ConfigError("refused")
    assert run.checkpoints_path.is_dir()


def test_a_place_that_the_system_keeps_from_everybody_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an immutable directory does, where even root gets EPERM."""
    (tmp_path / "run").mkdir()

    def refuse(path: Path, *args: Any, **options: Any) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"run .*\(Operation not permitted\): .*lsattr"):
        RunDirectory.create_or_open(tmp_path / "run")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that everybody may look into."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def _somebody_else(run: Path) -> Iterator[None]:
    """Root becomes another user; who is not root closes the run to everybody, which is the same to them."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    else:
        run.chmod(0o000)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        else:
            run.chmod(0o700)


def test_a_run_of_somebody_else_is_closed_in_a_sentence_and_hides_no_other(shared: Path) -> None:
    for name in ("closed", "open"):
        with RunDirectory.create_or_open(shared / name) as run:
            run.write_config({"seed": 1})
    (shared / "open").chmod(0o755)
    with _somebody_else(shared / "closed"):
        readable, closed = runs_under(shared)
        assert readable.config() == {"seed": 1}
        assert closed.name == "closed"
        for look in (closed.config, lambda: RunDirectory.read(shared / "closed")):
            with pytest.raises(ConfigError, match=r"closed .*\(Permission denied\)"):
                look()
        with pytest.raises(ConfigError, match="Runs beside it"):
            RunDirectory.read(shared / "zzz")
        with pytest.raises(StorageError, match="Permission denied"):
            RunDirectory.create_or_open(shared / "closed")


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_new_run_and_its_lock_are_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with RunDirectory.create_or_open(tmp_path / "runs" / "a") as run:
            assert [stat.S_IMODE(path.stat().st_mode) for path in (run.path, run.lock_path)] == [0o700, 0o600]
    finally:
        os.umask(before)


def test_a_run_is_closed_twice_and_every_file_of_it_is_let_go(tmp_path: Path) -> None:
    before = _num_open_files()
    run = RunDirectory.create_or_open(tmp_path / "run")
    assert run.writer_pid == os.getpid()
    with pytest.raises(RunInUseError):
        RunDirectory.create_or_open(tmp_path / "run")
    assert _num_open_files() == before + 1
    run.close()
    run.close()
    assert (run.writer_pid, run.lost_writer_pid) == (None, None)
    assert _num_open_files() == before


def test_the_number_of_a_lost_writer_is_forgotten_by_the_next(tmp_path: Path) -> None:
    RunDirectory.create_or_open(tmp_path / "run").close()
    (tmp_path / "run" / "lock").write_text("98765432109876543210\n")  # as kill -9 leaves it
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        assert (run.writer_pid, run.lost_writer_pid) == (os.getpid(), None)
        run.write_config({})
    (tmp_path / "run" / "lock").write_text("7\n")
    reader = RunDirectory.read(tmp_path / "run")
    assert (reader.writer_pid, reader.lost_writer_pid) == (None, 7)
    (tmp_path / "run" / "lock").unlink()
    assert (reader.writer_pid, reader.lost_writer_pid) == (None, None)


def test_a_fork_closes_no_file_that_has_the_number_of_a_lock_let_go(tmp_path: Path) -> None:
    RunDirectory.create_or_open(tmp_path / "run").close()
    with RunDirectory.create_or_open(tmp_path / "run") as run, (tmp_path / "other").open("w") as other:
        held = run._lock_descriptor
        assert held is not None
        run.close()
        os.dup2(other.fileno(), held)
        assert _in_a_fork(lambda: os.fstat(held))
        os.close(held)
        with RunDirectory.create_or_open(tmp_path / "run") as again:
            held = again._lock_descriptor
            assert held is not None
            assert not _in_a_fork(lambda: os.fstat(held)), "a writer's lock is not inherited"


def _in_a_fork(look: Callable[[], object]) -> bool:
    """Whether it does not raise in a child of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which this child does not wait for
        child = os.fork()
    if child == 0:
        try:
            look()
        except BaseException:  # noqa: BLE001  the child ends here
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_writers_that_wait_for_a_reader_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one of them waits, it holds nothing that another would be refused by."""
    RunDirectory.create_or_open(tmp_path / "run").close()
    lock, reader = tmp_path / "run" / "lock", open(tmp_path / "run" / "lock")  # noqa: SIM115
    fcntl.flock(reader, fcntl.LOCK_SH)
    slept: list[float] = []

    def sleep(duration_s: float) -> None:
        slept.append(duration_s)
        reader.close()
        with lock.open() as another:
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(locks, "time", SimpleNamespace(sleep=sleep))  # of this file alone
    RunDirectory.create_or_open(tmp_path / "run").close()
    assert slept == [0.001]


def test_a_model_is_no_run_and_none_is_written_into_it(tmp_path: Path) -> None:
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    for door in (RunDirectory.read, RunDirectory.create_or_open):
        with pytest.raises(ConfigError, match=r"model directory|something else"):
            door(model)
    assert runs_under(tmp_path) == []
    assert [each.name for each in model.iterdir()] == ["config.json"]


def test_a_reader_that_fails_takes_nothing_away(tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        run.write_config({})
    reader = RunDirectory.read(tmp_path / "run")
    reader.config_path.unlink()
    with pytest.raises(ZeroDivisionError), reader:
        raise ZeroDivisionError
    assert reader.lock_path.exists()


def test_what_is_no_number_is_not_written_into_a_run(tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        run.write_summary({"success": 0.5})
        with pytest.raises(ValueError, match="JSON"):
            run.write_summary({"success": float("nan")})
        assert run.summary() == {"success": 0.5}
