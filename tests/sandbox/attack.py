"""Runs every hostile program over one backend and says what came of it, as JSON; run as any user.

python attack.py bubblewrap runner|exec [numpy] ──► {"programs": …, "wrong": {name: its end}, "damage": […]}
"""

import glob
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hostile import attacks  # beside this file, which is run as a script

from rllm.sandbox import ExecResult, Limits, PythonRunner, open_sandbox
from rllm.sandbox.inside import kernel
from rllm.sandbox.inside.cellmates import members
from rllm.sandbox.leftovers import state_folder

LIMITS = Limits(wall_s=1.0, cpu_s=0.7, memory_mb=128, output_kb=64, disk_mb=4, processes=16)
SIDE_BY_SIDE = 3
LATE_S = 1.5
"""What a machine with much else to do may add to a limit."""
PACKAGES = sys.argv[3:]
"""What the programs may import; with some, those that make use of it attack too."""
ATTACKS = attacks(with_packages=bool(PACKAGES))


class Attacked:
    """What this process has that a program might want, and what became of it."""

    def __init__(self) -> None:
        self.nonce = f"nonce{secrets.token_hex(8)}"
        self.folder = Path(tempfile.mkdtemp(prefix="attacked-"))
        self.secret = self.folder / "secret"
        self.secret.write_text(self.nonce)
        os.environ["ATTACKED_SECRET"] = self.nonce
        self.servers = [socket.create_server(("127.0.0.1", 0))]
        for address in (str(self.folder / "socket"), f"\0{self.nonce}"):
            self.servers.append(socket.socket(socket.AF_UNIX))
            self.servers[-1].bind(address)
            self.servers[-1].listen()
        for server in self.servers:
            server.setblocking(False)
        self.mounts = Path("/proc/self/mountinfo").read_text()

    def source(self, name: str) -> str:
        facts = {
            "nonce": self.nonce,
            "secret": self.secret,
            "port": self.servers[0].getsockname()[1],
            "socket": self.folder / "socket",
            "owner": os.getpid(),
        }
        text = ATTACKS[name].source
        for word, value in facts.items():
            text = text.replace(f"{{{word}}}", str(value))
        return text

    def damage(self) -> list[str]:
        found = []
        for server in self.servers:
            try:
                server.accept()
            except BlockingIOError:
                continue
            found.append(f"a connection to {server.getsockname()!r}")
        if Path("/proc/self/mountinfo").read_text() != self.mounts:
            found.append("mounts")
        for place in ("/tmp", "/dev/shm", "/var/tmp", "/root", "/home", "/run", "/usr", "/"):
            found += [f"file {path}" for path in glob.glob(f"{place}/*{self.nonce}*")]
        found += [f"process {pid}" for pid in members(True, os.getpid())]
        found += [f"file {path}" for path in state_folder().glob(f"owner-{os.getpid()}-*/*")]
        found += [f"cgroup {path}" for path in glob.glob("/sys/fs/cgroup/**/*rllm*", recursive=True)]
        if self.secret.read_text() != self.nonce:
            found.append("the secret was changed")
        return found

    def leak(self, name: str, ended: ExecResult) -> list[str]:
        # a program that knows the nonce from its own source may show it in its traceback
        said = ended.stdout + ("" if self.nonce in self.source(name) else ended.stderr) + (ended.result or "")
        return [f"{name}: the secret came out"] if self.nonce in said else []


def require_walls(backend: str) -> None:
    """Some attacks signal every process they can see: none is run where that could be anybody's."""
    if backend not in ("bubblewrap", "unshare"):
        raise SystemExit(f"{backend} has no walls; this would attack your machine.")
    with PythonRunner(backend, workers=1) as runner:
        seen = runner.run(
            "import os; print(os.getuid() > 0, [p for p in os.listdir('/proc') if p.isdigit()])"
        )
    if seen.stdout != "True ['1', '2']\n":
        raise SystemExit(f"{backend} has a hole; nothing is attacked: {seen}")


def main(backend: str, way: str, *_: str) -> None:
    require_walls(backend)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    attacked = Attacked()
    ended = run_all(attacked, backend) if way == "runner" else exec_all(attacked, backend)
    damage = attacked.damage()
    for name, result in ended.items():
        damage += attacked.leak(name, result)
    shutil.rmtree(attacked.folder)
    wrong = {
        name: [result.status, result.wall_s, result.stderr[-300:]]
        for name, result in ended.items()
        if result.status not in ATTACKS[name].ends or result.wall_s > LIMITS.wall_s + LATE_S
    }
    print(json.dumps({"programs": len(ended), "wrong": wrong, "damage": damage}))


def run_all(attacked: Attacked, backend: str) -> dict[str, ExecResult]:
    with (
        PythonRunner(backend, limits=LIMITS, workers=SIDE_BY_SIDE, packages=PACKAGES) as runner,
        ThreadPoolExecutor(SIDE_BY_SIDE) as threads,
    ):
        ended = threads.map(lambda name: runner.run(attacked.source(name), wants_result=True), ATTACKS)
        return dict(zip(ATTACKS, ended, strict=True))


def exec_all(attacked: Attacked, backend: str) -> dict[str, ExecResult]:
    """A sandbox for each thread, and what a user does around a program: files in, files out."""
    mine = threading.local()
    opened = []

    def run(name: str) -> ExecResult:
        if not hasattr(mine, "sandbox"):
            mine.sandbox = open_sandbox(backend, limits=LIMITS, packages=PACKAGES)
            opened.append(mine.sandbox)
        box = mine.sandbox
        box.exec("chmod -R u+rwx . 2>/dev/null; rm -rf ./* /tmp/* /dev/shm/*")
        box.write("program.py", attacked.source(name))
        alone = [] if PACKAGES else ["-I"]  # that would hide the packages
        ended = box.exec(["/usr/bin/python3", *alone, "program.py"])
        target = attacked.folder / f"out-{len(os.listdir(attacked.folder))}-{threading.get_ident()}"
        box.download(".", target)
        for path in target.rglob("*"):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise AssertionError(f"{name}: {path} came out")
        return ended

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        ended = dict(zip(ATTACKS, threads.map(run, ATTACKS), strict=True))
    for box in opened:
        box.close()
    return ended


if __name__ == "__main__":
    main(*sys.argv[1:])
