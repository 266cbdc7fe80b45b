"""Which conversation of a session a call goes on with, when another server has made its prompt ids.

    prompt ids, messages ──place──► Place(conversation, segment, reason) ──record(answer)──┐
            ▲                                                                              │
            └─────── earlier prompts and answers, as digests ◄─────────────────────────────┘

Ids are compared first: a prompt that begins with all ids of an earlier prompt and its answer goes on with
that segment. Where only the text goes on, the server has made other ids of it than it had sampled, and a new
segment begins. Nothing but digests is kept, and no more than a fixed number of them.
"""

import hashlib
import itertools
from array import array
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import orjson

from rllm.rendering.chat import SegmentReason
from rllm.rendering.conversation_index import (
    ConversationIndex,
    IndexedConversation,
    message_digests,
    put_bounded,
)
from rllm.types.messages import Message
from rllm.types.wire import CallRecord, CallRequest, CallStatus, Choice

MAX_ENDS = 1024
"""Answers whose ids (or whose text) are remembered, of one session."""
MAX_BEGINNINGS = 8192
"""Beginnings of conversations that are remembered, of one session."""


class UpstreamSegmentReason(StrEnum):
    """Reasons that exist only where another server makes the prompt ids; otherwise see `SegmentReason`."""

    RETOKENIZED = "retokenized"
    """The conversation goes on, but its prompt has other ids than were sampled and sent before."""


@dataclass(slots=True, frozen=True)
class ConversationPlace:
    """Where a call belongs."""

    conversation: IndexedConversation = field(repr=False)
    segment: int
    reason: str
    tools: bytes = b""
    """Digest of the tools that were offered."""
    has_ids: bool = False

    def stamp(self, choice: Choice) -> None:
        choice.conversation = self.conversation.number
        choice.segment = self.segment
        choice.segment_reason = self.reason


class Continuity:
    """All conversations of one session."""

    def __init__(self, *, first_number: int = 0) -> None:
        self._index = ConversationIndex(
            max_entries=MAX_BEGINNINGS, numbers=itertools.count(first_number), num_conversations=first_number
        )
        self._ids = _Ends()
        """After every answer: prompt and answer, in ids."""
        self._texts = _Ends()
        """The same of bare prompts, in text."""
        self._prompts: dict[bytes, ConversationPlace] = {}
        """By whole prompts, in ids and as messages: sent again, they are the same call, no continuation."""
        self._answers: dict[bytes, ConversationPlace] = {}
        """By the messages up to and including an answer."""

    @property
    def num_conversations(self) -> int:
        return self._index.num_conversations

    @classmethod
    def from_history(cls, records: Iterable[CallRecord]) -> "Continuity":
        """The state after the calls that are in the ledger, oldest first."""
        answers = [record for record in records if record.status is CallStatus.OK]
        continuity = cls(first_number=1 + max((record.conversation for record in answers), default=-1))
        conversations: dict[int, IndexedConversation] = {}
        for record in answers:
            conversation = conversations.setdefault(
                record.conversation, IndexedConversation(record.conversation)
            )
            conversation.num_segments = max(conversation.num_segments, record.segment + 1)
            continuity._restore(record, conversation)
        return continuity

    def _restore(self, record: CallRecord, conversation: IndexedConversation) -> None:
        request = CallRequest(
            dialect=record.dialect,
            body={},
            messages=record.messages,
            prompt=record.prompt,
            tools=record.tools,
        )
        prompt = _digest_prompt(request, record.prompt_ids)
        prompt.place = ConversationPlace(
            conversation, record.segment, record.segment_reason, prompt.tools, bool(prompt.ids)
        )
        self._add_prompt(prompt)
        self._add_answer(prompt, record.completion_ids, record.response)

    def place(self, request: CallRequest, prompt_ids: Sequence[int]) -> "PlacedPrompt":
        """Where this prompt belongs. Without `prompt_ids`, by its text alone."""
        prompt = _digest_prompt(request, prompt_ids)
        prompt.place = self._place(prompt)
        self._add_prompt(prompt)
        return prompt

    def record(self, prompt: "PlacedPrompt", choice: Choice) -> None:
        """Add one answer to it. A prompt may have several."""
        self._add_answer(prompt, choice.completion_ids, choice.message())

    # ---- where a prompt belongs ----------------------------------------------------------------------------

    def _place(self, prompt: "PlacedPrompt") -> ConversationPlace:
        if prompt.ids:
            parent = self._prompts.get(prompt.ids_digest) or self._ids.longest(prompt.ids)
        else:
            parent = self._prompts.get(prompt.digests[-1])
        if parent is not None:
            return parent
        continuation = self._continuation(prompt)
        if continuation is not None:
            # Without ids on both sides nothing can show that they differ.
            if not prompt.ids or not continuation.has_ids:
                return continuation
            same_tools = continuation.tools == prompt.tools
            reason = UpstreamSegmentReason.RETOKENIZED if same_tools else SegmentReason.TOOLS_CHANGED
            return _new_segment(continuation.conversation, reason, prompt)
        conversation, reason = self._rewritten(prompt)
        return _new_segment(conversation or self._index.start(), reason, prompt)

    def _continuation(self, prompt: "PlacedPrompt") -> ConversationPlace | None:
        """The answer that the text goes on from."""
        # From the longest beginning on, which is the latest answer that the prompt holds.
        for digest in reversed(prompt.digests):
            place = self._answers.get(digest)
            if place is not None:
                return place
        return self._texts.longest(prompt.text) if prompt.text else None

    def _rewritten(self, prompt: "PlacedPrompt") -> tuple[IndexedConversation | None, str]:
        """Which conversation begins like this one, or holds one of its answers; None for a new one."""
        same = self._prompts.get(prompt.digests[-1]) if len(prompt.digests) > 1 else None
        if same is not None:  # the very same messages, and other ids
            tools_differ = same.tools != prompt.tools
            reason = SegmentReason.TOOLS_CHANGED if tools_differ else UpstreamSegmentReason.RETOKENIZED
            return same.conversation, reason
        conversation = self._index.find(prompt.messages, prompt.digests)
        reason = SegmentReason.FIRST if conversation is None else SegmentReason.HISTORY_REWRITTEN
        return conversation, reason

    def _add_prompt(self, prompt: "PlacedPrompt") -> None:
        if prompt.ids:
            put_bounded(self._prompts, prompt.ids_digest, prompt.place, MAX_ENDS)
        # The digest of no message is the same for all conversations.
        if len(prompt.digests) > 1:
            put_bounded(self._prompts, prompt.digests[-1], prompt.place, MAX_ENDS)
        self._index.add_prompt(prompt.messages, prompt.digests, prompt.place.conversation)

    def _add_answer(self, prompt: "PlacedPrompt", ids: Sequence[int], message: Message) -> None:
        if prompt.ids and ids:
            self._ids.add(prompt.ids + array("I", ids).tobytes(), prompt.place)
        if prompt.text:
            self._texts.add(prompt.text + _utf8(message.get("content") or ""), prompt.place)
        end = self._index.add_answer(prompt.digests[-1], message, prompt.place.conversation)
        if len(prompt.digests) > 1:
            put_bounded(self._answers, end, prompt.place, MAX_ENDS)


@dataclass(slots=True)
class PlacedPrompt:
    """One prompt, digested, and where it belongs."""

    ids: bytes
    ids_digest: bytes
    text: bytes
    """The text of a bare prompt."""
    digests: list[bytes]
    """[M + 1] digests of the first 0, 1, … M messages."""
    messages: Sequence[Message]
    tools: bytes
    place: ConversationPlace = field(init=False)


def _digest_prompt(request: CallRequest, prompt_ids: Sequence[int]) -> PlacedPrompt:
    ids = array("I", prompt_ids).tobytes()
    return PlacedPrompt(
        ids=ids,
        ids_digest=_digest(ids) if ids else b"",
        text=_utf8(request.prompt) if isinstance(request.prompt, str) else b"",
        digests=message_digests(request.messages)
        if request.prompt is None
        else _bare_digests(request.prompt),
        messages=request.messages,
        tools=_digest(orjson.dumps(request.tools)) if request.tools else b"",
    )


def _new_segment(conversation: IndexedConversation, reason: str, prompt: PlacedPrompt) -> ConversationPlace:
    return ConversationPlace(
        conversation, conversation.next_segment(), str(reason), prompt.tools, bool(prompt.ids)
    )


class _Ends:
    """Byte strings by digest, found again as beginnings of longer ones, in time linear in these."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, bytes], ConversationPlace] = {}
        self._lengths: list[int] = []
        """Sorted; one entry a length."""
        self._num_of_length: dict[int, int] = {}

    def add(self, data: bytes, place: ConversationPlace) -> None:
        key = (len(data), _digest(data))
        if key not in self._places:
            if not self._num_of_length.get(len(data)):
                insort(self._lengths, len(data))
            self._num_of_length[len(data)] = self._num_of_length.get(len(data), 0) + 1
        self._places[key] = place
        if len(self._places) > MAX_ENDS:
            self._forget(next(iter(self._places)))

    def longest(self, data: bytes) -> ConversationPlace | None:
        """The value that was added under the longest beginning of `data`."""
        longest: ConversationPlace | None = None
        digest = hashlib.blake2b(digest_size=16)
        view = memoryview(data)
        start = 0
        for length in self._lengths[: bisect_right(self._lengths, len(data))]:
            digest.update(view[start:length])
            start = length
            longest = self._places.get((length, digest.copy().digest()), longest)
        return longest

    def _forget(self, key: tuple[int, bytes]) -> None:
        del self._places[key]
        self._num_of_length[key[0]] -= 1
        if not self._num_of_length[key[0]]:
            del self._num_of_length[key[0]]
            self._lengths.remove(key[0])


def _bare_digests(prompt: str | list[int]) -> list[bytes]:
    """[2] digests, as of one message: a bare prompt is one."""
    return [b"", _digest(b"prompt" + (_utf8(prompt) if isinstance(prompt, str) else orjson.dumps(prompt)))]


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
