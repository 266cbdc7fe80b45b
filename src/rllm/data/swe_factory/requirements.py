"""The packages that a project's tests import beside it: versions that pip chose once, as an install step of
its rows.

    requirements ──► pip, which resolves alone ──► RLLM_HOME/swe/requirements/KEY/ ──► `install`
    none but pytest ──► no step: the pytest that is installed here, without a network

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
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rllm.data.swe_environment import python_version
from rllm.data.swe_factory.project import Project, require_plain
from rllm.errors import ConfigError
from rllm.files.home import rllm_home
from rllm.sandbox.made_once import made_once

PYTEST = "pytest"
TIMEOUT_S = 900.0
_FORM = 2


@dataclass(kw_only=True, slots=True, frozen=True)
class Requirements:
    """Packages for the tests of a project."""

    install: tuple[str, ...]
    """Shell commands that make an environment with them; none takes this machine's Python with pytest."""
    versions: tuple[str, ...]
    """`name==version` of all that is there."""
    python: str
    """Version of the interpreter, as in `3.11`."""
    left_out: tuple[str, ...] = ()
    """Test requirements that pip could not find wheels of."""


def requirements_of(project: Project, extra: tuple[str, ...]) -> Requirements:
    """Resolved once for the same requirements, then without a network.

    Raises ConfigError for a requirement of the project, or one of `extra`, that cannot be had as a wheel.
    """
    python = python_version()
    requirements = tuple(dict.fromkeys((*project.requirements, *require_plain(extra, "--with"))))
    optional = tuple(each for each in project.test_requirements if _name(each) != PYTEST)
    if not requirements and not optional and _has_pytest(python):
        version = importlib.metadata.version(PYTEST)
        return Requirements(install=(), versions=(f"{PYTEST}=={version}",), python=python)
    key = hashlib.sha256(json.dumps([_FORM, python, requirements, optional]).encode()).hexdigest()[:24]
    target = rllm_home() / "swe" / "requirements" / key
    with made_once(target) as part:
        if part is not None:
            _resolve(part, requirements, optional, python)
    facts = json.loads((target / "facts.json").read_text(encoding="utf-8"))
    versions = tuple(facts["versions"])
    return Requirements(
        install=(f"pip install {shlex.join(versions)}",),
        versions=versions,
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


def _resolve(part: Path, requirements: tuple[str, ...], optional: tuple[str, ...], python: str) -> None:
    """All together where that goes; else what is needed, and of the tests' what can be had."""
    left_out: list[str] = []
    try:
        versions = _versions((PYTEST, *requirements, *optional), python)
    except _ResolutionError:
        try:
            versions = _versions((PYTEST, *requirements), python)
        except _ResolutionError as error:
            raise ConfigError(
                f"The requirements {', '.join((PYTEST, *requirements))} cannot be had as wheels for Python "
                f"{python}: {error} It needs the network once."
            ) from error
        installable: list[str] = []
        for each in optional:
            try:
                versions = _versions((PYTEST, *requirements, *installable, each), python)
                installable.append(each)
            except _ResolutionError:
                left_out.append(each)
    (part / "facts.json").write_text(json.dumps({"versions": versions, "left_out": left_out}), "utf-8")


class _ResolutionError(Exception):
    """pip found no set of wheels; its text is why."""


def _versions(requirements: tuple[str, ...], python: str) -> list[str]:
    """`name==version` of a set of wheels with which all requirements are met."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--no-input", "--disable-pip-version-check", "--only-binary", ":all:"]
    with tempfile.TemporaryDirectory(prefix="rllm-requirements-") as folder:
        report = Path(folder) / "report.json"
        command += ["--python-version", python, "--target", folder, "--report", str(report), *requirements]
        try:
            process = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise _ResolutionError(f"pip was not done after {TIMEOUT_S:g} s.") from error
        if process.returncode:
            errors = [each for each in process.stderr.splitlines() if each.startswith("ERROR")]
            raise _ResolutionError((errors or [f"pip ended with code {process.returncode}."])[-1])
        packages = [each["metadata"] for each in json.loads(report.read_text("utf-8"))["install"]]
    return sorted(f"{each['name'].replace('_', '-')}=={each['version']}" for each in packages)
