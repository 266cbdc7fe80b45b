"""Which Python runs inside, and what of this machine a sandbox sees.

    /usr/bin/python3, or else this process's own interpreter ──► Interpreter(path, the directory to bind)
    packages, by name ──► rllm.sandbox.packages ──► Interpreter.packages: files to bind

Programs get the standard library of that interpreter and the packages that were asked for, nothing else: no
site-packages, no user directory, no environment variable decides. `Interpreter.version` says which Python it
is.
"""

import os
import stat
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox import packages as installed
from rllm.sandbox.packages import PackageBinding

SYSTEM_PYTHON = "/usr/bin/python3"
OLDEST = (3, 9)
SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
    "/etc/ld.so.cache",
)
"""The paths of this machine that a sandbox sees, read-only; those that exist. No home, no /etc with its
secrets, no /var."""
ASKING = (
    "import array, ctypes, encodings, json, marshal, select, socket, sys; "  # what a warden needs
    "from importlib.util import MAGIC_NUMBER as magic; "
    "print(json.dumps([sys.version_info[:2], sys.version.split()[0], sys.base_prefix, encodings.__file__, "
    "magic.hex()]))"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Interpreter:
    path: str
    version: str
    bytecode: bytes
    """The magic number of what it compiles to."""
    binds: tuple[str, ...]
    """Paths of this machine that a sandbox binds for it, beyond SYSTEM_PATHS."""
    packages: tuple[PackageBinding, ...] = ()
    """The installed packages of this process that programs see."""
    imports: tuple[str, ...] = ()
    """Modules of those that a warm interpreter imports before any program."""

    @property
    def command(self) -> list[str]:
        """Without site-packages, the user's directory and bytecode files; `-c` and its text come next."""
        return [self.path, "-s", "-S", "-B"]

    @property
    def environment(self) -> dict[str, str]:
        """All of its environment: sets are in the same order in every run."""
        own = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
        return own | installed.ENVIRONMENT if self.packages else own


def system_paths() -> list[str]:
    return [path for path in SYSTEM_PATHS if os.path.lexists(path)]


@cache
def interpreter(path: str | None = None, packages: tuple[str, ...] = ()) -> Interpreter:
    """The interpreter that sandboxes run: `path`, or the system's, or the one that runs this.

    With `packages` (`packages.package_names`) it must be of the same version as the one that runs this, where
    they are installed. Raises ConfigError for a path that is none or too old and for packages that are not
    there, SandboxError where no interpreter is found.
    """
    choice = _interpreter_for(path, has_packages=bool(packages))
    if not packages:
        return choice
    bindings = installed.bindings_of(packages, for_anybody=os.geteuid() == 0)
    return replace(choice, packages=bindings, imports=tuple(installed.imported_ahead(packages)))


def _interpreter_for(path: str | None, *, has_packages: bool) -> Interpreter:
    if path is not None:
        answer = _probe(path, has_packages=has_packages)
        if isinstance(answer, str):
            raise ConfigError(f"`{path}` cannot run programs in a sandbox: {answer}.")
        return answer
    own = os.path.realpath(sys.executable)
    refusals: list[str] = []
    for candidate in (SYSTEM_PYTHON, own):
        answer = _probe(candidate, has_packages=has_packages)
        if isinstance(answer, Interpreter):
            return answer
        refusals.append(f"{candidate}: {answer}")
    raise SandboxError(
        f"No Python for the sandbox ({'; '.join(refusals)}). Install one, as with: apt-get install python3"
    )


def _probe(path: str, *, has_packages: bool) -> Interpreter | str:
    answer = interpreter_at(path)
    own = ".".join(map(str, sys.version_info[:2]))
    if has_packages and isinstance(answer, Interpreter) and answer.version.rpartition(".")[0] != own:
        return f"it is Python {answer.version}, and packages are installed here for {own}"
    return answer


@cache
def interpreter_at(path: str) -> Interpreter | str:
    """The interpreter at `path`, or the reason that sandboxes cannot use it."""
    import json

    if not os.access(path, os.X_OK):
        return "it is not there or not executable"
    answer = subprocess.run(
        [path, "-I", "-S", "-c", ASKING], capture_output=True, timeout=60, check=False, env={}, cwd="/"
    )
    if answer.returncode:
        return f"it ended with code {answer.returncode}"
    release, version, prefix, library_file, magic = json.loads(answer.stdout)
    if tuple(release) < OLDEST:
        return f"it is Python {version}; {OLDEST[0]}.{OLDEST[1]} or newer is needed"
    real = os.path.realpath(path)
    # The library file is HOME/lib/pythonX.Y/encodings/__init__.py, the program HOME/bin/python3.
    homes = {prefix, str(Path(library_file).parents[3]), str(Path(real).parents[1])}
    outside = sorted(home for home in homes if not _is_under(home, SYSTEM_PATHS))
    if "/" in outside:
        return "its library is not in a directory of its own"
    for path_to_show in (*outside, os.path.dirname(library_file), library_file, real):
        if not os.stat(path_to_show).st_mode & stat.S_IROTH:
            return f"`{path_to_show}` cannot be read by other users, and programs are run as one"
    return Interpreter(path=real, version=version, bytecode=bytes.fromhex(magic), binds=tuple(outside))


def _is_under(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)
