"""Work that some requests need at every token: text as it is written, stop texts, alternatives, a grammar.

    logits ──► sample (all rows) ──► WatchedRows.resample (rows with a grammar) ──► tokens
                                                                                      │
             piece of text ◄── Watch.take ◄── WatchedRows.tell (rows with a watch) ◄──┘

A request without any of these has no watch, and its step is the one that training takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.errors import InferenceError
from rllm.inference.client import TokenPiece
from rllm.inference.local.grammar import GrammarState
from rllm.inference.local.sampling import SamplingRows, most_likely, sample_among
from rllm.inference.local.text import Decode, StopTexts, TextStream
from rllm.inference.local.thoughts import ThoughtLimit
from rllm.types.messages import SamplingParams, TopLogprobs


@dataclass(slots=True, frozen=True)
class Listener:
    """Where the pieces of an answer go. Both are called in the engine's thread."""

    put: Callable[[TokenPiece], None]
    wake: Callable[[], None]
    """Says that pieces were put; once for all rows of a step, because waking another thread is not cheap."""


class Watch:
    """Follows one answer token by token, in the engine's thread."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        decode: Decode,
        is_special: Callable[[int], bool],
        listener: Listener | None = None,
        grammar: GrammarState | ThoughtLimit | None = None,
    ) -> None:
        self.grammar = grammar
        self.listener = listener
        self.num_top = sampling.top_logprobs
        self.top_logprobs: list[TopLogprobs] = []
        self.forced_places: list[int] = []
        """Places in the answer whose token the grammar alone chose, ascending."""
        self.error: InferenceError | None = None
        """The error that ended this answer and no other."""
        self._decode = decode
        self._stops = StopTexts(sampling.stop)
        self._stream = TextStream(decode, is_special) if listener or sampling.stop else None
        self._texts: list[str] = []
        """The text of the tokens so far."""
        self._answer_texts: list[str] = []
        """The part of it that belongs to the answer for sure."""
        self._piece = TokenPiece()
        self._num_taken = 0

    @property
    def text(self) -> str | None:
        """The whole answer; None when nobody asked for its text while it was written."""
        return None if self._stream is None else "".join(self._answer_texts)

    @property
    def stop_sequence(self) -> str | None:
        return self._stops.match

    def take(self, token: int, logprob: float, top: TopLogprobs | None, *, is_end: bool) -> bool:
        """Hear of the next token, and say whether the answer is over with it."""
        if top is not None:
            self.top_logprobs.append(top)
        # Before the grammar takes the token, because the question is whether this one was a choice.
        if self.grammar is not None and self.grammar.is_forced:
            self.forced_places.append(self._num_taken)
        self._num_taken += 1
        if self.listener is not None:
            self._piece.token_ids.append(token)
            self._piece.logprobs.append(logprob)
            if top is not None:
                self._piece.top_logprobs.append(top)
        # An end token has no text, and the grammar has already said that the answer may end.
        if is_end:
            return True
        if self._stream is not None:
            self._show(self._stream.add(token))
            self._send(even_without_text=False)
        if self._stops.match is not None:
            return True
        if self.grammar is None:
            return False
        self.grammar.take(token)
        return self.grammar.complete

    def finish(self, said_ids: Sequence[int]) -> None:
        """The answer is over: show what was held back. `said_ids` are its tokens without the end token."""
        if self.error is None:
            self.finish_on_error(lambda: self._finish(said_ids))

    def finish_on_error(self, act: Callable[[], bool]) -> bool:
        """The result of `act`; True, the answer is over, where it raises: one answer's trouble must not end
        its neighbours."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001  it becomes the error of this one answer
            if isinstance(error, InferenceError):
                self.error = error
            else:
                self.error = InferenceError(f"The answer failed: {error!r}")
                self.error.__cause__ = error
            return True

    def _finish(self, said_ids: Sequence[int]) -> bool:
        if self._stream is not None and self._stops.match is None:
            text = "".join(self._texts)
            whole = self._decode(said_ids)
            # A tokenizer that takes back what it had said is not followed: it was handed out already.
            self._show(whole[len(text) :] if whole.startswith(text) else self._stream.rest())
            self._keep(self._stops.rest())
        self._send(even_without_text=True)
        return True

    def _show(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._keep(self._stops.feed(text))

    def _keep(self, text: str) -> None:
        if text:
            self._answer_texts.append(text)
            if self.listener is not None:
                self._piece.text += text

    def _send(self, *, even_without_text: bool) -> None:
        piece = self._piece
        if self.listener is not None and (piece.text or (even_without_text and piece.token_ids)):
            self._piece = TokenPiece()
            self.listener.put(piece)


class WatchedRows:
    """The rows of one batch that have a watch."""

    def __init__(self, watches: Sequence[Watch | None]) -> None:
        self._watches = [(row, watch) for row, watch in enumerate(watches) if watch is not None]
        self._grammars = [(row, watch.grammar) for row, watch in self._watches if watch.grammar is not None]
        self._wakes = {watch.listener.wake for _, watch in self._watches if watch.listener is not None}
        self._top_counts = [(row, watch.num_top) for row, watch in self._watches if watch.num_top]

    def __bool__(self) -> bool:
        return bool(self._watches)

    def resample(
        self,
        logits_B_V: Tensor,
        tokens_B: NDArray[np.int64],
        logprobs_B: NDArray[np.float32],
        sampling: SamplingRows,
    ) -> None:
        """Draw anew, in place, where a grammar allows only some tokens."""
        if not self._grammars:
            return
        masks = [(row, grammar.allowed_V) for row, grammar in self._grammars]
        masks = [(row, allowed_V) for row, allowed_V in masks if allowed_V is not None]
        if not masks:
            return
        # A draw is a function of seed and position, so drawing again leaves all other rows as they are.
        rows = [row for row, _ in masks]
        allowed_G_V = torch.from_numpy(np.stack([allowed_V for _, allowed_V in masks]))
        tokens = sample_among(logits_B_V[rows], allowed_G_V.to(logits_B_V.device), sampling.part(rows))
        tokens_B[rows], logprobs_B[rows] = (values.cpu().numpy() for values in tokens)

    def tell(
        self,
        logits_B_V: Tensor,
        sampling: SamplingRows,
        tokens_B: NDArray[np.int64],
        logprobs_B: NDArray[np.float32],
        ended_B: NDArray[np.bool_],
    ) -> None:
        """Tell every watch its token, and note in `ended_B` whose answer is over."""
        top_of_row = self._most_likely(logits_B_V, sampling)
        for row, watch in self._watches:
            token, logprob, is_end = int(tokens_B[row]), float(logprobs_B[row]), bool(ended_B[row])
            take = partial(watch.take, token, logprob, top_of_row.get(row), is_end=is_end)
            ended_B[row] = watch.finish_on_error(take)
        for wake in self._wakes:
            wake()

    def _most_likely(self, logits_B_V: Tensor, sampling: SamplingRows) -> dict[int, TopLogprobs]:
        if not self._top_counts:
            return {}
        rows = [row for row, _ in self._top_counts]
        best = most_likely(logits_B_V[rows], sampling.part(rows), max(count for _, count in self._top_counts))
        return {row: top[:count] for (row, count), top in zip(self._top_counts, best, strict=True)}
