"""The image of a task's Dockerfile, without a container engine: layers for a sandbox's writable root.

    FROM ──► this machine's system, where its version fits
    RUN ──► rllm.sandbox.layer_build, as root, with the network ──┐
    COPY, ADD, WORKDIR ──► files beside the Dockerfile ───────────┴─► RLLM_HOME/layers/KEY/, one a line
    ENV, ARG, USER, SHELL ──► what the lines after them, and the task, begin with

A layer's key is a hash of what made it: the layers below, the line, its variables and the files that it
copies. So
equal beginnings of Dockerfiles are built once. Every line that cannot be done is an error that names it,
before any agent comes; a line that failed leaves nothing.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rllm.data.dockerfile import DockerLine, fill, fill_line, instructions_of, pairs_of
from rllm.data.home import rllm_home
from rllm.errors import ConfigError
from rllm.sandbox.inside.files import landing
from rllm.sandbox.inside.layers import SCRATCH, SYSTEM
from rllm.sandbox.interpreter import SYSTEM_PYTHON, interpreter
from rllm.sandbox.launch import is_privileged
from rllm.sandbox.layer_build import BuildStep, build_layer, registries_are_reachable
from rllm.sandbox.system_layer import machine_release, make_system_layer, system_key
from rllm.store.made_once import made_once, remove_tree

CODENAMES = {
    "debian": {"buster": "10", "bullseye": "11", "bookworm": "12", "trixie": "13", "forky": "14"},
    "ubuntu": {"focal": "20.04", "jammy": "22.04", "noble": "24.04", "plucky": "25.04"},
}
RELATED = {("ubuntu", "22.04"): ("debian", "12"), ("ubuntu", "24.04"): ("debian", "13")}
"""Releases of Ubuntu, with the one of Debian that was made of the same packages; either stands for the
other."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_IMAGE = re.compile(
    r"(?:.*/)?(debian|ubuntu|python)(?:-(\d+)-(\d+))?(?::([\w.-]+))?(?:@sha256:\w+)?", re.ASCII
)
_PREDEFINED = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
_NO_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "CMD", "ENTRYPOINT")
"""Of images as they are started; a task's commands start by themselves."""
_COPY_FLAGS = ("chown", "chmod", "link")
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
    """`path:line` of its RUN lines."""
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
        resolved = self.resolve(path)
        if resolved[1:] in ("", *SCRATCH):  # every sandbox has these
            return True
        about = self.about(resolved)
        return about is not None and stat.S_ISDIR(about.st_mode)

    def read(self, path: str) -> str:
        """A text file of the image; empty where there is none."""
        resolved = self.resolve(path)
        for layer in self.layers:
            file = Path(f"{layer}{resolved}")
            if file.is_file() and not file.is_symlink():
                return file.read_text("utf-8", "replace")
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
                return None if stat.S_ISCHR(about.st_mode) else about
            if top and _hides(top, path):
                return None
        return None


def image_of(
    dockerfile: Path, *, variables: Mapping[str, str] = {}, timeout_s: float = 600.0, builds: bool = True
) -> Image:
    """The image of a Dockerfile, from the cache or made now; `variables` are those of the task beside its
    own.

    Without `builds` nothing is run or written: it says what is wrong with a line, and which RUN lines there
    are. Raises ConfigError that names the line.
    """
    build = _Build(dockerfile, timeout_s, builds)
    for instruction in instructions_of(dockerfile):
        build.do(instruction)
    if not build.has_base:
        raise ConfigError(f"{dockerfile} has no FROM.")
    return build.image(variables)


class _Build:
    """The state between the lines of a Dockerfile."""

    def __init__(self, dockerfile: Path, timeout_s: float, builds: bool) -> None:
        self.context = dockerfile.parent
        self.has_base = False
        self._path, self._builds = dockerfile, builds
        self._ignores = _ignore_rule(self.context)
        self._first_arguments: dict[str, str] = {}
        self._arguments: dict[str, str] = {}
        self._variables: dict[str, str] = {}
        self._shell = ["/bin/sh", "-c"]
        self._workdir, self._user = "/", ""
        self._layers: list[Path] = []
        self._runs: list[str] = []
        self._folders: list[str] = []
        self._deadline_s = time.monotonic() + timeout_s

    def image(self, variables: Mapping[str, str]) -> Image:
        image = Image(
            layers=tuple(self._layers), variables=self._variables | dict(variables), workdir=self._workdir
        )
        return Image(
            layers=image.layers,
            variables=image.variables,
            workdir=image.workdir,
            user=user_of(image, self._user, str(self._path))[0] if self._user and self._builds else 0,
            runs=tuple(self._runs),
            folders=tuple(dict.fromkeys(each for each in self._folders if each.strip("/"))),
        )

    def do(self, raw: DockerLine) -> None:
        instruction = fill_line(
            raw,
            self._first_arguments
            if raw.word == "FROM"
            else {"PATH": PATH} | self._arguments | self._variables,
        )
        if not self.has_base and instruction.word not in ("FROM", "ARG"):
            raise ConfigError(f"{instruction.where}: `{instruction.word}` stands before FROM.")
        match instruction.word:
            case "FROM":
                self._from(instruction)
            case "ARG":
                self._argument(instruction)
            case "ENV":
                self._variables |= pairs_of(instruction)
            case "WORKDIR":
                self._workdir = os.path.normpath(os.path.join(self._workdir, _one(instruction)))
                self._folders.append(self._workdir)
                self._make(instruction, ["workdir", self._workdir], self._fill_workdir)
            case "USER":
                self._user = _one(instruction)
            case "SHELL":
                self._shell = instruction.json_words or []
                if not self._shell:
                    raise ConfigError(
                        f'{instruction.where}: SHELL takes a list of words, as in ["bash", "-c"].'
                    )
            case "COPY" | "ADD":
                self._copy(instruction)
            case "RUN":
                self._run(instruction)
            case word if word not in _NO_EFFECT:
                raise ConfigError(f"{instruction.where}: `{word}` cannot be done without a container engine.")
            case _:
                pass

    def _from(self, instruction: DockerLine) -> None:
        if self.has_base:
            raise ConfigError(f"{instruction.where}: several stages cannot be built here; leave one FROM.")
        words = instruction.words
        if not words or not (len(words) == 1 or (len(words) == 3 and words[1].lower() == "as")):
            raise ConfigError(f"{instruction.where}: `FROM {instruction.text:.80}` names no image.")
        platform = dict(instruction.flags).get("platform", "linux/amd64")
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
        if platform.split("/")[:2] != ["linux", machine]:
            raise ConfigError(
                f"{instruction.where}: the platform {platform} is not this machine's, linux/{machine}."
            )
        self.has_base = True
        self._workdir = "/app" if "/t-bench/" in words[0] else "/"
        is_python = require_fitting(words[0], instruction.where)
        lines = {each.word for each in instructions_of(self._path)}
        if self._builds and lines & {"RUN", "USER"}:
            self._system(is_python)

    def _system(self, is_python: bool) -> None:
        self._layers.insert(0, _layer_of(system_key(), make_system_layer))
        if is_python:
            self._variables |= {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
            self._layers.insert(0, _layer_of("python-1", _fill_python))

    def _argument(self, instruction: DockerLine) -> None:
        name, has_default, default = instruction.text.partition("=")
        value = fill(default.strip("\"'"), self._first_arguments | self._arguments | self._variables)
        if not self.has_base:
            self._first_arguments[name] = value
        elif has_default:
            self._arguments[name] = value
        elif name in self._first_arguments:
            self._arguments[name] = self._first_arguments[name]

    def _run(self, instruction: DockerLine) -> None:
        self._runs.append(instruction.where)
        has_network = True
        for name, value in instruction.flags:
            if name == "network" and value in ("none", "default"):
                has_network = value == "default"
            elif not (name == "mount" and value.startswith("type=cache")):
                raise ConfigError(
                    f"{instruction.where}: `--{name}={value}` cannot be done without a container engine."
                )
        if not self._builds:
            return
        command = instruction.json_words or [*self._shell, instruction.text]
        if instruction.documents and instruction.json_words is None:
            command = _document_command(instruction, self._shell)
        image = self.image({})
        user = user_of(image, self._user, instruction.where) if self._user else (0, 0)
        has_registries = has_network and registries_are_reachable()
        variables = {"PATH": PATH, "HOME": _home_of(image, user[0]), **self._arguments, **self._variables}
        step = BuildStep(
            command=tuple(command),
            variables=variables,
            workdir=self._workdir,
            user=user,
            has_network=has_registries,
            timeout_s=max(self._deadline_s - time.monotonic(), 0.1),
        )

        def build(part: Path) -> None:
            try:
                layer = build_layer(part / "build", self._layers, step)
            except ConfigError as error:
                offline = "" if has_registries else " No package registry of this machine answers."
                shown = instruction.text.replace("\n", " ")
                raise ConfigError(f"{instruction.where}: `RUN {shown:.120}`: {error}{offline}") from None
            layer.rename(part / "layer")
            remove_tree(part / "build")

        about = ["run", command, sorted(variables.items()), self._workdir, user, has_network]
        self._make(instruction, about, build, makes_parts=True)
        self._folders += _homes_made(self._layers[0])

    def _copy(self, instruction: DockerLine) -> None:
        unknown = [name for name, _ in instruction.flags if name not in _COPY_FLAGS]
        words = instruction.words
        if unknown or len(words) < 2 or instruction.documents:
            what = f"`--{unknown[0]}`" if unknown else f"`{instruction.word} {instruction.text:.80}`"
            raise ConfigError(
                f"{instruction.where}: {what} cannot be done here; files beside the Dockerfile are copied."
            )
        *sources, target = words
        files = _sources(self.context, sources, instruction, self._ignores)
        flags = dict(instruction.flags)
        about = [
            "copy",
            instruction.word,
            target,
            self._workdir,
            flags,
            [[name, _digest(each)] for name, each in files],
        ]
        self._make(
            instruction, about, lambda layer: self._fill_copies(layer, files, target, flags, instruction)
        )
        into = os.path.normpath(os.path.join(self._workdir, target))
        self._folders.append(into if _is_folder(target, files) else os.path.dirname(into))

    def _fill_copies(
        self,
        layer: Path,
        files: list[tuple[str, Path]],
        target: str,
        flags: dict[str, str],
        instruction: DockerLine,
    ) -> None:
        image = self.image({})
        into = os.path.join(self._workdir, target)
        place = Path(f"{layer}{image.resolve(into)}")
        is_folder = _is_folder(target, files) or image.is_directory(into)
        for _, source in files:
            if source.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                _copy_tree(source, place, lambda path: self._ignores(path.relative_to(self.context)))
            elif instruction.word == "ADD" and tarfile.is_tarfile(source):
                place.mkdir(parents=True, exist_ok=True)
                with tarfile.open(source) as archive:
                    archive.extractall(place, filter="data")
            else:
                goal = place / source.name if is_folder else place
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, goal, follow_symlinks=False)
        owner = user_of(image, flags["chown"], instruction.where) if "chown" in flags else (0, 0)
        _set_owners(layer, flags.get("chmod", ""), owner, instruction.where)
        _keep_directories(layer, image)

    def _fill_workdir(self, layer: Path) -> None:
        image = self.image({})
        Path(f"{layer}{image.resolve(self._workdir)}").mkdir(parents=True, exist_ok=True)
        _keep_directories(layer, image)

    def _make(
        self,
        instruction: DockerLine,
        about: list[object],
        make: Callable[[Path], None],
        *,
        makes_parts: bool = False,
    ) -> None:
        """Lay what a line makes on top, from the cache or made now."""
        if not self._builds:
            return
        below = [each.parent.name for each in self._layers]
        key = hashlib.sha256(json.dumps([below, about, is_privileged()], default=str).encode()).hexdigest()[
            :32
        ]

        def fill_part(part: Path) -> None:
            if makes_parts:
                make(part)
                return
            (part / "layer").mkdir()
            try:
                make(part / "layer")
            except (OSError, tarfile.TarError) as error:
                raise ConfigError(
                    f"{instruction.where}: `{instruction.word} {instruction.text:.80}`: {error}"
                ) from error

        self._layers.insert(0, _layer_of(key, fill_part, makes_parts=True))


def require_fitting(reference: str, where: str) -> bool:
    """Whether the image is one of Python's. Raises ConfigError for one that this machine's system is not."""
    match = _IMAGE.fullmatch(reference)
    if match is None:
        raise ConfigError(
            f"{where}: `FROM {reference}` cannot be built here; images of debian, ubuntu and python "
            f"are, over this "
            "machine's system."
        )
    name, major, minor, tag = match.groups()
    if major is not None and not (tag or "").startswith(major):
        tag = f"{major}.{minor}" if name != "debian" else major
    words = [
        each for each in (tag or "latest").split("-") if each not in ("slim", "latest", "stable", "backports")
    ]
    if name == "python":
        here = interpreter()
        versions = [each for each in words if each[0].isdigit()]
        rest = [each for each in words if each not in versions]
        version = versions[0].split(".")[:2] if versions else []
        if here.path != os.path.realpath(SYSTEM_PYTHON) or version != here.version.split(".")[: len(version)]:
            raise ConfigError(
                f"{where}: `FROM {reference}` wants another Python than this machine's, {here.version}."
            )
        name, words = "debian", [each for each in rest if each in CODENAMES["debian"]]
        if len(rest) > len(words):
            raise ConfigError(
                f"{where}: `FROM {reference}` is no image of Debian, which this machine's system is."
            )
        _require_release("debian", words, reference, where)
        return True
    _require_release(name, words, reference, where)
    return False


def _require_release(name: str, words: list[str], reference: str, where: str) -> None:
    release = machine_release()
    here = release.get("ID", "unknown"), release.get("VERSION_ID", "")
    version = CODENAMES[name].get(words[0], words[0]) if words else ""
    if name == "debian":
        version = version.split(".")[0]
    release_name = (name, version)
    is_related = RELATED.get(release_name) == here or RELATED.get(here) == release_name
    fits = not version or release_name == here or is_related
    if not fits or here[0] not in CODENAMES:
        raise ConfigError(
            f"{where}: `FROM {reference}` is {name} {version or '(any)'}, and this machine's system is "
            f"{here[0]} {here[1]}, which it would be built over."
        )


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


def _home_of(image: Image, uid: int) -> str:
    homes = [each[5] for each in _table(image.read("/etc/passwd"), 6) if each[2] == str(uid)]
    return homes[0] if homes else "/root" if uid == 0 else "/"


def _layer_of(key: str, make: Callable[[Path], None], *, makes_parts: bool = False) -> Path:
    target = rllm_home() / "layers" / key
    with made_once(target) as part:
        if part is not None and makes_parts:
            make(part)
        elif part is not None:
            (part / "layer").mkdir()
            make(part / "layer")
    return (target / "layer").absolute()


def _fill_python(layer: Path) -> None:
    """`python` and `pip`, as images of Python have them."""
    folder = layer / "usr" / "local" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / name).symlink_to(SYSTEM_PYTHON)
    for name in ("pip", "pip3"):
        (folder / name).write_text(f'#!/bin/sh\nexec {SYSTEM_PYTHON} -m pip "$@"\n')
        (folder / name).chmod(0o755)


def _one(instruction: DockerLine) -> str:
    text = instruction.text.strip().strip("\"'")
    if not text or "\0" in text:
        raise ConfigError(f"{instruction.where}: `{instruction.word}` names nothing.")
    return text


def _document_command(instruction: DockerLine, shell: list[str]) -> list[str]:
    """A RUN line that is one here-document is a script; another gets its documents as a shell would."""
    text = instruction.text.strip()
    if re.fullmatch(r"<<-?[\"']?\w+[\"']?", text):
        script = instruction.documents[0]
        first = script.split("\n", 1)[0]
        return (
            ["/usr/bin/env", "-S", *_shebang(first), "-c", script]
            if first.startswith("#!")
            else [*shell, script]
        )
    names = re.findall(r"<<-?[\"']?(\w+)[\"']?", text)
    ends = "".join(f"{body}{name}\n" for name, body in zip(names, instruction.documents, strict=True))
    return [*shell, f"{text}\n{ends}"]


def _shebang(line: str) -> list[str]:
    words = line.removeprefix("#!").split()
    return words[1:] if words and words[0].endswith("/env") else words


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
        matches = [each for each in matches if not ignores(each.relative_to(context))]
        if not matches or any(not each.resolve().is_relative_to(top) for each in matches):
            raise ConfigError(f"{instruction.where}: there is no `{name}` beside the Dockerfile.")
        files += [(name, each) for each in matches]
    return files


def _ignore_rule(context: Path) -> Callable[[Path], bool]:
    """Whether `.dockerignore` leaves a path out. Its last pattern that fits counts."""
    file = context / ".dockerignore"
    rules: list[tuple[bool, re.Pattern[str]]] = []
    for line in file.read_text("utf-8").splitlines() if file.is_file() else []:
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        pattern = os.path.normpath(bare.lstrip("!").strip()).lstrip("/")
        rules.append((not bare.startswith("!"), re.compile(f"{_glob(pattern)}(?:/.*)?", re.DOTALL)))

    def is_ignored(path: Path) -> bool:
        verdicts = [leaves_out for leaves_out, pattern in rules if pattern.fullmatch(str(path))]
        return bool(verdicts) and verdicts[-1] and str(path) != "."

    return is_ignored


def _glob(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(words.get(each) or re.escape(each) for each in parts)


def _copy_tree(source: Path, target: Path, leaves_out: Callable[[Path], bool]) -> None:
    def skipped(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if leaves_out(Path(folder) / name)}

    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=skipped)


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


def _keep_directories(layer: Path, image: Image) -> None:
    """Directories that the image has already stay as they are there: of two of one path, the upper one
    counts."""
    for path in [each for each in layer.rglob("*") if each.is_dir() and not each.is_symlink()]:
        about = image.about(f"/{path.relative_to(layer)}")
        if about is not None and stat.S_ISDIR(about.st_mode):
            if is_privileged():
                os.chown(path, about.st_uid, about.st_gid)
            path.chmod(stat.S_IMODE(about.st_mode))


def _is_folder(target: str, files: list[tuple[str, Path]]) -> bool:
    """Whether the target of a COPY is a directory by its words."""
    return target.endswith(("/", "/.")) or target == "." or len(files) > 1 or files[0][1].is_dir()


def _homes_made(layer: Path) -> list[str]:
    """Directories that a RUN line made where people work, and which no tool keeps its settings in."""
    tops = [Path("root"), Path("usr/src"), Path("usr/local/src")]
    folders = [
        top / name for top in tops if (layer / top).is_dir() for name in sorted(os.listdir(layer / top))
    ]
    return [f"/{each}" for each in folders if not each.name.startswith(".") and (layer / each).is_dir()]


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
