"""docs/environments.md: its blocks run as they stand, in order, beside the environments of these tests."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verifiers")

ROOT = Path(__file__).resolve().parents[2]


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "environments", tmp_path, dirs_exist_ok=True)
    page = (ROOT / "docs" / "environments.md").read_text()
    blocks = re.findall(r"^```sh in make test-adapters\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert blocks
    command = tmp_path / "bin" / "rllm"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rllm "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        ["bash", "-ec", "".join(blocks)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "verifiers-vf_sums-seed0" / "model").is_dir()
