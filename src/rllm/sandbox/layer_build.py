"""One command as root of a writable root over layers, with the network: what it writes becomes a layer.

    setpriv (ends with its owner) ─ unshare (mounts) ─ sh: overlays on `/` and /usr ─ bwrap: namespaces, few
    capabilities ─ the command                                                              └──► a layer

It sees this machine's /usr and network and the layers, and nothing else of it: no home, no other process, no
device. Package managers need a root user, so what makes images is trusted more than what runs in a sandbox:
run only such that you would give to `docker build`. As a plain user the root is that of a user namespace with
one user.
"""

import os
import socket
import subprocess
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox.interpreter import SYSTEM_PATHS
from rllm.sandbox.launch import SURROUNDINGS, is_privileged
from rllm.sandbox.made_once import remove_tree
from rllm.sandbox.programs import SYSTEM_PATH, find_program, install_hint

CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
    *("NET_BIND_SERVICE", "SYS_CHROOT", "AUDIT_WRITE"),
)
"""Docker's default capabilities, without device nodes and raw sockets."""
KERNEL = tuple(f"/proc/{name}" for name in ("sys", "sysrq-trigger", "fs", "irq", "bus", "mtrr", "scsi"))
"""Settings of the kernel: they ask for a root user, and for no capability that could be left out."""
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
PIP = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_CERT",
    "PIP_DEFAULT_TIMEOUT",
    "PIP_TRUSTED_HOST",
)
"""Settings of this machine that say where packages come from."""
REACH_S = 2.0
_OUTPUT_CHARS = 4000
_MOUNT = """\
set -e
cd "$1"
mount -t overlay overlay -o "lowerdir=$2,upperdir=up/root,workdir=work/root,userxattr" new
mount -t overlay overlay -o "lowerdir=$3,upperdir=up/usr,workdir=work/usr,userxattr" new/usr
shift 3
exec "$@"
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class BuildStep:
    """One command of a build."""

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    user: tuple[int, int] = (0, 0)
    """uid and gid."""
    has_network: bool = True
    timeout_s: float = 600.0


def missing() -> str | None:
    """The reason that nothing can be built here; None where it can be tried."""
    for program in ("bwrap", "unshare", "setpriv"):
        if find_program(program, SYSTEM_PATH) is None:
            return f"`{program}` is not installed; run: {install_hint(program)}"
    return SURROUNDINGS["unshare"].missing() or SURROUNDINGS["bubblewrap"].missing()


def build_layer(work: Path, below: Sequence[Path], step: BuildStep) -> Path:
    """Run a step over layers, the topmost first; the directory below `work`, which is empty, that holds
    what it wrote.

    Raises ConfigError where the command fails or takes too long, SandboxError where nothing can be run.
    """
    why = missing()
    if why is not None:
        raise SandboxError(f"Images cannot be built here: {why}.")
    if step.user != (0, 0) and not is_privileged():
        raise ConfigError(f"the user {step.user[0]} needs root here: a plain user can be one user alone")
    for part in ("new", "up/root", "up/usr", "work/root", "work/usr", "below"):
        (work / part).mkdir(parents=True)
    for number, layer in enumerate(below):  # short names: mount(2) takes a page of options
        (work / "below" / str(number)).symlink_to(layer)
    result = _run(work, len(below), step)
    if result.returncode:
        output = (result.stdout + result.stderr).decode(errors="replace").strip()[-_OUTPUT_CHARS:]
        raise ConfigError(f"it ended with code {result.returncode}: {output}")
    root, usr = work / "up" / "root", work / "up" / "usr"
    if (root / "usr").is_dir():
        (root / "usr").rmdir()  # the mount point, should its attributes have been changed
    if any(usr.iterdir()):
        usr.rename(root / "usr")
    remove_tree(work / "work")
    return root


def _run(work: Path, num_layers: int, step: BuildStep) -> "subprocess.CompletedProcess[bytes]":
    root_layers = [f"below/{number}" for number in range(num_layers)]
    usr_layers = [f"{each}/usr" for each in root_layers if (work / each / "usr").is_dir()]
    # of the layer that is this machine's system, /usr is the machine's own
    options = ["--mount"] if is_privileged() else ["--mount", "--user", "--map-root-user"]
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *options, "sh", "-c", _MOUNT, "sh", str(work)]
    command += [":".join(root_layers), ":".join([*usr_layers, "/usr"]), *_walls(step), "--", *_as_user(step)]
    try:
        return subprocess.run(
            command,
            env={"PATH": SYSTEM_PATH},  # nothing of a Dockerfile steers a program out here
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=step.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"it was not done after {step.timeout_s:g} s") from None


def _walls(step: BuildStep) -> list[str]:
    words = [
        find_program("bwrap", SYSTEM_PATH) or "bwrap",
        "--bind",
        "new",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--die-with-parent",
        "--new-session",
    ]
    words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "build", "--cap-drop", "ALL"]
    for capability in CAPABILITIES:
        words += ["--cap-add", f"CAP_{capability}"]
    for path in KERNEL:
        words += ["--ro-bind-try", path, path]
    if not step.has_network:
        words += ["--unshare-net"]
    for path in ("/etc/resolv.conf", "/etc/hosts"):
        if os.path.exists(path):
            # /etc/resolv.conf is often a link to a file of a service, which the build does not see.
            words += ["--ro-bind", os.path.realpath(path), path]
    for path in _package_places():
        words += ["--ro-bind", path, path]
    words += ["--clearenv"]
    for name, value in _environment(step).items():
        words += ["--setenv", name, value]
    return [*words, "--chdir", step.workdir]


def _as_user(step: BuildStep) -> list[str]:
    if step.user == (0, 0):
        return [*step.command]
    uid, gid = step.user
    return ["setpriv", "--reuid", str(uid), "--regid", str(gid), "--clear-groups", "--", *step.command]


def _environment(step: BuildStep) -> dict[str, str]:
    own = {
        name: value for name in (*PROXIES, *PIP) if (value := os.environ.get(name, "")) and _is_public(value)
    }
    return {"LANG": "C.UTF-8", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | own | dict(step.variables)


def _is_public(value: str) -> bool:
    """Whether no part of it is a URL with a name or a password."""
    return not any("@" in urllib.parse.urlsplit(each).netloc for each in value.split() if "://" in each)


def _package_places() -> list[str]:
    """Directories of this machine in which its settings say that packages lie."""
    words = " ".join(os.environ.get(name, "") for name in PIP).split()
    pip = Path("/etc/pip.conf")
    if pip.is_file():
        words += pip.read_text("utf-8", "replace").replace("=", " ").split()
    paths = [each.removeprefix("file://") for each in words if each.startswith(("/", "file://"))]
    places = [each for each in dict.fromkeys(paths) if os.path.isdir(each)]
    return [each for each in places if not f"{each}/".startswith(tuple(f"{path}/" for path in SYSTEM_PATHS))]


@cache
def registries_are_reachable() -> bool:
    """Whether one of the places that this machine takes packages from answers."""
    urls = [os.environ.get(name, "") for name in ("https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")]
    urls = [each for each in urls if each] or [
        *_apt_sources(),
        os.environ.get("PIP_INDEX_URL", "https://pypi.org"),
    ]
    for host, port in dict.fromkeys(_address(each) for each in urls):
        try:
            socket.create_connection((host, port), REACH_S).close()
        except OSError:
            continue
        return True
    return False


def _address(url: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _apt_sources() -> list[str]:
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted(folder.glob("sources.list.d/*"))]
    words = [word for each in files if each.is_file() for word in each.read_text("utf-8", "replace").split()]
    return [word for word in words if word.startswith(("http://", "https://"))]
