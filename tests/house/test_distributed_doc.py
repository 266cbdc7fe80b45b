"""docs/distributed.md runs: its commands from top to bottom, and what it says is refused is."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.config.distributed import DistributedConfig
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.store.run_directory import RunDirectory


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "distributed.md").read_text()


def commands(page: str, kind: str) -> list[list[str]]:
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for body in blocks for line in body.splitlines()]


def test_what_the_page_says_is_refused_is_refused_before_any_work(page: str, empty_directory: Path) -> None:
    refused = commands(page, "sh fails")
    assert len(refused) == 11
    for words in refused:
        done = CliRunner().invoke(front_door, words[1:], prog_name="rllm")
        assert done.exit_code == 2, (words, done.output)
        assert not (empty_directory / "runs").exists()


def test_every_key_is_on_the_page(page: str) -> None:
    keys = {f"distributed.{name}" for name in config_dict(TrainConfig())["distributed"]}
    assert keys == set(re.findall(r"`(distributed\.\w+)`", page))
    assert f"({DistributedConfig().timeout_s:.0f})" in page


@pytest.mark.slow
def test_the_commands_of_the_page_run(
    page: str, rllm: Callable[[list[str]], str], empty_directory: Path
) -> None:
    bin_directory = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}"}
    for words in commands(page, "sh"):
        if words[0] == "rllm":
            rllm(words[1:])
            continue
        machines = 2 if "--nnodes" in words else 1
        halves = [subprocess.Popen(words, env=environment) for _ in range(machines)]
        assert [half.wait(600) for half in halves] == [0] * machines
    for name in ("two", "torchrun", "machines", "shards", "tensors", "tensor-adapter"):
        summary = RunDirectory.read(empty_directory / "runs" / name).summary()
        assert summary is not None
        assert summary["after"]["sampled_report"]["attempted"] == 8
