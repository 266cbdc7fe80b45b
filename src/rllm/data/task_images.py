"""The image of a task's Dockerfile, without a container engine: layers for a sandbox's writable root.

    FROM ──► this machine's system, where its version fits
    RUN ──► rllm.sandbox.layer_build, as root, with the network ──┐
    COPY, ADD, WORKDIR ──► files beside the Dockerfile ───────────┴─► RLLM_HOME/layers/KEY/, one a line
    COPY --from ──► files of another stage; of several stages those that the last one needs are built
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
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rllm.data.dockerfile import DockerLine, fill, fill_line, instructions_of, pairs_of
from rllm.data.image import Image, home_of, user_of
from rllm.data.image_bases import require_fitting
from rllm.data.image_copies import (
    TAKE,
    TAKEN,
    copy_of,
    copy_of_stage,
    ignore_rule,
    keep_directories,
    patterns_of_stage,
)
from rllm.data.image_stages import stages_of
from rllm.errors import ConfigError
from rllm.files.home import rllm_home
from rllm.sandbox.interpreter import SYSTEM_PYTHON
from rllm.sandbox.launch import is_privileged
from rllm.sandbox.layer_build import BuildStep, build_layer, registries_are_reachable
from rllm.sandbox.made_once import made_once, remove_tree
from rllm.sandbox.system_layer import make_system_layer, system_key

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NO_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "CMD", "ENTRYPOINT")
"""The instructions about images as they are started; a task's commands start by themselves."""


def image_of(
    dockerfile: Path, *, variables: Mapping[str, str] = {}, timeout_s: float = 600.0, builds: bool = True
) -> Image:
    """The image of a Dockerfile, from the cache or made now; `variables` are those of the task beside its
    own.

    Without `builds` nothing is run or written: it says what is wrong with a line, and which RUN lines there
    are. Raises ConfigError that names the line.
    """
    instructions = instructions_of(dockerfile)
    first = next((place for place, each in enumerate(instructions) if each.word == "FROM"), len(instructions))
    file = _File(path=dockerfile, builds=builds, deadline_s=time.monotonic() + timeout_s)
    before = _Stage(file)
    for instruction in instructions[:first]:
        before.do(instruction)
    if first == len(instructions):
        raise ConfigError(f"{dockerfile} has no FROM.")
    stages = stages_of(instructions[first:], file.arguments)
    file.needs_system = any(each.needs_system for each in stages)
    stage = before
    for each in stages:
        stage = _Stage(file)
        for instruction in each.lines:
            stage.do(instruction)
        file.stages |= dict.fromkeys(each.names, stage)
    return stage.image(variables)


@dataclass(kw_only=True, slots=True)
class _File:
    """State that the stages of one Dockerfile share."""

    path: Path
    builds: bool
    deadline_s: float
    needs_system: bool = False
    """Whether any of them is built by running something."""
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    """The arguments before the first FROM."""
    stages: "dict[str, _Stage]" = field(default_factory=dict[str, "_Stage"])
    """By name in small letters, and by number."""


class _Stage:
    """The state between the lines of one stage of a Dockerfile."""

    def __init__(self, file: _File) -> None:
        self.context = file.path.parent
        self.has_base = False
        self._file, self._path, self._builds = file, file.path, file.builds
        self._ignores = ignore_rule(self.context)
        self._first_arguments = file.arguments
        self._arguments: dict[str, str] = {}
        self._variables: dict[str, str] = {}
        self._shell = ["/bin/sh", "-c"]
        self._workdir, self._user = "/", ""
        self._layers: list[Path] = []
        self._runs: list[str] = []
        self._folders: list[str] = []
        self._deadline_s = file.deadline_s

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
        words = instruction.words
        if words[0].lower() in self._file.stages:
            self._go_on_with(self._file.stages[words[0].lower()])
            return
        platform = dict(instruction.flags).get("platform", "linux/amd64")
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
        if platform.split("/")[:2] != ["linux", machine]:
            raise ConfigError(
                f"{instruction.where}: the platform {platform} is not this machine's, linux/{machine}."
            )
        self.has_base = True
        self._workdir = "/app" if "/t-bench/" in words[0] else "/"
        is_python = require_fitting(words[0], instruction.where)
        if self._builds and self._file.needs_system:
            self._system(is_python)

    def _go_on_with(self, stage: "_Stage") -> None:
        """Begin where another stage ended: its arguments alone are not known here."""
        self.has_base = True
        self._variables, self._shell = dict(stage._variables), list(stage._shell)
        self._workdir, self._user = stage._workdir, stage._user
        self._layers, self._runs, self._folders = [*stage._layers], [*stage._runs], [*stage._folders]

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
        # An argument from before FROM holds in a stage only where the stage names it again.
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
        variables = {"PATH": PATH, "HOME": home_of(image, user[0]), **self._arguments, **self._variables}
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
                line = instruction.text.replace("\n", " ")
                raise ConfigError(f"{instruction.where}: `RUN {line:.120}`: {error}{offline}") from None
            layer.rename(part / "layer")
            remove_tree(part / "build")

        # What the line asks for, not `has_registries`: a layer stays valid when this machine is offline.
        about = ["run", command, sorted(variables.items()), self._workdir, user, has_network]
        # One that is built offline may lack what `pip install x || true` brings, so it counts only offline.
        if has_network and not has_registries and not _place_of(_key_of(self._layers, about)).is_dir():
            about.append("offline")
        self._make(instruction, about, build, makes_parts=True)
        self._folders += _homes_made(self._layers[0])

    def _copy(self, instruction: DockerLine) -> None:
        origin = dict(instruction.flags).get("from")
        if origin is None:
            copy = copy_of(instruction, self.context, self._ignores)
        else:
            context = self._context_of(instruction, origin)
            if context is None:
                return
            copy = copy_of_stage(instruction, context)
        image, workdir = self.image({}), self._workdir
        about = ["copy", instruction.word, workdir, *copy.key]
        self._make(instruction, about, lambda layer: copy.fill(layer, image, workdir))
        into = os.path.normpath(os.path.join(workdir, copy.target))
        self._folders.append(into if copy.is_into_folder else os.path.dirname(into))

    def _context_of(self, instruction: DockerLine, origin: str) -> Path | None:
        """A directory with what a line takes from another stage, each in one of its own; None without
        `builds`."""
        stage = self._file.stages.get(origin.lower())
        if stage is None or instruction.word != "COPY":
            raise ConfigError(
                f"{instruction.where}: `--from={origin}` names no stage above; images are not fetched."
            )
        patterns = patterns_of_stage(instruction)
        self._runs += [*stage._runs, instruction.where]
        if not self._builds:
            return None
        step = BuildStep(
            command=("/bin/sh", "-c", TAKE, "sh", *patterns),
            variables={"PATH": PATH},
            has_network=False,
            timeout_s=max(self._deadline_s - time.monotonic(), 0.1),
        )

        def build(part: Path) -> None:
            try:
                layer = build_layer(part / "build", stage._layers, step)
            except ConfigError as error:
                raise ConfigError(
                    f"{instruction.where}: `COPY --from={origin} {instruction.text:.80}`: {error}"
                ) from None
            (layer / TAKEN).rename(part / "layer")
            remove_tree(part / "build")

        return _layer_of(_key_of(stage._layers, ["take", patterns]), build, makes_parts=True)

    def _fill_workdir(self, layer: Path) -> None:
        image = self.image({})
        Path(f"{layer}{image.resolve(self._workdir)}").mkdir(parents=True, exist_ok=True)
        keep_directories(layer, image)

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

        key = _key_of(self._layers, about)
        self._layers.insert(0, _layer_of(key, fill_part, makes_parts=True))


def _key_of(below: list[Path], about: list[object]) -> str:
    # The key of a layer stands for its content.
    names = [each.parent.name for each in below]
    content = json.dumps([names, about, is_privileged()], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _place_of(key: str) -> Path:
    return rllm_home() / "layers" / key


def _layer_of(key: str, make: Callable[[Path], None], *, makes_parts: bool = False) -> Path:
    target = _place_of(key)
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


def _homes_made(layer: Path) -> list[str]:
    """Directories that a RUN line made where people work, and which no tool keeps its settings in."""
    tops = [Path("root"), Path("usr/src"), Path("usr/local/src")]
    folders = [
        top / name for top in tops if (layer / top).is_dir() for name in sorted(os.listdir(layer / top))
    ]
    return [f"/{each}" for each in folders if not each.name.startswith(".") and (layer / each).is_dir()]
