"""Tokens that may come next, by what a parser says of them."""

from typing import Any, Self

import numpy as np
import pytest

from rllm.errors import InferenceError
from rllm.inference.local.grammar import GrammarState

VOCAB = 10


class Matcher:
    """Allows `tokens`, takes all of them but `refused`, and accepts where `accepts` says so, or behind the
    tokens that `ends` names."""

    def __init__(
        self,
        tokens: list[int],
        *,
        accepts: bool = False,
        ends: tuple[int, ...] = (),
        refused: tuple[int, ...] = (),
        stop_reason: str = "NotStopped",
        is_broken: bool = False,
    ) -> None:
        self.tokens, self.accepts, self.ends, self.refused = tokens, accepts, ends, refused
        self._stop_reason, self._is_broken = stop_reason, is_broken

    def compute_bitmask(self) -> bytes:
        bits = np.zeros(16, dtype=np.uint8)
        bits[self.tokens] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def consume_token(self, token: int) -> bool:
        self.accepts = token in self.ends
        return token not in self.refused

    def is_accepting(self) -> bool:
        return self.accepts

    def is_error(self) -> bool:
        return self._is_broken

    def stop_reason(self) -> str:
        return self._stop_reason

    def get_error(self) -> str:
        return "first line\nsecond line"

    def deep_copy(self) -> Self:
        return type(self)(self.tokens, accepts=self.accepts, ends=self.ends, refused=self.refused)


def state_of(matcher: Any, **fields: Any) -> GrammarState:
    ids: dict[str, Any] = {"end_token_ids": [], "foreign_end_ids": [], "stop_token_ids": ()}
    return GrammarState(matcher, VOCAB, **{**ids, **fields})


@pytest.mark.parametrize(
    ("matcher", "fields", "allowed"),
    [
        (Matcher([1, 4, 9, 12]), {}, [1, 4, 9]),
        (Matcher([1, 4]), {"end_token_ids": [0, 9, VOCAB, 12]}, [1, 4]),
        (Matcher([1, 4], accepts=True), {"end_token_ids": [0, 9, VOCAB, 12]}, [0, 1, 4, 9]),
        (Matcher([0, 1, 4]), {"end_token_ids": [0]}, [1, 4]),
        (Matcher([0, 1, 4], ends=(0,)), {"end_token_ids": [0]}, [0, 1, 4]),
        (Matcher([0, 1, 4], ends=(0,), refused=(0,)), {"end_token_ids": [0]}, [1, 4]),
        (Matcher([1, 4]), {"foreign_end_ids": [4, 9, VOCAB, 12]}, [1]),
        (Matcher([1, 4], accepts=True), {"foreign_end_ids": [4], "end_token_ids": [4]}, [1, 4]),
        (Matcher([1, 4]), {"stop_token_ids": (0, 9, VOCAB, -1)}, [1, 4]),
        (Matcher([1, 4], accepts=True), {"stop_token_ids": (0, 9, VOCAB, -1)}, [0, 1, 4, 9]),
    ],
)
def test_ends_are_allowed_where_the_grammar_accepts(
    matcher: Matcher, fields: dict[str, Any], allowed: list[int]
) -> None:
    state = state_of(matcher, **fields)
    assert np.flatnonzero(state.allowed_V).tolist() == allowed
    assert state.num_allowed == len(allowed)
    assert state.is_forced is (len(allowed) == 1)
    assert not state.complete


def test_an_answer_goes_on_as_far_as_its_grammar() -> None:
    matcher = Matcher([1, 4], ends=(4,), refused=(7,))
    state = state_of(matcher)
    matcher.tokens = [5]
    state.take(1)
    assert np.flatnonzero(state.allowed_V).tolist() == [5]
    assert state.is_forced
    matcher.tokens = []
    state.take(4)
    assert (state.complete, state.is_forced) == (True, False)
    with pytest.raises(InferenceError, match="no token"):
        state.take(5)
    with pytest.raises(InferenceError, match="first line"):
        state.take(7)


@pytest.mark.parametrize("reason", ["MaxTokensTotal", "ParserTooComplex", "InternalError"])
def test_a_grammar_that_the_parser_gives_up_is_an_error(reason: str) -> None:
    with pytest.raises(InferenceError, match=reason) as error:
        state_of(Matcher([1], stop_reason=reason))
    assert "second line" not in str(error.value)
    with pytest.raises(InferenceError, match="complex"):
        state_of(Matcher([1], is_broken=True))
    assert state_of(Matcher([1], stop_reason="EndOfSentence")).num_allowed == 1
