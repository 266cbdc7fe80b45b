"""docs/web.md: its program prints what the page says, its commands run, its tables name what there is."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.environments.web.actions import ACTIONS
from rllm.environments.web.sites.forum import FORUM
from rllm.environments.web.sites.issue_tracker import ISSUE_TRACKER
from rllm.environments.web.sites.office import OFFICE
from rllm.environments.web.sites.shop_tasks import SHOP
from rllm.environments.web.sites.site_env import DIFFICULTIES

PAGE = (Path(__file__).parents[3] / "docs" / "web.md").read_text()
ELSEWHERE = ("pip", "apt-get", "rllm eval miniwob --agent", "rllm eval web-office --agent")
"""Commands that install, or want a server."""
SITES = (SHOP, FORUM, ISSUE_TRACKER, OFFICE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_program_prints_what_the_page_says(chromium: str, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks("python")
    exec(compile(program, "docs/web.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == blocks("text")[0]


@pytest.mark.slow
def test_the_commands_run(chromium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks("sh")).splitlines():
        if not line.startswith(ELSEWHERE):
            result = CliRunner().invoke(front_door, shlex.split(line)[1:], catch_exceptions=False)
            assert result.exit_code == 0, (line, result.output)


def test_the_table_names_every_action() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|[^|]*\|$", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)[(*]?", row)}
    families = ("mouse_", "keyboard_")
    assert {name for name in ACTIONS if not name.startswith(families)} <= named
    assert set(families) <= named


def test_the_table_names_every_template_of_every_site_by_difficulty() -> None:
    rows = re.findall(r"^\| `(web-\w+)` \| [^|]* \| (.*) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
    assert [name for name, *_ in rows] == [kind.name for kind in SITES]
    for kind, (_, *cells) in zip(SITES, rows, strict=True):
        for difficulty, names in zip(DIFFICULTIES, cells, strict=True):
            assert re.findall(r"`([\w-]+)`", names) == [
                name for name, each in kind.templates.items() if each.difficulty == difficulty
            ]
    assert f"All {sum(len(kind.templates) for kind in SITES)} templates" in PAGE
