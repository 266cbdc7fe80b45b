"""Programs of somebody else's that a program starts: what the kernel holds them to, and who is not held."""

import json

import pytest

from rllm.errors import RllmError
from rllm.sandbox import open_sandbox
from rllm.sandbox.base import Sandbox
from rllm.sandbox.inside import kernel
from rllm.sandbox.types import ExecResult, GuardRules, Limits, Root

GUARD = GuardRules(
    hidden=("/tests", "/logs/verifier"),
    left="/run/verifier/left.json",
    system=("/usr", "/etc", "/root", "/run", "/proc", "/sys"),
    writable=("/run/verifier/tmp", "/run/verifier/them"),
    home="/run/verifier/home",
    their_home="/run/verifier/them",
)
FOLDERS = ("/app", "/tests", "/logs/verifier", "/logs/agent", "/run/verifier/tmp", "/run/verifier/home")
HELD_OR_NOT = "cat /tests/expected 2> /dev/null && echo seen || echo held"


def ran(backend: str, theirs: dict[str, str], script: str) -> tuple[ExecResult, Sandbox]:
    """A script of the tests', which starts some of their files."""
    if not kernel.landlock_version():
        pytest.skip("this kernel has no Landlock")
    try:
        sandbox = open_sandbox(
            backend,
            limits=Limits(disk_mb=16, wall_s=60),
            root=Root(folders=(*FOLDERS, GUARD.their_home)),
        )
    except RllmError as error:
        pytest.skip(f"{backend}: {error}")
    for path, text in theirs.items():
        sandbox.write(path, text)
    sandbox.write(GUARD.left, json.dumps(list(theirs)))
    sandbox.write("/tests/expected", "secret\n")
    sandbox.write("/tests/test.sh", script)
    env = {"HOME": GUARD.home}
    return sandbox.exec(["bash", "/tests/test.sh"], cwd="/app", env=env, guard=GUARD), sandbox


@pytest.mark.parametrize("backend", ["bubblewrap", "unshare"])
def test_who_is_held_and_who_is_not(backend: str) -> None:
    """A shell that reads its code from a pipe is the tests' own."""
    script = """chmod +x try.sh
bash try.sh; bash /app/../app/try.sh; bash -c ./try.sh; timeout 9 env bash -ex try.sh; bash try.sh & wait $!
bash - try.sh
bash -c 'cat /tests/expected'; cp own.txt /logs/verifier/copy; cat try.sh | bash
python3 -c "open('/logs/verifier/reward', 'w').write(open('/tests/expected').read())" own.txt
"""
    done, sandbox = ran(backend, {"/app/try.sh": HELD_OR_NOT, "/app/own.txt": "x\n"}, script)
    with sandbox:
        assert done.stdout.split() == [*["held"] * 6, "secret", "secret", "seen"], done
        assert sandbox.read("/logs/verifier/reward") == b"secret\n"
        assert sandbox.read("/logs/verifier/copy") == b"x\n"


ATTEMPTS = """
import os, pathlib, signal, subprocess, sys, threading
def can(act):
    try: act()
    except OSError: return False
    return True
def write(path): return lambda: pathlib.Path(path).write_text("x")
places = ["/app/a", "/tmp/a", "/run/verifier/tmp/a", "/logs/agent/a", "/dev/null", os.environ["HOME"] + "/a"]
print(*[can(write(each)) for each in places])
places = ["/tests/a", "/tests/expected", "/logs/verifier/a", "/run/verifier/home/a", "/etc/a"]
places += ["/usr/bin/a", "/a"]
print(*[can(write(each)) for each in places])
print(can(lambda: os.listdir("/tests")), can(lambda: os.truncate("/tests/expected", 0)),
      can(lambda: os.rename("/tests", "/app/t")), can(lambda: os.kill(os.getppid(), 0)),
      can(lambda: os.kill(os.getpid(), 0)), can(lambda: open(f"/proc/{os.getppid()}/mem", "wb")),
      can(lambda: open(sys.argv[1]).read()), os.environ["HOME"] == "/run/verifier/them")
codes = []
def again(): codes.append(subprocess.run(["bash", "/app/again.sh", "20"], capture_output=True).returncode)
thread = threading.Thread(target=again); thread.start(); thread.join(); print(*codes)
signal.signal(signal.SIGUSR1, lambda *_: print("signal")); os.kill(os.getpid(), signal.SIGUSR1)
child = subprocess.Popen(["sleep", "9"])
os.kill(child.pid, signal.SIGSTOP); os.waitpid(child.pid, os.WUNTRACED)
child.kill(); print(child.wait()); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("backend", ["bubblewrap", "unshare"])
def test_what_a_held_program_can_and_cannot(backend: str) -> None:
    """Beside files: signals, threads, job control and many execs are as ever."""
    again = "[ $1 = 0 ] || exec bash /app/again.sh $(($1 - 1)); cat /tests/expected"
    script = "echo named > /tests/input; python3 try.py /tests/input; echo $?"
    done, sandbox = ran(backend, {"/app/try.py": ATTEMPTS, "/app/again.sh": again}, script)
    with sandbox:
        expected = [*["True"] * 6, *["False"] * 11, "True", "False", "True", "True"]
        assert done.stdout.split() == [*expected, "1", "signal", "-9", "143"], done


def test_what_a_held_program_makes_is_held_and_what_the_tests_make_is_not() -> None:
    pause = "sleep 0.1"  # longer than the grain of the clock of files
    script = f"echo 'cat /tests/expected' > /tmp/own.sh; {pause}; bash make.sh; {pause}; bash /tmp/made.sh; "
    script += "bash /tmp/own.sh"
    done, sandbox = ran("bubblewrap", {"/app/make.sh": f"echo '{HELD_OR_NOT}' > /tmp/made.sh"}, script)
    with sandbox:
        assert done.stdout.split() == ["held", "secret"], done


THREAD_THAT_EXECS = """
import os, threading
threading.Thread(target=os.execv, args=("/bin/true", ["true"])).start()
threading.Event().wait()
"""


@pytest.mark.parametrize(
    "start",
    ["bash wait.sh & bash wait.sh & wait", "python3 exec.py"],
    ids=["two at a time", "a thread that becomes another program"],
)
def test_what_the_tests_make_after_held_programs_ended_is_not_held(start: str) -> None:
    pause = "sleep 0.1"  # longer than the grain of the clock of files
    script = f"{start}; {pause}; echo 'cat /tests/expected' > /tmp/own.sh; bash /tmp/own.sh"
    theirs = {"/app/wait.sh": pause, "/app/exec.py": THREAD_THAT_EXECS}
    done, sandbox = ran("bubblewrap", theirs, script)
    with sandbox:
        assert done.stdout == "secret\n", done
