"""Token in, token out, for a session in which several conversations run at once.

    messages ──begin──► Turn (prompt ids) ──engine──► completion ids ──record──┐
                 ▲                                                             │
                 └── the earlier answer that these messages go on from ◄───────┘

A client sends its whole conversation every time, and does not say which one. So every prompt and every
answer is remembered under a digest of the messages up to it. New messages go on from the longest such
beginning: their prompt is the ids that were really sent and sampled, plus the encoding of what is new.
Sub-agents, parallel calls, retries and forks need no marks of their own: they are branches.

`conversation_index` says which messages are the same. Text that a client stripped or changed is a rewrite,
and a new segment.

Reasoning is not part of the message that a client gets, and need not come back: the ids of an answer go on
with the model's own reasoning in them, as long as the chat template would keep it there
(`ChatRenderer.appends`). Where it would not, as in a template that drops thoughts when the user speaks again,
a new segment begins with the prompt that the template makes.
"""

import hashlib
import itertools
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.rendering.chat import ChatRenderer, SegmentReason
from rllm.rendering.conversation_index import (
    ConversationIndex,
    IndexedConversation,
    canonical_json,
    message_digests,
)
from rllm.types.images import ids_array
from rllm.types.messages import Message

Tools = Sequence[Mapping[str, Any]]

MAX_ALIKE = 64
"""Answers that are kept of those that read alike behind one prompt."""


@dataclass(kw_only=True, slots=True)
class _Prompt:
    """A prompt that was asked, as what it adds to the answer before it."""

    conversation: IndexedConversation
    segment: int
    reason: SegmentReason
    tools: bytes
    digest: bytes
    """A digest of its messages."""
    after: "_Answer | None"
    new_ids: "array[int]"

    def ids(self) -> list[int]:
        parts: list[array[int]] = []
        prompt: _Prompt | None = self
        while prompt is not None:
            parts.append(prompt.new_ids)
            answer = prompt.after
            if answer is not None:
                parts.append(answer.ids)
            prompt = answer.prompt if answer is not None else None
        return list(itertools.chain.from_iterable(reversed(parts)))


@dataclass(kw_only=True, slots=True)
class _Answer:
    prompt: _Prompt
    ids: "array[int]"
    call_ids: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Turn:
    """One call under way."""

    prompt_ids: list[int]
    num_kept: int
    """The number of them that were sent or sampled before; 0 where a segment begins."""
    conversation: int
    segment: int
    """Counted within the conversation, from 0."""
    reason: SegmentReason
    """The reason that this segment began."""
    prompt: _Prompt = field(repr=False)
    """The prompt that `record` adds the answer to."""


class ConversationTree:
    """All conversations of one session. `begin`, then `record`, as the calls come.

    `numbers` gives each conversation its number, where several trees share a session.
    `max_turns` bounds the memory: of more prompts and answers than that, the oldest are forgotten, and a
    conversation that goes on from a forgotten answer counts as a new one. Ids are kept once, however many
    calls share them.
    """

    def __init__(
        self, renderer: ChatRenderer, *, max_turns: int = 20_000, numbers: Iterator[int] | None = None
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"`max_turns` is {max_turns}; it must be at least 1.")
        self.renderer = renderer
        self._max_turns = max_turns
        self._index = ConversationIndex(max_entries=4 * max_turns, numbers=numbers or itertools.count())
        self._prompts: dict[bytes, dict[bytes, _Prompt]] = {}
        """By messages, then by tools."""
        self._answers: dict[bytes, list[_Answer]] = {}
        """By the messages up to and including the answer."""
        self._undo: deque[Callable[[], None]] = deque()
        """Forgets one prompt or answer each, the oldest first."""
        self._known_tools: deque[tuple[list[Any], bytes]] = deque(maxlen=8)

    @property
    def num_conversations(self) -> int:
        return self._index.num_conversations

    def __len__(self) -> int:
        """Prompts and answers that are remembered."""
        return len(self._undo)

    def begin(self, messages: Sequence[Message], tools: Tools = ()) -> Turn:
        """The prompt for `messages`, the whole conversation as the client sees it.

        The same messages asked again (a retry, a second sample) get the same ids. Raises ConfigError where
        the chat template refuses them, or where a message has content that is no text.
        """
        digests = message_digests(messages)
        tools_digest = self._digest_of(tools)
        prompt = self._prompts.get(digests[-1], {}).get(tools_digest)
        if prompt is None:
            prompt = self._new_prompt(messages, digests, tools, tools_digest)
            self._remember(prompt, messages, digests)
        ids = prompt.ids()
        return Turn(
            prompt_ids=ids,
            num_kept=len(ids) - len(prompt.new_ids) if prompt.after is not None else 0,
            conversation=prompt.conversation.number,
            segment=prompt.segment,
            reason=prompt.reason,
            prompt=prompt,
        )

    def record(self, turn: Turn, completion_ids: Sequence[int], message: Message) -> None:
        """Add what the model answered; `message` is the assistant message as the client gets it.

        A turn may be answered several times.
        """
        prompt = turn.prompt
        answer = _Answer(prompt=prompt, ids=ids_array(completion_ids), call_ids=_call_ids(message))
        digest = self._index.add_answer(prompt.digest, message, prompt.conversation)
        alike = self._answers.setdefault(digest, [])
        if any(each.ids == answer.ids and each.call_ids == answer.call_ids for each in alike):
            return
        alike.append(answer)
        self._keep(lambda: self._forget_answer(digest, answer))
        # What `_undo` has for the one that goes finds nothing to forget then.
        if len(alike) > MAX_ALIKE:
            del alike[0]

    # ---- where a prompt belongs ------------------------------------------------------------------------

    def _new_prompt(
        self, messages: Sequence[Message], digests: Sequence[bytes], tools: Tools, tools_digest: bytes
    ) -> _Prompt:
        place, answer = self._longest_answered(messages, digests, tools_digest)
        if answer is None:
            conversation, reason = self._rewritten(messages, digests)
        elif answer.prompt.tools != tools_digest:
            conversation, reason = answer.prompt.conversation, SegmentReason.TOOLS_CHANGED
        elif not self.renderer.appends(messages[place:], tools):
            conversation, reason = answer.prompt.conversation, SegmentReason.TEMPLATE_NOT_INCREMENTAL
        else:
            new_ids = self.renderer.continuation(
                answer.ids, messages[place:], tools, answer=messages[place - 1]
            )
            return _Prompt(
                conversation=answer.prompt.conversation,
                segment=answer.prompt.segment,
                reason=answer.prompt.reason,
                tools=tools_digest,
                digest=digests[-1],
                after=answer,
                new_ids=ids_array(new_ids),
            )
        ids = self.renderer.render(messages, tools)
        conversation = conversation or self._index.start()
        return _Prompt(
            conversation=conversation,
            segment=conversation.next_segment(),
            reason=reason,
            tools=tools_digest,
            digest=digests[-1],
            after=None,
            new_ids=ids_array(ids),
        )

    def _longest_answered(
        self, messages: Sequence[Message], digests: Sequence[bytes], tools_digest: bytes
    ) -> tuple[int, _Answer | None]:
        """The number of messages that an earlier call and its answer account for, and that answer.

        Of answers that read alike, the one with the same tools, then with the ids of calls that the client
        echoes, then the latest.
        """
        for place in range(len(messages), 0, -1):
            alike = self._answers.get(digests[place])
            if alike:
                call_ids = _call_ids(messages[place - 1])
                return place, max(
                    # `max` takes the first of those that are equal: the latest.
                    reversed(alike),
                    key=lambda each: (each.prompt.tools == tools_digest, each.call_ids == call_ids),
                )
        return 0, None

    def _rewritten(
        self, messages: Sequence[Message], digests: Sequence[bytes]
    ) -> tuple[IndexedConversation | None, SegmentReason]:
        """Which conversation begins like this one, or holds one of its answers; None for a new one."""
        if digests[-1] in self._prompts:  # the very same messages, so the tools are others
            prompts = self._prompts[digests[-1]].values()
            return next(iter(prompts)).conversation, SegmentReason.TOOLS_CHANGED
        conversation = self._index.find(messages, digests)
        reason = SegmentReason.FIRST if conversation is None else SegmentReason.HISTORY_REWRITTEN
        return conversation, reason

    # ---- memory ----------------------------------------------------------------------------------------

    def _remember(self, prompt: _Prompt, messages: Sequence[Message], digests: Sequence[bytes]) -> None:
        self._prompts.setdefault(prompt.digest, {})[prompt.tools] = prompt
        self._index.add_prompt(messages, digests, prompt.conversation)
        self._keep(lambda: self._forget_prompt(prompt))

    def _keep(self, forget: Callable[[], None]) -> None:
        self._undo.append(forget)
        if len(self._undo) > self._max_turns:
            self._undo.popleft()()

    def _forget_prompt(self, prompt: _Prompt) -> None:
        by_tools = self._prompts[prompt.digest]
        del by_tools[prompt.tools]
        if not by_tools:
            del self._prompts[prompt.digest]

    def _forget_answer(self, link: bytes, answer: _Answer) -> None:
        left = [each for each in self._answers.get(link, []) if each is not answer]
        if left:
            self._answers[link] = left
        else:
            self._answers.pop(link, None)

    def _digest_of(self, tools: Tools) -> bytes:
        """Clients send the same long list every time: comparing it is ten times faster than digesting it."""
        if not tools:
            return b""
        for other, digest in self._known_tools:
            if other == list(tools):
                return digest
        text = canonical_json(list(tools))
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self._known_tools.append((json.loads(text), digest))  # a copy: theirs may change
        return digest


def _call_ids(message: Message) -> tuple[str, ...]:
    return tuple(str(call.get("id") or "") for call in message.get("tool_calls") or ())
