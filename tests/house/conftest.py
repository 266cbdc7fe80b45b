"""What the tests of the house share: the checkout, ways to run what documents say here, a fresh Python.

Pages and commands run in this process, where everything is imported already. What is about imports, or how a
process ends, starts a Python of its own, which costs seconds.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rllm.cli.main import rllm as front_door

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test works from now on, its home as well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def rllm(empty_directory: Path) -> Callable[[list[str]], str]:
    """Runs `rllm WORD…` in an empty directory; it must end well. Returns what it printed."""

    def call(words: list[str]) -> str:
        done = CliRunner().invoke(front_door, words, prog_name="rllm", catch_exceptions=False)
        assert done.exit_code == 0, f"{words}\n{done.output}"
        return done.stdout

    return call


@pytest.fixture
def run_page(empty_directory: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs blocks of a page in an empty directory, each after those before it; returns what one printed."""
    names: dict[str, object] = {"__name__": "page"}

    def run(block: str) -> str:
        exec(compile(block, "page", "exec"), names)
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="session")
def run_python(checkout: Path) -> RunPython:
    """Runs this Python with the given arguments in a new process that imports `rllm` from the checkout."""

    def run(*arguments: str, cwd: Path = checkout) -> subprocess.CompletedProcess[str]:
        paths = [str(checkout / "src"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "COLUMNS": "110",
        }
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def core_python(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """A Python that has rLLM and what it cannot do without, and none of its extras; nothing is downloaded."""
    home = tmp_path_factory.mktemp("core")
    venv.create(home / "venv", symlinks=True)
    (packages,) = (home / "venv").glob("lib/python*/site-packages")
    for name in _with_dependencies("rllm"):
        files = metadata.distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            source = Path(str(metadata.distribution(name).locate_file(top)))
            if not source.name.startswith("_editable") and source.suffix != ".pth":
                (packages / top).symlink_to(source)
    (packages / "checkout.pth").write_text(str(checkout / "src"))
    return home / "venv" / "bin" / "python"


def _with_dependencies(name: str) -> set[str]:
    """The distributions that `name` needs without any extra, itself among them."""
    names, todo = set[str](), [name]
    while todo:
        each = canonicalize_name(todo.pop())
        if each not in names:
            names.add(each)
            needs = [Requirement(text) for text in metadata.requires(each) or []]
            todo += [
                need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
            ]
    return names
