"""Tokens in, text out, as they come: whole characters only, and never a part of a text that ends the answer.

token ──TextStream.add──► whole characters ──StopTexts.feed──► text that may be shown
                                                 └─► `match`: a stop text is complete
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"
"""The character that decoders put in place of bytes that are no character, or not yet one."""
CONTEXT = 16
"""The window of tokens that are decoded together is cut back when it is longer than this."""
LONGEST_HELD = 32
"""Tokens without a single whole character after which the broken ones are let through."""
LONGEST_CHARACTER = 4
"""Bytes, and so tokens at most, of one character."""


class TextStream:
    """Decodes one answer token by token.

    Only a short window is decoded at each token, so the work grows with the length of the answer and not with
    its square. Tokenizers look back when they decode (a leading space, bytes of one character), so the window
    begins with some tokens whose text was handed out already.
    """

    def __init__(self, decode: Decode, is_special: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_special = is_special
        self._ids: list[int] = []
        self._num_shown = 0
        """Characters of the window's text that were handed out."""
        self._fresh = 0
        """Where in the window the tokens begin that came after the last whole text."""

    def add(self, token: int) -> str:
        """The characters that this token made whole."""
        if self._is_special(token):
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        end = len(text.rstrip(BROKEN))
        new = text[self._num_shown : end]
        if len(self._ids) - self._fresh > LONGEST_HELD and (end < len(text) or not new):
            return self._let_through(text)
        self._num_shown = max(self._num_shown, end)
        # The window is cut only behind whole characters: a cut within one would lose its first bytes.
        if new and end == len(text):
            if len(self._ids) >= CONTEXT:
                self._keep(self._fresh)
            self._fresh = len(self._ids)
        return new

    def rest(self) -> str:
        """The text that was held back because it is no whole character: nothing comes that could complete
        it."""
        return self._decode(self._ids)[self._num_shown :] if self._ids else ""

    def _let_through(self, text: str) -> str:
        """Bytes that make no character: all but the last, which the next token may complete."""
        num_unsure = int(text.endswith(BROKEN))
        new = text[self._num_shown : len(text) - num_unsure]
        self._keep(len(self._ids) - LONGEST_CHARACTER)
        self._num_shown = max(0, self._num_shown - num_unsure)
        self._fresh = 0
        return new

    def _keep(self, start: int) -> None:
        self._ids = self._ids[start:]
        self._num_shown = len(self._decode(self._ids))


class StopTexts:
    """Looks for the texts that end an answer, in text that comes in pieces of any size.

    The text that is complete first wins; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.match: str | None = None
        self._stops = tuple(stops)
        self._tail = ""

    def feed(self, text: str) -> str:
        """The text that may be shown: everything before a match, and nothing that may become the beginning of
        one."""
        pending = self._tail + text
        hits = [
            (start + len(stop), start, stop) for stop in self._stops if (start := pending.find(stop)) >= 0
        ]
        if hits:
            _, start, self.match = min(hits)
            self._tail = ""
            return pending[:start]
        show = len(pending) - max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._tail = pending[show:]
        return pending[:show]

    def rest(self) -> str:
        """The text that was held back, once no more can come."""
        pending, self._tail = self._tail, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
