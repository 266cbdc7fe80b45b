"""What the documents promise is there: every relative link leads to a file, and the version has its entry."""

import re
import tomllib
from pathlib import Path

LINK = re.compile(r"!?\[[^\]]*\]\(<?(?P<target>[^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$", re.MULTILINE | re.DOTALL)


def documents(checkout: Path) -> list[Path]:
    return [
        *sorted(checkout.glob("*.md")),
        *sorted(checkout.glob("docs/**/*.md")),
        *sorted(checkout.glob("examples/**/*.md")),
    ]


def broken_links(document: Path) -> list[str]:
    """Relative link targets in `document` that are no file or directory beside it."""
    prose = FENCE.sub("", document.read_text())
    targets = (match["target"].partition("#")[0] for match in LINK.finditer(prose))
    return [
        target
        for target in targets
        if target and not re.match(r"[a-z]+:", target) and not (document.parent / target).exists()
    ]


def test_every_relative_link_leads_to_a_file(checkout: Path) -> None:
    found = {str(each.relative_to(checkout)): broken_links(each) for each in documents(checkout)}
    assert {name: links for name, links in found.items() if links} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    (tmp_path / "there.md").write_text("")
    document.write_text(
        "[a](there.md#part) [b](gone.md) ![c](gone.png) [d](https://example.com) [e](#here)\n"
        "```sh\n[f](in-code.md)\n```\n"
    )
    assert broken_links(document) == ["gone.md", "gone.png"]


def test_the_changelog_has_an_entry_for_this_version(checkout: Path) -> None:
    version = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["version"]
    changelog = (checkout / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[?{re.escape(version)}\b", changelog, re.MULTILINE), f"no heading `## {version}`"


def test_every_document_that_a_reader_looks_for_is_there(checkout: Path) -> None:
    names = (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE",
        "docs/architecture.md",
        "docs/tutorial.md",
    )
    assert [name for name in names if not (checkout / name).is_file()] == []
