"""docs/asynchronous.md: its command resolves, what it says is refused is, and every key is on it."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "asynchronous.md").read_text()


def _lines(page: str, kind: str) -> list[list[str]]:
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_the_command_of_the_page_resolves(page: str, rllm: Callable[[list[str]], str]) -> None:
    (words,) = _lines(page, "sh")
    assert "max_staleness = 2" in rllm(words[1:])


def test_what_the_page_says_is_refused_is_refused_before_any_work(page: str, empty_directory: Path) -> None:
    for words in _lines(page, "sh fails"):
        done = CliRunner().invoke(front_door, words[1:], prog_name="rllm")
        assert done.exit_code == 2, (words, done.output)
        assert not (empty_directory / "runs").exists()


def test_every_key_is_on_the_page(page: str) -> None:
    keys = {f"schedule.{name}" for name in config_dict(TrainConfig())["schedule"]}
    assert keys == set(re.findall(r"^\| `(schedule\.\w+)` \|", page, re.MULTILINE))
