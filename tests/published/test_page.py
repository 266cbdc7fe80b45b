"""docs/published.md runs: its Python as one program that prints what the page says."""

import re
import warnings
from pathlib import Path

import pytest


def test_the_python_of_the_page_prints_what_stands_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path))
    page = (Path(__file__).parents[2] / "docs" / "published.md").read_text()
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        exec(compile(program, "page", "exec"), {"__name__": "page"})
    expected = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == expected
