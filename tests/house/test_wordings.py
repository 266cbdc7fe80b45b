"""Tests prove meanings: what an error names (value, limit, key, mend), and not the sentence around it.

The budget only falls: lower it when you are below it.
"""

import re
from pathlib import Path

LITERAL = re.compile(
    r"""(?:match=|assert )[rf]*("(?:[^"\n\\]|\\.)*"|'(?:[^'\n\\]|\\.)*')(?: (?:not )?in |[,)])"""
)
"""What stands in `pytest.raises(…, match="…")` and in `assert "…" in text`."""
SENTENCE = re.compile(r"(?<![\w`'/.-])[A-Za-z]?[a-z]*(?: [a-z]+){3}(?![\w`'/-])")
"""Four plain words in a row."""
SENTENCES = 55
"""Those that may stay: what a test itself wrote, programs of others say, an agent reads or a user types."""


def test_no_more_tests_match_sentences_than_before(checkout: Path) -> None:
    sentences = [
        f"{file.relative_to(checkout)}: {literal[1]}"
        for file in sorted((checkout / "tests").rglob("*.py"))
        for literal in LITERAL.finditer(file.read_text())
        if SENTENCE.search(literal[1])
    ]
    assert len(sentences) <= SENTENCES, f"match what the text must name, with `.*` between: {sentences}"
