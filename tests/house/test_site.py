"""The docs site has a place for every page; `make docs` builds it, and finds dead links."""

import re
from pathlib import Path

MADE_WHEN_BUILT = {
    "index.md",
    *(f"reference/{name}.md" for name in ("benchmarks", "commands", "configuration", "python")),
}


def test_every_page_has_one_place_in_the_navigation(checkout: Path) -> None:
    navigation = (checkout / "site" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    places = re.findall(r"([\w/]+\.md)$", navigation, re.MULTILINE)
    pages = {str(page.relative_to(checkout / "docs")) for page in (checkout / "docs").rglob("*.md")}
    assert sorted(places) == sorted(pages | MADE_WHEN_BUILT)
