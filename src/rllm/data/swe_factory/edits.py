"""Places of a syntax tree as positions in its source text, and edits at them that keep all other formatting.

source ──► SourceText ── span(node), gap(a, b), tokens ──► Edit(start, end, text) ──► changed source
"""

import ast
import bisect
import io
import itertools
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(slots=True, frozen=True)
class Edit:
    """Characters `start` to `end` of a source become `text`."""

    start: int
    end: int
    text: str


@dataclass(slots=True, frozen=True)
class Token:
    """A token that means something to Python, with its place in characters."""

    kind: int
    text: str
    start: int
    end: int


def with_edits(source: str, edits: Sequence[Edit]) -> str:
    """The source after edits that do not overlap."""
    # From the last to the first, so that the places of the others stay right.
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


class SourceText:
    """A module's text with its syntax tree. Raises SyntaxError (or its kind) for what Python cannot read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        # Not `splitlines`: it ends a line at characters that Python has within one, such as U+2028.
        self._lines = io.StringIO(text, newline="").readlines()
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    @cached_property
    def tokens(self) -> list[Token]:
        """Without comments, line ends and indentation."""
        quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        return [
            Token(
                kind=each.type,
                text=each.string,
                start=self._starts[each.start[0] - 1] + each.start[1],
                end=self._starts[each.end[0] - 1] + each.end[1],
            )
            for each in tokenize.generate_tokens(io.StringIO(self.text, newline="").readline)
            if each.type not in quiet and each.string
        ]

    def span(self, node: ast.expr | ast.stmt | ast.arg) -> tuple[int, int]:
        """First character of a node, and the one behind its last."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def tokens_in(self, start: int, end: int) -> list[Token]:
        first = bisect.bisect_left(self.tokens, start, key=lambda each: each.start)
        return list(
            itertools.takewhile(lambda each: each.end <= end, self.tokens[first : first + (end - start)])
        )

    def gap(self, before: ast.expr, behind: ast.expr) -> list[Token]:
        """The tokens between two nodes, brackets left out: an operator, mostly."""
        tokens = self.tokens_in(self.span(before)[1], self.span(behind)[0])
        return [each for each in tokens if each.text not in "()"]

    def line_span(self, first: int, last: int) -> tuple[int, int]:
        """All of the lines `first` to `last`, counted from 1, with their ends."""
        return self._starts[first - 1], self._starts[last]

    def line_at(self, place: int) -> int:
        """The line, counted from 1, of a character."""
        return bisect.bisect_right(self._starts, place)

    def has_lines_alone(self, node: ast.stmt) -> bool:
        """Whether nothing but the statement, and comments, stands on its lines."""
        start, end = self.span(node)
        assert node.end_lineno is not None
        first, last = self.line_span(node.lineno, node.end_lineno)
        behind = self.text[end:last].strip()
        return not self.text[first:start].strip() and (not behind or behind.startswith("#"))

    def _place(self, line: int, utf8_column: int) -> int:
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        # The parser counts columns in bytes of UTF-8.
        column = utf8_column if text.isascii() else len(text.encode()[:utf8_column].decode())
        return self._starts[line - 1] + column
