"""The Python that a software-engineering task's programs run with: this machine's Python, or a virtual
environment.

    no `install`  ──► this machine's Python, as `python` too, and pytest, nothing else
    `install`     ──► wheels that its pip commands name, downloaded ──► a sandbox without network: /opt/venv,
                      then the commands, one after another ──► RLLM_HOME/swe/environments/KEY/

What is downloaded is wheels alone, so nothing of a package runs outside of a sandbox. The key is a hash of
the commands and, unless they name packages and nothing else, of the files of the repository that steer
builds; what failed is not kept.
"""

import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm.data.swe_repository import PLACE, Repository
from rllm.data.swe_rows import SWETask
from rllm.errors import ConfigError
from rllm.files.home import rllm_home
from rllm.sandbox.archive import unpack_layer
from rllm.sandbox.backends import open_sandbox
from rllm.sandbox.base import Sandbox
from rllm.sandbox.interpreter import interpreter
from rllm.sandbox.made_once import made_once
from rllm.sandbox.packages import PLACE as PACKAGES
from rllm.sandbox.types import ExecResult, Limits, Root, Scope, Status

VENV = "/opt/venv"
_FORM = 2
"""The form of a directory in the cache; another number makes all of them anew."""
_PROGRAMS = "/opt/python/bin"
"""Where `python` is without a virtual environment."""
TEST_PACKAGES = ("pytest",)
"""The packages that every task's tests are run with."""
_TOOLS = ("pip", "setuptools", "wheel")
_WHEELS = "/opt/wheels"
_STEERING = re.compile(
    r"(?:pyproject\.toml|setup\.py|setup\.cfg|MANIFEST\.in|requirements[^/]*\.txt|.*\.(?:c|h|cc|cpp|pyx|rs))"
)
"""Files of the repository that say what an install step makes."""
_LIMITS = Limits(wall_s=1800, cpu_s=1800, memory_mb=4096, disk_mb=4096, output_kb=65_536, processes=512)
_DOWNLOAD_S = 1800.0
_ESCAPED, _BACKSLASHED = re.compile(r"([*?\[!# \\])"), r"\\\1"
"""The characters that stand for themselves in a pattern of git's, escaped."""
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[^\]]*\])?(?:\s*[<>=!~;@].*)?")


@dataclass(kw_only=True, slots=True, frozen=True)
class Environment:
    """Parts of a world beside the repository."""

    path: Path
    """The path in the cache: `layer` holds the part of the worlds' roots above the repository."""
    packages: tuple[str, ...] = ()
    """The packages of this machine, where there is no virtual environment."""
    image_programs: str = ""
    """The folder of its `python` where a container image has all of it."""

    @property
    def has_venv(self) -> bool:
        return not (self.packages or self.image_programs)

    @property
    def layer(self) -> Path:
        """A layer of the worlds' roots, above the repository's."""
        return (self.path / "layer").absolute()

    @property
    def programs(self) -> str:
        """The folder of its `python`, as its programs see it."""
        return self.image_programs or (f"{VENV}/bin" if self.has_venv else _PROGRAMS)

    @property
    def python(self) -> str:
        return f"{self.programs}/python"

    @property
    def site(self) -> str:
        """The folder of its packages, as its programs see it."""
        return f"{VENV}/lib/python{python_version()}/site-packages" if self.has_venv else PACKAGES


@dataclass(kw_only=True, slots=True, frozen=True)
class _Installation:
    """Steps, and what of a repository they read."""

    name: str
    """The name of the task or project, in errors."""
    steps: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Path -> content of those that steer what the steps make."""
    layers: tuple[str, ...] = ()
    """With the repository."""

    @property
    def key(self) -> str:
        files = {path: hashlib.sha256(data).hexdigest() for path, data in self.files.items()}
        about = [_FORM, list(self.steps), python_version(), TEST_PACKAGES, dict(sorted(files.items()))]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def python_version() -> str:
    """The version of the Python that runs in sandboxes here, such as `3.11`."""
    return interpreter().version.rpartition(".")[0]


def environment_of(task: SWETask, repository: Repository, *, backend: str) -> Environment:
    """From the cache, or made now. Raises ConfigError that names the row and the install step that failed, or
    the Python that is not here."""
    here = python_version()
    if task.python and task.python.split(".")[:2] != here.split("."):
        raise ConfigError(
            f"{task.instance_id} asks for Python {task.python}; sandboxes here run {here}. Leave `python` "
            "out of the row where its tests pass with that."
        )
    if all(_names_packages_alone(each) for each in task.install):
        return package_environment(task.install, name=task.instance_id, backend=backend)
    files, layers = _steering_files(repository), (str(repository.layer),)
    return _make_environment(
        _Installation(name=task.instance_id, steps=task.install, files=files, layers=layers), backend
    )


def package_environment(steps: tuple[str, ...], *, name: str, backend: str) -> Environment:
    """With the packages that the steps name, each of them a `pip install` of names with versions; of any
    number of repositories. Raises ConfigError, in the name of `name`, for a step that fails."""
    if not steps:
        return Environment(path=_plain_python(), packages=TEST_PACKAGES)
    return _make_environment(_Installation(name=name, steps=steps), backend)


def _make_environment(installation: _Installation, backend: str) -> Environment:
    target = rllm_home() / "swe" / "environments" / installation.key
    with made_once(target) as part:
        if part is not None:
            _make(installation, backend, part)
    return Environment(path=target)


def _names_packages_alone(step: str) -> bool:
    """Whether what a step makes is the same whatever repository it is run in."""
    try:
        words = shlex.split(step)
    except ValueError:
        return False
    return words[:2] == ["pip", "install"] and all(map(_REQUIREMENT.fullmatch, words[2:]))


def _plain_python() -> Path:
    """A layer in which this machine's Python is called `python`."""
    path = interpreter(packages=TEST_PACKAGES).path
    target = rllm_home() / "swe" / "environments" / f"plain-{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    with made_once(target) as part:
        if part is not None:
            folder = Path(f"{part}/layer{_PROGRAMS}")
            folder.mkdir(parents=True)
            (folder / "python").symlink_to(path)
    return target


def _steering_files(repository: Repository) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    top = Path(f"{repository.layer}{PLACE}")
    for entry in sorted(top.rglob("*")):
        path = str(entry.relative_to(top))
        if entry.is_symlink() or f"{path}/".startswith(".git/"):
            continue
        if entry.is_file() and _STEERING.fullmatch(entry.name):
            files[path] = entry.read_bytes()
        elif entry.is_dir() and path.count("/") <= 1 and not path.startswith(".git"):
            files[f"{path}/"] = b""  # where packages are
    return files


def _make(installation: _Installation, backend: str, part: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rllm-swe-") as folder:
        wheels = Path(folder) / "wheels"
        wheels.mkdir()
        _download(installation, wheels)
        root = Root(folders=(PLACE, VENV, _WHEELS), layers=installation.layers)
        # After the steps of the project: pip leaves a version that they have installed as it is.
        last = f"pip install {' '.join(TEST_PACKAGES)}"
        with open_sandbox(backend, limits=_LIMITS, root=root) as sandbox:
            sandbox.upload(wheels, _WHEELS)
            for step in (*_first_steps(wheels), *installation.steps, last):
                _require_ok(installation.name, step, _step(sandbox, step))
            _keep(installation, sandbox, part)


def _first_steps(wheels: Path) -> tuple[str, ...]:
    # A wheel is a zip file, from which Python can run pip before any pip is installed.
    pip = next(each.name for each in sorted(wheels.glob("pip-*.whl")))
    return (
        f"python3 -m venv --without-pip {VENV}",
        f"{VENV}/bin/python {_WHEELS}/{pip}/pip install {' '.join(_TOOLS)}",
    )


def _step(sandbox: Sandbox, step: str) -> ExecResult:
    return sandbox.exec(
        ["bash", "-c", step],
        cwd=PLACE,
        env={
            "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin",
            "VIRTUAL_ENV": VENV,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": _WHEELS,
            "PIP_NO_CACHE_DIR": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )


def _require_ok(name: str, step: str, result: ExecResult) -> None:
    if result.status is not Status.OK:
        message = (result.stdout + result.stderr).strip()[-600:]
        raise ConfigError(
            f"{name}: its install step `{step}` ended with {result.status}. Steps run without "
            "network, with the wheels that pip commands in `install` and the project's own metadata name. "
            f"{message}"
        )


def _keep(installation: _Installation, sandbox: Sandbox, part: Path) -> None:
    unpack_layer(sandbox.snapshot(Scope(folders=(VENV,))).tar, part / "layer")
    if not installation.layers:
        return
    untracked_files = _step(sandbox, "git ls-files -z --others ':(exclude)**/__pycache__/**'")
    _require_ok(installation.name, "git ls-files", untracked_files)
    artifacts = [each for each in untracked_files.stdout.split("\0") if each]
    # A scope without any folder would mean the whole file system.
    packed = sandbox.snapshot(Scope(folders=tuple(f"{PLACE}/{each}" for each in artifacts) or ("/none",)))
    unpack_layer(packed.tar, part / "layer")
    exclude_file = Path(f"{part}/layer{PLACE}/.git/info/exclude")  # they are nobody's change
    exclude_file.parent.mkdir(parents=True, exist_ok=True)
    exclude_file.write_text("".join(f"/{_ESCAPED.sub(_BACKSLASHED, each)}\n" for each in artifacts), "utf-8")


# ---- wheels ------------------------------------------------------------------------------------------------


def _download(installation: _Installation, wheels: Path) -> None:
    """The wheels of all that the install steps need. Raises ConfigError for what is not to be had as one."""
    requirements = [*_TOOLS, *TEST_PACKAGES, *_requirements(installation)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        "--dest",
        str(wheels),
    ]
    done = subprocess.run(
        [*command, *dict.fromkeys(requirements)],
        capture_output=True,
        text=True,
        timeout=_DOWNLOAD_S,
        check=False,
        # A directory without modules, because `-m` looks for pip in the current one first.
        cwd=wheels,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise ConfigError(
            f"{installation.name}: the wheels for its `install` cannot be downloaded: "
            f"{done.stderr.strip()[-600:]}"
        )


def _requirements(installation: _Installation) -> list[str]:
    """Names that the pip commands of the steps give, and where they install the project what it says it
    needs."""
    requirements: list[str] = []
    steering = installation.files
    for step in installation.steps:
        for words in _pip_commands(step):
            files = [
                words[place + 1] for place, word in enumerate(words[:-1]) if word in ("-r", "--requirement")
            ]
            for name in files:
                requirements += _lines(steering.get(name.removeprefix("./"), b"").decode("utf-8", "replace"))
            for word in words:
                project = re.fullmatch(r"\.(?:/)?(?:\[([^\]]*)\])?", word)
                if project is not None:
                    requirements += _project_requirements(steering, (project[1] or "").split(","))
                elif word not in files and _REQUIREMENT.fullmatch(word):
                    requirements.append(word)
    return requirements


def _pip_commands(step: str) -> list[list[str]]:
    """The words after `pip install` of each such command in a step."""
    commands: list[list[str]] = []
    for part in re.split(r"&&|\|\||;|\n", step):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            continue
        for place in range(len(words) - 1):
            if words[place].rsplit("/")[-1].startswith("pip") and words[place + 1] == "install":
                commands.append(words[place + 2 :])
                break
    return commands


def _lines(text: str) -> list[str]:
    lines = (each.split(" #")[0].strip() for each in text.splitlines())
    return [each for each in lines if each and _REQUIREMENT.fullmatch(each)]


def _project_requirements(steering: dict[str, bytes], extras: list[str]) -> list[str]:
    """Requirements of pyproject.toml for building and running the project."""
    try:
        table: dict[str, Any] = tomllib.loads(steering.get("pyproject.toml", b"").decode("utf-8", "replace"))
    except tomllib.TOMLDecodeError:
        return []
    project = table.get("project", {})
    optional = project.get("optional-dependencies", {})
    requirements = [*table.get("build-system", {}).get("requires", ()), *project.get("dependencies", ())]
    for extra in extras:
        requirements += optional.get(extra.strip(), ())
    return [str(each) for each in requirements]
