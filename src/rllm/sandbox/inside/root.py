"""A file system of one's own for the `unshare` backend, as bubblewrap makes it for its own: runs inside.

tmpfs ─ /usr and more, read-only ─ /proc ─ /dev (null, zero, full, random, urandom) ─ /box, /tmp, /run/cell
"""

import fcntl
import os
import socket
import struct

from rllm.sandbox.inside import kernel

DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
HOSTS = "127.0.0.1 localhost\n::1 localhost\n"


def build(binds: "list[list[str]]") -> None:
    """Leave this machine's files behind for good, but for `binds`: directories, files and links to keep, each
    with the path that it has from then on."""
    # Mounts made here must not show up on the machine, and pivot_root(2) refuses shared ones.
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    new = "/sys"  # any directory that nothing is bound from; in this mount namespace alone
    kernel.mount("root", new, "tmpfs", kernel.MS_NOSUID, "size=1m,mode=755")
    for source, path in binds:
        _bind(source, new + path)
    for path in ("/proc", "/dev", "/box", "/tmp", "/run/cell", "/etc"):
        os.makedirs(new + path, exist_ok=True)
    with open(f"{new}/etc/hosts", "w", encoding="ascii") as stream:
        stream.write(HOSTS)
    kernel.mount("proc", f"{new}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    _devices(f"{new}/dev")
    os.chdir(new)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    kernel.mount("", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)
    _loopback_up()


def _bind(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, flags=kernel.MS_BIND | kernel.MS_REC)
    _read_only(target)


def _read_only(target: str) -> None:
    """The mount at `target` and all below it. Flags that the machine has set stay: they may be locked."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        points = [line.split()[4].encode().decode("unicode_escape") for line in stream]
    for point in points:
        if point == target or point.startswith(target + "/"):
            # One mount at a time, because a remount does not take MS_REC.
            statvfs_flags = os.statvfs(point).f_flag & (
                os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_RELATIME
            )
            flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
            kernel.mount("", point, flags=flags | _mount_flags(statvfs_flags))


def _mount_flags(statvfs_flags: int) -> int:
    """mount(2) flags for what statvfs says is set; both share their numbers but for relatime."""
    relatime = 1 << 21 if statvfs_flags & os.ST_RELATIME else 0
    return (statvfs_flags & (os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME)) | relatime


def _devices(folder: str) -> None:
    kernel.mount("dev", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, "size=64k,mode=755")
    # Bound, because device nodes cannot be made in a user namespace.
    for name in DEVICES:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.mount(f"/dev/{name}", f"{folder}/{name}", flags=kernel.MS_BIND)
    for name, target in LINKS.items():
        os.symlink(target, f"{folder}/{name}")
    os.mkdir(f"{folder}/shm")
    kernel.mount("", folder, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)


def _loopback_up() -> None:
    # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING. The loopback of a new network namespace is down.
    set_flags, up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, set_flags, struct.pack("16sH14x", b"lo", up_and_running))
