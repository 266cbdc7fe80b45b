"""Whatever ends the owner, its sandboxes end too."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.sandbox import PythonRunner, open_sandbox
from rllm.sandbox.inside.cellmates import members
from rllm.sandbox.leftovers import reap, started_at, state_folder

PATIENCE_S = 60.0
"""For what must happen, on a machine that does other things too."""
OWNER = """
import sys, threading
from rllm.sandbox import Limits, PythonRunner, open_sandbox
backend, count = sys.argv[1], int(sys.argv[2])
boxes = [open_sandbox(backend) for _ in range(count)]
runner = PythonRunner(backend, workers=1)
limits = Limits(wall_s=600)
work = [lambda box=box: box.exec("setsid sleep 600 & sleep 600", limits=limits) for box in boxes]
work.append(lambda: runner.run("import subprocess; subprocess.run(['sleep', '600'])", limits=limits))
for job in work:
    threading.Thread(target=job, daemon=True).start()
threading.Event().wait()
"""


def _owner(backend: str, count: int) -> "tuple[subprocess.Popen[str], dict[int, str]]":
    """Its process and those below it, once each sandbox runs two commands and the runner one."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, backend, str(count)], text=True)
    while sum(map(_is_sleep, processes := _descendants(owner.pid))) < 2 * count + 1:
        assert owner.poll() is None, "it ended by itself"
        time.sleep(0.05)
    return owner, processes


def _descendants(pid: int) -> dict[int, str]:
    return {child: started_at(child) for child in members(True, pid)}


def _is_sleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _left_of(processes: dict[int, str]) -> list[int]:
    return [pid for pid, started in processes.items() if started_at(pid) == started and not _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:4]
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait_until_gone(processes: dict[int, str]) -> list[int]:
    deadline_s = time.monotonic() + PATIENCE_S
    while _left_of(processes) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return _left_of(processes)


def _folders_of(pid: int) -> list[Path]:
    return list(state_folder().glob(f"owner-{pid}-*"))


@pytest.mark.parametrize(("backend", "count"), [("bubblewrap", 20), ("unshare", 4), ("subprocess", 4)])
def test_twenty_sandboxes_end_with_an_owner_that_is_killed(
    backend: str, count: int, need: Callable[[str], str]
) -> None:
    owner, processes = _owner(need(backend), count)
    owner.kill()
    owner.communicate()
    assert _wait_until_gone(processes) == []
    reap()
    assert _folders_of(owner.pid) == []


def test_the_next_owner_ends_what_was_stopped_and_removes_its_files(need: Callable[[str], str]) -> None:
    owner, processes = _owner(need("subprocess"), 1)
    wardens = [int(path.name.split("-")[1]) for path in _folders_of(owner.pid)[0].glob("warden-*")]
    for pid in wardens:
        os.kill(pid, signal.SIGSTOP)
    owner.kill()
    owner.communicate()
    assert set(_left_of(processes)) >= set(wardens)
    assert reap() >= len(wardens)
    assert _wait_until_gone({pid: processes[pid] for pid in wardens}) == []
    assert _folders_of(owner.pid) == []


def test_the_living_are_not_reaped(need: Callable[[str], str]) -> None:
    with open_sandbox(need("subprocess")) as sandbox:
        sandbox.write("file", "here")
        reap()
        assert sandbox.read("file") == b"here"


@pytest.mark.parametrize("backend", ["bubblewrap", "unshare", "subprocess"])
def test_many_runs_leave_nothing(backend: str, need: Callable[[str], str]) -> None:
    before = members(True, os.getpid())
    mounts = Path("/proc/self/mountinfo").read_text()
    descriptors = len(os.listdir("/proc/self/fd"))
    with PythonRunner(need(backend), workers=2) as runner:
        for n in range(60):
            assert runner.run(f"print({n})").stdout == f"{n}\n"
    assert [pid for pid in members(True, os.getpid()) if pid not in before] == []
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # the register of this process stays open
