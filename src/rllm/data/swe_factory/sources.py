"""Where projects come from: a directory, a git repository, an sdist.

    ./project  ./clone  https://…/project.git  project-1.0.tar.gz  pypi:project==1.0
        └──► Source: its files as plain directory, its version, its commits where there are any

Only the second-to-last kinds need a network, once. What git has not committed of a clone is not looked at.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from rllm.data.swe_rows import ARCHIVES
from rllm.data.unpacking import extract_tar, open_tar
from rllm.errors import ConfigError

PYPI = "pypi:"
GIT_URLS = ("https://", "http://", "git://", "ssh://", "file://", "git@")
MAX_TREE_MB = 100
"""The size of a project's files: they are held in a sandbox, twice."""
TIMEOUT_S = 600.0
"""The time of one download."""
NOT_COPIED = (
    *(".git", ".hg", ".venv", "venv", "env", ".tox", ".nox", "node_modules", "__pycache__", ".mypy_cache"),
    *(".pytest_cache", ".ruff_cache", ".eggs", ".hypothesis"),
)
"""Directories of a project that are made by tools."""
_VARIABLES_OF_A_REPOSITORY = {
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_NAMESPACE"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE"),
    *("GIT_CONFIG", "GIT_CONFIG_COUNT", "GIT_CONFIG_PARAMETERS"),
}
"""Variables that git sets for its hooks, in which our own git would act on the repository of the hook."""
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_RELEASE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")


@dataclass(kw_only=True, slots=True, frozen=True)
class Source:
    """One project at one state."""

    name: str
    """The prefix of its tasks' names; letters, digits, `.`, `_` and `-`."""
    address: str
    """As it was given."""
    kind: str
    """`directory`, `git` or `sdist`."""
    tree: Path
    """Its files."""
    digest: str
    """sha256 of the files' paths and contents."""
    commit: str = ""
    repository: Path | None = None
    """A clone with its history, of kind `git`."""


def open_source(address: str, folder: Path) -> Source:
    """The project behind an address, put into `folder`, which is empty.

    Raises ConfigError for what is no project, cannot be had, or is too large.
    """
    tree = folder / "tree"
    commit, repository = "", None
    if address.startswith(PYPI):
        archive = _release_of(address, folder / "download")
        kind, name = "sdist", _archive_name(archive.name)
        _unpack(archive, tree)
    elif address.startswith(GIT_URLS):
        kind, name = "git", re.sub(r"\.git$", "", address.rstrip("/").replace(":", "/").rsplit("/", 1)[-1])
        repository = _clone(address, folder / "clone")
        commit = _checkout(repository, tree, address)
    else:
        path = Path(address)
        if path.is_file() and path.name.endswith(ARCHIVES) and not path.name.endswith(".zip"):
            kind, name = "sdist", _archive_name(path.name)
            _unpack(path, tree)
        elif (path / ".git").exists() or ((path / "HEAD").is_file() and (path / "objects").is_dir()):
            kind, name = "git", re.sub(r"\.git$", "", path.resolve().name)
            repository = _clone(str(path.resolve()), folder / "clone")
            commit = _checkout(repository, tree, address)
        elif path.is_dir():
            kind, name = "directory", path.resolve().name
            _copy(path, tree)
        else:
            raise ConfigError(
                f"`{address}` is no project: give a directory, a git repository, an sdist "
                f"({', '.join(ARCHIVES[:4])}), or a release as in pypi:toolz==1.0.0."
            )
    _require_whole(tree, address)
    return Source(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "project",
        address=address,
        kind=kind,
        tree=tree,
        digest=digest_of(tree),
        commit=commit,
        repository=repository,
    )


def digest_of(tree: Path) -> str:
    """sha256 over the paths and contents of all files, in order of their paths."""
    total = hashlib.sha256()
    for path in files_of(tree):
        data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        name = path.relative_to(tree).as_posix().encode()
        total.update(b"%d %s %d " % (len(name), name, len(data)) + data)
    return total.hexdigest()


def files_of(tree: Path) -> list[Path]:
    """Every file and link, without what git or Python keep there."""
    paths: list[Path] = []
    for folder, folders, names in os.walk(tree):
        folders[:] = [each for each in folders if each not in NOT_COPIED]
        paths += [Path(folder, each) for each in names]
    return sorted(paths, key=lambda each: each.relative_to(tree).as_posix())


def git(*words: str, at: Path, **variables: str) -> str:
    """Run git and return its output. Raises ConfigError with its last line where it refuses."""
    plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-c", "safe.directory=*", "-c", "core.autocrlf=false", "-c", "core.hooksPath=/dev/null"]
    process = _run([*command, *words], at, {**plain, **variables})
    if process.returncode:
        raise ConfigError(f"git {words[0]} in {at}: {_last_line(process)}")
    return process.stdout


def _run(command: list[str], at: Path, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    plain_variables = {
        name: value for name, value in os.environ.items() if name not in _VARIABLES_OF_A_REPOSITORY
    }
    try:
        return subprocess.run(
            command,
            cwd=at,
            env={**plain_variables, **variables},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"`{command[0]}` is not installed.") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`{' '.join(command[:8])} …` was not done after {TIMEOUT_S:g} s.") from error


def _last_line(process: "subprocess.CompletedProcess[str]") -> str:
    lines = [each.strip() for each in process.stderr.splitlines() if each.strip()]
    errors = [each for each in lines if each.lower().startswith(("error", "fatal"))]
    return (errors or lines or [f"exit code {process.returncode}"])[-1]


def _release_of(address: str, folder: Path) -> Path:
    """The sdist of a release, by pip: from the index, or the folder, that pip is set up for."""
    match = _RELEASE.fullmatch(address.removeprefix(PYPI))
    if match is None:
        raise ConfigError(
            f"`{address}` names no release; write name and version, as in pypi:toolz==1.0.0. The version "
            "makes the tasks the same next year."
        )
    name, version = match.groups()
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, "--dest", "."]
    command += ["--disable-pip-version-check", "--no-input", f"{name}=={version}"]
    process = _run(command, folder, {})
    archives = [each for each in folder.iterdir() if each.name.endswith(ARCHIVES)]
    if process.returncode or len(archives) != 1:
        raise ConfigError(
            f"{address} cannot be had: {_last_line(process)}. It needs the network once; or give the path of "
            "an sdist that is here."
        )
    return archives[0]


def _archive_name(file: str) -> str:
    return next(file.removesuffix(each) for each in ARCHIVES if file.endswith(each))


def _unpack(archive: Path, tree: Path) -> None:
    unpacked_folder = tree.with_name("unpacked")
    try:
        with open_tar(archive) as members:
            extract_tar(members, unpacked_folder)
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(f"{archive} cannot be unpacked: {error}.") from error
    inside = list(unpacked_folder.iterdir())
    os.rename(inside[0] if len(inside) == 1 and inside[0].is_dir() else unpacked_folder, tree)


def _clone(address: str, folder: Path) -> Path:
    folder.mkdir(parents=True)
    git("clone", "--quiet", "--no-checkout", "--no-hardlinks", "--", address, ".", at=folder)
    return folder


def _copy(path: Path, tree: Path) -> None:
    if tree.resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"The tasks of {path} cannot be written into it; choose an --out beside it.")
    try:
        shutil.copytree(path, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    except shutil.Error as error:  # of all files that it could not copy: the first says enough
        source, _, reason = error.args[0][0]
        raise ConfigError(f"{source} cannot be copied: {reason}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be copied: {error}") from error


def _checkout(repository: Path, tree: Path, address: str) -> str:
    try:
        commit = git("rev-parse", "HEAD", at=repository).strip()
    except ConfigError as error:
        raise ConfigError(f"{address} has no commit yet; commit something first.") from error
    tree.mkdir()
    git("--work-tree", str(tree), "checkout", "--quiet", "--force", commit, "--", ".", at=repository)
    if (tree / ".gitmodules").is_file():
        raise ConfigError(
            f"{address} has submodules, which are not fetched; give a directory that has them as plain files."
        )
    return commit


def _require_whole(tree: Path, address: str) -> None:
    """Raises ConfigError for a tree that is too large, or holds pointers instead of files."""
    total = 0
    for path in files_of(tree):
        if path.is_symlink():
            continue
        total += path.stat().st_size
        if total > MAX_TREE_MB << 20:
            raise ConfigError(
                f"{address} has more than {MAX_TREE_MB} MiB of files; give a copy without data and pictures."
            )
        if path.stat().st_size < 1024 and path.read_bytes().startswith(_LFS_POINTER):
            name = path.relative_to(tree)
            raise ConfigError(
                f"{address}: `{name}` is a pointer of Git LFS and not the file; run `git lfs pull` and give "
                "the directory without its `.git`."
            )
