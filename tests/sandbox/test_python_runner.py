"""Python programs in warm sandboxes: as a script would run, each as if it were the first."""

import asyncio
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox import Limits, PythonRunner, Status, shared_runner

SMALL = Limits(wall_s=10, cpu_s=8, memory_mb=128, output_kb=64, disk_mb=8, processes=16)
"""As the sandboxes of conftest.py have it."""


def test_a_program_runs_as_a_script_does(runner: PythonRunner) -> None:
    ended = runner.run(
        "import sys, helper\n"
        "if __name__ == '__main__':\n"
        "    print(helper.twice(int(input())), sys.argv[0].endswith('main.py'), open('data/x').read())\n",
        stdin="21",
        files={"helper.py": "def twice(n):\n    return 2 * n\n", "data/x": "ä"},
    )
    assert (ended.status, ended.stdout) == (Status.OK, "42 True ä\n")


def test_an_exception_ends_in_a_traceback_of_the_program_alone(runner: PythonRunner) -> None:
    ended = runner.run("def f():\n    return 1 / 0\nf()\n")
    assert (ended.status, ended.exit_code) == (Status.ERROR, 1)
    assert "return 1 / 0" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr
    assert "rllm" not in ended.stderr.replace("rllm-sandboxes", "")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("raise SystemExit", 0),
        ("def broken(:", 1),
        ("import os; os._exit(0)", 0),
        ("import sys; sys.exit(256)", 0),
        ("\0", 1),
    ],
)
def test_exit_codes_are_those_of_an_interpreter(runner: PythonRunner, source: str, code: int) -> None:
    assert runner.run(source).exit_code == code


def test_threads_and_exit_handlers_finish_before_the_end(runner: PythonRunner) -> None:
    ended = runner.run(
        "import atexit, threading, time\n"
        "atexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "print('main')\n"
    )
    assert ended.stdout == "main\nthread\nhandler\n"


def test_a_result_comes_out_beside_stdout(runner: PythonRunner) -> None:
    source = "import os\nprint('noise')\nos.write(int(os.environ['RLLM_RESULT_FD']), b'[1, 2]')\n"
    assert runner.run(source, wants_result=True).result == "[1, 2]"
    assert runner.run(source).status is Status.ERROR
    assert runner.run("import os; os._exit(0)", wants_result=True).result is None


def test_a_program_holds_nothing_on_which_it_could_report_for_itself(runner: PythonRunner) -> None:
    ended = runner.run(
        "import os\n"
        "for fd in range(3, 300):\n"
        '    try: os.write(fd, b\'{"status": 0, "cpu_s": 0, "max_rss_kb": 0}\\n\')\n'
        "    except OSError: pass\n"
        "    else: print('wrote on', fd)\n"
        "os._exit(5)\n"
    )
    assert (ended.status, ended.exit_code, ended.stdout) == (Status.ERROR, 5, "")


def test_a_result_that_never_ends_is_the_output_limit(runner: PythonRunner) -> None:
    ended = runner.run("import os\nwhile True: os.write(3, b'x' * 4096)", wants_result=True)
    assert (ended.status, ended.truncated) == (Status.OUTPUT_LIMIT, True)


def test_nothing_is_left_for_the_next_program(runner: PythonRunner) -> None:
    runner.run(
        "import builtins, json, os, sys\n"
        "json.loads = lambda text: 'patched'\n"
        "builtins.print = None\n"
        "sys.modules['math'] = None\n"
        "os.environ['NOTE'] = 'note'\n"
        "open('note', 'w').write('note'); open(os.environ['TMPDIR'] + '/note', 'w').write('note')\n"
    )
    ended = runner.run(
        "import json, math, os\n"
        "print(json.loads('[1]'), math.pi > 3, os.environ.get('NOTE'), os.listdir('.'),\n"
        "      os.listdir(os.environ['TMPDIR']))\n"
    )
    assert ended.stdout == "[1] True None ['main.py'] []\n"


def test_the_warden_has_not_read_what_earlier_programs_were(runner: PythonRunner) -> None:
    secret = "needle" * 3
    runner.run(f"text = '{secret}'; print(text, file=__import__('sys').stderr); print(text)", stdin=secret)
    ended = runner.run(
        "import re\n"
        "needle, found = re.compile(b'(?:nee[d]le){3}'), 0\n"
        "for line in open('/proc/self/maps'):\n"
        "    begin, end = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "    if ' rw' in line and end - begin < 1 << 26:\n"
        "        with open('/proc/self/mem', 'rb', 0) as memory:\n"
        "            memory.seek(begin)\n"
        "            found += needle.search(memory.read(end - begin)) is not None\n"
        "print('found', found)\n"
    )
    assert ended.stdout == "found 0\n", ended.stderr


def test_sets_have_one_order_and_draws_differ(runner: PythonRunner) -> None:
    ordered = {runner.run("print(list({'a', 'b', 'c', 'd', 'e'}))").stdout for _ in range(3)}
    assert len(ordered) == 1
    drawn = {runner.run("import random; print(random.random())").stdout for _ in range(3)}
    assert len(drawn) == 3


def test_the_version_is_that_of_the_programs(runner: PythonRunner) -> None:
    said = runner.run(
        "import sys; print(sys.version.split()[0]); print([p for p in sys.path if 'site' in p])"
    )
    assert said.stdout == f"{runner.version}\n[]\n"


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("while True: pass", Status.TIMEOUT),
        ("import time; time.sleep(60)", Status.TIMEOUT),
        ("held = []\nwhile True: held.append(bytearray(10**6))", Status.OUT_OF_MEMORY),
        ("bytes(10**12)", Status.OUT_OF_MEMORY),
        ("while True: print('x' * 999)", Status.OUTPUT_LIMIT),
        ("import os; os.kill(os.getpid(), 9)", Status.KILLED),
        ("import os; os.abort()", Status.CRASHED),
        ("import ctypes; ctypes.string_at(0)", Status.CRASHED),
        ("raise ValueError", Status.ERROR),
        ("", Status.OK),
    ],
)
def test_every_status_can_be_reached(runner: PythonRunner, source: str, status: Status) -> None:
    seconds = 0.7 if status is Status.TIMEOUT else 20
    limits = Limits(wall_s=seconds, cpu_s=seconds, memory_mb=128, output_kb=64, disk_mb=8, processes=16)
    assert runner.run(source, limits=limits).status is status


def test_memory_is_counted_over_all_processes(runner: PythonRunner) -> None:
    ended = runner.run(
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(os.urandom(1)) * (60 << 20)\n"
        "        time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    assert (ended.status, ended.exit_code) == (Status.OUT_OF_MEMORY, None)


def test_processor_time_is_counted_over_all_processes(runner: PythonRunner) -> None:
    ended = runner.run(
        "import os\nfor _ in range(3): os.fork()\nwhile True: pass",
        limits=Limits(wall_s=60, cpu_s=1, memory_mb=256, processes=16),
    )
    assert ended.status is Status.TIMEOUT
    assert ended.wall_s < 50


def test_a_disk_limit_may_differ_from_run_to_run(runner: PythonRunner) -> None:
    source = "open('big', 'wb').write(bytes(20 << 20))"
    assert runner.run(source).status is Status.ERROR
    assert runner.run(source, limits=Limits(disk_mb=32)).status is Status.OK


def test_files_outside_are_refused_before_anything_runs(runner: PythonRunner) -> None:
    for path in ("/etc/x", "../x", "a/../../x", "x\0y"):
        with pytest.raises(ConfigError, match="outside"):
            runner.run("", files={path: ""})
    with pytest.raises(ConfigError, match="itself"):
        runner.run("", files={"./main.py": ""})


@pytest.mark.parametrize("backend", ["bubblewrap", "unshare", "subprocess"])
def test_a_killed_worker_is_replaced(backend: str, need: Callable[[str], str]) -> None:
    with PythonRunner(need(backend), limits=SMALL, workers=1) as mine:
        assert mine.run("print(1)").stdout == "1\n"
        (worker,) = mine._all
        os.kill(worker.pid, signal.SIGKILL)
        assert mine.run("print(2)").stdout == "2\n"


def test_a_closed_runner_says_so(need: Callable[[str], str]) -> None:
    mine = PythonRunner(need("unshare"), workers=1)
    mine.run("")
    mine.close()
    mine.close()
    with pytest.raises(SandboxError, match="closed"):
        mine.run("")


def test_threads_and_event_loops_call_it_alike(need: Callable[[str], str]) -> None:
    with PythonRunner(need("unshare"), limits=SMALL, workers=2) as mine:
        with ThreadPoolExecutor(6) as threads:
            said = list(threads.map(lambda n: mine.run(f"print({n})").stdout, range(24)))
        assert said == [f"{n}\n" for n in range(24)]

        async def both() -> list[str]:
            runs = (asyncio.to_thread(mine.run, f"print({n})") for n in range(4))
            return [ended.stdout for ended in await asyncio.gather(*runs)]

        assert asyncio.run(both()) == [f"{n}\n" for n in range(4)]


def test_a_sandbox_outlives_the_thread_that_made_it(need: Callable[[str], str]) -> None:
    mine = PythonRunner(need("unshare"), limits=SMALL, workers=1)
    starter = threading.Thread(target=mine.warm)
    starter.start()
    starter.join()
    (worker,) = mine._all
    assert mine.run("print(1)").stdout == "1\n"
    assert mine._all == {worker}
    mine.close()


def test_who_waits_for_a_worker_gets_it_before_whoever_gave_it_back_asks_again(
    need: Callable[[str], str],
) -> None:
    """A thread that runs one program after the other was always faster than the one that it woke."""
    busy_runs, over = 0, threading.Event()

    with PythonRunner(need("unshare"), limits=SMALL, workers=1) as mine:

        def keep_busy() -> None:
            nonlocal busy_runs
            while not over.is_set() and busy_runs < 100:
                mine.run("pass")
                busy_runs += 1

        busy = threading.Thread(target=keep_busy)
        busy.start()
        passed: list[int] = []
        while len(passed) < 5:
            before = busy_runs
            mine.run("pass")
            passed.append(busy_runs - before)
        over.set()
        busy.join()
    assert max(passed) <= 2, passed


def test_the_shared_runner_is_shared(need: Callable[[str], str]) -> None:
    assert shared_runner(need("unshare")) is shared_runner("unshare")
    assert shared_runner("unshare").run("print(1)").stdout == "1\n"


def test_docker_and_no_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="fork"):
        PythonRunner("docker")
    with pytest.raises(ConfigError, match="workers"):
        PythonRunner("unshare", workers=0)
    with pytest.raises(ConfigError, match="choose one of"):
        PythonRunner("firejail")


@pytest.mark.parametrize("backend", ["bubblewrap", "unshare"])
def test_another_interpreter_may_be_named(backend: str, need: Callable[[str], str]) -> None:
    with PythonRunner(need(backend), workers=1, python=sys.executable) as mine:
        said = mine.run("import sys, json; print(sys.version.split()[0])")
    assert said.stdout == f"{sys.version.split()[0]}\n", said.stderr
    with pytest.raises(ConfigError, match="not there"):
        PythonRunner(backend, python="/no/python")


def test_text_that_is_no_utf_8_reaches_a_program_somehow(runner: PythonRunner) -> None:
    ended = runner.run("import sys; print(len(sys.stdin.buffer.read()))", stdin="\ud800x")
    assert (ended.status, ended.stdout) == (Status.OK, "4\n")
    assert runner.run("x = '\ud800'").status is Status.ERROR


def test_processor_time_of_orphans_counts(runner: PythonRunner) -> None:
    ended = runner.run(
        "import os, time\n"
        "while True:\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0:\n"
        "            end = time.process_time() + 0.2\n"
        "            while time.process_time() < end: pass\n"
        "        os._exit(0)\n"
        "    os.wait(); time.sleep(0.25)\n",
        limits=Limits(wall_s=60, cpu_s=1, memory_mb=256, processes=16),
    )
    assert ended.status is Status.TIMEOUT
    assert ended.wall_s < 50


@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="there is no system Python to copy")
def test_an_interpreter_that_others_cannot_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    copied = shutil.copy("/usr/bin/python3", tmp_path / "bin" / "python3")
    os.chmod(copied, 0o700)
    with pytest.raises(ConfigError, match="other users"):
        PythonRunner("subprocess", python=str(copied))
