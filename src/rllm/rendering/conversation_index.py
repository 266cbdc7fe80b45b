"""Which conversation of a session some messages belong to, where clients send them whole and do not say.

    messages ──message_digests──► one digest for every beginning ──► ConversationIndex ──► IndexedConversation
    an answer ──message_digest──► a digest of it alone ───────────────────┘

Two messages are the same when a model would have read the same. Content in parts equals content in one text,
null equals nothing, and keys that clients add (`refusal`, `annotations`, `provider_specific_fields`, …) do
not count. An answer is known by its text and its calls, whose arguments may have been parsed and written
again. Text that a client stripped or changed is other text. Images and the like are compared as they are.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rllm.types.messages import Message

_V = TypeVar("_V")


def message_digests(messages: Sequence[Message]) -> list[bytes]:
    """[M + 1] digests of the first 0, 1, … M messages, each made from the one before it."""
    digests = [b""]
    for message in messages:
        digests.append(message_digest(digests[-1], message))
    return digests


def message_digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """[16] bytes for `message` behind messages whose digest is `before`; `b""` for a message by itself."""
    return _digest(before + _frame_of(message))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _frame_of(message: Mapping[str, Any]) -> bytes:
    """Everything that a model would have read of it, each field behind its length."""
    role, content = str(message.get("role")), message.get("content")
    fields = [role, content] if isinstance(content, str) else [role, *_content_fields(content)]
    if role == "assistant":
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            fields += [str(function.get("name")), _canonical_arguments(function.get("arguments"))]
    elif role == "tool":
        fields.append(str(message.get("tool_call_id") or ""))
    else:
        fields.append(str(message.get("name") or ""))
    parts = [field.encode("utf-8", "surrogatepass") for field in fields]
    # Lengths keep the fields apart: without them, text moved from one field to the next would go unseen.
    return b"".join([b"%d:%b" % (len(part), part) for part in parts])


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _content_fields(content: Any) -> list[str]:
    """One field for content whose parts are texts, two where something in it is none."""
    if content is None:
        return [""]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    strings = [text for text in texts if isinstance(text, str)]
    return ["".join(strings)] if len(strings) == len(texts) else ["parts", canonical_json(content)]


def _canonical_arguments(arguments: Any) -> str:
    """Arguments as clients may write them again: other space, other order of keys, 1 for 1.0."""
    if not isinstance(arguments, str):
        return canonical_json(arguments or {})
    try:
        return canonical_json(json.loads(arguments or "{}", parse_float=_whole_if_it_can_be))
    except (ValueError, RecursionError):
        return arguments


def _whole_if_it_can_be(text: str) -> int | float:
    number = float(text)
    # From 2^53 on floats leave out whole numbers, so this one may not be what the text says.
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


@dataclass(slots=True, eq=False)
class IndexedConversation:
    """One conversation of a session, and how many segments it has so far."""

    number: int
    num_segments: int = 0

    def next_segment(self) -> int:
        self.num_segments += 1
        return self.num_segments - 1


@dataclass(kw_only=True, slots=True)
class ConversationIndex:
    """The conversations of one session, by how they begin and by what was answered in them.

    The first conversation that had a beginning or an answer keeps it. Of more than `max_entries` beginnings,
    and of more answers, the oldest are forgotten.
    """

    max_entries: int
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of the conversations; given where several indexes share a session."""
    num_conversations: int = 0
    _beginnings: dict[bytes, IndexedConversation] = field(default_factory=dict[bytes, IndexedConversation])
    """By every beginning that holds more than rules."""
    _answers: dict[bytes, IndexedConversation] = field(default_factory=dict[bytes, IndexedConversation])
    """By every answer alone: what is left of a conversation whose beginning was cut off."""

    def __len__(self) -> int:
        """Entries in the larger of its tables."""
        return max(len(self._beginnings), len(self._answers))

    def start(self) -> IndexedConversation:
        self.num_conversations += 1
        return IndexedConversation(next(self.numbers))

    def add_prompt(
        self, messages: Sequence[Message], digests: Sequence[bytes], conversation: IndexedConversation
    ) -> None:
        """Add all beginnings of a prompt; `digests` are `message_digests(messages)`."""
        has_begun = False
        for message, digest in zip(messages, digests[1:], strict=False):
            # Conversations of one program share their rules, which do not say which of them it is.
            has_begun = has_begun or message.get("role") not in ("system", "developer")
            if has_begun:
                self._add_first(self._beginnings, digest, conversation)

    def add_answer(self, before: bytes, message: Message, conversation: IndexedConversation) -> bytes:
        """Add an answer to the messages of digest `before`; gives the digest of all messages with it."""
        frame = _frame_of(message)
        digest = _digest(before + frame)
        self._add_first(self._beginnings, digest, conversation)
        # An answer with nothing in it may be that of any conversation.
        if message.get("content") or message.get("tool_calls"):
            self._add_first(self._answers, _digest(frame), conversation)
        return digest

    def find(self, messages: Sequence[Message], digests: Sequence[bytes]) -> IndexedConversation | None:
        """The conversation with the longest common beginning, else one that gave the last known answer."""
        for digest in reversed(digests):
            conversation = self._beginnings.get(digest)
            if conversation is not None:
                return conversation
        for message in reversed(messages):
            if message.get("role") == "assistant":
                conversation = self._answers.get(message_digest(b"", message))
                if conversation is not None:
                    return conversation
        return None

    def _add_first(
        self, table: dict[bytes, IndexedConversation], key: bytes, conversation: IndexedConversation
    ) -> None:
        if key not in table:
            put_bounded(table, key, conversation, self.max_entries)


def put_bounded(table: dict[bytes, _V], key: bytes, value: _V, limit: int) -> None:
    """Set a value; the oldest entry goes where there are more than `limit`."""
    table[key] = value
    if len(table) > limit:
        del table[next(iter(table))]
