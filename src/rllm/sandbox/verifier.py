"""Tests of what a policy left behind, in a world where the policy never was.

    agent's sandbox ── snapshot of its folders ──┐
    the task's own files and tests ──────────────┴─► a fresh sandbox ── tests ──► files read from outside

Nothing else of the agent's world comes along: no process, no mount, no user (root gives each sandbox its own;
a plain user's are apart by their namespaces), no system directory, no home and no site folder. Links that
lead out of the snapshot are left out: one to the tests would find the expected answer there.

Programs that the agent left and the tests start neither see the tests nor change what these write
(`rllm.sandbox.inside.guard`), where the kernel has Landlock; not with docker.
"""

import errno
import io
import json
import logging
import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath

from rllm.errors import ConfigError, SandboxError
from rllm.errors.machine import MACHINE_ERRNOS
from rllm.sandbox.backends import open_sandbox
from rllm.sandbox.base import Sandbox
from rllm.sandbox.packages import PLACE
from rllm.sandbox.types import ExecResult, GuardRules, Limits, Root, Scope, Snapshot

log = logging.getLogger(__name__)

TESTS, LOGS = "/tests", "/logs/verifier"
OWN = "/run/verifier"
"""The verifier's own folders: a home, a site folder, a place for temporary files."""
HOME, SITE, SCRATCH = f"{OWN}/home", f"{OWN}/python", f"{OWN}/tmp"
THEIR_HOME, LEFT = f"{OWN}/them", f"{OWN}/left.json"
"""The home of programs that the agent left, and the file that lists them."""
MOST_REWARD_BYTES = 64 * 1024
"""The size of a file that is read from outside."""
NOT_KEPT = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/packages", "/proc", "/root"),
    *("/run", "/sbin", "/sys", "/tmp", "/usr", TESTS, "/solution", LOGS),
)
"""Folders that are not of the task, unless it names a folder in them: system, home, temporary files, and the
tests'."""
NEVER_KEPT = (
    *("/bin", "/boot", "/dev", "/lib", "/lib32", "/lib64", "/libx32", "/packages", "/proc", "/run", "/sbin"),
    *("/sys", TESTS, "/solution", LOGS, "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64"),
    *("/usr/libexec", "/usr/local/bin", "/usr/local/sbin", "/usr/local/lib", "/etc/ld.so.preload"),
    *("/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/profile", "/etc/profile.d", "/etc/passwd", "/etc/group"),
    *("/etc/bash.bashrc", "/etc/environment", "/etc/gitconfig", "/etc/python3", "/etc/python3.11"),
)
"""Folders that are not kept even if a task names them, nor a folder that holds them: interpreters, their
libraries and what they read when they start are looked for there."""
STEERING_FILES = (".py", ".pth", ".ini", ".cfg", ".toml")
"""The suffixes of files that are not kept directly in `/`: test runners read such in every folder above the
tests."""
LINK_HOMES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/dev/null")
"""Where links may lead beside the snapshot: what the machine brings, the same in every world."""
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
STEERING = (
    *("LD_", "PYTHON", "PYTEST_", "GIT_", "BASH_", "PERL5", "RUBY", "NODE_", "JAVA_TOOL_OPTIONS", "ENV"),
    *("IFS", "CDPATH", "GLOBIGNORE", "SHELLOPTS", "BASHOPTS", "PS4", "HOME", "TMPDIR", "XDG_", "GCONV_PATH"),
)
"""The prefixes of variables that say where programs find code: those of the agent's world do not come
along."""
GIT_CONFIG = {"core.hooksPath": "/dev/null", "core.fsmonitor": "false", "safe.directory": "*"}
"""The settings of every repository, whatever its own configuration says."""
GIT_VARIABLES = {"GIT_CONFIG_COUNT": str(len(GIT_CONFIG))} | {
    f"GIT_CONFIG_{part}_{place}": text
    for place, pair in enumerate(GIT_CONFIG.items())
    for part, text in zip(("KEY", "VALUE"), pair, strict=True)
}


@dataclass(kw_only=True, slots=True, frozen=True)
class Examination:
    """The tests to run, and their place."""

    backend: str
    tests: Path
    """A directory of this machine; /tests inside."""
    command: tuple[str, ...] = ("bash", f"{TESTS}/test.sh")
    workdir: str = "/"
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """The variables of the agent's world: those that steer interpreters are left out, its PATH comes last."""
    own_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """The variables of the tests alone."""
    folders: tuple[str, ...] = ()
    """That the task names: made in every world, and kept wherever they lie (but see NEVER_KEPT)."""
    limits: Limits
    """`disk_mb` is that of the agent's world; this one has room for what was left and as much again."""
    layers: tuple[str, ...] = ()
    """The layers of every world of the task, the topmost first; not with docker."""
    owner: int = 0
    """The user id in the layers that the tests run as."""
    prepare: Callable[[Sandbox, Callable[[str], bool]], None]
    """Puts what the task itself brings into a world beside its layers, where the function says that nothing
    else does."""
    results: tuple[str, ...]
    """Names of files in /logs/verifier to read."""
    packages: tuple[str, ...] = ()
    """Distributions of this machine that Python sees in the world of the tests; not with docker."""
    image: str | None = None
    """The image, for docker alone."""
    stdin: str = ""
    """The input of the tests, of which they leave no trace, such as a secret to seal their results with."""
    most_result_bytes: int = MOST_REWARD_BYTES
    """The size of one result."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Examined:
    """The end of the tests."""

    test_run: ExecResult | None
    """None where what was left could not be put into a world at all: then `refusal` says why."""
    results: dict[str, bytes] = field(default_factory=dict[str, bytes])
    faults: dict[str, str] = field(default_factory=dict[str, str])
    """The reasons that results that are there in some form were not read: a link, a FIFO, a directory, too
    large."""
    refusal: str = ""


def snapshot_of(agent: Sandbox, examination: Examination) -> Snapshot:
    """The files of the agent in folders that are kept. Raises OSError where they are more than its disk."""
    return agent.snapshot(
        Scope(
            left_out=(*NOT_KEPT, *NEVER_KEPT),
            named=_folders_kept_by_name(examination.folders),
            loose_suffixes_left_out=STEERING_FILES,
            link_homes=LINK_HOMES,
            changes=bool(examination.layers),
        )
    )


def examine(examination: Examination, snapshot: Snapshot | None) -> Examined:
    """Run the tests on what was left; without a snapshot on what the task brings.

    Raises SandboxError where the world itself fails, ConfigError for tests that cannot be copied.
    """
    disk_mb = 2 * examination.limits.disk_mb + 64
    own = (TESTS, LOGS, HOME, THEIR_HOME, SITE, SCRATCH, examination.workdir, *examination.folders)
    root = Root(
        folders=tuple(dict.fromkeys(each for each in own if each.strip("/"))),
        layers=examination.layers,
        owner=examination.owner,
    )
    limits = replace(examination.limits, disk_mb=disk_mb)
    with open_sandbox(
        examination.backend, limits=limits, root=root, image=examination.image, packages=examination.packages
    ) as fresh:
        examination.prepare(fresh, lambda path: snapshot is None or not is_kept(path, examination.folders))
        if snapshot is not None:
            if snapshot.is_whole and examination.layers:  # what the agent removed of them is not there either
                fresh.exec(["rm", "-rf", "--", *_kept_tops(examination)])
            try:
                fresh.restore(snapshot)
            except OSError as error:
                if error.errno in MACHINE_ERRNOS:  # ENOSPC: there is room for more than a snapshot holds
                    raise SandboxError(f"What was left cannot be put back: {error}") from error
                return Examined(test_run=None, refusal=f"what was left cannot be put back: {error}")
        # After the restore: nothing that the agent left is put over them.
        _bring_tests(fresh, examination.tests)
        guard = _guard(fresh, examination, snapshot) if snapshot is not None else None
        test_run = fresh.exec(
            examination.command,
            stdin=examination.stdin,
            env=environment_of(examination),
            cwd=examination.workdir,
            limits=limits,
            guard=guard,
        )
        return _read_results(fresh, test_run, examination)


def is_kept(path: str, folders: tuple[str, ...] = ()) -> bool:
    """Whether a snapshot holds the file at `path`."""
    if _is_below(path, _folders_kept_by_name(folders)):
        return True
    is_loose = str(PurePosixPath(path).parent) == "/"
    return not _is_below(path, NOT_KEPT) and not (is_loose and path.endswith(STEERING_FILES))


def _kept_tops(examination: Examination) -> list[str]:
    """Directories at the top of the layers that are kept of the agent's world."""
    names = {f"/{name}" for layer in examination.layers for name in os.listdir(layer)}
    return sorted(
        {each for each in names if is_kept(f"{each}/_")} | {*_folders_kept_by_name(examination.folders)}
    )


def environment_of(examination: Examination) -> dict[str, str]:
    """The variables that the tests see."""
    inputs = {
        name: value
        for name, value in examination.variables.items()
        if not any(name.startswith(each) for each in STEERING)
    }
    path = [*PATH, *(each for each in inputs.get("PATH", "").split(":") if each and each not in PATH)]
    own = {
        "PATH": ":".join(path),
        "HOME": HOME,
        "TMPDIR": SCRATCH,
        "PYTHONPATH": f"{SITE}:{TESTS}:{PLACE}",
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "VERIFIER_LAST": examination.variables.get("PYTHONPATH", ""),
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    # The later ones win: variables of the agent's world decide nothing that is set here.
    return inputs | own | GIT_VARIABLES | dict(examination.own_variables)


def _bring_tests(fresh: Sandbox, tests: Path) -> None:
    code = (resources.files("rllm.sandbox.inside") / "last_imports.py").read_text(encoding="utf-8")
    fresh.write(f"{SITE}/sitecustomize.py", code)
    try:
        fresh.upload(tests, TESTS)
    except OSError as error:
        kind = SandboxError if error.errno in MACHINE_ERRNOS else ConfigError
        raise kind(f"The tests in `{tests}` cannot be copied: {error}") from error


def _guard(fresh: Sandbox, examination: Examination, left: Snapshot) -> GuardRules | None:
    """Limits of the programs in `left` that the tests start; None where the kernel cannot hold them."""
    if examination.backend == "docker" or not _has_landlock():
        return None
    with tarfile.open(fileobj=io.BytesIO(left.tar)) as tar:
        paths = [f"/{each.name.removeprefix('./')}" for each in tar if each.isfile() or each.islnk()]
    fresh.write(LEFT, json.dumps(paths))
    return GuardRules(
        hidden=(TESTS, LOGS),
        left=LEFT,
        system=tuple(each for each in NOT_KEPT if each not in ("/tmp", "/dev")),
        writable=(SCRATCH, THEIR_HOME, *_folders_kept_by_name(examination.folders)),
        home=HOME,
        their_home=THEIR_HOME,
    )


@cache
def _has_landlock() -> bool:
    from rllm.sandbox.inside import kernel  # of Linux alone

    if kernel.landlock_version():
        return True
    log.warning(
        "This kernel has no Landlock (Linux 5.13, lsm=landlock): programs of an agent's that tests start can "
        "change the tests and their result while they run."
    )
    return False


def _read_results(fresh: Sandbox, test_run: ExecResult, examination: Examination) -> Examined:
    results: dict[str, bytes] = {}
    faults: dict[str, str] = {}
    most_bytes = examination.most_result_bytes
    for name in examination.results:
        try:
            results[name] = fresh.read(f"{LOGS}/{name}", most_bytes=most_bytes)
        except FileNotFoundError:
            continue
        except OSError as error:
            why = errno.errorcode.get(error.errno or 0)
            faults[name] = f"no plain file of at most {most_bytes} bytes ({why})"
    return Examined(test_run=test_run, results=results, faults=faults)


def _folders_kept_by_name(folders: tuple[str, ...]) -> tuple[str, ...]:
    """The folders among those that a task names that are kept and would not be without it."""
    return tuple(
        folder
        for folder in dict.fromkeys(str(PurePosixPath(each)) for each in folders)
        if _is_below(folder, NOT_KEPT)
        and folder not in ("/etc", "/usr", "/usr/local", "/usr/share")
        and not _is_below(folder, NEVER_KEPT)
        and not any(_is_below(each, (folder,)) for each in NEVER_KEPT)
    )


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
