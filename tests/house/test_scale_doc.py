"""docs/scale.md runs: its commands say what they are said to say."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.trainer.memory import readable


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "scale.md").read_text()


def test_a_plan_ends_with_its_memory_for_one_process_and_for_each_of_several(
    page: str, empty_directory: Path
) -> None:
    (block,) = re.findall(r"^```sh\n(rllm.*?)^```", page, re.MULTILINE | re.DOTALL)
    alone, several = (shlex.split(line) for line in block.splitlines())
    shown = CliRunner().invoke(front_door, alone[1:], prog_name="rllm")
    assert shown.exit_code == 0, shown.output
    printed = CliRunner().invoke(front_door, several[1:], prog_name="rllm")
    memory = json.loads(printed.stdout)["memory"]
    assert memory["ranks"] == 2
    assert memory["problem"] is None
    assert memory["peak"] == max(memory["moments"].values()) + memory["fragments"]
    parts = ("weights", "gradients", "optimizer", "cache")
    assert sum(memory[part] for part in parts) < memory["peak"]
    for part in parts:
        assert f"{part} = {readable(memory[part])}" in shown.output
    assert list(empty_directory.iterdir()) == []
