"""A sandbox in a container of a Docker engine: no network, no capabilities, a read-only system, limits by
cgroup.

    DockerSandbox ── create, attach to stdin, start ──► container: init ─ cat   (until its stdin ends, which
          │                                                                      it does when the owner dies)
          └── exec, as user 1000 ──► the program ; afterwards: kill -9 -1, as user 1000

What an engine cannot tell: a program that ends with code 128 + n is taken for one that signal n has ended.
"""

import errno
import io
import json
import os
import shlex
import socket
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox.archive import names_of, pack_tree, tar_of_file, unpack_tree, without_top, without_ways_out
from rllm.sandbox.base import Sandbox
from rllm.sandbox.docker_api import CALL_S, STDERR, STDOUT, DockerApi, DockerError, Stream, engine
from rllm.sandbox.inside.files import MOST_NAMED
from rllm.sandbox.leftovers import started_at
from rllm.sandbox.outcomes import file_error, status_of
from rllm.sandbox.session import FILE_LIMITS_S, checked_command, checked_environment
from rllm.sandbox.types import MOST, ExecResult, GuardRules, Limits, Root, Scope, Snapshot, Status

DEFAULT_IMAGE = "python:3.11-slim"
WORKDIR = "/box"
EMPTY_TAR = bytes(10240)
USER = "1000:1000"
LABEL = "rllm.sandbox.owner"
LIMIT_FILES = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/pids.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/pids/pids.max",
)
"""Where a container sees what the kernel holds it to: cgroup version 2, then 1."""
OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Where it sees how often the kernel has killed in it."""
ENDING_S = 2.0
"""The time after the end of its output in which a program may end."""
REFUSED = {
    10: (40, "a link is in the way"),
    11: (22, "not a plain file"),
    12: (2, "no such file"),
    13: (27, "too large"),
}
"""Exit code of a file script -> errno and what it says."""

# $1 is the path. No part of it may be a link.
NO_LINKS = (
    'p=$1; while [ "$p" != / ] && [ "$p" != . ]; do [ -L "$p" ] && exit 10; p=$(dirname -- "$p"); done; '
)
READ = NO_LINKS + '[ -e "$1" ] || exit 12; [ -f "$1" ] || exit 11; exec cat -- "$1"'
READ_AT_MOST = NO_LINKS + (
    '[ -e "$1" ] || exit 12; [ -f "$1" ] || exit 11; [ "$(wc -c < "$1")" -le {most} ] || exit 13; '
    'exec cat -- "$1"'
)
WRITE = (
    'd=$(dirname -- "$1"); '
    + NO_LINKS.replace("p=$1", "p=$d")
    + 'mkdir -p -- "$d" && rm -rf -- "$1.part" && '
    'cat > "$1.part" && { [ ! -d "$1" ] || exit 11; } && mv -f -- "$1.part" "$1"'
)
PACK = NO_LINKS + (
    '[ -e "$1" ] || exit 12; if [ -d "$1" ]; then cd -- "$1" && exec tar -cf - .; fi; '
    '[ -f "$1" ] || exit 11; exec cat -- "$1"'
)
UNPACK = NO_LINKS + 'mkdir -p -- "$1" && cd -- "$1" && exec tar -xf -'
PACK_PATHS = (
    'cd / && for p in {paths}; do [ -e "./$p" ] || [ -L "./$p" ] && set -- "$@" "./$p"; done; shift; '
)
PACK_PATHS += '[ $# -eq 0 ] || exec tar -cf - {excluded} "$@"'
UNPACK_ROOT = "cd / && tar -xof - && chown -R {user} {tops}"
MAKE_FOLDERS = "mkdir -p {folders} && chown -R {user} {folders}"
ROOT_HOME = "/root"
IS_DIRECTORY = '[ -d "$1" ]'


@dataclass(kw_only=True, slots=True, frozen=True)
class _Said:
    """The result of an exec in the container."""

    why: str
    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    wall_s: float


class DockerSandbox(Sandbox):
    """One container."""

    backend = "docker"

    def __init__(
        self, image: str, *, limits: Limits, snapshot: Snapshot | None = None, root: Root | None = None
    ) -> None:
        self.limits = limits
        self._root = root
        self.workdir = WORKDIR if root is None else "/"
        self._home = WORKDIR if root is None else ROOT_HOME
        self._lock = threading.Lock()
        self._closed = False
        self._api = engine()
        reap_containers(self._api)
        self._memory_mb = limits.memory_mb
        self._processes = limits.processes
        self._oom_kills = 0
        self._id = self._create_container(image)
        self._lifeline: Stream | None = None
        try:
            self._lifeline = self._api.stream(f"/containers/{self._id}/attach", stream="1", stdin="1")
            self._api.call("POST", f"/containers/{self._id}/start")
            self._require_limits()
            if root is not None:
                self._make_folders(root.folders)
            if snapshot is not None:
                self.restore(snapshot)
        except BaseException:
            self.close()
            raise

    def _create_container(self, image: str) -> str:
        limits = self.limits
        tmpfs = f"rw,nosuid,nodev,exec,size={int(limits.disk_mb * 1024)}k,mode=1777"
        places = {WORKDIR: tmpfs, "/tmp": tmpfs} if self._root is None else {}
        body: dict[str, Any] = {
            "Image": image,
            "Cmd": ["cat"],
            "User": "0:0",
            "WorkingDir": self.workdir,
            "OpenStdin": True,
            # The engine ends the container's stdin with the connection
            # of its owner, and with it `cat` and the container.
            "StdinOnce": True,
            "AttachStdin": True,
            "NetworkDisabled": True,
            "Labels": {LABEL: json.dumps(_owner(os.getpid()))},
            "HostConfig": {
                "Init": True,
                "AutoRemove": True,
                "NetworkMode": "none",
                "IpcMode": "private",
                "ReadonlyRootfs": self._root is None,
                "CapDrop": ["ALL"],
                # to give folders to the programs' user, who has none of these
                "CapAdd": [] if self._root is None else ["CHOWN", "DAC_OVERRIDE", "FOWNER"],
                "SecurityOpt": ["no-new-privileges"],
                "Memory": limits.memory_mb * 2**20,
                # Memory and swap together: the same number means no swap.
                "MemorySwap": limits.memory_mb * 2**20,
                "PidsLimit": limits.processes + 3,
                "Tmpfs": places,
                "ShmSize": min(limits.disk_mb, 64) * 2**20,
                "LogConfig": {"Type": "none"},
            },
        }
        try:
            return self._api.call("POST", "/containers/create", body)["Id"]
        except DockerError as error:
            if error.status == 404:
                raise ConfigError(f"Docker has no image `{image}`; run: docker pull {image}") from error
            raise

    def _require_limits(self) -> None:
        """Raises SandboxError where the engine took the limits and does not hold the container to them, as
        one without cgroups does; or where the image's shell cannot set those of a process."""
        limits = self.limits
        script = f"{_ulimits(limits)}; cat {' '.join(LIMIT_FILES)} 2>/dev/null; true"
        output = self._run(["/bin/sh", "-c", script], b"", {}, replace(limits, wall_s=FILE_LIMITS_S))
        numbers = [int(word) for word in output.stdout.split() if word.isdigit()]
        if output.exit_code or output.stderr:
            message = output.stderr[-300:].decode(errors="replace").strip()
            raise SandboxError(f"The image's shell cannot set limits: {message}")
        if limits.memory_mb * 2**20 not in numbers or limits.processes + 3 not in numbers:
            raise SandboxError(
                "The docker engine does not hold a container to its limits of memory and processes: inside, "
                f"the files of its cgroup say {numbers or 'nothing'}. Start it on a machine with the cgroup "
                'controllers `memory` and `pids`, and without `cgroups = "disabled"`.'
            )

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: str = "",
        env: Mapping[str, str] = {},
        cwd: str = "",
        limits: Limits | None = None,
        guard: GuardRules | None = None,
    ) -> ExecResult:
        if guard is not None:
            raise ConfigError(
                "`guard` is for bubblewrap and unshare; docker holds no program that another starts."
            )
        limits = limits or self.limits
        enter = f"cd {shlex.quote(cwd)} || exit 127; " if cwd else ""
        script = f'{_ulimits(limits)}; {enter}exec "$@"'
        argv = ["/bin/sh", "-c", script, "sandbox", *checked_command(command)]
        with self._lock:
            self._allow(limits)
            output = self._run(argv, stdin.encode("utf-8", "surrogatepass"), checked_environment(env), limits)
            # Under the lock, because the number of kills is compared with that of the run before.
            status = self._status(output, limits)
        return ExecResult(
            status=status,
            exit_code=output.exit_code if output.why == "exit" and status is not Status.TIMEOUT else None,
            stdout=output.stdout.decode("utf-8", "replace"),
            stderr=output.stderr.decode("utf-8", "replace"),
            truncated=output.truncated,
            wall_s=output.wall_s,
        )

    def _allow(self, limits: Limits) -> None:
        """Make the container's limits those of the next program."""
        if (limits.memory_mb, limits.processes) != (self._memory_mb, self._processes):
            memory = limits.memory_mb * 2**20
            update = {"Memory": memory, "MemorySwap": memory, "PidsLimit": limits.processes + 3}
            try:
                self._api.call("POST", f"/containers/{self._id}/update", update)
            except DockerError as error:
                if error.status != 404 or not self.is_alive:
                    raise
                raise ConfigError(
                    "This engine cannot change the limits of a container that runs (Podman before 4.5 "
                    f"cannot); give `memory_mb` {limits.memory_mb} and `processes` {limits.processes} to "
                    "open_sandbox."
                ) from error
            self._memory_mb, self._processes = limits.memory_mb, limits.processes

    def _status(self, output: _Said, limits: Limits) -> Status:
        status = status_of(
            output.why, output.exit_code, cpu_s=0.0, max_rss_kb=0, stderr=output.stderr, limits=limits
        )
        if status is Status.KILLED and output.why == "exit":
            kills = self._count_oom_kills()
            if kills > self._oom_kills:
                status = Status.OUT_OF_MEMORY
            self._oom_kills = kills
        return status

    def _count_oom_kills(self) -> int:
        """The number of processes that the kernel killed in this container for want of memory; 0 where it
        does not say."""
        output = self._run(["cat", *OOM_FILES], b"", {}, replace(self.limits, wall_s=10))
        counts = dict(
            line.split() for line in output.stdout.decode(errors="replace").splitlines() if " " in line
        )
        return int(counts.get("oom_kill", 0))

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        return self._file("read", READ if most_bytes is None else READ_AT_MOST.format(most=most_bytes), path)

    def write(self, path: str, data: bytes | str) -> None:
        self._file(
            "write", WRITE, path, data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        )

    def upload(self, source: Path, path: str) -> None:
        if source.is_dir() and not source.is_symlink():
            self._file("upload", UNPACK, path, pack_tree(source))
        else:
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as stream:
                self.write(path, stream.read())

    def download(self, path: str, target: Path) -> list[str]:
        with self._lock:
            is_directory = self._run_script(IS_DIRECTORY, path, b"").exit_code == 0
        data = self._file("download", PACK, path)
        return sorted(unpack_tree(io.BytesIO(data if is_directory else tar_of_file(data)), target))

    def snapshot(self, scope: Scope | None = None) -> Snapshot:
        if scope is None:
            return Snapshot(tar=self._file("snapshot", PACK, "."))
        with self._lock:
            names = self._run_script("ls -A /", "/", b"").stdout.decode(errors="surrogateescape").splitlines()
        loose = scope.loose_suffixes_left_out or ("/",)
        tops = scope.folders or [f"/{name}" for name in names if not name.endswith(loose)]
        top_folders = [
            top for top in (*tops, *scope.named) if top in scope.named or top not in scope.left_out
        ]
        inside = [each for each in scope.left_out if any(each.startswith(f"{top}/") for top in top_folders)]
        script = PACK_PATHS.format(
            paths=" ".join(shlex.quote(each.lstrip("/")) for each in top_folders),
            excluded=" ".join(f"--exclude={shlex.quote('.' + each)}" for each in inside),
        )
        data = self._file("snapshot", script, "/")
        if scope.link_homes is None:
            return Snapshot(tar=data, base="/")
        tar, left_out = without_ways_out(data, (*scope.link_homes, *top_folders)) if data else (EMPTY_TAR, [])
        return Snapshot(tar=tar, base="/", left_out=tuple(left_out[:MOST_NAMED]))

    def restore(self, snapshot: Snapshot) -> None:
        try:
            if snapshot.base == ".":
                self._file("unpack", UNPACK, ".", without_top(snapshot.tar))
                return
            tar = without_top(snapshot.tar)
            tops = sorted({name.removeprefix("./").split("/")[0] for name in names_of(tar)})
        except (OSError, tarfile.TarError) as error:
            raise SandboxError(f"The snapshot cannot be unpacked: {error}") from error
        if tops:
            quoted_paths = " ".join(shlex.quote(f"/{each}") for each in tops)
            self._file("unpack", UNPACK_ROOT.format(user=USER, tops=quoted_paths), "/", tar, user="0:0")

    def _make_folders(self, folders: Sequence[str]) -> None:
        quoted_paths = " ".join(shlex.quote(each) for each in (*folders, self._home))
        try:
            self._file("mkdir", MAKE_FOLDERS.format(user=USER, folders=quoted_paths), "/", user="0:0")
        except OSError as error:
            raise SandboxError(f"The folders of the container cannot be made: {error}") from error

    def _file(self, what: str, script: str, path: str, stdin: bytes = b"", *, user: str = USER) -> bytes:
        if "\0" in path:
            raise OSError(22, "a path cannot hold a NUL", path)
        with self._lock:
            output = self._run_script(script, path, stdin, user=user)
        if output.why in ("output", "timeout"):  # of what its programs left there
            raise OSError(errno.EFBIG, f"{what}: stopped at the limit `{output.why}`", path)
        if output.why == "exit" and output.exit_code == 0:
            return output.stdout
        if output.why == "exit" and output.exit_code in REFUSED:
            raise OSError(*REFUSED[output.exit_code], path)
        message = output.stderr[-500:].decode(errors="replace").strip()
        if output.why == "exit" and output.exit_code in (1, 2):
            number = next((each for each in errno.errorcode if os.strerror(each) in message), errno.EPROTO)
            raise file_error(what, number, f"{what}: {message}", path)
        raise SandboxError(
            f"`{what}` of `{path}` failed: {output.why}, exit code {output.exit_code}. {message}"
        )

    def _run_script(self, script: str, path: str, stdin: bytes, *, user: str = USER) -> _Said:
        whole = os.path.normpath(os.path.join(self.workdir, path))
        room = Limits(wall_s=FILE_LIMITS_S, output_kb=min(self.limits.disk_mb * 2048 + 1024, MOST))
        return self._run(["/bin/sh", "-c", script, "sandbox", whole], stdin, {}, room, user=user)

    def _run(
        self, argv: list[str], stdin: bytes, env: dict[str, str], limits: Limits, *, user: str = USER
    ) -> _Said:
        started_s = time.monotonic()
        environment = {"HOME": self._home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"} | env
        body = {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Cmd": argv,
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "User": user,
            "WorkingDir": self.workdir,
        }
        exec_id = self._api.call("POST", f"/containers/{self._id}/exec", body)["Id"]
        stream = self._api.stream(f"/exec/{exec_id}/start", {"Detach": False, "Tty": False})
        buffers = {STDOUT: bytearray(), STDERR: bytearray()}
        room, why = limits.output_kb * 1024, "exit"
        try:
            for number, content in stream.frames(stdin, started_s + limits.wall_s):
                buffers[number] += content[:room]
                if len(content) > room:
                    why = "output"
                    break
                room -= len(content)
        except TimeoutError:
            why = "timeout"
        except OSError as error:
            raise SandboxError(f"The docker sandbox died while it ran a program: {error}") from error
        finally:
            stream.close()
        wall_s = time.monotonic() - started_s
        code = self._exit_code(exec_id) if why == "exit" else -9
        self._end_processes()
        return _Said(
            why=why,
            exit_code=code,
            stdout=bytes(buffers[STDOUT]),
            stderr=bytes(buffers[STDERR]),
            truncated=why == "output",
            wall_s=wall_s,
        )

    def _exit_code(self, exec_id: str) -> int:
        until_s = time.monotonic() + ENDING_S
        state = self._api.call("GET", f"/exec/{exec_id}/json")
        while state.get("Running") and time.monotonic() < until_s:  # an engine hears of an end a little later
            time.sleep(0.02)
            state = self._api.call("GET", f"/exec/{exec_id}/json")
        if state.get("Running") or state.get("ExitCode") is None:
            return -9  # it gave its output away and goes on: ended with all that it left
        code = state["ExitCode"]
        return 128 - code if 128 < code <= 192 else code

    def _end_processes(self) -> None:
        """End all that the program left; the container's own two processes belong to another user."""
        exec_id = self._api.call(
            "POST",
            f"/containers/{self._id}/exec",
            {"Cmd": ["/bin/sh", "-c", "kill -9 -1"], "User": USER, "AttachStdout": True},
        )["Id"]
        stream = self._api.stream(f"/exec/{exec_id}/start", {"Detach": False, "Tty": False})
        try:
            # Read to the end, which comes when the kill is done.
            for _ in stream.frames(b"", time.monotonic() + CALL_S):
                pass
        except (TimeoutError, OSError) as error:
            raise SandboxError(f"The docker sandbox could not end its program: {error!r}") from error
        finally:
            stream.close()

    def stop(self) -> None:
        self._end_processes()

    def listen(self, port: int, *, datagrams: bool = False) -> socket.socket:
        raise ConfigError(
            "A container has a network that nobody outside can listen in; use bubblewrap or unshare."
        )

    @property
    def is_alive(self) -> bool:
        if self._closed:
            return False
        try:
            return self._api.call("GET", f"/containers/{self._id}/json")["State"]["Running"]
        except DockerError:
            return False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            _remove(self._api, self._id)  # first: podman fails to remove what is ending by itself
        finally:
            if self._lifeline is not None:
                self._lifeline.close()


def _ulimits(limits: Limits) -> str:
    """The limits that the kernel counts for each process: the shell sets them, and then becomes the program.
    One limit a command, because dash takes no more."""
    cpu_s = int(limits.cpu_s + 0.999)  # the soft limit's signal says why; a kill at the hard one would not
    return (
        f"ulimit -c 0; ulimit -t {cpu_s + 1}; ulimit -S -t {cpu_s}; "
        f"ulimit -f {int(limits.disk_mb * 2048)}; ulimit -d {int(limits.memory_mb * 1024)}"
    )


@cache
def _owner(pid: int) -> dict[str, str]:
    """The owner of a container: a process, told apart from others of its number on other machines and
    boots."""
    return {
        "pid": str(pid),
        "started": started_at(pid),
        "namespace": os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else "",
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        if os.path.exists("/proc/sys/kernel/random/boot_id")
        else "",
    }


def reap_containers(api: DockerApi) -> int:
    """Remove the containers of owners on this machine that are dead; returns how many."""
    here = _owner(os.getpid())
    num_removed = 0
    filters = json.dumps({"label": [LABEL]})
    for container in api.call("GET", "/containers/json", all="1", filters=filters):
        owner = json.loads(container["Labels"][LABEL])
        same_place = all(owner.get(key) == here[key] for key in ("namespace", "boot"))
        # Without a boot id, as outside of Linux, a process id does not say which process it is.
        if same_place and here["boot"] and started_at(int(owner["pid"])) != owner["started"]:
            _remove(api, container["Id"])
            num_removed += 1
    return num_removed


def _remove(api: DockerApi, container: str) -> None:
    try:
        api.call("DELETE", f"/containers/{container}", force="1", v="1")
    except DockerError as error:
        if error.status not in (404, 409):  # gone, or being removed by itself
            raise
