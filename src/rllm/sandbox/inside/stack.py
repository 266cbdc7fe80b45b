"""A writable root over layers, and states of its files to return to: runs inside.

    what programs write     states/2   tmpfs, the upper directory of an overlay on `/`, and one on /usr
    kept states             states/1, states/0
    layers                  /run/layers/0, /run/layers/1, …   directories of this machine, never written to
    this machine            /usr

To keep a state is to put a new, empty directory above it; to return is to leave out what is above. Nothing is
copied and nothing that a program wrote is read. As root the layers are mounted with their owner mapped to the
program's user (mount_setattr(2), MOUNT_ATTR_IDMAP), so that files need not change hands one by one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat

from rllm.errors.machine import MACHINE_ERRNOS
from rllm.sandbox.inside import kernel, layers

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LAYERS = "/run/layers"
"""Where the layers are bound, each under its number from the topmost on."""
STATES, WORK, MAPPED, TRASH, NONE = "states", "work", "mapped", "trash", "none"
"""Directories of the sandbox's tmpfs."""
ROOT = "root"
"""In a state, the directory with changes of `/`; those of /usr lie in `usr` beside it."""
MAX_KEPT = 100
"""The number of states one above the other: a page is all that mount(2) takes of their names."""
MOST_UID = 65_536


class Stack:
    """The writable root of one sandbox."""

    def __init__(
        self, disk: str, settings: dict[str, Any], own: Callable[[str], None], uid: int, *, is_user: bool
    ) -> None:
        """`own` gives a path to the program, whose user is `uid`."""
        self._disk, self._own = disk, own
        self.chain: list[int] = []
        """Numbers of the kept states that the present one stands on, the oldest first."""
        self.state = 0
        self._newest = 0
        for part in (layers.NEW, STATES, f"{STATES}/proc", WORK, MAPPED, TRASH, NONE):
            os.mkdir(f"{disk}/{part}", 0o755)
        system = [each for each in layers.mounts() if each[1:] in layers.SYSTEM and os.path.isdir(each)]
        sources = {name: f"{LAYERS}/{name}" for name in sorted(os.listdir(LAYERS), key=int)}
        lower = self._mount_layers(
            sources | {each[1:]: each for each in system}, settings["owner"], uid, is_user
        )
        self._system = {each[1:]: lower[each[1:]] for each in system}
        self._layers = [lower[name] for name in sources]
        self._points = [each for each in layers.mounts() if each not in system]
        for folder in layers.OWN_IN_USR:
            if stat.S_ISDIR(_mode(f"/usr/{folder}".rstrip("/"))):
                layers.make_own(f"{disk}/{STATES}/0/usr", folder, own)
        self.read_only: list[str] = []
        """The parts of the system that programs cannot write to; where there are any, the layers were
        copied."""
        if not (settings["overlay"] and self._is_laid()):
            self.read_only = system
            self._copy_layers()
        self._furnish(settings, uid)
        # Where owners are not mapped by the mount, files in the folders are given to the program one by one.
        if self.read_only or (not is_user and not lower[next(iter(sources))].startswith(MAPPED)):
            for folder in settings["folders"]:
                layers.own_all(f"{disk}/{layers.NEW}{folder}", own)

    def keep(self) -> int:
        """The number of a state that has the files as they are now. Raises OSError where there are too
        many."""
        if self.read_only:
            raise OSError(errno.EOPNOTSUPP, "states are kept where there are overlays, and here are none")
        if len(self.chain) >= MAX_KEPT:
            raise OSError(errno.E2BIG, f"{MAX_KEPT} states are kept one above the other, and no more can be")
        self.chain.append(self.state)
        self._begin_state()
        return self.chain[-1]

    def return_to(self, chain: list[int]) -> None:
        """Make the files those of the last state of `chain`; what was written since is gone."""
        discarded_state = self.state
        self.chain = list(chain)
        self._begin_state()
        # Only now is it no upper directory of a mounted overlay.
        os.rename(f"{self._disk}/{STATES}/{discarded_state}", f"{self._disk}/{TRASH}/{discarded_state}")
        with contextlib.suppress(OSError, RecursionError):  # one that is hard to remove is its own disk
            shutil.rmtree(f"{self._disk}/{TRASH}/{discarded_state}")

    def enter_states(self) -> None:
        """Make the states alone the `/` of this mount namespace: for who reads what programs changed."""
        states = f"{self._disk}/{STATES}"
        kernel.mount(states, states, flags=kernel.MS_BIND)
        layers.enter_at(states)

    def _is_laid(self) -> bool:
        try:
            self._mount()
        except OSError as error:
            if error.errno in MACHINE_ERRNOS:
                raise
            with contextlib.suppress(OSError):  # where not even the first overlay was mounted
                kernel.unmount(f"{self._disk}/{layers.NEW}")
            return False
        return True

    def _begin_state(self) -> None:
        kernel.unmount(f"{self._disk}/{layers.NEW}")
        self._newest += 1
        self.state = self._newest
        self._mount()

    def _copy_layers(self) -> None:
        """Files of the layers as the sandbox's own: no links, which programs could write through."""
        new = f"{self._disk}/{layers.NEW}"
        if any(os.path.lexists(os.path.join(self._disk, layer, "usr")) for layer in self._layers):
            raise OSError(errno.EOPNOTSUPP, "a layer changes /usr, which needs overlays, refused here")
        for layer in reversed(self._layers):
            shutil.copytree(os.path.join(self._disk, layer), new, symlinks=True, dirs_exist_ok=True)
        for point in (*self.read_only, *self._points):
            if os.path.isdir(point) and not _is_of_layers(new, point):
                kernel.mount(point, directory(new, point[1:]), flags=kernel.MS_BIND | kernel.MS_REC)
        self._mount_devices()

    def _mount(self) -> None:
        """Lay all mounts of the present state."""
        new = f"{self._disk}/{layers.NEW}"
        self._overlay(ROOT, new, [*self._layers, NONE])
        for name, path in self._system.items():
            above = [f"{each}/{name}" for each in self._layers]
            above = [each for each in above if stat.S_ISDIR(_mode(os.path.join(self._disk, each)))]
            self._overlay(name, directory(new, name), [*above, path])
        for point in self._points:
            if os.path.isdir(point) and not _is_of_layers(new, point):
                kernel.mount(point, directory(new, point[1:]), flags=kernel.MS_BIND | kernel.MS_REC)
        self._mount_devices()

    def _mount_devices(self) -> None:
        """/dev, with an empty /dev/shm."""
        new, memory = f"{self._disk}/{layers.NEW}", f"{self._disk}/shm"
        shutil.rmtree(memory)
        os.mkdir(memory, 0o700)
        self._own(memory)
        kernel.mount("/dev", directory(new, "dev"), flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.mount(memory, f"{new}/dev/shm", flags=kernel.MS_BIND)

    def _overlay(self, name: str, target: str, below: list[str]) -> None:
        """One overlay of the present state over the kept ones and `below`, paths from the disk on."""
        upper, work = f"{STATES}/{self.state}/{name}", f"{WORK}/{self.state}/{name}"
        states = [f"{STATES}/{each}/{name}" for each in reversed(self.chain)]
        for path in (upper, work):
            os.makedirs(f"{self._disk}/{path}", exist_ok=True)
        self._own(f"{self._disk}/{upper}")
        # Paths relative to the disk, because mount(2) takes one page of
        # options. `userxattr` for root as well: the cell that packs changes
        # has no capability, and would not see attributes of the trusted kind.
        options = f"lowerdir={':'.join([*states, *below])},upperdir={upper},workdir={work},userxattr"
        os.chdir(self._disk)
        try:
            kernel.mount("overlay", target, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        finally:
            os.chdir("/")

    def _furnish(self, settings: dict[str, Any], uid: int) -> None:
        """Add files that a root has whatever its layers are."""
        new = f"{self._disk}/{layers.NEW}"
        for name in os.listdir("/"):
            if os.path.islink(f"/{name}") and not os.path.lexists(f"{new}/{name}"):
                os.symlink(os.readlink(f"/{name}"), f"{new}/{name}")
        for folder in (*layers.SCRATCH, *(each.strip("/") for each in settings["folders"])):
            layers.make_own(new, folder, self._own)
        for name in ("proc", "sys"):
            directory(new, name)
        for point in self._points:
            if not os.path.isdir(point) and not _is_of_layers(new, point):
                directory(new, os.path.dirname(point)[1:])
                layers.copy_file(point, f"{new}{point}", self._own)
        for name, text in (("passwd", layers.PASSWD), ("group", layers.GROUP)):
            lines = text.format(uid=uid).splitlines(keepends=True)
            path = f"{directory(new, 'etc')}/{name}"
            is_there = stat.S_ISREG(_mode(path))
            if not is_there and os.path.lexists(path):
                os.unlink(path)  # a link of a layer's would be followed here, outside of the root
            with open(path, "a", encoding="ascii") as stream:
                stream.write("".join(lines[1:] if is_there else lines))
        self._own(new)

    def _mount_layers(self, sources: dict[str, str], owner: int, uid: int, is_user: bool) -> dict[str, str]:
        """The same directories, mounted so that what belongs to `owner` there belongs to the program; as they
        are where the kernel cannot, and for a plain user, whose files they are."""
        if is_user:
            return sources
        # Only the owner's id is mapped to another; all below and above it stay what they are.
        identities = (f"0 0 {owner}\n" if owner else "") + f"{owner} {uid} 1\n"
        identities += f"{owner + 1} {owner + 1} {MOST_UID - owner - 1}\n"
        places: dict[str, str] = {}
        try:
            with kernel.user_namespace(identities) as namespace:
                for name, source in sources.items():
                    places[name] = f"{MAPPED}/{name}"
                    os.mkdir(f"{self._disk}/{places[name]}")
                    kernel.mount_mapped(source, f"{self._disk}/{places[name]}", namespace)
        except OSError as error:
            if error.errno in MACHINE_ERRNOS:
                raise
            return sources
        return places


def directory(top: str, path: str) -> str:
    """`path` below `top`, made where it is not there; what is no directory on the way is replaced."""
    here = top
    for part in path.split("/"):
        here = f"{here}/{part}"
        if not stat.S_ISDIR(_mode(here)):
            if os.path.lexists(here):
                os.unlink(here)
            os.mkdir(here, 0o755)
    return here


def _is_of_layers(new: str, point: str) -> bool:
    """Whether a layer says what is at `point` itself: an image has an /etc of its own."""
    return point.startswith("/etc/") and os.path.lexists(f"{new}{point}")


def _mode(path: str) -> int:
    """Type and mode of what is there, no link followed; 0 for nothing."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
