"""Folders of a sandbox, however deep: entered step by step, and looked through from the top.

Nothing here loads a module once a program has run: it would read files that the program may have written.
"""

from __future__ import annotations

import contextlib
import os
import stat

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Cursor:
    """An open folder that moves: down through no link, up by `..`.

    A path may have more folders than the system takes in one call or a process may hold open. Nothing else
    may move folders meanwhile.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._parts: list[str] = []

    def enter(self, parts: list[str], *, makes: bool = False) -> int:
        """The folder at `parts` below the root, open until the next call. Raises OSError: ELOOP or ENOTDIR
        for a link on the way."""
        same = min(len(self._parts), len(parts))
        if self._parts[:same] != parts[:same]:
            same = next(place for place in range(same) if self._parts[place] != parts[place])
        while len(self._parts) > same:
            self._step("..")
            self._parts.pop()
        for part in parts[same:]:
            if makes:
                make_directory(part, self._folder, 0o755)
            self._step(part)
            self._parts.append(part)
        return self._folder

    def _step(self, part: str) -> None:
        below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._folder)
        os.close(self._folder)
        self._folder = below

    def close(self) -> None:
        os.close(self._folder)


def walk(
    cursor: Cursor,
    top: list[str],
    *,
    refuse: Callable[[list[str], OSError], None],
    skips: Callable[[list[str]], bool] = lambda parts: False,
) -> Iterator[tuple[list[str], os.stat_result]]:
    """The parts of the path of `top`, and of all below it that is not skipped, each with its status; folders
    before what is in them. `refuse` is told what cannot be looked at, and may raise."""
    here, levels = top[:-1], [top[-1:] or ["."]]
    while levels:
        if not levels[-1]:
            levels.pop()
            here = here[:-1]
            continue
        name = levels[-1].pop()
        parts = top if len(levels) == 1 else [*here, name]
        if skips(parts):
            continue
        try:
            about = os.lstat(name, dir_fd=cursor.enter(here))
        except OSError as error:
            refuse(parts, error)
            continue
        yield parts, about
        if stat.S_ISDIR(about.st_mode):
            try:
                levels.append(sorted(os.listdir(cursor.enter(parts)), reverse=True))
            except OSError as error:
                refuse(parts, error)
            else:
                here = parts


def make_directory(name: str, folder: int, mode: int) -> None:
    with contextlib.suppress(FileExistsError):  # it is opened next, without following a link
        os.mkdir(name, mode & 0o777, dir_fd=folder)
