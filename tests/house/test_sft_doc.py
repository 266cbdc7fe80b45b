"""docs/sft.md runs: its Python and its commands, from top to bottom in one directory; its keys exist."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.config.loader import config_dict
from rllm.config.supervised import SftConfig


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "sft.md").read_text()


def test_the_blocks_of_the_page_run_from_top_to_bottom(
    page: str, run_page: Callable[[str], str], rllm: Callable[[list[str]], str]
) -> None:
    told = ""
    for language, body in re.findall(r"^```(python|sh)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            run_page(body)
        else:
            told += "".join(rllm(shlex.split(line)[1:]) for line in body.splitlines())
    assert "Nothing was written." in told
    for name in ("chats", "from-python"):
        run = Path("runs") / name
        summary = json.loads((run / "summary.json").read_text())
        assert summary["after"]["loss"] < summary["before"]["loss"]
        assert (run / "model" / "model.safetensors").is_file()


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
