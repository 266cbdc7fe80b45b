import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rllm.build.installed import (
    EXTRAS,
    REQUIRED,
    REQUIRED_ON_LINUX,
    extra_of,
    is_older,
    rllm_version,
    version_of,
)

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]

FOR_DEVELOPERS = {"dev"}


def oldest_versions(requirements: list[str]) -> dict[str, str]:
    """Of each package, without the upper bounds, and without the extras that an extra builds on."""
    parsed = [Requirement(each) for each in requirements]
    return {
        each.name: next(bound.version for bound in each.specifier if bound.operator == ">=")
        for each in parsed
        if each.name != "rllm"
    }


def test_the_tables_say_what_pyproject_says() -> None:
    assert oldest_versions(PROJECT["dependencies"]) == {**REQUIRED, **REQUIRED_ON_LINUX}
    for extra, packages in EXTRAS.items():
        assert oldest_versions(PROJECT["optional-dependencies"][extra]) == packages
    assert EXTRAS.keys() == PROJECT["optional-dependencies"].keys() - FOR_DEVELOPERS


@pytest.mark.parametrize(
    ("version", "oldest", "answer"),
    [
        ("2.13.0+cpu", "2.13", False),
        ("2.9.1", "2.13", True),
        ("5.0.0rc1", "5.0", False),
        ("4.57.3", "5.0", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, oldest: str, answer: bool) -> None:
    assert is_older(version, oldest) is answer


def test_a_module_is_known_by_the_extra_that_brings_it() -> None:
    assert extra_of("torch.nn") == "train"
    assert extra_of("aiohttp.web") == "gateway"
    assert extra_of("my_typo") is None
    assert extra_of(None) is None


def test_versions_are_read_without_an_import() -> None:
    assert re.match(r"\d", version_of("click") or "")
    assert version_of("no-such-package") is None
    assert re.match(r"\d", rllm_version())
