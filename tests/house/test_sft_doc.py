"""docs/sft.md runs: its Python and its commands, from top to bottom in one directory; its keys exist."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.config.loader import config_dict
from rllm.config.supervised import SftConfig

LAST_LINES = "import sys\nsys.argv = {words!r}\nfrom rllm.cli.main import main\ntry:\n    main()\n"
LAST_LINES += "except SystemExit as end:\n    assert not end.code, end.code\n"


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "sft.md").read_text()


def test_the_blocks_of_the_page_run_from_top_to_bottom(
    page: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    parts: list[str] = []
    for language, body in re.findall(r"^```(python|sh)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            parts.append(body)
        else:
            parts += [LAST_LINES.format(words=[*shlex.split(line)]) for line in body.splitlines()]
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(parts))
    done = run_python(str(program), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Nothing was written." in done.stdout
    for name in ("chats", "from-python"):
        summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        assert summary["after"]["loss"] < summary["before"]["loss"]
        assert (tmp_path / "runs" / name / "model" / "model.safetensors").is_file()


def test_every_key_is_on_the_page_and_every_key_of_the_page_exists(page: str) -> None:
    sections = config_dict(SftConfig())
    keys = {key for key, value in sections.items() if not isinstance(value, dict)} | {
        f"{section}.{key}" for section, value in sections.items() if isinstance(value, dict) for key in value
    }
    named = set(re.findall(r"`((?:[a-z]+\.)?[a-z_]+)`", page.split("## All keys")[1]))
    named |= set(re.findall(r"`([a-z]+\.[a-z_]+)`", page))
    whole = {section for section in sections if f"`{section}.…`" in page}
    assert {name for name in named if "." in name and name.partition(".")[0] in sections} <= keys
    assert keys - named - {key for key in keys if key.partition(".")[0] in whole} == {"lora.dropout"}
