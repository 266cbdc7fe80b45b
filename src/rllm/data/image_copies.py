"""COPY and ADD of a Dockerfile: files beside it become files of a layer.

instruction, files beside the Dockerfile ──copy_of──┬─► FileCopy ──key──► is it there already?
instruction, what TAKE took of a stage ──copy_of_stage──┘      └──fill──► the layer
"""

import hashlib
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.data.dockerfile import DockerLine
from rllm.data.image import Image, user_of
from rllm.data.unpacking import extract_tar
from rllm.errors import ConfigError
from rllm.sandbox.launch import is_privileged

_FLAGS = ("chown", "chmod", "link")
TAKEN = ".taken"
TAKE = f"""
set -e; IFS=; number=100000
for pattern in "$@"; do
  for path in $pattern; do
    if [ ! -e "$path" ]; then echo "there is no $pattern in that stage" >&2; exit 1; fi
    mkdir -p "/{TAKEN}/$number"; cp -aH -- "$path" "/{TAKEN}/$number/"; number=$((number + 1))
  done
done
"""
"""Run in a stage: what patterns name, in order, each in a directory of its own below TAKEN."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FileCopy:
    """One COPY or ADD."""

    instruction: DockerLine
    context: Path
    files: list[tuple[str, Path]]
    """(as the instruction names it, file or directory), in order."""
    target: str
    """As the instruction names it."""
    flags: dict[str, str]
    ignores: Callable[[Path], bool]
    keeps_owners: bool = False
    """A file of another stage keeps its owner, unless `--chown` says otherwise."""

    @property
    def key(self) -> list[Any]:
        """Everything that what it makes depends on, but for the image and its working directory."""
        digests = [[name, _digest(each)] for name, each in self.files]
        return [self.target, self.flags, digests]

    @property
    def is_into_folder(self) -> bool:
        """Whether the target is a directory by its words."""
        target, files = self.target, self.files
        return target.endswith(("/", "/.")) or target == "." or len(files) > 1 or files[0][1].is_dir()

    def fill(self, layer: Path, image: Image, workdir: str) -> None:
        """Put the files into a layer that will lie on those of `image`."""
        where, into = self.instruction.where, os.path.join(workdir, self.target)
        place = Path(f"{layer}{image.resolve(into)}")
        is_folder = self.is_into_folder or image.is_directory(into)
        owners: dict[Path, os.stat_result] = {}
        for _, source in self.files:
            if source.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                _copy_tree(source, place, lambda path: self.ignores(path.relative_to(self.context)))
                owners |= {place / each.relative_to(source): each.lstat() for each in source.rglob("*")}
            elif self.instruction.word == "ADD" and tarfile.is_tarfile(source):
                place.mkdir(parents=True, exist_ok=True)
                with tarfile.open(source) as archive:
                    extract_tar(archive, place)
            else:
                goal = place / source.name if is_folder else place
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, goal, follow_symlinks=False)
                owners[goal] = source.lstat()
        owner = user_of(image, self.flags["chown"], where) if "chown" in self.flags else (0, 0)
        _set_owners(layer, self.flags.get("chmod", ""), owner, where)
        for path, about in owners.items() if self.keeps_owners and is_privileged() else ():
            os.chown(path, about.st_uid, about.st_gid, follow_symlinks=False)
        keep_directories(layer, image)


def copy_of(instruction: DockerLine, context: Path, ignores: Callable[[Path], bool]) -> FileCopy:
    """The copy that an instruction asks for. Raises ConfigError for a missing source, or what cannot be
    done."""
    _require_doable(instruction, _FLAGS)
    *sources, target = instruction.words
    return FileCopy(
        instruction=instruction,
        context=context,
        files=_sources(context, sources, instruction, ignores),
        target=target,
        flags=dict(instruction.flags),
        ignores=ignores,
    )


def _require_doable(instruction: DockerLine, flags: Iterable[str]) -> None:
    unknown = [name for name, _ in instruction.flags if name not in flags]
    if unknown or len(instruction.words) < 2 or instruction.documents:
        what = f"`--{unknown[0]}`" if unknown else f"`{instruction.word} {instruction.text:.80}`"
        raise ConfigError(
            f"{instruction.where}: {what} cannot be done here; files beside the Dockerfile are copied."
        )


def patterns_of_stage(instruction: DockerLine) -> list[str]:
    """The absolute paths and patterns that a COPY names of another stage. Raises ConfigError for what cannot
    be done."""
    _require_doable(instruction, (*_FLAGS, "from"))
    patterns = ["/" + os.path.normpath(each).lstrip("/") for each in instruction.words[:-1]]
    if "/" in patterns:
        raise ConfigError(f"{instruction.where}: a whole stage cannot be copied; name directories of it.")
    return patterns


def copy_of_stage(instruction: DockerLine, context: Path) -> FileCopy:
    """A COPY of what TAKE took of another stage."""
    flags = {name: value for name, value in instruction.flags if name != "from"}
    return FileCopy(
        instruction=instruction,
        context=context,
        # TAKE counts from 100000, so the order of the names as text is that of the patterns.
        files=[(each.name, each) for folder in sorted(context.iterdir()) for each in folder.iterdir()],
        target=instruction.words[-1],
        flags=flags,
        ignores=lambda path: False,
        keeps_owners="chown" not in flags,
    )


def _sources(
    context: Path, names: Iterable[str], instruction: DockerLine, ignores: Callable[[Path], bool]
) -> list[tuple[str, Path]]:
    """The files that the words of a COPY name, in order. Raises ConfigError for what is not beside the
    Dockerfile."""
    top = context.resolve()
    files: list[tuple[str, Path]] = []
    for name in names:
        if "://" in name or name.startswith("git@"):
            raise ConfigError(
                f"{instruction.where}: `{name:.120}` would be downloaded; only local files are added."
            )
        bare = os.path.normpath(f"/{name}").lstrip("/")
        matches = sorted(context.glob(bare)) if bare else [context]
        matches = [
            each
            for each in matches
            if not _is_left_out(each, lambda path: ignores(path.relative_to(context)))
        ]
        if not matches or any(not each.resolve().is_relative_to(top) for each in matches):
            raise ConfigError(f"{instruction.where}: there is no `{name}` beside the Dockerfile.")
        files += [(name, each) for each in matches]
    return files


def ignore_rule(context: Path) -> Callable[[Path], bool]:
    """Whether `.dockerignore` leaves a path out. Its last pattern that fits counts."""
    file = context / ".dockerignore"
    rules: list[tuple[bool, re.Pattern[str]]] = []
    for line in file.read_text("utf-8").splitlines() if file.is_file() else []:
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        pattern = os.path.normpath(bare.lstrip("!").strip()).lstrip("/")
        # What fits a directory fits all that is below it.
        rules.append((not bare.startswith("!"), re.compile(f"{_glob(pattern)}(?:/.*)?", re.DOTALL)))

    def is_ignored(path: Path) -> bool:
        verdicts = [leaves_out for leaves_out, pattern in rules if pattern.fullmatch(str(path))]
        return bool(verdicts) and verdicts[-1] and str(path) != "."

    return is_ignored


def _glob(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(words.get(each) or re.escape(each) for each in parts)


def _copy_tree(source: Path, target: Path, ignores: Callable[[Path], bool]) -> None:
    def names_left_out(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if _is_left_out(Path(folder) / name, ignores)}

    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=names_left_out)


def _is_left_out(path: Path, ignores: Callable[[Path], bool]) -> bool:
    """Whether nothing of a path is copied: an exception below an ignored directory keeps the way to it."""
    if not ignores(path):
        return False
    return path.is_symlink() or all(ignores(each) for each in path.rglob("*"))


def _set_owners(layer: Path, mode: str, owner: tuple[int, int], where: str) -> None:
    if mode and not re.fullmatch(r"[0-7]{3,4}", mode):
        raise ConfigError(f"{where}: `--chmod={mode}` is read as an octal number, such as 755.")
    if owner != (0, 0) and not is_privileged():
        raise ConfigError(f"{where}: `--chown` needs root here: a plain user can be one user alone.")
    for path in layer.rglob("*"):
        if is_privileged():
            os.chown(path, *owner, follow_symlinks=False)
        if mode and not path.is_symlink():
            path.chmod(int(mode, 8))


def keep_directories(layer: Path, image: Image) -> None:
    """Directories that the image has already stay as they are there: of two of one path, the upper one
    counts."""
    for path in [each for each in layer.rglob("*") if each.is_dir() and not each.is_symlink()]:
        about = image.about(f"/{path.relative_to(layer)}")
        if about is not None and stat.S_ISDIR(about.st_mode):
            if is_privileged():
                os.chown(path, about.st_uid, about.st_gid)
            path.chmod(stat.S_IMODE(about.st_mode))


def _digest(path: Path) -> str:
    """A hash of a file, or of a directory with all below it."""
    digest = hashlib.sha256()
    for each in [path] if not path.is_dir() else sorted(path.rglob("*")):
        about = each.lstat()
        digest.update(
            f"{each.relative_to(path.parent)}\0{stat.S_IMODE(about.st_mode)}\0{about.st_mode}".encode()
        )
        if each.is_symlink():
            digest.update(os.readlink(each).encode())
        elif each.is_file():
            digest.update(hashlib.sha256(each.read_bytes()).digest())
    return digest.hexdigest()
