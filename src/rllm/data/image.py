"""The image of a Dockerfile as layers of a writable root, and what is in it: types, modes, links, users.

A path is looked up in the layers from the topmost on, as an overlay does, and then in this machine's system.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rllm.errors import ConfigError
from rllm.sandbox.inside.files import landing
from rllm.sandbox.inside.layers import SCRATCH, SYSTEM

_MAX_LINKS = 40


@dataclass(kw_only=True, slots=True, frozen=True)
class Image:
    """The result of a Dockerfile."""

    layers: tuple[Path, ...] = ()
    """The topmost first."""
    variables: dict[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    user: int = 0
    """The user id that its programs run as."""
    runs: tuple[str, ...] = ()
    """`path:line` of the lines that are built by running something: RUN, and COPY of another stage."""
    folders: tuple[str, ...] = ()
    """Directories that its lines name, or make in a home, for somebody to work in."""

    def resolve(self, path: str) -> str:
        """`path` without links. Raises ConfigError for links in a circle."""
        here, parts = "/", [each for each in path.split("/") if each]
        links = 0
        while parts:
            part = parts.pop(0)
            if part in (".", ".."):
                here = str(PurePosixPath(here).parent) if part == ".." else here
                continue
            place = f"{here.rstrip('/')}/{part}"
            target = self._link_at(place)
            if target is None:
                here = place
                continue
            links += 1
            if links > _MAX_LINKS:
                raise ConfigError(f"{path} leads through links in a circle")
            parts = [each for each in landing(target, place).split("/") if each] + parts
            here = "/"
        return here

    def is_directory(self, path: str) -> bool:
        target_path = self.resolve(path)
        if target_path[1:] in ("", *SCRATCH):  # every sandbox has these
            return True
        about = self.about(target_path)
        return about is not None and stat.S_ISDIR(about.st_mode)

    def read(self, path: str) -> str:
        """A text file of the image; empty where there is none."""
        target_path = self.resolve(path)
        for layer in self.layers:
            about = _lstat(f"{layer}{target_path}")
            if about is not None:  # the uppermost counts, also where it says that the file was removed
                is_file = stat.S_ISREG(about.st_mode)
                return Path(f"{layer}{target_path}").read_text("utf-8", "replace") if is_file else ""
            if _hides(str(layer), target_path):
                return ""
        return ""

    def _link_at(self, path: str) -> str | None:
        for top in (*map(str, self.layers), ""):
            if not top and not (path.startswith("/usr/") or path[1:] in SYSTEM):
                return None
            about = _lstat(f"{top}{path}")
            if about is not None:
                return os.readlink(f"{top}{path}") if stat.S_ISLNK(about.st_mode) else None
            if top and path.count("/") > 1 and _hides(top, path):
                return None
        return None

    def about(self, path: str) -> os.stat_result | None:
        """Type, mode and owner of a path without links; None where there is nothing."""
        for top in (*map(str, self.layers), ""):
            if not top and not path.startswith("/usr"):
                return None
            about = _lstat(f"{top}{path}")
            if about is not None:
                # A character device in a layer says that the file was removed there.
                return None if stat.S_ISCHR(about.st_mode) else about
            if top and _hides(top, path):
                return None
        return None


def user_of(image: Image, text: str, where: str) -> tuple[int, int]:
    """uid and gid of `name`, `name:group`, `uid` or `uid:gid`. Raises ConfigError for a name the image
    lacks."""
    name, _, group = text.partition(":")
    users = {each[0]: each for each in _table(image.read("/etc/passwd"), 4)}
    groups = {each[0]: each for each in _table(image.read("/etc/group"), 3)}
    if name in ("root", "0"):
        uid, gid = 0, 0
    elif name.isdigit():
        uid = int(name)
        gid = next((int(each[3]) for each in users.values() if each[2] == name), 0)
    elif name in users:
        uid, gid = int(users[name][2]), int(users[name][3])
    else:
        raise ConfigError(f"{where}: the image has no user {name!r}.")
    if group:
        if not group.isdigit() and group not in groups and group != "root":
            raise ConfigError(f"{where}: the image has no group {group!r}.")
        gid = int(group) if group.isdigit() else int(groups[group][2]) if group in groups else 0
    return uid, gid


def _table(text: str, num_fields: int) -> list[list[str]]:
    rows = [line.split(":") for line in text.splitlines()]
    return [row for row in rows if len(row) >= num_fields and row[2].isdigit()]


def home_of(image: Image, uid: int) -> str:
    homes = [each[5] for each in _table(image.read("/etc/passwd"), 6) if each[2] == str(uid)]
    return homes[0] if homes else "/root" if uid == 0 else "/"


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _hides(top: str, path: str) -> bool:
    """Whether a directory of a layer on the way to `path` hides what is below it."""
    here = top
    for part in PurePosixPath(path).parent.parts[1:]:
        here = f"{here}/{part}"
        about = _lstat(here)
        if about is None:
            return False
        if not stat.S_ISDIR(about.st_mode) or _is_opaque(here):
            return True
    return False


def _is_opaque(path: str) -> bool:
    try:
        return os.getxattr(path, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False
