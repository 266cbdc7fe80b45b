"""The installation of a harness: made once and kept in RLLM_HOME/harnesses/KEY, shown to sandboxes at
/opt/harness.

    pip  ──► wheels into a virtual environment of the sandbox's Python     no line of them runs here
             or of another release, `python`, which is shown to sandboxes too
    build ─► wheels made here of the source of the packages that it names  their setup runs here, as this user
    npm  ──► packages below node_modules, without their install scripts
    copy ──► files of its own

KEY is a hash of all of them, of the contents of `copy` and of the Python. What failed is not kept.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rllm.environments.harness.spec import HOME, HarnessSpec
from rllm.errors import ConfigError
from rllm.files.home import rllm_home
from rllm.sandbox.interpreter import Interpreter, interpreter, interpreter_at
from rllm.sandbox.made_once import made_once

INSTALL_TIMEOUT_S = 3600.0
_FORM = 1
"""The form of a directory in the cache; another number makes all of them anew."""


def mounts_of(spec: HarnessSpec) -> tuple[tuple[str, str], ...]:
    """The directories that a sandbox is shown for it: its own, and a Python that would not be seen else."""
    python = _python_of(spec) if spec.pip else interpreter()
    binds = python.binds if python != interpreter() else ()
    return ((str(harness_directory(spec)), HOME), *((path, path) for path in binds))


def harness_directory(spec: HarnessSpec) -> Path:
    """Its directory, from the cache or made now.

    Raises ConfigError, with what the package manager said, where it cannot be installed.
    """
    target = rllm_home() / "harnesses" / f"{spec.name}-{_key(spec)}"
    with made_once(target) as part:
        if part is not None:
            _install(spec, part)
    return target


def _key(spec: HarnessSpec) -> str:
    content = spec.content()
    about = [
        _FORM,
        *(content[name] for name in ("pip", "build", "npm", "copy")),
        _python_of(spec).version if spec.pip else "",
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]


def _python_of(spec: HarnessSpec) -> Interpreter:
    """The Python of its release. Raises ConfigError where there is none."""
    here = interpreter()
    if not spec.python or here.version.startswith(f"{spec.python}."):
        return here
    for path in _candidates(spec.python):
        python = interpreter_at(path)
        if isinstance(python, Interpreter) and python.version.startswith(f"{spec.python}."):
            return python
    raise ConfigError(
        f"The harness `{spec.name}` needs Python {spec.python}, and there is none here that other users may "
        f"read. Install one, as with: apt-get install python{spec.python}, or pyenv install {spec.python}"
    )


def _candidates(release: str) -> list[str]:
    """The paths that a Python of that release may have, as the system, pyenv and uv install it."""
    on_path = shutil.which(f"python{release}")
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")
    folders = [*pyenv.glob(f"versions/{release}.*"), *uv.glob(f"cpython-{release}.*")]
    paths = [str(folder / "bin" / f"python{release}") for folder in sorted(folders)]
    return [on_path, *paths] if on_path else paths


def _install(spec: HarnessSpec, part: Path) -> None:
    part.chmod(0o755)
    if spec.pip:
        _install_wheels(spec, part, _python_of(spec))
    if spec.npm:
        _install_node_packages(spec, part)
    for name in spec.copy:
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.folder / name, part / name)
        (part / name).chmod(0o755)


def _install_wheels(spec: HarnessSpec, part: Path, python: Interpreter) -> None:
    _run(spec, "python -m venv", [python.path, "-m", "venv", "--without-pip", str(part)])
    pip = [sys.executable, "-m", "pip", "--python", str(part / "bin" / "python")]
    options = ["--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    options += [f"--no-binary={package.partition('==')[0]}" for package in spec.build]
    _run(spec, "pip", [*pip, "install", *options, *spec.pip, *spec.build])
    # Scripts that pip installs name their interpreter by where it lies now; inside it lies at HOME.
    for script in (part / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            script.write_bytes(script.read_bytes().replace(str(part).encode(), HOME.encode()))


def _install_node_packages(spec: HarnessSpec, part: Path) -> None:
    if shutil.which("npm") is None:
        raise ConfigError(f"The harness `{spec.name}` needs `npm`; run: apt-get install npm")
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    _run(spec, "npm", ["npm", "install", "--prefix", str(part), *options, *spec.npm])


def _run(spec: HarnessSpec, what: str, command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            umask=0o022,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"The harness `{spec.name}` cannot be installed: {what} took more than {INSTALL_TIMEOUT_S:g} s."
        ) from error
    if done.returncode:
        message = (done.stderr or done.stdout).strip()[-600:]
        raise ConfigError(
            f"The harness `{spec.name}` cannot be installed: {what} ended with code {done.returncode}: "
            f"{message}"
        )
