"""System calls that Python has no function for. Runs inside the sandbox, on any Python from 3.9.

Raises OSError as `os` does.
"""

import contextlib
import ctypes
import errno
import os
import signal
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
OPEN_TREE_CLONE, MOVE_MOUNT_EMPTY_PATH, AT_EMPTY_PATH, AT_FDCWD = 1, 4, 0x1000, -100
MOUNT_ATTR_IDMAP = 0x00100000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
SECCOMP_MODE_FILTER = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_holding = ctypes.PyDLL(None)
"""The same library, called without letting go of the interpreter's lock."""
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
# Made here once: a new type touches memory all over the interpreter, which after a fork means copies of
# pages.
_UInt32x2, _UInt32x6 = ctypes.c_uint32 * 2, ctypes.c_uint32 * 6


class _FilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _require_success(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def fork() -> int:
    """Like os.fork, at half its price: without Python's own work after a fork, which copies 200 pages.

    That work is for threads, locks and hooks that a warden does not have. What is left is reseeding `random`,
    which `jobs` does. Only for a process of one thread.
    """
    return _require_success(_holding.fork(), "fork")


def unshare(flags: int) -> None:
    _require_success(_libc.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def setns(descriptor: int, kind: int) -> None:
    _require_success(_libc.setns(descriptor, ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _require_success(
        _libc.mount(
            source.encode() or None,
            target.encode(),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        f"mount {target}",
    )


def unmount(target: str) -> None:
    _require_success(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


@contextlib.contextmanager
def user_namespace(identities):  # type: ignore[no-untyped-def]  # without `typing`
    """A descriptor of a user namespace with the lines of `identities` as its uid_map and gid_map."""
    ready, tell = os.pipe()
    # Only a privileged process of the parent namespace may
    # map several ids, so the holder waits until this one has.
    holder = fork()
    if holder == 0:
        try:
            unshare(CLONE_NEWUSER)
            os.write(tell, b".")
            signal.pause()
        finally:
            os._exit(0)
    os.close(tell)
    try:
        if not os.read(ready, 1):
            raise OSError(errno.EPERM, "user namespaces cannot be made")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{holder}/{name}", "w", encoding="ascii") as stream:
                stream.write(identities)
        namespace = os.open(f"/proc/{holder}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield namespace
        finally:
            os.close(namespace)
    finally:
        os.close(ready)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def mount_mapped(source: str, target: str, namespace: int) -> None:
    """Bind `source` at `target` with the ids of a user namespace. Needs Linux 5.12."""
    # the numbers are the same on all machines: open_tree, mount_setattr, move_mount
    call = _libc.syscall
    tree = _require_success(
        call(ctypes.c_long(428), AT_FDCWD, source.encode(), OPEN_TREE_CLONE | os.O_CLOEXEC), "open_tree"
    )
    try:
        attributes = struct.pack("QQQQ", MOUNT_ATTR_IDMAP, 0, 0, namespace)
        _require_success(
            call(ctypes.c_long(442), tree, b"", AT_EMPTY_PATH, attributes, ctypes.c_size_t(len(attributes))),
            f"mount_setattr {source}",
        )
        _require_success(
            call(ctypes.c_long(429), tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_EMPTY_PATH),
            "move_mount",
        )
    finally:
        os.close(tree)


def pivot_root(new: str, old: str) -> None:
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    _require_success(_libc.syscall(ctypes.c_long(number), new.encode(), old.encode()), "pivot_root")


def prctl(option: int, *values: int) -> None:
    if _libc.prctl(option, *(*values, 0, 0, 0, 0)[:4]) < 0:
        _require_success(-1, f"prctl {option}")


def drop_bounding_set() -> None:
    """No program that this process starts can gain a capability. Needs CAP_SETPCAP."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            if ctypes.get_errno() == errno.EINVAL:
                return  # past the last capability of this kernel
            _require_success(-1, "drop the bounding set")


def drop_capabilities() -> None:
    """Give up every capability for good: ambient, inheritable, permitted and effective."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    set_capabilities(0)


def set_capabilities(mask: int) -> None:
    """Effective and permitted become `mask`; nothing is inheritable."""
    header = _UInt32x2(CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = _UInt32x6(low, low, 0, high, high, 0)
    _require_success(_libc.capset(header, data), "capset")


def landlock_version() -> int:
    """Landlock's version (LANDLOCK_CREATE_RULESET_VERSION); 0 where the kernel has none."""
    return max(_libc.syscall(ctypes.c_long(444), None, ctypes.c_size_t(0), ctypes.c_uint32(1)), 0)


def install_filter(program: bytes) -> None:
    """Put a seccomp filter, an array of `struct sock_filter`, over this process and all it starts."""
    holder = _FilterProgram(len(program) // 8, program)
    # Without it the kernel wants CAP_SYS_ADMIN for a filter.
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(holder))
