"""The runs that a page shows, each under a name that links can carry.

    directories ──► scan ──► {"frozenlake-seed0": RunDirectory, …}

A name in a link is looked up among what was found; it never becomes a path.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rllm.errors import ConfigError
from rllm.store.run_directory import RunDirectory, is_run, runs_under

_DEEPEST = 3
"""Levels below a directory that are searched: runs of one learner lie a level deeper than runs."""
_NOT_SEARCHED = {"checkpoints", "model", "models", "initial_model", "adapter", "reference", "node_modules"}


class Sources:
    """Directories that hold runs, or are runs, and what there is in them now."""

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                raise ConfigError(
                    f"There is no directory {root}; name a run, or a directory that holds runs."
                )
            if not may_look_into(root):
                raise ConfigError(f"{root} is closed to you; name another, or ask for permission (`chmod`).")
        self.roots = [root.absolute() for root in roots]

    def runs(self) -> dict[str, RunDirectory]:
        """Key -> run, each root's newest first. A key is the run's path below its root."""
        by_key: dict[str, RunDirectory] = {}
        for root in self.roots:
            for run in _runs_below(root, 0):
                by_key[self._key(run.path, root)] = run
        return by_key

    def run(self, key: str) -> RunDirectory:
        run = self.runs().get(key)
        if run is None:
            raise ConfigError(f"There is no run {key[:200]!r} here; the page of runs lists those that are.")
        return run

    def directories_with(self, file: str) -> dict[str, Path]:
        """Key -> directory that holds a file of this name, in the roots and below them, also within runs."""
        return {
            self._key(path, root): path
            for root in self.roots
            for path in _directories_below(root, 0)
            if (path / file).is_file()
        }

    def _key(self, path: Path, root: Path) -> str:
        """The path below the root; with several roots behind what tells them apart."""
        parts = path.relative_to(root).parts
        if len(self.roots) == 1:
            return "/".join(parts or (root.name,))
        return "/".join((self._label(root), *parts))

    def _label(self, root: Path) -> str:
        """The shortest end of a root's path that tells it from the other roots."""
        for length in range(1, len(root.parts) + 1):
            label = "/".join(root.parts[-length:])
            if sum("/".join(each.parts[-length:]) == label for each in self.roots) == 1:
                return label
        return root.as_posix()


def _directories_below(directory: Path, depth: int) -> Iterator[Path]:
    """The directory and what lies below it, as deep as runs may lie, without what is closed to this user."""
    if not may_look_into(directory):
        return
    yield directory
    if depth <= _DEEPEST:
        for each in sorted(directory.iterdir()):
            if each.is_dir() and not (
                each.name.startswith(".") or each.is_symlink() or each.name in _NOT_SEARCHED
            ):
                yield from _directories_below(each, depth + 1)


def may_look_into(directory: Path) -> bool:
    """Whether this user may list the directory and open what is in it."""
    try:
        os.scandir(directory).close()
        os.stat(os.path.join(directory, "."))
    except PermissionError:
        return False
    return True


def _runs_below(directory: Path, depth: int) -> list[RunDirectory]:
    """The runs in a directory and below it; nothing is looked for inside a run."""
    if is_run(directory):
        return [RunDirectory.read(directory)]
    runs = runs_under(directory)
    if depth < _DEEPEST:
        mine = {run.path for run in runs} | {directory / name for name in _NOT_SEARCHED}
        for each in sorted(directory.iterdir()):
            if each not in mine and each.is_dir() and not each.name.startswith(".") and not each.is_symlink():
                runs += _runs_below(each, depth + 1)
    return runs
