"""A cell: where one program runs. Made fresh for each, gone with its first process.

    warden ─ unshare(pid) ─ fork ─► init: a mount namespace, one tmpfs for all files, its own /proc
                                     └─ fork ─► the program: own uid or user namespace, rlimits, seccomp,
                                                no capabilities, nothing open but descriptors 0 to 2 (and 3)

Three ways to be somebody else (`identity`): "own_uid" (the warden is root: a uid that nobody has),
"own_userns" (a plain user: a user namespace of one's own, so that the process limit counts this program
alone), and "bare" (no namespace at all: the `subprocess` backend, which contains nothing). Runs inside the
sandbox.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket

from rllm.sandbox.inside import cellmates, guard, jobs, kernel, layers, root, seccomp, stack

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    from typing import Any, NoReturn

DISK = "/run/cell"
"""Where the tmpfs of a cell is mounted before its parts are put in their places."""
PARTS = {"box": "/box", "tmp": "/tmp", "shm": "/dev/shm"}
"""Directory of that tmpfs -> where a program sees it. One tmpfs, so that one limit holds for all."""
INODES_PER_MB = 64
OPEN_FILES = 256
MOST_DESCRIPTORS = 1 << 20
TCP_BUFFER_BYTES = "4096 65536 212992"
"""Least, first and most."""
INSIDE_ID = 1000
"""uid and gid that a program sees as its own under "own_userns"."""


class Cell:
    """A cell that waits for its order, or does it."""

    def __init__(self, init: int, line: socket.socket, report: int, number: int, disk_mb: float) -> None:
        self.init = init
        """Process id of its init, as the warden sees it."""
        self.line = line
        """Where the program waits for what it shall do."""
        self.report = report
        """A pipe on which the init says how the program ended."""
        self.number = number
        self.disk_mb = disk_mb

    def give(self, order: dict[str, Any], descriptors: list[int]) -> None:
        """Hand an order and its descriptors to the program. A cell that is broken says so in its report."""
        rights = array.array("i", descriptors).tobytes()
        try:
            self.line.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise

    def close(self) -> None:
        self.line.close()
        os.close(self.report)


class CellHome:
    """Where the cells of one warden are, and what they have in common."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.identity: str = arguments["identity"]
        self.keeps_files: bool = arguments["keeps_files"]
        self.directory: str = arguments["directory"]
        self.is_bare = self.identity == "bare"
        self.root: dict[str, Any] | None = arguments["root"]
        self.read_only: list[str] = []
        """The parts of a writable root that programs cannot write to."""
        self.stack: stack.Stack | None = None
        """The layers of a writable root that has some."""
        self.filter = b""
        self._first_uid = 0
        self._pid_namespace = -1
        self._has_disk = False
        self._count = 0
        self._spare: Cell | None = None
        if self.is_bare:
            return
        if arguments["builds_root"]:
            root.build(arguments["binds"])
        limit_tcp_buffers()
        self.filter = seccomp.seccomp_filter(os.uname().machine)
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def begin(self, first_uid: int, disk_mb: float) -> None:
        self._first_uid = first_uid
        if self.keeps_files and not self.is_bare:
            mount_disk(disk_mb, self.identity, first_uid)
            if self.root is not None:
                self._lay_root(self.root)

    def _lay_root(self, plan: dict[str, Any]) -> None:
        is_user = self.identity == "own_userns"
        uid = self._first_uid

        def own(path: str) -> None:
            if not is_user:  # else the warden's own user is the program's
                os.chown(path, uid, uid, follow_symlinks=False)

        inside = INSIDE_ID if is_user else uid
        if plan["layers"]:
            self.stack = stack.Stack(DISK, plan, own, inside, is_user=is_user)
            self.read_only = self.stack.read_only
            return
        self.read_only = layers.lay(DISK, plan, own, inside, is_user=is_user)

    def take(self, disk_mb: float, job: str, rules: dict[str, Any] | None = None) -> Cell:
        """A cell for a job that nobody has used: the one that was made ahead, or a new one. `rules`: see
        `guard.Guard`."""
        spare = self._spare
        is_ordinary = job != "changes" and rules is None
        # A spare has its mounts already, those of an ordinary
        # job; and its own disk, where files are not kept.
        if spare is not None and is_ordinary and (self.keeps_files or spare.disk_mb == disk_mb):
            self._spare = None
            return spare
        self.discard_spare()
        return self._new_cell(disk_mb, job, rules)

    def make_ahead(self, disk_mb: float) -> None:
        """Have a cell ready for the next order, so that it need not wait for the forks."""
        if not (self.is_bare and self.keeps_files):
            self._spare = self._new_cell(disk_mb)

    def discard_spare(self) -> None:
        """End the cell that was made ahead: it would see other files than those of now."""
        spare, self._spare = self._spare, None
        if spare is not None:
            self.discard(spare)

    def discard(self, cell: Cell) -> None:
        """End a cell and remove its files; those in namespaces go with it."""
        # The end is seen without reaping, so the process id stays this cell's
        # until `clear`, and a repeated kill cannot hit another process.
        ending = os.pidfd_open(cell.init)
        self.kill(cell)
        while not select.select([ending], [], [], 0.05)[0]:
            self.kill(cell)
        os.close(ending)
        self.clear(cell)

    def kill(self, cell: Cell) -> None:
        """Kill what is in a cell. A bare one takes more than one call where its program forks faster than
        this."""
        if not self.is_bare:
            os.kill(cell.init, signal.SIGKILL)
            return
        for pid in cellmates.members(True, cell.init):
            with contextlib.suppress(ProcessLookupError):  # was quicker
                os.kill(pid, signal.SIGKILL)

    def clear(self, cell: Cell) -> None:
        """Reap a cell that has ended."""
        os.waitpid(cell.init, 0)
        if self.is_bare and not self.keeps_files:
            remove_tree(self._bare_directory(cell.number))
        cell.close()

    def remove(self) -> None:
        self.discard_spare()
        if self.is_bare:
            remove_tree(self.directory)

    def _new_cell(self, disk_mb: float, job: str = "", rules: dict[str, Any] | None = None) -> Cell:
        self._count += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report, report_write = os.pipe()
        if self.is_bare:
            init = kernel.fork()
        else:
            # This moves the children of the warden and not itself. Without the way back the next cell would
            # be born in the namespace of this one, where nothing can be forked once its init has ended.
            kernel.unshare(kernel.CLONE_NEWPID)
            init = kernel.fork()
            if init:
                kernel.setns(self._pid_namespace, kernel.CLONE_NEWPID)
        if init == 0:
            self._be_init(theirs.fileno(), report_write, disk_mb, job, rules)
        theirs.close()
        os.close(report_write)
        return Cell(init, ours, report, self._count, disk_mb)

    def _uid(self) -> int:
        return self._first_uid + (0 if self.keeps_files else self._count & 0xFF)

    def _bare_directory(self, number: int) -> str:
        return self.directory if self.keeps_files else os.path.join(self.directory, str(number))

    def _be_init(
        self, line: int, report: int, disk_mb: float, job: str, rules: dict[str, Any] | None
    ) -> NoReturn:
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            box = PARTS["box"] if self.root is None else "/"
            if self.is_bare:
                # Without a process namespace orphans would go to the
                # machine's init, where `end_descendants` does not find them.
                kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
                box = os.path.join(self._bare_directory(self._count), "box")
                for part in ("box", "tmp"):
                    os.makedirs(os.path.join(os.path.dirname(box), part), exist_ok=True)
            else:
                self._furnish(disk_mb, job)
            # The program waits at the gate until it is traced, so that no exec of its is missed.
            follower = guard.Guard(rules) if rules is not None else None
            gate = os.pipe() if follower is not None else ()
            program = kernel.fork()
            if program == 0:
                if gate:
                    os.close(gate[1])
                    os.read(gate[0], 1)
                self._be_program(line, report, box)
            if follower is not None:
                follower.seize(program)
            close_all_but(report)  # which opens the gate
            status, usage = (
                follower.await_program(program) if follower is not None else await_program(program)
            )
            if self.is_bare:
                end_descendants()
            message = {
                "status": status,
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "max_rss_kb": usage.ru_maxrss,
            }
            os.write(report, json.dumps(message).encode() + b"\n")
        except BaseException as error:  # noqa: BLE001  this process has nobody else to tell
            report_failure(report, error)
        finally:
            os._exit(0)

    def _furnish(self, disk_mb: float, job: str) -> None:
        """Mounts that are this cell's alone."""
        kernel.unshare(kernel.CLONE_NEWNS)
        if self.stack is not None and job == "changes":
            self.stack.enter_states()
            return
        if self.root is not None:
            allow_entry(f"{DISK}/{layers.NEW}")
            layers.enter(DISK)
            return
        if not self.keeps_files:
            mount_disk(disk_mb, self.identity, self._uid())
        for part in PARTS:
            allow_entry(f"{DISK}/{part}")
        for part, target in PARTS.items():
            kernel.mount(f"{DISK}/{part}", target, flags=kernel.MS_BIND)
        kernel.unmount(DISK)
        safe = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("proc", "/proc", "proc", safe)
        kernel.mount("/proc/sys", "/proc/sys", flags=kernel.MS_BIND)
        kernel.mount("", "/proc/sys", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | safe)

    def _be_program(self, line: int, report: int, box: str) -> NoReturn:
        try:
            os.setsid()
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            os.umask(0o022)
            line, report = keep_only(line, report)
            if self.identity == "own_uid":
                become(self._uid())
            elif self.identity == "own_userns":
                enter_user_namespace()
            # The change of user has reset it, and /proc/self belongs to root as long as it is 0.
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            with open("/proc/self/oom_score_adj", "w", encoding="ascii") as stream:
                stream.write("1000")  # a kernel without memory shall kill this before anything else
            os.chdir(box)
            order, payload = await_order(line)
            # Limits come with the order. The filter comes last: it refuses calls that were needed until here.
            set_rlimits(order["limits"], is_bare=self.is_bare)
            if self.filter:
                kernel.install_filter(self.filter)
        except BaseException as error:  # noqa: BLE001  this process has nobody else to tell
            report_failure(report, error)
            os._exit(1)
        os.close(report)  # from here on nobody believes this process
        try:
            home = box if self.root is None else layers.HOME
            jobs.do(order, payload, box, home=home, is_bare=self.is_bare)
        finally:
            os._exit(jobs.GAVE_UP_CODE)


def limit_tcp_buffers() -> None:
    """Limit, for this network namespace, the memory that a TCP socket may hold without asking to that of
    others.

    Its kernel lets root alone write that; where it does not, as for a plain user, the number of sockets is
    all that bounds them.
    """
    safe = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", DISK, "proc", safe)  # the one that is there may be read-only
    try:
        for name in ("tcp_rmem", "tcp_wmem"):
            with (
                contextlib.suppress(PermissionError),
                open(f"{DISK}/sys/net/ipv4/{name}", "w", encoding="ascii") as stream,
            ):
                stream.write(TCP_BUFFER_BYTES)
    finally:
        kernel.unmount(DISK)


def mount_disk(disk_mb: float, identity: str, uid: int) -> None:
    # Inodes are counted too: empty files have no size, but each takes memory of the kernel.
    options = f"size={int(disk_mb * 1024)}k,nr_inodes={int(disk_mb * INODES_PER_MB) + 256},mode=755"
    kernel.mount("cell", DISK, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for part in PARTS:
        os.mkdir(f"{DISK}/{part}", 0o700)
        if identity == "own_uid":
            os.chown(f"{DISK}/{part}", uid, uid)


def allow_entry(folder: str) -> None:
    """Give a directory back to its owner, whatever an earlier program made of its mode: without that the next
    one could not start."""
    os.chmod(folder, os.stat(folder).st_mode | 0o700)


def become(uid: int) -> None:
    """Be `uid` for good, without groups or capabilities."""
    # Groups and the bounding set first: without root the right to change them is gone.
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    kernel.drop_bounding_set()
    os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()


def enter_user_namespace() -> None:
    """Be the only user of a namespace, without capabilities."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else /proc/self is not ours to write
    kernel.unshare(kernel.CLONE_NEWUSER)
    # The kernel lets a plain user write gid_map only after setgroups is denied.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_ID} 0 1"),
        ("gid_map", f"{INSIDE_ID} 0 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as stream:
            stream.write(text)
    kernel.drop_bounding_set()
    kernel.drop_capabilities()


def set_rlimits(limits: dict[str, Any], *, is_bare: bool) -> None:
    """Set the kernel's limits of each process. In a bare cell the user's other processes would count as
    well."""
    memory = int(limits["memory_mb"] * 2**20)
    disk = int(limits["disk_mb"] * 2**20)
    cpu_s = int(limits["cpu_s"]) + (limits["cpu_s"] % 1 > 0)
    limit_values = [
        (resource.RLIMIT_DATA, memory, memory),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_FSIZE, disk, disk),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 2**16, 2**16),
    ]
    if not is_bare:
        limit_values.append((resource.RLIMIT_NPROC, int(limits["processes"]), int(limits["processes"])))
    for kind, soft, hard in limit_values:
        # A hard limit that this process was started with cannot be raised.
        _, most = resource.getrlimit(kind)
        cap = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, cap), cap))


def report_failure(report: int, error: BaseException) -> None:
    message = {"why": "failed", "error": f"{type(error).__name__}: {error}"}
    os.write(report, json.dumps(message).encode() + b"\n")


def await_order(line: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Wait for the order; its descriptors become 0, 1, 2 and perhaps 3. Returns it and the payload.

    A line that ends without an order belongs to a cell that is not needed.
    """
    with socket.socket(fileno=line) as waiting:
        order, descriptors = receive(waiting)
    if order is None:
        os._exit(0)
    with open(descriptors[0], "rb") as stream:
        payload = json.loads(stream.read())
    for place, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, place, inheritable=True)
        os.close(descriptor)
    os.closerange(len(descriptors) - 1, 4)  # what held the place of a result that is not wanted: the report
    return order, payload


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next order and the descriptors that came with it; None when the sender is gone."""
    descriptors = array.array("i")
    try:
        data, ancillary, _, _ = control.recvmsg(65536, socket.CMSG_SPACE(8 * descriptors.itemsize))
    except ConnectionError:
        return None, []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return (json.loads(data) if data else None), list(descriptors)


def keep_only(line: int, report: int) -> tuple[int, int]:
    """Close every descriptor but these two, which move out of the way of what the order brings."""
    os.dup2(line, 100, False)
    os.dup2(report, 101, False)
    os.closerange(3, 100)
    os.closerange(102, MOST_DESCRIPTORS)
    for place in range(
        4
    ):  # taken, so that no descriptor of the order arrives in a place that it must move to
        os.dup2(101, place, False)
    return 100, 101


def close_all_but(descriptor: int) -> None:
    os.closerange(0, descriptor)
    os.closerange(descriptor + 1, MOST_DESCRIPTORS)


def await_program(program: int) -> tuple[int, resource.struct_rusage]:
    """Reap whatever ends until the program does; returns its wait status and what it used."""
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == program:
            return status, usage


def end_descendants() -> None:
    """Kill what the program of a bare cell left behind; its orphans are our children."""
    while True:
        left = cellmates.members(True, os.getpid())
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def remove_tree(directory: str) -> None:
    """Delete a directory whatever modes its program gave to what is in it."""
    import shutil

    def unlock(function: Any, path: str, _: Any) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            if function is not os.rmdir:
                shutil.rmtree(path, onerror=unlock)
                return
        function(path)

    if os.path.isdir(directory):
        shutil.rmtree(directory, onerror=unlock)
