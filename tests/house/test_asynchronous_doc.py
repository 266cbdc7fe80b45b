"""docs/asynchronous.md and docs/fleet.md: their commands resolve, what they refuse is, every key is there."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig

PAGES = {"asynchronous": "schedule", "fleet": "inference"}
OF_THE_BUILT_IN_ENGINE = {
    *("num_slots", "max_context", "max_prefill_tokens", "lockstep", "cache_tokens", "dtype"),
}


@pytest.fixture(params=sorted(PAGES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def page(checkout: Path, name: str) -> str:
    return (checkout / "docs" / f"{name}.md").read_text()


def _lines(page: str, kind: str) -> list[list[str]]:
    blocks = re.findall(r"^```(.*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    of_kind = [block for language, block in blocks if re.fullmatch(kind, language)]
    lines = (line for block in of_kind for line in block.replace("\\\n", " ").splitlines())
    return [shlex.split(line) for line in lines]


def test_the_command_of_the_page_resolves(
    page: str, name: str, rllm: Callable[[list[str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.trainer.samplers.require_vllm", lambda python, key: None)
    words = next(line for line in _lines(page, "(?:sh)?") if line[-1] == "--dry-run")
    printed = rllm(words[1:])
    assert {"asynchronous": "max_staleness = 2", "fleet": "replicas = 2"}[name] in printed


def test_what_the_page_says_is_refused_is_refused_before_any_work(page: str, empty_directory: Path) -> None:
    for words in _lines(page, "sh fails"):
        done = CliRunner().invoke(front_door, words[1:], prog_name="rllm")
        assert done.exit_code == 2, (words, done.output)
        assert not (empty_directory / "runs").exists()


def test_every_key_is_on_the_page(page: str, name: str) -> None:
    section = PAGES[name]
    keys = {f"{section}.{key}" for key in set(config_dict(TrainConfig())[section]) - OF_THE_BUILT_IN_ENGINE}
    assert keys == set(re.findall(rf"^\| `({section}\.\w+)` \|", page, re.MULTILINE))
