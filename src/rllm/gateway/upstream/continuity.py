"""Which conversation of a session a call goes on with, when another server has made its prompt ids.

    prompt ids, messages ──place──► Place(conversation, segment, reason) ──record(answer)──┐
            ▲                                                                              │
            └─────── earlier prompts and answers, as digests ◄─────────────────────────────┘

Ids are compared first: a prompt that begins with all ids of an earlier prompt and its answer goes on with
that segment. Where only the text goes on, the server has made other ids of it than it had sampled, and a new
segment begins. Nothing but digests is kept, and no more than a fixed number of them.
"""

import hashlib
from array import array
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import orjson

from rllm.gateway.wire import CallRecord, CallRequest, CallStatus, Choice
from rllm.rendering.chat import SegmentReason
from rllm.types.messages import Message

_V = TypeVar("_V")

MAX_ENDS = 1024
"""Answers whose ids (or whose text) are remembered, of one session."""
MAX_LINKS = 8192
"""Beginnings of conversations that are remembered, of one session."""


class UpstreamSegmentReason(StrEnum):
    """What only happens where another server makes the prompt ids; otherwise see `SegmentReason`."""

    RETOKENIZED = "retokenized"
    """The conversation goes on, but its prompt has other ids than were sampled and sent before."""


@dataclass(slots=True, eq=False)
class _Conversation:
    number: int
    num_segments: int = 0


@dataclass(slots=True, frozen=True)
class Place:
    """Where a call belongs."""

    of: _Conversation = field(repr=False)
    segment: int
    reason: str
    tools: bytes = b""
    """Digest of the tools that were offered."""
    has_ids: bool = False

    def stamp(self, choice: Choice) -> None:
        choice.conversation = self.of.number
        choice.segment = self.segment
        choice.segment_reason = self.reason


class Continuity:
    """All conversations of one session."""

    def __init__(self) -> None:
        self.num_conversations = 0
        self._ids = _Ends()
        """After every answer: prompt and answer, in ids."""
        self._texts = _Ends()
        """The same of bare prompts, in text."""
        self._asked: dict[bytes, Place] = {}
        """Whole prompts, in ids or as messages: asked again, they are no continuation but the same call."""
        self._answered: dict[bytes, Place] = {}
        """Messages up to and including an answer."""
        self._seen: dict[bytes, _Conversation] = {}
        """Every beginning of a conversation that holds more than rules."""
        self._said: dict[bytes, _Conversation] = {}
        """Every answer by itself: what is left of a conversation whose beginning was cut off."""

    @classmethod
    def from_history(cls, records: Iterable[CallRecord]) -> "Continuity":
        """What is known from calls that are in the ledger, oldest first."""
        known = cls()
        conversations: dict[int, _Conversation] = {}
        for record in records:
            if record.status is CallStatus.OK:
                conversation = conversations.setdefault(
                    record.conversation, _Conversation(record.conversation)
                )
                conversation.num_segments = max(conversation.num_segments, record.segment + 1)
                known._restore(record, conversation)
        known.num_conversations = max(conversations, default=-1) + 1
        return known

    def _restore(self, record: CallRecord, conversation: _Conversation) -> None:
        request = CallRequest(
            dialect=record.dialect,
            body={},
            messages=record.messages,
            prompt=record.prompt,
            tools=record.tools,
        )
        asked = _asked(request, record.prompt_ids)
        asked.place = Place(conversation, record.segment, record.segment_reason, asked.tools, bool(asked.ids))
        self._remember_prompt(asked)
        self._remember_answer(asked, record.completion_ids, record.response)

    def place(self, request: CallRequest, prompt_ids: Sequence[int]) -> "Asked":
        """Where this prompt belongs. Without `prompt_ids`, by its text alone."""
        asked = _asked(request, prompt_ids)
        asked.place = self._place(asked)
        self._remember_prompt(asked)
        return asked

    def record(self, asked: "Asked", choice: Choice) -> None:
        """Add one answer to it. A prompt may have several."""
        self._remember_answer(asked, choice.completion_ids, choice.message())

    # ---- where a prompt belongs ----------------------------------------------------------------------------

    def _place(self, asked: "Asked") -> Place:
        if asked.ids:
            known = self._asked.get(asked.ids_digest) or self._ids.longest(asked.ids)
            if known is not None:
                return known
        elif (known := self._asked.get(asked.links[-1])) is not None:
            return known
        continued = self._continued(asked)
        if continued is not None:
            if not asked.ids or not continued.has_ids:
                return continued
            same_tools = continued.tools == asked.tools
            reason = UpstreamSegmentReason.RETOKENIZED if same_tools else SegmentReason.TOOLS_CHANGED
            return self._new_segment(continued.of, reason, asked)
        conversation, reason = self._rewritten(asked)
        if conversation is None:
            conversation = _Conversation(self.num_conversations)
            self.num_conversations += 1
        return self._new_segment(conversation, reason, asked)

    def _continued(self, asked: "Asked") -> Place | None:
        """The answer that the text goes on from."""
        for link in reversed(asked.links):
            place = self._answered.get(link)
            if place is not None:
                return place
        return self._texts.longest(asked.text) if asked.text else None

    def _rewritten(self, asked: "Asked") -> tuple[_Conversation | None, str]:
        """Which conversation begins like this one, or holds one of its answers; None for a new one."""
        same = self._asked.get(asked.links[-1]) if len(asked.links) > 1 else None
        if same is not None:  # the very same messages, and other ids
            changed = same.tools != asked.tools
            return same.of, SegmentReason.TOOLS_CHANGED if changed else UpstreamSegmentReason.RETOKENIZED
        for link in reversed(asked.links):
            conversation = self._seen.get(link)
            if conversation is not None:
                return conversation, SegmentReason.HISTORY_REWRITTEN
        for message in reversed(asked.messages):
            if message.get("role") == "assistant":
                conversation = self._said.get(_link(b"", message))
                if conversation is not None:
                    return conversation, SegmentReason.HISTORY_REWRITTEN
        return None, SegmentReason.FIRST

    def _new_segment(self, conversation: _Conversation, reason: str, asked: "Asked") -> Place:
        segment = conversation.num_segments
        conversation.num_segments += 1
        return Place(conversation, segment, str(reason), asked.tools, bool(asked.ids))

    def _remember_prompt(self, asked: "Asked") -> None:
        place = asked.place
        if asked.ids:
            _put(self._asked, asked.ids_digest, place, MAX_ENDS)
        if len(asked.links) > 1:
            _put(self._asked, asked.links[-1], place, MAX_ENDS)
        begun = False
        for message, link in zip(asked.messages, asked.links[1:], strict=False):
            begun = begun or message.get("role") not in ("system", "developer")
            if begun:
                _put_first(self._seen, link, place.of, MAX_LINKS)

    def _remember_answer(self, asked: "Asked", ids: Sequence[int], message: Message) -> None:
        place = asked.place
        if asked.ids and ids:
            self._ids.add(asked.ids + array("i", ids).tobytes(), place)
        if asked.text:
            self._texts.add(asked.text + _utf8(message.get("content") or ""), place)
        if len(asked.links) > 1:
            end = _link(asked.links[-1], message)
            _put(self._answered, end, place, MAX_ENDS)
            _put_first(self._seen, end, place.of, MAX_LINKS)
        if message.get("content") or message.get("tool_calls"):
            _put_first(self._said, _link(b"", message), place.of, MAX_ENDS)


@dataclass(slots=True)
class Asked:
    """One prompt, digested, and where it belongs."""

    ids: bytes
    ids_digest: bytes
    text: bytes
    """Of a bare prompt."""
    links: list[bytes]
    """[M + 1] digests of the first 0, 1, … M messages."""
    messages: Sequence[Message]
    tools: bytes
    place: Place = field(init=False)


def _asked(request: CallRequest, prompt_ids: Sequence[int]) -> Asked:
    ids = array("i", prompt_ids).tobytes()
    return Asked(
        ids=ids,
        ids_digest=_digest(ids) if ids else b"",
        text=_utf8(request.prompt) if isinstance(request.prompt, str) else b"",
        links=_chain(request.messages) if request.prompt is None else _prompt_chain(request.prompt),
        messages=request.messages,
        tools=_digest(orjson.dumps(request.tools)) if request.tools else b"",
    )


class _Ends:
    """Byte strings by digest, found again as beginnings of longer ones, in time linear in these."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, bytes], Place] = {}
        self._lengths: list[int] = []
        """Sorted; one entry a length."""
        self._num_of_length: dict[int, int] = {}

    def add(self, data: bytes, place: Place) -> None:
        key = (len(data), _digest(data))
        if key not in self._places:
            if not self._num_of_length.get(len(data)):
                insort(self._lengths, len(data))
            self._num_of_length[len(data)] = self._num_of_length.get(len(data), 0) + 1
        self._places[key] = place
        if len(self._places) > MAX_ENDS:
            self._forget(next(iter(self._places)))

    def longest(self, data: bytes) -> Place | None:
        """What was added under the longest beginning of `data`."""
        found: Place | None = None
        digest = hashlib.blake2b(digest_size=16)
        view = memoryview(data)
        start = 0
        for length in self._lengths[: bisect_right(self._lengths, len(data))]:
            digest.update(view[start:length])
            start = length
            found = self._places.get((length, digest.copy().digest()), found)
        return found

    def _forget(self, key: tuple[int, bytes]) -> None:
        del self._places[key]
        self._num_of_length[key[0]] -= 1
        if not self._num_of_length[key[0]]:
            del self._num_of_length[key[0]]
            self._lengths.remove(key[0])


# ---- when two messages are the same ------------------------------------------------------------------------


def _chain(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    links = [b""]
    for message in messages:
        links.append(_link(links[-1], message))
    return links


def _prompt_chain(prompt: str | list[int]) -> list[bytes]:
    """A bare prompt is one thing said."""
    return [b"", _digest(b"prompt" + (_utf8(prompt) if isinstance(prompt, str) else orjson.dumps(prompt)))]


def _link(previous: bytes, message: Mapping[str, Any]) -> bytes:
    """Keys that clients add or drop do not count: a model would not have read them."""
    role = message.get("role")
    said: list[Any] = [role, _content(message.get("content"))]
    if role == "assistant":
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            said += [function.get("name"), _arguments(function.get("arguments"))]
    elif role == "tool":
        said.append(message.get("tool_call_id") or "")
    return _digest(previous + orjson.dumps(said, option=orjson.OPT_SORT_KEYS))


def _content(content: Any) -> Any:
    """Text in parts equals text; null equals nothing. Images and the like are compared as they are."""
    if not isinstance(content, list):
        return content or ""
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(texts) else content


def _arguments(arguments: Any) -> str:
    """Clients read them and write them again, with other spaces and another order."""
    if not isinstance(arguments, str):
        return orjson.dumps(arguments or {}, option=orjson.OPT_SORT_KEYS).decode()
    try:
        return orjson.dumps(orjson.loads(arguments or "{}"), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # no JSON, or nested too deeply
        return arguments


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


# ---- bounded memory ----------------------------------------------------------------------------------------


def _put(table: dict[bytes, _V], key: bytes, value: _V, limit: int) -> None:
    table[key] = value
    if len(table) > limit:
        del table[next(iter(table))]


def _put_first(table: dict[bytes, _V], key: bytes, value: _V, limit: int) -> None:
    if key not in table:
        _put(table, key, value, limit)
