"""The part of docs/swe.md on tasks from one's own code, as a reader types it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm
from rllm.data.swe_rows import read_swe_rows

PAGE = (Path(__file__).parents[2] / "docs" / "swe.md").read_text()
PART = PAGE.partition("## Tasks from your own code")[2].partition("\n## ")[0]


@pytest.fixture
def tasks(bubblewrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the command of the page makes of the repository that the page makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    (repository,) = [
        each for each in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if 'git("init"' in each
    ]
    exec(compile(repository, "docs/swe.md", "exec"), {"__name__": "page"})
    (command,) = re.findall(r"^```sh\n(.*?)\n```", PART, re.M | re.S)
    ended = CliRunner().invoke(rllm, shlex.split(command)[1:], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return tmp_path / "tasks"


def test_the_command_makes_the_files_that_the_page_lists(tasks: Path) -> None:
    listed = re.findall(r"^\| (`.*?) \| ", PART.partition("| in `tasks` |")[2], re.M)
    names = {name for each in listed for name in re.findall(r"`([^`]+)`", each)}
    assert names == {"train", "validation", "test", "tasks.jsonl", "sources", "manifest.json"}
    manifest = json.loads((tasks / "manifest.json").read_text())
    assert manifest["tasks"] == 3
    assert {each.name for each in tasks.iterdir()} == names - {
        split for split, count in manifest["splits"].items() if not count
    }
    assert all(row["source"].endswith("calculator.bundle") for row in read_swe_rows(tasks / "train"))


@pytest.mark.slow
def test_the_reference_of_a_task_passes_and_nothing_fails_in_the_graders_own_world(tasks: Path) -> None:
    words = ["doctor", "tasks", str(tasks / "train"), "--no-tampering", "--max-tasks", "1"]
    ended = CliRunner().invoke(rllm, words, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
