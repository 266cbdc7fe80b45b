"""Whatever a function does, its caller has an answer in time, and nothing of it is left."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rllm.errors import ConfigError, RewardError
from rllm.rewards.workers import WorkerPool, WorkerStatus, shared_pool

HERE = Path(__file__).parent
LIMIT_S = 1.0
"""For what must not answer; around it the worker is asked what it answers at once."""
PATIENCE_S = 20.0
"""For what must happen, on a machine that does other things too."""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    yield from _pool(monkeypatch, PATIENCE_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    yield from _pool(monkeypatch, LIMIT_S)


def _pool(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> Iterator[WorkerPool]:
    monkeypatch.syspath_prepend(str(HERE))
    made = WorkerPool("misbehaving:do", workers=1, timeout_s=timeout_s)
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    """A zombie of ours counts: nobody has taken its exit code. One of init's, which is slow, does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return fields[0] != "Z" or int(fields[1]) == os.getpid()


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_call_gives_what_the_function_returns(pool: WorkerPool) -> None:
    value = {
        "numbers": [1, 2.5, None, True],
        "text": "π \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    }
    reply = pool.call("echo", value)
    assert (reply.status, reply.value) == (WorkerStatus.OK, value)


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("spin", WorkerStatus.TIMEOUT),
        ("spin_in_c", WorkerStatus.TIMEOUT),
        ("ignore_signals", WorkerStatus.TIMEOUT),
        ("divide", WorkerStatus.RAISED),
        ("leave", WorkerStatus.RAISED),
        ("recurse", WorkerStatus.RAISED),
        ("eat_memory", WorkerStatus.RAISED),
        ("vanish", WorkerStatus.CRASHED),
        ("kill_itself", WorkerStatus.CRASHED),
        ("an_object", WorkerStatus.JUNK),
        ("not_a_number", WorkerStatus.JUNK),
        ("flood", WorkerStatus.JUNK),
        ("write_to_all_descriptors", WorkerStatus.JUNK),
        ("print_a_lot", WorkerStatus.OK),
        ("no_such_function", WorkerStatus.RAISED),
    ],
)
def test_every_way_not_to_answer_has_a_status_and_the_next_call_is_served(
    request: pytest.FixtureRequest, what: str, status: WorkerStatus
) -> None:
    pool = request.getfixturevalue("impatient" if status is WorkerStatus.TIMEOUT else "pool")
    before = pool.call("process_id").value
    assert pool.call(what).status is status
    assert pool.call("echo", what).value == what
    replaced = pool.call("process_id").value != before
    kept = what != "write_to_all_descriptors" and status not in (WorkerStatus.TIMEOUT, WorkerStatus.CRASHED)
    assert replaced is not kept
    assert replaced is not is_alive(before), "a worker that was replaced is gone, and no zombie"


def test_a_child_that_is_forked_off_neither_answers_nor_stays(pool: WorkerPool, tmp_path: Path) -> None:
    reply = pool.call("fork", str(tmp_path / "pid"))
    assert reply.value == "parent"
    assert pool.call("echo", 1).value == 1, "the child did not answer this call"
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_a_program_that_was_left_running_ends_with_its_worker(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.call("start_a_program", str(tmp_path / "pid")).value == "started"
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
    assert pool.call("echo", 1).value == 1


def test_what_the_processor_gave_a_call_that_timed_out_is_told(impatient: WorkerPool) -> None:
    slept = impatient.call("sleep", 60)
    assert slept.status is WorkerStatus.TIMEOUT
    assert slept.cpu_s is not None
    assert slept.cpu_s < LIMIT_S / 2


def test_many_threads_share_the_workers_and_each_has_its_own_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    pool = WorkerPool("misbehaving:do", workers=2, timeout_s=PATIENCE_S)
    asked = [("echo", number) if number % 7 else ("vanish",) for number in range(140)]
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda args: pool.call(*args), asked))
    pool.close()
    assert [reply.value for reply in replies] == [number if number % 7 else None for number in range(140)]


async def test_from_asyncio_a_hang_is_waited_for_in_a_thread_and_the_loop_goes_on(
    impatient: WorkerPool,
) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    await asyncio.to_thread(impatient.call, "echo", 1)
    counting = asyncio.create_task(count())
    reply = await asyncio.to_thread(impatient.call, "spin_in_c")
    counting.cancel()
    assert reply.status is WorkerStatus.TIMEOUT
    assert turns > 10


def test_close_ends_the_workers_in_the_middle_of_a_call(pool: WorkerPool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    errors: list[RewardError] = []

    def call() -> None:
        try:
            pool.call("sleep", 60, str(note))
        except RewardError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert wait_until(lambda: note.exists() and note.read_text() != "")
    pool.close()
    caller.join(PATIENCE_S)
    assert "of a call" in str(errors[0])
    assert not is_alive(int(note.read_text()))
    pool.close()
    with pytest.raises(RewardError, match="were closed"):
        pool.call("echo", 1)


@pytest.mark.parametrize("busy", ["sleep", "nothing", "spin_in_c"])
def test_workers_do_not_outlive_an_owner_that_is_killed(busy: str, tmp_path: Path) -> None:
    program = tmp_path / "owner.py"
    program.write_text(
        "import sys, threading, time\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from rllm.rewards.workers import WorkerPool\n"
        "pool = WorkerPool('misbehaving:do', workers=1, timeout_s=600)\n"
        "print(pool.call('process_id').value, flush=True)\n"
        "call = {'sleep': ('sleep', 600), 'spin_in_c': ('spin_in_c',), 'nothing': ('echo', 1)}[sys.argv[1]]\n"
        "threading.Thread(target=pool.call, args=call).start()\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, str(program), busy], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    worker = int(owner.stdout.readline())
    time.sleep(0.1)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert wait_until(lambda: not is_alive(worker))


def test_a_process_that_is_forked_off_gets_workers_of_its_own(pool: WorkerPool, tmp_path: Path) -> None:
    program = tmp_path / "forking.py"
    program.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from rllm.rewards.workers import WorkerPool\n"
        "pool = WorkerPool('misbehaving:do', workers=1, timeout_s=10)\n"
        "first = pool.call('process_id').value\n"
        "if (child := os.fork()) == 0:\n"
        "    assert pool.call('process_id').value != first\n"
        "    os._exit(42)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42\n"
        "assert pool.call('process_id').value == first\n"
        "assert pool.call('number_of_calls').value == 3\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_function_that_is_not_there_is_no_answer_but_an_error() -> None:
    for name in ("rllm.no_such_module:check", "rllm.errors:no_such_function"):
        pool = WorkerPool(name, workers=1)
        with pytest.raises(RewardError, match="did not start"):
            pool.call(1)
        pool.close()


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in ({"workers": 0}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"memory_mb": 1}):
        with pytest.raises(ConfigError):
            WorkerPool("misbehaving:do", **wrong)  # pyright: ignore[reportArgumentType]


def test_an_owner_with_a_thousand_open_files_has_workers(pool: WorkerPool) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("this process may not open so many")
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert pool.call("echo", 5).value == 5
    finally:
        for each in files:
            os.close(each)


def test_a_shared_pool_is_the_same_for_everybody_with_the_same_settings() -> None:
    assert shared_pool("misbehaving:do", timeout_s=3.0) is shared_pool("misbehaving:do", timeout_s=3.0)
    assert shared_pool("misbehaving:do", timeout_s=3.0) is not shared_pool("misbehaving:do", timeout_s=4.0)


def test_secrets_of_the_caller_are_not_in_the_workers(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "OPENAI_API_KEY" not in pool.call("names_in_the_environment").value


def test_loading_is_no_part_of_the_limit_and_begins_before_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tmp_path / "loaded"
    (tmp_path / "slow_to_load.py").write_text(
        f"import os, time\ntime.sleep({1.5 * LIMIT_S})\nopen({str(loaded)!r}, 'a').write(str(os.getpid()))\n"
        "def do():\n    return os.getpid()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool("slow_to_load:do", workers=1, timeout_s=LIMIT_S)
    pool.warm()
    pool.warm()
    assert wait_until(loaded.exists), "it loads before anybody calls"
    reply = pool.call()
    pool.close()
    assert (reply.status, loaded.read_text()) == (WorkerStatus.OK, str(reply.value)), "once"
    cold = WorkerPool("slow_to_load:do", workers=1, timeout_s=LIMIT_S)
    assert cold.call().status is WorkerStatus.OK
    cold.close()
