"""The Python of docs/models_setup.md runs, and its table of providers is the one that there is."""

import re
from pathlib import Path

import pytest

from rllm.build.providers import PROVIDERS

PAGE = (Path(__file__).parents[2] / "docs" / "models_setup.md").read_text()


async def test_the_python_of_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(program, "models_setup.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", program)


def test_the_page_knows_every_provider_and_its_key() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", PAGE, re.MULTILINE))
    assert set(PROVIDERS) <= set(rows)
    for name, provider in PROVIDERS.items():
        assert f"`{provider.key_variable}`" in rows[name] or not provider.key_variable
