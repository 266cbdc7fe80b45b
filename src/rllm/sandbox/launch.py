"""The start of a warden, by backend: the command line, its job, and what makes its surroundings.

"bubblewrap"  bwrap --args FD -- python3 -c LOADER      namespaces and the read-only system by bubblewrap
"unshare"     unshare … -- python3 -c LOADER            namespaces by util-linux, the rest by inside/root.py
"subprocess"  python3 -c LOADER                         nothing: unsafe
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox.bundle import memory_file
from rllm.sandbox.inside.layers import TREE
from rllm.sandbox.inside.stack import LAYERS
from rllm.sandbox.interpreter import Interpreter, system_paths
from rllm.sandbox.packages import PLACE
from rllm.sandbox.programs import find_program, install_hint
from rllm.sandbox.types import Root

HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"
_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
WARDEN_CAPABILITIES = (
    *("SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "CHOWN", "FOWNER", "KILL", "SYS_PTRACE", "DAC_OVERRIDE"),
    "SETFCAP",  # to map uid 0 into a further user namespace
    "NET_BIND_SERVICE",  # to listen where names are looked up, in the sandbox's own network
)
"""The capabilities that a warden needs to make cells; a program has none of them."""
CAP_SYS_ADMIN = 21
FIRST_UID, LAST_UID = 0x40000000, 0x7FFFFFFF
"""Uids that belong to nobody: 256 for each warden, by its process id, one for each run in turn."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Start:
    """Everything to start one warden with."""

    command: list[str]
    identity: str
    builds_root: bool
    binds: list[tuple[str, str]]
    """(path of this machine, path inside) of what the warden itself binds."""
    descriptors: tuple[int, ...] = ()
    """To hand on and then close."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Surroundings:
    """One of the three ways. `start` takes the interpreter and the writable root, where there is one."""

    start: Callable[[Interpreter, Root | None], Start]
    missing: Callable[[], str | None]
    """The missing part and how to get it; None where it can be tried."""
    hint: Callable[[], str] = str
    """The place to look at where it is there and does not start."""


def is_privileged() -> bool:
    """Whether this process may make namespaces and be any user: root, and not the root of a small
    container."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/status", encoding="ascii") as stream:
        effective = next(int(line.split()[1], 16) for line in stream if line.startswith("CapEff:"))
    with open("/proc/self/uid_map", encoding="ascii") as stream:
        ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in stream)]
    has_uids = any(first <= FIRST_UID and first + count > LAST_UID for first, count in ranges)
    return has_uids and bool(effective >> CAP_SYS_ADMIN & 1)


def identity_here() -> str:
    return "own_uid" if is_privileged() else "own_userns"


def _bubblewrap_namespaces() -> list[str]:
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"]
    if not is_privileged():
        options += ["--unshare-user", "--uid", "0", "--gid", "0"]
    options += ["--cap-drop", "ALL"]
    for capability in WARDEN_CAPABILITIES:
        options += ["--cap-add", f"CAP_{capability}"]
    return options


def _bubblewrap(python: Interpreter, root: Root | None) -> Start:
    options = _bubblewrap_namespaces()
    binds = [*system_paths(), *python.binds]
    for path in binds:
        # A link such as /bin stays one: a writable root gets the
        # same links (`layers`), and no second mount of /usr.
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        else:
            for parent in reversed(Path(path).parents[:-1]):
                options += ["--perms", "0755", "--dir", str(parent)]
            options += ["--ro-bind", path, path]
    mounts = [(each.source, f"{PLACE}/{each.place}") for each in python.packages]
    for source, place in (*mounts, *(root.mounts if root else ())):
        for parent in reversed(Path(place).parents[:-1]):
            options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--ro-bind", source, place]
    hosts = memory_file(HOSTS, name="hosts")
    options += [
        "--perms",
        "0755",
        "--dir",
        "/etc",
        "--perms",
        "0644",
        "--ro-bind-data",
        str(hosts),
        "/etc/hosts",
    ]
    options += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/box", "/tmp", "/run/cell"):
        options += ["--dir", folder]
    for source, place in _root_binds(root):
        options += ["--ro-bind", source, place]
    # Last: below a root that is read-only no more places can be made.
    options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    arguments = memory_file("".join(option + "\0" for option in options).encode(), name="arguments")
    command = [_path_of("bwrap"), "--args", str(arguments), "--", *python.command]
    return Start(
        command=command,
        identity=identity_here(),
        builds_root=False,
        binds=[],
        descriptors=(arguments, hosts),
    )


def _unshare_namespaces() -> list[str]:
    options = ["--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child=SIGKILL"]
    return options if is_privileged() else [*options, "--user", "--map-root-user"]


def _unshare(python: Interpreter, root: Root | None) -> Start:
    # setpriv asks the kernel to end unshare with its parent, and --kill-child hands that on
    command = [
        _path_of("setpriv"),
        "--pdeathsig",
        "KILL",
        _path_of("unshare"),
        *_unshare_namespaces(),
        "--",
        *python.command,
    ]
    binds = [(path, path) for path in (*system_paths(), *python.binds)]
    binds += [(each.source, f"{PLACE}/{each.place}") for each in python.packages]
    binds += [*(root.mounts if root else ()), *_root_binds(root)]
    return Start(command=command, identity=identity_here(), builds_root=True, binds=binds)


def _subprocess(python: Interpreter, root: Root | None) -> Start:
    return Start(command=python.command, identity="bare", builds_root=False, binds=[])


def _root_binds(root: Root | None) -> list[tuple[str, str]]:
    """(directory of this machine, path inside) of what a writable root is laid over."""
    if root is None:
        return []
    tree = [(root.tree, TREE)] if root.tree else []
    return tree + [(layer, f"{LAYERS}/{number}") for number, layer in enumerate(root.layers)]


def _path_of(program: str) -> str:
    path = find_program(program)
    if path is None:
        raise ConfigError(f"`{program}` is not installed; run: {install_hint(program)}")
    return path


def _missing_on_linux(
    *programs: str, probe: Callable[[], list[str]] | None = None
) -> Callable[[], str | None]:
    def missing() -> str | None:
        if not sys.platform.startswith("linux"):
            return "it needs Linux; use `docker` here"
        try:
            for program in programs:
                _path_of(program)
            if probe is not None:
                _require_namespaces(tuple(probe()))
            return None
        except ConfigError as error:
            return str(error)

    return missing


def _bubblewrap_probe() -> list[str]:
    words = [_path_of("bwrap"), *_bubblewrap_namespaces(), "--ro-bind", "/", "/"]
    return [*words, "--proc", "/proc", "--dev", "/dev", "--", *_probe_mount()]


def _unshare_probe() -> list[str]:
    return [_path_of("unshare"), *_unshare_namespaces(), "--", *_probe_mount()]


def _probe_mount() -> list[str]:
    """Return a command that only a warden with its capabilities can run."""
    return [_path_of("mount"), "-t", "tmpfs", "tmpfs", "/tmp"]


# Of the answers only that it may is kept: a machine without memory refuses for a moment alone.
@cache
def _require_namespaces(probe: tuple[str, ...]) -> None:
    """Raises ConfigError where this machine forbids the namespaces of a sandbox, SandboxError where the probe
    cannot be started."""
    try:
        done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise SandboxError(f"`{probe[0]}` cannot be started: {error}") from error
    if done.returncode:
        error_text = done.stderr.decode(errors="replace").strip() or f"code {done.returncode}"
        raise ConfigError(
            f"this machine forbids it user namespaces ({error_text}). {namespaces_fix(probe[0])}"
        )


def namespaces_fix(program: str) -> str:
    """Return how to allow user namespaces to a program."""
    if _APPARMOR.exists() and _APPARMOR.read_text().strip() == "1":
        profile = f'profile rllm-{Path(program).name} "{program}" flags=(unconfined) {{ userns, }}'
        return (
            "AppArmor forbids them to programs that it does not know (Ubuntu from 23.10). Allow them to this "
            f"one: echo 'abi <abi/4.0>, {profile}' | sudo tee /etc/apparmor.d/rllm && "
            "sudo apparmor_parser -r /etc/apparmor.d/rllm; or to all: sudo sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0"
        )
    return (
        "Where user namespaces are off: sudo sysctl -w kernel.unprivileged_userns_clone=1 (Debian) or "
        "user.max_user_namespaces=10000; in a container, start it with --cap-add SYS_ADMIN --security-opt "
        "seccomp=unconfined"
    )


def _install_hint(program: str) -> Callable[[], str]:
    return lambda: f". {namespaces_fix(_path_of(program))}. Nothing weaker is used instead."


SURROUNDINGS = {
    "bubblewrap": Surroundings(
        start=_bubblewrap,
        missing=_missing_on_linux("bwrap", probe=_bubblewrap_probe),
        hint=_install_hint("bwrap"),
    ),
    "unshare": Surroundings(
        start=_unshare,
        missing=_missing_on_linux("unshare", "setpriv", probe=_unshare_probe),
        hint=_install_hint("unshare"),
    ),
    "subprocess": Surroundings(start=_subprocess, missing=_missing_on_linux()),
}
