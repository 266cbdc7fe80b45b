"""A machine that is full, interrupted or without memory, at each call on the way from an agent's work to its
reward: the work is paid, or the episode is an infrastructure failure. It is never worth 0.
"""

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from rllm.data.swe_repository import PLACE
from rllm.data.swe_rows import SWETask
from rllm.engine.failures import is_infrastructure
from rllm.errors import RewardError, SandboxError
from rllm.rewards.swe_grading import grade_patch
from rllm.rewards.swe_world import SWEWorld, patch_of
from rllm.rewards.task_tests import RESULTS, task_reward
from rllm.sandbox import Limits, Root, Sandbox, open_sandbox
from rllm.sandbox.bundle import MODULES
from rllm.sandbox.verifier import Examination

sys.path.insert(0, str(Path(__file__).parent))
from machine_faults import (
    DEATH,
    ERRNOS,
    HERE,
    TESTS_PROGRAM,
    Point,
    fault_here,
    fault_in_tests_program,
    fault_inside,
    points_of,
)
from swe_projects import LIMITS as SWE_LIMITS
from swe_projects import repository, row, usable_backend

LIMITS = Limits(wall_s=20, cpu_s=20, memory_mb=256, disk_mb=32, processes=64)
SEED = 50
WORK = (
    "cd /app; mkdir -p new/deep; echo right > answer; echo more > new/deep/file; ln -s deep new/link; "
    "rm -r old; chmod 700 new"
)
TEST = (
    "grep -q right /app/answer && grep -q more /app/new/link/file && [ ! -e /app/old ] && score=1; "
    "echo ${score:-0} > /logs/verifier/reward.txt"
)
FILE_JOBS = ("snapshot", "changes")
SYSTEM_CALLS = (
    *("openat", "read", "write", "close", "pipe2", "socketpair", "memfd_create", "sendmsg", "sendto"),
    *("recvmsg", "poll", "fcntl", "mkdir", "unlink", "getdents64", "newfstatat"),
)


@pytest.fixture(scope="module")
def examination(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    folder = tmp_path_factory.mktemp("task")
    (folder / "layer/app/old").mkdir(parents=True)
    (folder / "layer/app/old/file").write_text("old\n")
    (folder / "tests").mkdir()
    (folder / "tests/test.sh").write_text(TEST)
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    return Examination(
        backend=usable_backend(),
        tests=folder / "tests",
        workdir="/app",
        folders=("/app",),
        limits=LIMITS,
        layers=(str(folder / "layer"),),
        prepare=lambda sandbox, brings: None,
        results=RESULTS,
    )


def opened(examination: Examination) -> Sandbox:
    root = Root(layers=examination.layers, folders=("/app", "/logs/verifier"))
    sandbox = open_sandbox(examination.backend, limits=LIMITS, root=root)
    assert sandbox.exec(WORK).exit_code == 0
    return sandbox


class Agent:
    """An agent's world in which the work is done; another one where a fault has ended it."""

    def __init__(self, examination: Examination) -> None:
        self._examination = examination
        self._sandbox = opened(examination)

    @property
    def sandbox(self) -> Sandbox:
        if not self._sandbox.is_alive:
            self._sandbox.close()
            self._sandbox = opened(self._examination)
        return self._sandbox


@pytest.fixture(scope="module")
def agent(examination: Examination) -> Iterator[Agent]:
    made = Agent(examination)
    yield made
    made.sandbox.close()


@dataclass(frozen=True)
class Fault:
    """A point, an errno, and for how long the machine is in that state."""

    point: Point
    number: int
    is_for_good: bool
    is_agents: bool = False
    """Whether it is inside the agent's world, from the snapshot on, and not inside those of the tests."""

    def __str__(self) -> str:
        what = errno.errorcode.get(self.number, "death")
        where = "of the agent" if self.is_agents else ""
        return (
            f"{self.point.key} {self.point.call} {what} {'for good' if self.is_for_good else 'once'} {where}"
        )


def faults_here() -> list[Fault]:
    points = [point for module in HERE for point in points_of(module)]
    return [Fault(*each) for each in product(points, ERRNOS, (False, True))]


def faults_inside() -> list[Fault]:
    points = [point for module in MODULES for point in points_of(module)]
    numbers = (*ERRNOS, DEATH)
    tests = [Fault(*each) for each in product(points, numbers, (False, True))]
    return tests + [Fault(*each, is_for_good=True, is_agents=True) for each in product(points, numbers)]


def faults_of_hidden_tests() -> list[Fault]:
    return [Fault(*each) for each in product(points_of(TESTS_PROGRAM), (*ERRNOS, DEATH), (False, True))]


def sample(faults: list[Fault], count: int) -> list[Fault]:
    return random.Random(SEED).sample(faults, count)


def end_of(agent: Sandbox, examination: Examination, *, is_for_good: bool = False) -> str:
    """ "paid", "failed", or what is wrong with how honest work ended.

    Tests that for good do not even run on the task as it was given are the task's fault: not tried again.
    """
    try:
        reward = task_reward(agent, examination, where="the task", solve=lambda: None)
    except Exception as error:  # noqa: BLE001  all that an environment raises is an infrastructure failure
        is_fine = is_infrastructure(error) or (is_for_good and isinstance(error, RewardError))
        return "failed" if is_fine else f"not tried again: {type(error).__name__}: {error}"
    return "paid" if reward.rewards == {"reward": 1.0} else f"worth nothing: {reward}"


def end_with(fault: Fault, agent: Agent, examination: Examination) -> str:
    sandbox = agent.sandbox
    worlds = None if fault.is_for_good else 1
    if fault.point.module in HERE:
        with fault_here(fault.point, fault.number, times=worlds):
            return end_of(sandbox, examination, is_for_good=fault.is_for_good)
    if not fault.is_agents:
        with fault_inside(fault.point, fault.number, worlds=worlds):
            return end_of(sandbox, examination, is_for_good=fault.is_for_good)
    try:
        with fault_inside(fault.point, fault.number, jobs=FILE_JOBS):
            own = opened(examination)
    except SandboxError:
        return "failed"
    with own:
        return end_of(own, examination)


def unfair_ends(faults: list[Fault], agent: Agent, examination: Examination) -> list[str]:
    ends = {str(fault): end_with(fault, agent, examination) for fault in faults}
    print(Counter(ends.values()))
    return [f"{fault}: {end}" for fault, end in ends.items() if end not in ("paid", "failed")]


def test_a_machine_in_trouble_never_costs_honest_work_its_reward(
    agent: Agent, examination: Examination
) -> None:
    assert end_of(agent.sandbox, examination) == "paid"
    assert unfair_ends(sample([*faults_here(), *faults_inside()], 40), agent, examination) == []


# A fault where something is closed leaves it open, which Python says when it finds it.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("module", [*HERE, *MODULES])
def test_trouble_at_any_call_never_costs_honest_work_its_reward(
    agent: Agent, examination: Examination, module: str
) -> None:
    faults = [fault for fault in [*faults_here(), *faults_inside()] if fault.point.module == module]
    assert unfair_ends(faults, agent, examination) == []


def end_under_strace(agent: Agent, examination: Examination, injection: str) -> str:
    """The end while system calls of the thread that asks for the reward fail."""
    sandbox, start, ends = agent.sandbox, threading.Event(), list[str]()

    def work() -> None:
        start.wait()
        ends.append(end_of(sandbox, examination))

    thread = threading.Thread(target=work)
    thread.start()
    command = ["strace", "-qq", "-o", os.devnull, "-e", f"inject={injection}", "-p", str(thread.native_id)]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        status = Path(f"/proc/self/task/{thread.native_id}/status")
        while "TracerPid:\t0\n" in status.read_text():
            if tracer.poll() is not None:
                pytest.skip("strace may not attach to other processes here")
            time.sleep(0.01)
    finally:
        start.set()
        thread.join()
        tracer.terminate()
        tracer.wait()
    return ends[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_trouble_at_any_system_call_never_costs_honest_work_its_reward(
    agent: Agent, examination: Examination
) -> None:
    ends: dict[str, str] = {}
    for call, number, when in product(SYSTEM_CALLS, ERRNOS, (1, 2, 5, 20)):
        injection = f"{call}:error={errno.errorcode[number]}:when={when}"
        ends[injection] = end_under_strace(agent, examination, injection)
    print(Counter(ends.values()))
    assert [each for each in ends.items() if each[1] not in ("paid", "failed")] == []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SWEWorld]:
    source, commit = repository(tmp_path_factory.mktemp("source"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLLM_HOME", str(tmp_path_factory.mktemp("home")))
        task = SWETask.from_row(row(source, base_commit=commit))
        yield SWEWorld.of(task, backend=usable_backend(), limits=SWE_LIMITS)


@pytest.fixture(scope="module")
def patch(world: SWEWorld) -> str:
    with world.open() as sandbox:
        assert sandbox.exec("sed -i s/a.-.b/a+b/ calc/__init__.py; echo > new", cwd=PLACE).exit_code == 0
        return patch_of(sandbox, world)


def end_of_patch(world: SWEWorld, patch: str, fault: Fault) -> str:
    try:
        with fault_in_tests_program(fault.point, fault.number, worlds=None if fault.is_for_good else 1):
            grade = grade_patch(world, patch, timeout_s=60)
    except SandboxError:
        return "failed"
    except RewardError as error:  # the tests do not run on the row's own solution either
        return "failed" if fault.is_for_good else f"not tried again: {error}"
    return "paid" if grade.score == 1.0 else f"worth nothing: {grade.reason}"


def test_a_patch_is_never_blamed_for_trouble_where_its_tests_run(world: SWEWorld, patch: str) -> None:
    faults = sample(faults_of_hidden_tests(), 8)
    ends = {str(fault): end_of_patch(world, patch, fault) for fault in faults}
    assert [each for each in ends.items() if each[1] not in ("paid", "failed")] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [*ERRNOS, DEATH])
def test_a_patch_is_never_blamed_for_trouble_at_any_call_where_its_tests_run(
    world: SWEWorld, patch: str, number: int
) -> None:
    faults = [fault for fault in faults_of_hidden_tests() if fault.number == number]
    ends = {str(fault): end_of_patch(world, patch, fault) for fault in faults}
    assert [each for each in ends.items() if each[1] not in ("paid", "failed")] == []
