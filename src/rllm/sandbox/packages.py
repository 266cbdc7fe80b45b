"""Installed distributions that programs may import, and nothing else of the place where they are installed.

    ("numpy",) ──► each distribution, and what it requires ──► the files that its RECORD names
                                                                   └──► Binding(source, place), read-only

A directory is shown whole where all that lies in it belongs to the distribution; where anything else does,
such as a second distribution or a file that somebody left there, its parts are shown one by one. Where a
package came from (`direct_url.json`, which may hold a password) is never shown.
"""

import importlib.metadata
import os
import re
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError

PLACE = "/packages"
"""Where programs see them."""
IMPORTED_AHEAD = ("mpmath", "networkx", "numpy", "sympy")
"""Modules that a warm interpreter imports before any program, where they were asked for: slow to import, and
known to start no thread."""
ENVIRONMENT = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""The variables of programs that see packages: a thread pool of each would take their memory and outlive a
fork badly."""
_UNSEEN = ("direct_url.json",)
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(kw_only=True, slots=True, frozen=True)
class PackageBinding:
    """A file or directory of this machine and where a program sees it, relative to PLACE."""

    source: str
    place: str


def package_names(packages: Iterable[str]) -> tuple[str, ...]:
    """The names once each, in order. Raises ConfigError for what is no list of names."""
    if isinstance(packages, str):
        raise ConfigError(f'`packages` is {packages!r}; write a list of names, such as ("{packages}",).')
    distribution_names = list(packages)
    for name in distribution_names:
        if not isinstance(name, str) or not _REQUIREMENT.fullmatch(name):
            raise ConfigError(
                f"`packages` holds {name!r:.80}; it must be the name of an installed distribution, such as "
                '"numpy", without a version.'
            )
    return tuple(sorted(dict.fromkeys(distribution_names)))


@cache
def bindings_of(packages: tuple[str, ...], *, for_anybody: bool) -> tuple[PackageBinding, ...]:
    """The bindings that show these distributions, and those they require, to a program.

    `for_anybody`: the program will run as a user that nobody is, so every file must be readable by all.
    Raises ConfigError for one that is not installed, or not in a form that can be shown.
    """
    bindings: dict[str, PackageBinding] = {}
    for distribution in _with_requirements(packages):
        for binding in _bindings(distribution):
            bindings.setdefault(binding.place, binding)
    if for_anybody:
        for binding in bindings.values():
            _require_readable(binding)
    return tuple(bindings[place] for place in sorted(bindings))


def imported_ahead(packages: Collection[str]) -> list[str]:
    return [name for name in IMPORTED_AHEAD if name in packages]


def _with_requirements(packages: Sequence[str]) -> list[Distribution]:
    """The distributions, and those that they require, each once."""
    waiting = [(name, "") for name in reversed(packages)]
    visits: set[tuple[str, str]] = set()
    distributions: dict[str, Distribution] = {}
    while waiting:
        requirement, by = waiting.pop()
        match = _REQUIREMENT.match(requirement)
        assert match is not None, "names were looked at, and requirements are written by build tools"
        name, extras = match[1], _extra_names(match[2])
        key = re.sub(r"[-_.]+", "-", name).lower()
        distributions.setdefault(key, _distribution(name, by))
        for extra in extras or [""]:
            # Distributions may require each other in a circle.
            if (key, extra) not in visits:
                visits.add((key, extra))
                waiting += [(each, name) for each in _requirements(distributions[key], extra)]
    return list(distributions.values())


def _requirements(distribution: Distribution, extra: str) -> Iterator[str]:
    """The requirements of a distribution, in general or for one of its extras.

    Conditions on the machine are not read: what is installed here is taken to apply here.
    """
    for line in distribution.requires or ():
        name, _, condition = line.partition(";")
        asked_for = _EXTRA.findall(condition)
        if asked_for and extra not in asked_for:
            continue
        if condition and not _is_installed(name):
            continue
        yield name


def _is_installed(requirement: str) -> bool:
    match = _REQUIREMENT.match(requirement)
    try:
        importlib.metadata.distribution(match[1] if match else requirement)
    except PackageNotFoundError:
        return False
    return True


def _extra_names(extras: str | None) -> list[str]:
    return [each.strip() for each in extras.split(",") if each.strip()] if extras else []


def _distribution(name: str, by: str) -> Distribution:
    try:
        return importlib.metadata.distribution(name)
    except PackageNotFoundError:
        pass
    if by:
        raise ConfigError(
            f"Package `{name}`, which `{by}` requires, is not installed for {sys.executable}; "
            f"run: pip install {name}"
        )
    made_by = importlib.metadata.packages_distributions().get(name, [])
    if made_by:
        raise ConfigError(f"There is no package `{name}`; the module of that name is in `{made_by[0]}`.")
    raise ConfigError(
        f"Package `{name}` is not installed for {sys.executable}; run: pip install {name}. Sandboxes show "
        "programs what is installed here."
    )


# ---- which files -------------------------------------------------------------------------------------------


def _bindings(distribution: Distribution) -> list[PackageBinding]:
    name = distribution.metadata["Name"]
    files = [Path(str(each)) for each in distribution.files or ()]
    inside = [each for each in files if not each.is_absolute() and ".." not in each.parts]
    code = [each for each in inside if not each.parts[0].endswith(".dist-info") and each.suffix != ".pth"]
    if not files or not any(each.suffix in (".py", ".so") for each in code):
        raise ConfigError(
            f"Package `{name}` is installed without a list of its files, or in editable form, and so cannot "
            f"be shown to a sandbox; run: pip install --force-reinstall {name}"
        )
    tree: dict[str, Any] = {}
    for each in inside:
        if each.suffix == ".pth" or each.name in _UNSEEN:
            continue
        here = tree
        for part in each.parts[:-1]:
            here = here.setdefault(part, {})
        here[each.name] = None
    root = Path(os.path.abspath(str(distribution.locate_file(""))))
    try:
        return _parts(tree, root, "")
    except OSError as error:
        raise ConfigError(f"Package `{name}` cannot be shown to a sandbox: {error}") from error


def _parts(tree: dict[str, Any], folder: Path, place: str) -> list[PackageBinding]:
    """The bindings that show the files of `tree`, and no other of `folder`."""
    bindings: list[PackageBinding] = []
    for name, below in sorted(tree.items()):
        source = folder / name
        # A link may lead to files that no list names, and a file that is listed may be gone by now.
        if source.is_symlink() or not source.exists():
            continue
        if below is None or _is_whole(below, source):
            bindings.append(PackageBinding(source=str(source), place=f"{place}{name}"))
        else:
            bindings += _parts(below, source, f"{place}{name}/")
    return bindings


def _is_whole(tree: dict[str, Any], folder: Path) -> bool:
    """Whether all that is in a directory belongs to the distribution, or was compiled from what does."""
    with os.scandir(folder) as entries:
        for entry in entries:
            below = tree.get(entry.name, _UNKNOWN)
            if entry.name == "__pycache__":
                all_names = {*tree, *(below if isinstance(below, dict) else ())}
                with os.scandir(entry) as entries:
                    if not all(
                        each.name in all_names or f"{each.name.split('.')[0]}.py" in all_names
                        for each in entries
                    ):
                        return False
            elif (
                below is _UNKNOWN
                or entry.is_symlink()
                or (
                    entry.is_dir() and not (isinstance(below, dict) and _is_whole(below, folder / entry.name))
                )
            ):
                return False
    return True


_UNKNOWN = object()


def _require_readable(binding: PackageBinding) -> None:
    """Raises ConfigError for the first file that other users cannot read."""
    paths = [binding.source]
    for folder, folders, files in os.walk(binding.source):
        paths += [os.path.join(folder, name) for name in (*folders, *files)]
    for path in paths:
        about = os.stat(path)
        mode = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(about.st_mode) else 0)
        if about.st_mode & mode != mode:
            raise ConfigError(
                f"`{path}` cannot be read by other users, and programs are run as one; "
                f"run: chmod -R o+rX {binding.source}"
            )
