"""A root that programs can write to, from `/` on: runs inside.

    machine's system   tmpfs `/` ─ /usr, an overlay ─ /etc, /app, … plain directories ─ /proc, /dev, /dev/shm
    unpacked image     an overlay of the whole tree on `/`       (no overlay to be had: a copy of the tree)

What is written lands in the sandbox's one tmpfs, so that one limit holds for all of it. The warden lays the
layers once; each cell makes them its `/` and leaves the rest behind.
"""

from __future__ import annotations

import os
import stat

from rllm.errors.machine import MACHINE_ERRNOS
from rllm.sandbox.inside import kernel

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NEW, UPPER, WORK = "root", "upper", "work"
"""Directories of the sandbox's tmpfs."""
TREE = "/run/tree"
"""Where an unpacked image is bound."""
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
OWN_IN_USR = (
    *("", "bin", "sbin", "lib", "libexec", "share", "include", "src", "games"),
    *("local", "local/bin", "local/sbin", "local/lib", "local/share", "local/include", "local/src"),
)
"""Directories of /usr that are the program's own, so that it can add to them and replace what is in them."""
SCRATCH = ("tmp", "var/tmp", "run", "root", "home", "etc", "var/log", "var/lib", "opt", "srv", "mnt", "sys")
HOME = "/root"
PASSWD = "root:x:0:0:root:/root:/bin/bash\nagent:x:{uid}:{uid}:agent:/root:/bin/bash\n"
GROUP = "root:x:0:\nagent:x:{uid}:\n"
UNSEEN = ("/proc", "/dev", "/run", "/box", "/tmp", "/sys")
"""Mounts of the warden that a program gets in another way, or not at all."""


def lay(disk: str, plan: dict[str, Any], own: Callable[[str], None], uid: int, *, is_user: bool) -> list[str]:
    """Make `disk`/root what programs shall see as `/`; returns what of it they cannot write to.

    `own` gives a path to the program. `is_user`: in a user namespace, where overlays keep their marks in
    attributes of the user.
    """
    for part in (NEW, UPPER, WORK):
        os.mkdir(f"{disk}/{part}", 0o755)
    new = f"{disk}/{NEW}"
    read_only = (_lay_tree if plan["tree"] else _lay_system)(disk, plan, own, is_user)
    for folder in (*SCRATCH, *(each.strip("/") for each in plan["folders"])):
        make_own(new, folder, own)
    for folder in ("proc", "dev", "sys"):
        os.makedirs(f"{new}/{folder}", exist_ok=True)
    if not plan["tree"]:
        for name, text in (("passwd", PASSWD), ("group", GROUP)):
            with open(f"{new}/etc/{name}", "w", encoding="ascii") as stream:
                stream.write(text.format(uid=uid))
    own(new)
    kernel.mount("/dev", f"{new}/dev", flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.mount(f"{disk}/shm", f"{new}/dev/shm", flags=kernel.MS_BIND)
    return read_only


def enter(disk: str) -> None:
    """Make the layers the `/` of this mount namespace, with a /proc of its own, and forget all else."""
    new = f"{disk}/{NEW}"
    # pivot_root(2) takes mount points alone.
    kernel.mount(new, new, flags=kernel.MS_BIND | kernel.MS_REC)
    enter_at(new)


def enter_at(new: str) -> None:
    """Make a mount the `/` of this mount namespace, with a /proc of its own."""
    safe = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", f"{new}/proc", "proc", safe)
    kernel.mount(f"{new}/proc/sys", f"{new}/proc/sys", flags=kernel.MS_BIND)
    kernel.mount("", f"{new}/proc/sys", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | safe)
    os.chdir(new)
    # This puts the old root over the new one at the same place, and
    # the unmount takes it away: no directory for it has to exist.
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")


def _lay_system(disk: str, plan: dict[str, Any], own: Callable[[str], None], is_user: bool) -> list[str]:
    new = f"{disk}/{NEW}"
    read_only = []
    for name in os.listdir("/"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{new}/{name}")
    for point in mounts():
        target = f"{new}{point}"
        if not os.path.isdir(point):
            copy_file(point, target, own)
            continue
        os.makedirs(target, exist_ok=True)
        name = point[1:]
        if name in SYSTEM:
            for folder in OWN_IN_USR if name == "usr" else ("",):
                if os.path.isdir(f"{point}/{folder}") and not os.path.islink(f"{point}/{folder}"):
                    make_own(f"{disk}/{UPPER}/{name}", folder, own)
            if plan["overlay"] and _overlaid(point, target, disk, name, is_user=is_user):
                continue
            read_only.append(point)
        kernel.mount(point, target, flags=kernel.MS_BIND | kernel.MS_REC)
    return read_only


def _lay_tree(disk: str, plan: dict[str, Any], own: Callable[[str], None], is_user: bool) -> list[str]:
    import shutil

    new = f"{disk}/{NEW}"
    os.makedirs(f"{disk}/{UPPER}/tree")
    if not (plan["overlay"] and _overlaid(TREE, new, disk, "tree", is_user=is_user)):
        shutil.copytree(TREE, new, symlinks=True, dirs_exist_ok=True)
    for folder in plan["folders"]:
        own_all(_real_directory(new, folder.strip("/")), own)
    return []


def own_all(top: str, own: Callable[[str], None]) -> None:
    """Give all that is below a directory to the program."""
    for here, folders, files in os.walk(top):
        for name in (*folders, *files):
            own(f"{here}/{name}")


def copy_file(source: str, target: str, own: Callable[[str], None]) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(source, "rb") as source_file, open(target, "wb") as target_file:
        target_file.write(source_file.read())
    own(target)


def _overlaid(lower: str, target: str, disk: str, name: str, *, is_user: bool) -> bool:
    """Mount an overlay; False where the kernel has none, or not for this user."""
    upper, work = f"{disk}/{UPPER}/{name}", f"{disk}/{WORK}/{name}"
    os.makedirs(upper, exist_ok=True)
    os.makedirs(work, exist_ok=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}" + (",userxattr" if is_user else "")
    try:
        kernel.mount("overlay", target, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    except OSError as error:
        if error.errno in MACHINE_ERRNOS:
            raise
        return False
    return True


def mounts() -> list[str]:
    """Where this machine's files are bound in the warden's own root, outermost first."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        # mountinfo writes spaces and the like as octal escapes.
        points = {line.split()[4].encode().decode("unicode_escape") for line in stream}
    return sorted(
        point
        for point in points
        if point != "/" and not any(point == each or point.startswith(each + "/") for each in UNSEEN)
    )


def make_own(top: str, folder: str, own: Callable[[str], None]) -> None:
    """A directory below `top`, and those on the way that are not there, that belong to the program."""
    here = top
    if not os.path.isdir(here):
        os.makedirs(here)
        own(here)
    for part in [each for each in folder.split("/") if each]:
        here = f"{here}/{part}"
        is_new = not os.path.lexists(here)
        if is_new:
            os.mkdir(here, 0o755)
        if not stat.S_ISDIR(os.lstat(here).st_mode):
            return  # a link of the image: what it names is there already
        if is_new or here == f"{top}/{folder}":
            own(here)


def _real_directory(top: str, folder: str) -> str:
    """`folder` below `top`, made where it is not there. Raises OSError where a link is on the way."""
    here = top
    for part in folder.split("/"):
        here = f"{here}/{part}"
        if not os.path.lexists(here):
            os.mkdir(here, 0o755)
        if not stat.S_ISDIR(os.lstat(here).st_mode):
            raise NotADirectoryError(20, "is no directory of the image", here)
    return here
