"""Shell completion, as docs/tour.md says to set it up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RLLM = Path(sys.executable).with_name("rllm")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_is_given_a_function_that_completes(shell: str) -> None:
    assert f"{shell}_source" in (Path(__file__).parents[2] / "docs" / "tour.md").read_text()
    source = subprocess.run(
        [RLLM], env={**os.environ, "_RLLM_COMPLETE": f"{shell}_source"}, capture_output=True, text=True
    )
    assert f"_RLLM_COMPLETE={shell}_complete" in source.stdout


def test_commands_are_completed() -> None:
    asked = {"_RLLM_COMPLETE": "bash_complete", "COMP_WORDS": "rllm ru", "COMP_CWORD": "1"}
    done = subprocess.run([RLLM], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout == "plain,runs\n"
