"""The fenced blocks of a text, as CommonMark has them and as models write them beside words.

    "- Run:\\n  ~~~python\\n  x = 1\\n  ~~~"  ──► fenced_blocks ──► [Fenced(language="python", text="x = 1")]

A fence may stand behind the mark of a list item, and what it holds loses the indentation of the fence. Words
may stand before a fence that names a language, and behind one that closes a block.
"""

import re
from dataclasses import dataclass

_OPENING = re.compile(
    r"(?P<indent>[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})"
    r"[ \t]*(?P<language>[^\s`]*)[^`]*\Z"
)
_BEHIND_WORDS = re.compile(r"(?P<indent>)[^`]*[\s:](?P<fence>`{3,})(?P<language>[A-Za-z][^\s`]*)[ \t]*\Z")
_CLOSING = re.compile(r"[ \t]*(`{3,}|~{3,})[.,;:!?)]*(?:[ \t].*)?\Z")


@dataclass(kw_only=True, slots=True, frozen=True)
class Fenced:
    """One block."""

    language: str
    """The first word behind the fence, in lower case."""
    text: str
    is_closed: bool
    """Whether a fence ends it, and not the end of the text."""


def fenced_blocks(text: str) -> list[Fenced]:
    """Return the blocks in order."""
    blocks: list[Fenced] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        if opening is None:
            opening, lines = _OPENING.match(line) or _BEHIND_WORDS.match(line), []
        elif (closing := _CLOSING.match(line)) and closing[1].startswith(opening["fence"]):
            blocks.append(_block(opening, lines, is_closed=True))
            opening = None
        else:
            lines.append(line)
    if opening is not None:
        blocks.append(_block(opening, lines, is_closed=False))
    return blocks


def _block(opening: re.Match[str], lines: list[str], *, is_closed: bool) -> Fenced:
    # Some answers indent the fence and not the code: the first line says which it is.
    first = next((line for line in lines if line.strip()), "")
    width = min(len(opening["indent"]), len(first) - len(first.lstrip(" \t")))
    text = "\n".join(re.sub(rf"\A[ \t]{{0,{width}}}", "", line) for line in lines)
    return Fenced(language=opening["language"].lower(), text=text, is_closed=is_closed)
