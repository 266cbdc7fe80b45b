"""One call on its way through the engine, and its answer as it is written.

TokenPiece ──ChoiceStream──► Piece, Piece, …      ModelOutput ──LocalCall.fill──► Choice
"""

import asyncio
import hashlib
import itertools
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.gateway.draw_numbers import DrawNumbers
from rllm.gateway.local.token_requests import TEMPLATE_VARIABLES, Reader
from rllm.inference.client import TokenPiece
from rllm.rendering.chat import ChatRenderer
from rllm.rendering.conversations import ConversationTree, Turn
from rllm.rendering.tools import ParsedAnswer, StreamEvent
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams, TopLogprobs
from rllm.types.wire import (
    Answer,
    CallRecord,
    CallRequest,
    CallStatus,
    Choice,
    Piece,
    TokenLogprob,
    ToolCallPiece,
    WireToolCall,
)

_MAX_TREES = 16


@dataclass(slots=True)
class SessionState:
    """The policy's memory of a session."""

    trees: OrderedDict[str, ConversationTree] = field(default_factory=OrderedDict[str, ConversationTree])
    """By the variables for the chat template that calls come with, as JSON: another prompt for each."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the tree is read or changed, perhaps by the thread for large prompts."""
    is_restored: bool = False
    """The calls that are in the ledger were replayed."""
    draw_numbers: DrawNumbers = field(default_factory=DrawNumbers)
    """By `digest_of` the prompt's ids. Only the thread that replays calls and, from then on, the loop change
    them."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of the conversations in all trees."""

    def tree_for(self, renderer: ChatRenderer, variables: Mapping[str, Any]) -> ConversationTree:
        key = json.dumps(variables, sort_keys=True)
        tree = self.trees.get(key)
        if tree is None:
            tree = self.trees[key] = ConversationTree(renderer, numbers=self._numbers)
            if len(self.trees) > _MAX_TREES:
                self.trees.popitem(last=False)
        self.trees.move_to_end(key)
        return tree

    def replay(self, record: CallRecord, renderer_for: Callable[[Mapping[str, Any]], ChatRenderer]) -> None:
        """A call from the ledger, as if it had just been answered."""
        if record.status is not CallStatus.OK or not record.prompt_ids:
            return
        # Once a call, as when it was answered, whatever number of choices it has.
        if record.choice == 0:
            self.draw_numbers.take(digest_of(record.prompt_ids))
        if record.prompt is None:
            variables = record.sampling.get(TEMPLATE_VARIABLES, {})
            tree = self.tree_for(renderer_for(variables), variables)
            turn = tree.begin(record.messages, record.tools)
            message: Message = {
                key: value for key, value in record.response.items() if key != "reasoning_content"
            }
            tree.record(turn, record.completion_ids, message)


def digest_of(prompt_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()


@dataclass(slots=True)
class LocalCall:
    """One request on its way."""

    request: CallRequest
    tree: ConversationTree
    turn: Turn | None
    """None for text completions, which belong to no conversation."""
    prompt_ids: list[int]
    digest: bytes
    """The `digest_of` the prompt's ids."""
    samplings: list[SamplingParams]
    """One per choice."""
    sends_seeds: bool
    """Whether the engine is sent their seeds."""
    reader: Reader | None
    """Splits the text of chat answers; text completions are left as they are."""
    tokenizer_text: Callable[[int], str]
    answer: Answer

    @property
    def echo_text(self) -> str:
        if not self.request.echo:
            return ""
        prompt = self.request.prompt
        return prompt if isinstance(prompt, str) else "".join(map(self.tokenizer_text, self.prompt_ids))

    def fill(self, choice: Choice, output: ModelOutput) -> None:
        """Everything that is known once the answer is whole."""
        answer = (
            ParsedAnswer(content=output.text, reasoning="", calls=[], unparsed_markup=False)
            if self.reader is None
            else self.reader.parse(output.text)
        )
        choice.text = self.echo_text + answer.content
        choice.reasoning = answer.reasoning
        choice.tool_calls = [
            WireToolCall(
                id=_call_id(self.answer.id, choice.index, number), name=call.name, arguments=call.arguments
            )
            for number, call in enumerate(answer.calls)
        ]
        # A call that broke off in the middle: the answer ended for want of tokens, whatever whole calls stand
        # before.
        cut_off = answer.unparsed_markup and output.finish_reason is FinishReason.LENGTH
        has_calls = bool(choice.tool_calls) and not cut_off
        choice.finish_reason = FinishReason.TOOL_CALLS if has_calls else output.finish_reason
        choice.stop_sequence = output.stop_sequence
        choice.has_cut_thought = output.has_cut_thought
        choice.unparsed_markup = answer.unparsed_markup
        choice.completion_ids = output.completion_ids
        choice.logprobs = output.logprobs
        choice.logprob_meaning = output.logprob_meaning
        choice.temperature = output.temperature
        choice.seed = self.samplings[choice.index].seed if self.sends_seeds else None
        choice.policy_versions = output.policy_versions
        if self.request.logprobs:
            choice.token_logprobs = self.token_logprobs(
                output.completion_ids, output.logprobs, output.top_logprobs
            )

    def token_logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs]
    ) -> list[TokenLogprob]:
        text = self.tokenizer_text
        return [
            TokenLogprob(
                token_id=token,
                text=text(token),
                logprob=logprob,
                top=[(each, text(each), value) for each, value in (top[place] if top else ())],
            )
            for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
        ]


class ChoiceStream:
    """Text as it is sampled, turned into pieces of one choice."""

    def __init__(self, call: LocalCall, choice: Choice, on_piece: Callable[[Piece], None]) -> None:
        self.any_sent = False
        self._call = call
        self._choice = choice
        self._on_piece = on_piece
        self._events = None if call.reader is None else call.reader.stream()

    def take(self, piece: TokenPiece) -> None:
        logprobs: list[TokenLogprob] = []
        if self._call.request.logprobs:
            logprobs = self._call.token_logprobs(piece.token_ids, piece.logprobs, piece.top_logprobs)
        if self._events is None:
            self.say(piece.text, logprobs)
            return
        events = self._events.feed(piece.text)
        # Text that may become markup is held back, but each token has its log-probability in the stream once.
        if logprobs and not events:
            self._send(Piece(choice=self._choice.index, logprobs=logprobs))
        for event in events:
            self._send(self._piece(event, logprobs))
            logprobs = []

    def say(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if text or logprobs:
            self._choice.text += text
            self._send(Piece(choice=self._choice.index, text=text, logprobs=list(logprobs)))

    def finish(self, choice: Choice) -> None:
        """Emit the text that was held back because it might have become markup."""
        if self._events is not None:
            for event in self._events.finish():
                self._send(self._piece(event, []))

    def _piece(self, event: StreamEvent, logprobs: list[TokenLogprob]) -> Piece:
        piece = Piece(choice=self._choice.index, logprobs=logprobs)
        if event.kind == "text":
            piece.text = event.text
        elif event.kind == "reasoning":
            piece.reasoning = event.text
        else:
            first = bool(event.name)
            piece.tool_call = ToolCallPiece(
                index=event.index,
                id=_call_id(self._call.answer.id, self._choice.index, event.index) if first else "",
                name=event.name,
                arguments=event.text,
            )
        return piece

    def _send(self, piece: Piece) -> None:
        self.any_sent = True
        self._on_piece(piece)


def _call_id(answer_id: str, choice: int, number: int) -> str:
    """The id of a tool call: derived, so that a streamed and a captured call have the same."""
    return f"call_{hashlib.blake2b(f'{answer_id}/{choice}/{number}'.encode(), digest_size=12).hexdigest()}"
