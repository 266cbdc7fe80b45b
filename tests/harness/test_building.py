"""Packages of a harness that have no wheel: built from source where its file names them, and nowhere else."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from rllm.environments.harness.installing import harness_directory
from rllm.environments.harness.spec import HarnessSpec, harness_named
from rllm.errors import ConfigError

BACKEND = """
import pathlib, zipfile

def build_wheel(directory, config_settings=None, metadata_directory=None):
    pathlib.Path({witness!r}).write_text("its setup ran")
    name = "{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(directory) / name, "w") as wheel:
        wheel.writestr("{name}.py", "NAME = '{name}'")
        about = "{name}-1.0.dist-info"
        wheel.writestr(about + "/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n")
        wheel.writestr(about + "/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(about + "/RECORD", "")
    return name
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def add_sdist(folder: Path, name: str) -> Path:
    """A package that is published without a wheel. Returns what its setup writes when it runs."""
    witness = folder / f"{name}.ran"
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "pyproject.toml": PROJECT,
        "backend.py": BACKEND.format(name=name, witness=str(witness)),
    }
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-1.0/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return witness


def add_wheel(folder: Path, name: str, *requirements: str) -> None:
    needs = "".join(f"Requires-Dist: {each}\n" for each in requirements)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        about = f"{name}-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is all the registry that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def spec_of(folder: Path, text: str) -> HarnessSpec:
    (folder / "my_agent.toml").write_text(f'command = ["{{harness}}/bin/x", "{{task}}"]\n{text}')
    return harness_named(str(folder / "my_agent.toml"))


def test_what_has_no_wheel_is_built_where_the_file_names_it(index: Path, tmp_path: Path) -> None:
    witness = add_sdist(index, "sources")
    add_wheel(index, "agent", "sources")
    wheels_alone = spec_of(tmp_path, 'pip = ["agent==1.0"]')
    with pytest.raises(ConfigError, match="sources"):
        harness_directory(wheels_alone)
    assert not witness.exists(), "no line of a package runs that is not named"
    directory = harness_directory(spec_of(tmp_path, 'pip = ["agent==1.0"]\nbuild = ["sources==1.0"]'))
    assert witness.exists()
    assert [path.name for path in directory.glob("lib/python3*/site-packages/sources.py")] == ["sources.py"]
    with pytest.raises(ConfigError, match="sources"):
        harness_directory(wheels_alone)


def test_only_what_is_named_is_built(index: Path, tmp_path: Path) -> None:
    add_sdist(index, "sources")
    witness = add_sdist(index, "others")
    add_wheel(index, "agent", "sources", "others")
    with pytest.raises(ConfigError, match="others"):
        harness_directory(spec_of(tmp_path, 'pip = ["agent==1.0"]\nbuild = ["sources==1.0"]'))
    assert not witness.exists()
    assert list((tmp_path / "home" / "harnesses").glob("my_agent-*/bin")) == [], "nothing half-made stays"
