"""A tree of files read as a Python project: packages, tests, requirements. No line of it is run.

tree ──► pyproject.toml, setup.cfg, PKG-INFO, names of files ──► Project
"""

import configparser
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Any

from rllm.data.swe_factory.sources import Source, files_of
from rllm.errors import ConfigError

TEST_FOLDERS = ("test", "tests", "testing")
"""The folders of tests: files in them, at any depth, belong to the tests, and a policy's changes there are
taken back."""
NOT_SOURCE = (
    *("doc", "docs", "example", "examples", "benchmark", "benchmarks", "bench", "script", "scripts"),
    *("tools", "build", "dist", "setup.py", "noxfile.py", "tasks.py"),
)
"""At the top, what holds no code of the project proper."""
TEST_EXTRAS = ("test", "tests", "testing", "dev")
"""Names of optional requirements, and dependency groups, that tests may need."""
REQUIREMENTS_FILES = (
    *("requirements-test.txt", "requirements-tests.txt", "test-requirements.txt", "test_requirements.txt"),
    *("requirements/test.txt", "requirements/tests.txt", "requirements/testing.txt"),
)
_TEST_FILE = re.compile(r"(test_.*|.*_tests?|tests?)\.py")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(?:\[[^\]@]*\])?[^@]*")


@dataclass(kw_only=True, slots=True, frozen=True)
class Project:
    """Paths are relative to the tree, with `/`."""

    name: str
    version: str
    paths: tuple[str, ...]
    """Where its packages are imported from: `src`, or the tree itself (``)."""
    sources: tuple[str, ...]
    """Modules in which bugs may be made."""
    test_files: tuple[str, ...]
    options: tuple[str, ...]
    """The options of pytest, which runs the suites of unittest as well."""
    requirements: tuple[str, ...]
    """The requirements of the project itself."""
    test_requirements: tuple[str, ...]
    """That it names for its tests: some of them may not be needed, or not be there."""

    @property
    def test_command(self) -> tuple[str, ...]:
        return ("python", "-m", "pytest", *self.options)


def project_of(source: Source) -> Project:
    """Raises ConfigError for a tree without Python packages or without tests."""
    tree = source.tree
    python = [each for each in files_of(tree) if each.suffix == ".py" and not each.is_symlink()]
    names = [each.relative_to(tree).as_posix() for each in python]
    tests = [each for each in names if _TEST_FILE.fullmatch(PurePosixPath(each).name)]
    path = "src" if any(each.startswith("src/") for each in names) else ""
    sources = [each for each in names if each not in tests and _is_source(each, path)]
    if not sources:
        raise ConfigError(
            f"{source.address} has no Python modules to make bugs in; packages are looked for beside "
            "pyproject.toml and in src/."
        )
    if not tests:
        raise ConfigError(
            f"{source.address} has no tests: no file is named test_*.py or *_test.py. Many sdists leave them "
            "out; give the git repository instead."
        )
    settings = _pyproject(tree, source.address)
    facts = _metadata(tree, settings)
    return Project(
        name=facts["name"] or source.name,
        version=facts["version"] or (source.commit[:12] or source.digest[:12]),
        paths=(path,) if path else ("",),
        sources=tuple(sources),
        test_files=tuple(tests),
        options=_options(settings, path),
        requirements=require_plain(facts["requirements"], source.address),
        test_requirements=tuple(_test_requirements(tree, settings, facts)),
    )


def require_plain(requirements: Iterable[str], where: str) -> tuple[str, ...]:
    """Names with versions; neither options of pip nor addresses, which would fetch from anywhere."""
    for each in requirements:
        if not _REQUIREMENT.fullmatch(each):
            raise ConfigError(
                f"{where}: the requirement {each!r:.120} is no name with a version, as in `attrs>=23`."
            )
    return tuple(requirements)


def _is_source(name: str, path: str) -> bool:
    parts = PurePosixPath(name).parts
    if path:
        if parts[0] != path:
            return False
        parts = parts[1:]
    if len(parts) == 1 and parts[0].startswith("_version"):
        return False
    if parts[0] in NOT_SOURCE or parts[-1] == "conftest.py":
        return False
    return not any(each in TEST_FOLDERS or each.startswith(".") for each in parts)


def _options(settings: dict[str, Any], path: str) -> tuple[str, ...]:
    """The project's own options are switched off, because they ask for plug-ins and reports; what says how
    tests are imported stays."""
    own = settings.get("tool", {}).get("pytest", {}).get("ini_options", {}).get("addopts", "")
    words = own.split() if isinstance(own, str) else list(own)
    modes = [each for each in words if str(each).startswith("--import-mode=")]
    return ("-o", "addopts=", *(("-o", f"pythonpath={path}") if path else ()), *modes)


def _pyproject(tree: Path, address: str) -> dict[str, Any]:
    path = tree / "pyproject.toml"
    if not _is_plain(path):
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{address}: pyproject.toml cannot be read: {error}.") from error


def _metadata(tree: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Name, version and requirements: of an sdist's PKG-INFO, else as far as the project's files say them."""
    if _is_plain(tree / "PKG-INFO"):
        message = Parser().parsestr((tree / "PKG-INFO").read_text(encoding="utf-8", errors="replace"))
        every = [str(each) for each in message.get_all("Requires-Dist") or []]
        extras: dict[str, list[str]] = {}
        for each in every:
            for extra in _EXTRA.findall(each):
                extras.setdefault(extra, []).append(each.partition(";")[0].strip())
        own = [each for each in every if not _EXTRA.search(each)]
        return _facts(str(message["Name"] or ""), str(message["Version"] or ""), own, extras)
    project = settings.get("project", {})
    if project:
        extras = {name: list(each) for name, each in project.get("optional-dependencies", {}).items()}
        own = list(project.get("dependencies", []))
        return _facts(str(project.get("name", "")), str(project.get("version", "")), own, extras)
    parser = configparser.ConfigParser(interpolation=None)
    if _is_plain(tree / "setup.cfg"):
        parser.read_string((tree / "setup.cfg").read_text(encoding="utf-8", errors="replace"))
    own = _lines(parser.get("options", "install_requires", fallback=""))
    extras = (
        {name: _lines(value) for name, value in parser.items("options.extras_require")}
        if parser.has_section("options.extras_require")
        else {}
    )
    version = parser.get("metadata", "version", fallback="")
    return _facts(parser.get("metadata", "name", fallback=""), "" if ":" in version else version, own, extras)


def _facts(name: str, version: str, requirements: list[str], extras: dict[str, list[str]]) -> dict[str, Any]:
    return {"name": name, "version": version, "requirements": requirements, "extras": extras}


def _test_requirements(tree: Path, settings: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    requirement_lines: list[str] = []
    for extra in TEST_EXTRAS:
        requirement_lines += facts["extras"].get(extra, [])
        requirement_lines += [
            each for each in settings.get("dependency-groups", {}).get(extra, []) if isinstance(each, str)
        ]
    for file in REQUIREMENTS_FILES:
        if _is_plain(tree / file):
            requirement_lines += _lines((tree / file).read_text(encoding="utf-8", errors="replace"))
    return [each for each in dict.fromkeys(requirement_lines) if _REQUIREMENT.fullmatch(each)]


def _is_plain(path: Path) -> bool:
    """Whether it is a file, and no link to one that may lie outside of the project."""
    return path.is_file() and not path.is_symlink()


def _lines(text: str) -> list[str]:
    lines = [each.partition("#")[0].strip() for each in text.splitlines()]
    return [each for each in lines if each and not each.startswith(("-", "."))]
