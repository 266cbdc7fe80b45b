"""A thought that is closed for the model at a limit of tokens (Muennighoff et al. 2025, arXiv:2501.19393).

    tokens ──take──► inside a thought? ──limit reached──► the closing is forced, token by token ──► free again

It stands where a grammar stands: the policy does not choose the tokens that it forces, so they are not
trained on.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rllm.inference.local.grammar import GrammarState
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.answers import CLOSE_THINK

CLOSING = f"\n{CLOSE_THINK}\n\n"


class ThoughtLimit:
    """The position of one answer with regard to its thought, before a grammar that it may have as well."""

    def __init__(
        self,
        limit: int,
        tokenizer: HuggingFaceTokenizer,
        prompt_ids: Sequence[int],
        grammar: GrammarState | None,
        vocab_size: int,
    ) -> None:
        """`limit`: tokens of a thought, above 0. The vocabulary has tokens around thoughts."""
        assert tokenizer.thought_ids is not None, "a limit without such tokens was refused"
        self._open_id, self._close_id = tokenizer.thought_ids
        self._grammar, self._vocab_size = grammar, vocab_size
        self._left = limit
        self._is_inside = tokenizer.ends_in_thought(prompt_ids)
        self._closing = tokenizer.encode(CLOSING)
        self._closing_left: list[int] = []
        """Tokens of the closing that are still to come, the next one first."""
        self.has_cut = False
        """Whether the thought was closed for the model."""

    @property
    def allowed_V(self) -> NDArray[np.bool_] | None:
        """[V] tokens that may come next; None where all may."""
        if not self._closing_left:
            return None if self._grammar is None else self._grammar.allowed_V
        allowed_V = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed_V[self._closing_left[0]] = True
        return allowed_V

    @property
    def is_forced(self) -> bool:
        """Whether there is no choice about the next token."""
        return bool(self._closing_left) or (self._grammar is not None and self._grammar.is_forced)

    @property
    def complete(self) -> bool:
        """Whether a grammar has ended the answer."""
        return self._grammar is not None and self._grammar.complete

    def take(self, token: int) -> None:
        """Go on by a token that does not end the answer."""
        if self._grammar is not None:
            self._grammar.take(token)
        if self._closing_left:
            self._closing_left.pop(0)
        elif self._is_inside:
            self._left -= 1
        if token == self._open_id:
            self._is_inside = True
        elif token == self._close_id:
            self._is_inside = False
        if self._is_inside and self._left <= 0 and not self._closing_left:
            self._closing_left, self.has_cut = list(self._closing), True
