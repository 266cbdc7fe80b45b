"""Messages ⇄ token ids, by appending only.

    messages ──render──► prompt ids ──engine──► completion ids ─┐
                              ▲                                 │ kept as they are: never decoded and encoded
                              └──── continuation(new messages) ◄┘ again

A `Conversation` holds the ids of what was really sent and sampled. The next prompt is those ids plus the
encoding of the messages that came since. When an agent changes what had been said, no append can express it:
the whole conversation is rendered anew and a new segment begins, with the reason on record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

from rllm.errors import ConfigError
from rllm.types.messages import Message


class TextTokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text, special tokens recognised, none added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids without special tokens."""
        ...

    def apply_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text.

        Raises ConfigError where the template refuses it, such as one with a system message.
        """
        ...


class SegmentReason(StrEnum):
    """Why a segment began."""

    FIRST = "first"
    HISTORY_REWRITTEN = "history_rewritten"
    """The agent changed or dropped something that had been said."""
    TEMPLATE_NOT_INCREMENTAL = "template_not_incremental"
    """The chat template renders earlier turns differently once later ones exist."""


_MARK = "\u2063answer\u2063"
"""Stands for an assistant's answer while the text after it is cut out of a rendered template."""


class ChatRenderer:
    """Renders with a model's own chat template, and knows the text that the template puts after an answer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._encode = lru_cache(maxsize=65_536)(self._encode_uncached)
        self._tail = lru_cache(maxsize=65_536)(self._tail_uncached)
        self._plain = lru_cache(maxsize=4_096)(self._plain_uncached)
        self.incremental = self._is_incremental()

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a whole conversation that asks for the next answer."""
        plain = tuple((str(m["role"]), m["content"]) for m in messages if _is_plain(m))
        if len(plain) == len(messages):  # all attempts at a task begin alike
            return list(self._plain(plain))
        return list(self._encode(self.tokenizer.apply_template(messages, add_generation_prompt=True)))

    def continuation(self, completion_ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """Ids to append after a sampled answer so that it is closed, `new_messages` are said and an answer is
        asked for.

        An end token that the model already wrote is not repeated.
        """
        plain = tuple((str(m["role"]), m["content"]) for m in new_messages if _is_plain(m))
        if len(plain) == len(new_messages):
            tail = self._tail(plain)
        else:
            tail = self._encode(self._text_after_answer(_STUB, new_messages))
        if completion_ids and tail and completion_ids[-1] == tail[0]:
            return list(tail[1:])
        return list(tail)

    def _plain_uncached(self, plain: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        messages: list[Message] = [{"role": role, "content": content} for role, content in plain]
        return self._encode(self.tokenizer.apply_template(messages, add_generation_prompt=True))

    def _tail_uncached(self, plain: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        new_messages: list[Message] = [{"role": role, "content": content} for role, content in plain]
        return self._encode(self._text_after_answer(_STUB, new_messages))

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text))

    def _text_after_answer(self, history: Sequence[Message], new_messages: Sequence[Message]) -> str:
        conversation = [*history, {"role": "assistant", "content": _MARK}, *new_messages]
        text = self.tokenizer.apply_template(conversation, add_generation_prompt=True)
        position = text.find(_MARK)
        if position < 0:
            raise ConfigError(
                "The model's chat template drops or rewrites assistant messages, so a conversation cannot "
                "be continued; use a template that prints the `content` of every assistant message."
            )
        return text[position + len(_MARK) :]

    def _is_incremental(self) -> bool:
        """Whether text once rendered stays as it is, whatever follows: tried on conversations of several
        shapes."""
        say = self.tokenizer.apply_template
        new: list[Message] = [{"role": "user", "content": "now"}]
        for history in _PROBES:
            try:
                before = say(history, add_generation_prompt=True)
            except ConfigError:
                if history is _STUB:
                    raise
                continue  # a template that knows no system message will not see one
            for answer in (_MARK, f"<think>\nidea\n</think>\n\n{_MARK}"):
                answered: list[Message] = [*history, {"role": "assistant", "content": answer}]
                if not say([*answered, *new], add_generation_prompt=True).startswith(before + answer):
                    return False
            if self._text_after_answer(history, new) != self._text_after_answer(_STUB, new):
                return False
        return True


_STUB: list[Message] = [{"role": "user", "content": "x"}]
_PROBES: list[list[Message]] = [
    _STUB,
    [*_STUB, {"role": "assistant", "content": "one"}, {"role": "user", "content": "second"}],
    [{"role": "system", "content": "rules"}, {"role": "user", "content": "first"}],
    [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ],
]


def _is_plain(message: Message) -> bool:
    return len(message) == 2 and isinstance(message.get("content"), str) and "role" in message


@dataclass(kw_only=True, slots=True)
class Conversation:
    """The token view of one conversation. `prompt` then `record`, turn by turn."""

    renderer: ChatRenderer
    ids: list[int] = field(default_factory=list[int])
    """Everything sent and sampled so far in the current segment."""
    segment_reason: SegmentReason = SegmentReason.FIRST
    num_segments: int = 0
    _said: list[Message] = field(default_factory=list[Message])
    _answer: str | None = None
    _completion_ids: list[int] = field(default_factory=list[int])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """[P] ids to send for `messages`: the ids so far plus what is new, or a fresh rendering where that is
        impossible.

        Asked again without an answer in between, as after a failed request, the prompt is the same.
        """
        if self.num_segments and self._answer is None and list(messages) == self._said:
            return self.ids
        new = self._new_messages(messages)
        if new is not None and self.renderer.incremental:
            self.ids = self.ids + self.renderer.continuation(self._completion_ids, new)
        else:
            if self.num_segments:
                rewritten = new is None
                self.segment_reason = (
                    SegmentReason.HISTORY_REWRITTEN if rewritten else SegmentReason.TEMPLATE_NOT_INCREMENTAL
                )
            self.num_segments += 1
            self.ids = self.renderer.render(messages)
        self._said = list(messages)
        self._answer = None
        return self.ids

    def record(self, completion_ids: Sequence[int], text: str) -> None:
        """Append what the model answered to the last prompt; `text` is how the agent sees it."""
        self.ids = self.ids + list(completion_ids)
        self._completion_ids = list(completion_ids)
        self._answer = text

    def _new_messages(self, messages: Sequence[Message]) -> list[Message] | None:
        """The messages after the recorded answer, or None when `messages` do not go on from it word for
        word."""
        if self._answer is None or len(messages) < len(self._said) + 2:
            return None
        if list(messages[: len(self._said)]) != self._said:
            return None
        answer = messages[len(self._said)]
        if answer.get("role") != "assistant" or answer.get("content") != self._answer or len(answer) != 2:
            return None
        return list(messages[len(self._said) + 1 :])
