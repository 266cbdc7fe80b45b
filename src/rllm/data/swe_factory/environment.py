"""What a project's tests can import beside it: wheels, unpacked, of the versions that pip chose once.

requirements ──► pip install --target, wheels alone ──► RLLM_HOME/swe/packages/KEY/ + manifest.json
    none but pytest ──► the pytest that is installed here: no network at all

No line of the project or of a requirement is run for it: what comes only as a source archive is refused. A
test requirement that cannot be had is left out, and counted; tests that need it then do not import.
"""

import hashlib
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rllm.data.home import rllm_home
from rllm.data.swe_factory.project import Project, require_plain
from rllm.errors import ConfigError
from rllm.sandbox.interpreter import interpreter
from rllm.store.files import write_directory_atomic

PYTEST = "pytest"
TIMEOUT_S = 900.0
_DIST = re.compile(r"(.+)-([^-]+)\.dist-info")
_FORM = 1


@dataclass(kw_only=True, slots=True, frozen=True)
class Environment:
    """Packages for the sandbox of a project."""

    folder: Path | None
    """On the path of its Python; None where the packages of this machine are shown instead."""
    installed: tuple[str, ...]
    """Names of this machine's distributions to show."""
    versions: tuple[str, ...]
    """`name==version` of all that is there."""
    python: str
    """Version of the interpreter, as in `3.11`."""
    left_out: tuple[str, ...] = ()
    """Test requirements that pip could not find wheels of."""

    @property
    def install(self) -> tuple[str, ...]:
        """Shell commands that make the same environment elsewhere."""
        return () if self.folder is None else (f"pip install {shlex.join(self.versions)}",)


def environment_of(project: Project, extra: tuple[str, ...]) -> Environment:
    """Made once for the same requirements, then without a network.

    Raises ConfigError for a requirement of the project, or one of `extra`, that cannot be had as a wheel.
    """
    python = ".".join(interpreter().version.split(".")[:2])
    needed = tuple(dict.fromkeys((*project.requirements, *require_plain(extra, "--with"))))
    wanted = tuple(each for each in project.test_requirements if _name(each) != PYTEST)
    if not needed and not wanted and _has_pytest(python):
        version = importlib.metadata.version(PYTEST)
        return Environment(
            folder=None, installed=(PYTEST,), versions=(f"{PYTEST}=={version}",), python=python
        )
    key = hashlib.sha256(json.dumps([_FORM, python, needed, wanted]).encode()).hexdigest()[:24]
    target = rllm_home() / "swe" / "packages" / key
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_directory_atomic(target, lambda part: _fill(part, needed, wanted, python))
    facts = json.loads((target / "facts.json").read_text(encoding="utf-8"))
    return Environment(
        folder=target / "site",
        installed=(),
        versions=tuple(facts["versions"]),
        python=python,
        left_out=tuple(facts["left_out"]),
    )


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0].lower() if match else ""


def _has_pytest(python: str) -> bool:
    if python != ".".join(map(str, sys.version_info[:2])):
        return False
    try:
        importlib.metadata.version(PYTEST)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _fill(part: Path, needed: tuple[str, ...], wanted: tuple[str, ...], python: str) -> None:
    """All together where that goes; else what is needed, and of the tests' what can be had."""
    part.mkdir(parents=True, exist_ok=True)
    site = part / "site"
    left_out: list[str] = []
    refusal = _pip(site, (PYTEST, *needed, *wanted), python)
    if refusal:
        installable: list[str] = []
        refusal = _pip(site, (PYTEST, *needed), python)
        if refusal:
            raise ConfigError(
                f"The requirements {', '.join((PYTEST, *needed))} cannot be had as wheels for Python "
                f"{python}: {refusal} It needs the network once."
            )
        for each in wanted:
            refused = _pip(site, (PYTEST, *needed, *installable, each), python)
            (left_out if refused else installable).append(each)
    versions = sorted(
        f"{match[1].replace('_', '-')}=={match[2]}"
        for match in (_DIST.fullmatch(each.name) for each in site.iterdir())
        if match
    )
    (part / "facts.json").write_text(json.dumps({"versions": versions, "left_out": left_out}), "utf-8")


def _pip(site: Path, requirements: tuple[str, ...], python: str) -> str:
    """Install into `site`; why not, or nothing."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-input"]
    command += ["--disable-pip-version-check", "--no-warn-conflicts", "--only-binary", ":all:"]
    command += ["--python-version", python, "--target", str(site), *requirements]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"pip was not done after {TIMEOUT_S:g} s."
    if ended.returncode == 0:
        return ""
    errors = [each for each in ended.stderr.splitlines() if each.startswith("ERROR")]
    return (errors or [f"pip ended with code {ended.returncode}."])[-1]
