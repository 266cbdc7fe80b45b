"""Grammars that answers must follow: a Lark text in, the set of tokens that may come next out.

    text ──Grammars.begin──► GrammarState ──allowed_V──► sampling
                                  ▲                         │
                                  └───────── take ◄─────────┘

The only file that knows llguidance. Its view of the vocabulary is built once per model, and every grammar is
compiled once: an answer walks a copy.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllm.errors import InferenceError, MissingExtraError

MAX_KEPT = 64
"""Compiled grammars that are kept for the next answer. A small one takes 70 KiB, and programs ask for few."""
LONGEST_FORCED = 20_000
"""Bytes that a grammar may force at its beginning; the parser's own limit is a little above."""
_FAILED = frozenset(
    {"MaxTokensTotal", "MaxTokensParser", "ParserTooComplex", "LexerTooComplex", "InternalError"}
)
"""Reasons to stop that are no end of the answer."""


class Grammars:
    """The grammars of one model. Compiling runs in a thread of its own, because some take a second."""

    def __init__(self, directory: Path, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._vocabulary: Any = None
        self._matchers: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    async def begin(self, text: str, stop_token_ids: Iterable[int] = ()) -> "GrammarState":
        """Where an answer begins. Raises ValueError for a grammar that does not compile, naming the
        problem."""
        matcher = self._from_cache(text)
        if matcher is None:
            if self._threads is None:
                # One thread alone, so that the vocabulary is read once however many answers begin at a time.
                self._threads = ThreadPoolExecutor(1, "rllm-grammar")
            matcher = await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, text)
        try:
            state = GrammarState(
                matcher.deep_copy(),
                self._vocab_size,
                end_token_ids=self._end_token_ids,
                foreign_end_ids=self._vocabulary.eos_tokens,
                stop_token_ids=tuple(stop_token_ids),
            )
        except InferenceError as error:
            raise ValueError(f"`grammar` cannot be followed: {error}") from error
        if state.num_allowed == 0:
            raise ValueError(f"`grammar` allows no answer of a single token: {_shorten(text)}")
        return state

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _from_cache(self, text: str) -> Any:
        with self._lock:
            if text in self._matchers:
                self._matchers.move_to_end(text)
            return self._matchers.get(text)

    def _compile(self, text: str) -> Any:
        matcher = self._from_cache(text)  # the request before may have asked for the same
        if matcher is not None:
            return matcher
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise MissingExtraError("llguidance", "gateway") from error
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        matcher = LLMatcher(self._vocabulary, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"`grammar` does not compile: {matcher.get_error().strip()}")
        if len(matcher.deep_copy().compute_ff_bytes()) > LONGEST_FORCED:
            raise ValueError(f"`grammar` forces one text that goes on for ever: {_shorten(text)}")
        with self._lock:
            self._matchers[text] = matcher
            while len(self._matchers) > MAX_KEPT:
                self._matchers.popitem(last=False)
        return matcher

    def _read_vocabulary(self) -> Any:
        path = self._directory / "tokenizer.json"
        try:
            description = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"An answer can follow a grammar only if its model has a tokenizer.json; {path} cannot be "
                f"read: {error}."
            ) from error
        try:
            return _vocabulary(description, self._vocab_size, self._end_token_ids)
        except ValueError as error:
            raise ValueError(f"{path} is not one that grammars can be followed with: {error}") from error


class GrammarState:
    """The position of one answer in its grammar."""

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        *,
        end_token_ids: list[int],
        foreign_end_ids: list[int],
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self.allowed_V: NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)
        """Tokens that may come next. End tokens are among them exactly when the answer may end here."""
        self.num_allowed = 0
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_token_ids = [token for token in end_token_ids if token < vocab_size]
        self._foreign_end_ids = [
            token for token in foreign_end_ids if token not in end_token_ids and token < vocab_size
        ]
        self._stop_token_ids = [token for token in stop_token_ids if 0 <= token < vocab_size]
        self._look()

    @property
    def is_forced(self) -> bool:
        """The grammar leaves no choice about the next token."""
        return self.num_allowed == 1

    @property
    def complete(self) -> bool:
        """The answer follows the grammar, nothing may come after it, and the model has no end token to say
        so."""
        return self.num_allowed == 0

    def take(self, token: int) -> None:
        """Go on by a token that does not end the answer.

        Raises InferenceError where the grammar cannot go on.
        """
        if not self._matcher.consume_token(token):  # it was allowed: what follows is too much for the parser
            raise InferenceError(
                f"The grammar became too complex to go on in it, or forces one text for ever, after token "
                f"{token}: {_first_line(self._matcher.get_error())}"
            )
        self._look()
        if self.num_allowed == 0 and not self._matcher.is_accepting():
            raise InferenceError(
                "The answer came to a place in its grammar where no token of the vocabulary can follow."
            )

    def _look(self) -> None:
        matcher = self._matcher
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if matcher.is_error() or matcher.stop_reason() in _FAILED:
            raise InferenceError(
                f"The grammar is too complex to go on in it ({matcher.stop_reason()}): "
                f"{_first_line(matcher.get_error())}"
            )
        may_end = matcher.is_accepting()
        for token in self._end_token_ids:
            allowed_V[token] = may_end or (allowed_V[token] and self._accepts_after(token))
        # The parser offers the tokenizer's end tokens, and the engine would not end the answer at these.
        allowed_V[self._foreign_end_ids] = False
        if may_end:
            allowed_V[self._stop_token_ids] = True
        self.allowed_V = allowed_V
        self.num_allowed = int(np.count_nonzero(allowed_V))

    def _accepts_after(self, token: int) -> bool:
        """Whether a grammar that itself names an end token is at its end with it."""
        ahead = self._matcher.deep_copy()
        return ahead.consume_token(token) and ahead.is_accepting()


def _vocabulary(description: str, vocab_size: int, end_token_ids: list[int]) -> Any:
    from llguidance import LLTokenizer

    whole = LLTokenizer(description, eos_token=end_token_ids or None)
    if whole.vocab_size >= vocab_size:
        return whole
    # Weights often have more rows than the tokenizer has tokens: those are never allowed.
    return LLTokenizer(description, n_vocab=vocab_size, eos_token=end_token_ids or None)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
