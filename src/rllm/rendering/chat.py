"""Messages ⇄ token ids, by appending only.

    messages ──render──► prompt ids ──engine──► completion ids ─┐
                              ▲                                 │ kept as they are: never decoded and encoded
                              └──── continuation(new messages) ◄┘ again

A `Conversation` holds the ids of what was really sent and sampled. The next prompt is those ids plus the
encoding of the messages that came since. When an agent changes what had been said, no append can express it:
the whole conversation is rendered anew and a new segment begins, with the reason on record.
"""

import copy
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, cast

from rllm.errors import ConfigError, ModelDirectoryError
from rllm.rendering.answers import CLOSE_THINK, OPEN_THINK
from rllm.rendering.guards import GUARD, encode_guarded, guard, guard_pattern
from rllm.rendering.images import with_patches
from rllm.rendering.template import as_template_sees
from rllm.rendering.tokens import TextTokenizer
from rllm.rendering.tools import (
    MARKUP,
    PROBE_NAME,
    PROBE_TOOLS,
    PlainFormat,
    ToolFormat,
    plain_format_of,
    probe_call,
    tool_format_of,
)
from rllm.types.messages import Message, SamplingParams
from rllm.types.prefix import Prefix

__all__ = ["ChatRenderer", "Conversation", "SegmentReason", "TextTokenizer"]


class SegmentReason(StrEnum):
    """The reason that a segment began."""

    FIRST = "first"
    HISTORY_REWRITTEN = "history_rewritten"
    """The agent changed or dropped something that had been said."""
    TEMPLATE_NOT_INCREMENTAL = "template_not_incremental"
    """The chat template renders earlier turns differently once later ones exist."""
    TOOLS_CHANGED = "tools_changed"
    """Other tools are offered than before; templates list them ahead of everything that was said."""


Tools = Sequence[Mapping[str, Any]]
Plain = tuple[tuple[str, str], ...]

MAX_SHORT = 2_048
"""Characters of a conversation that is remembered by its messages: every attempt at a task begins alike."""
MAX_LONG = 4_000_000
"""Characters of all longer texts together whose ids are remembered."""


class ChatRenderer:
    """Renders with a model's own chat template, and knows the text that the template puts after an answer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._images = tokenizer.images
        self._tail = lru_cache(maxsize=32_768)(self._tail_uncached)
        self._plain = lru_cache(maxsize=4_096)(self._plain_uncached)
        control_texts: frozenset[str] = getattr(tokenizer, "control_texts", frozenset())
        self._outer_guard = guard_pattern(control_texts)
        # A program may describe the markup of calls to the model.
        self._system_guard = guard_pattern(control_texts - MARKUP)
        self._long = _LongTexts(self._encode)
        self._appends = lru_cache(maxsize=256)(self._appends_uncached)
        self.stop_texts: tuple[str, ...] = getattr(tokenizer, "stop_texts", ())
        """Texts that end an answer, of models that have no token for that."""
        try:
            self.incremental = self._is_incremental()
        except ModelDirectoryError:  # no chat template: conversations are refused, texts are not
            self.incremental = False

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The form in which the model writes calls; None when its chat template does not know tools."""
        return tool_format_of(self.tokenizer)

    @cached_property
    def plain_format(self) -> PlainFormat:
        """The reading of answers where no tools are offered."""
        return plain_format_of(self.tokenizer)

    def completion_ids(self, prompt: str) -> list[int]:
        """Ids of a text that is to be continued, with the token that the tokenizer begins texts with."""
        begin: str = getattr(self.tokenizer, "begin_text", "")
        return self.tokenizer.encode(prompt if prompt.startswith(begin) else begin + prompt)

    def with_stops(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` for an answer in a conversation."""
        if not self.stop_texts:
            return sampling
        return replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *self.stop_texts))))

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a whole conversation that asks for the next answer."""
        plain, size = (None, 0) if tools else _plain_of(messages)
        if plain is None:
            text = self._say(messages, tools)
            ids = self._long.ids(text, len(text), lambda: text)
        elif size > MAX_SHORT:
            ids = self._long.ids(("all", plain), size, lambda: self._say(messages))
        else:
            ids = list(self._plain(plain))
        return ids if self._images is None else with_patches(ids, messages, self._images)

    def continuation(
        self,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = (),
        *,
        answer: Message | None = None,
    ) -> list[int]:
        """Ids to append after a sampled answer so that it is closed, `new_messages` are said and an answer is
        asked for.

        An end token that the model already wrote is not repeated. `answer`: the message that the sampled
        answer is in the conversation.
        """
        plain, size = (None, 0) if tools else _plain_of(new_messages)
        if plain is None:
            text = self._new_text(new_messages, tools)
            tail = self._long.ids(text, len(text), lambda: text)
        elif size > MAX_SHORT:
            tail = self._long.ids(("new", plain), size, lambda: self._new_text(new_messages))
        else:
            tail = self._tail(plain)
        if self._images is not None:
            tail = with_patches(tail, new_messages, self._images)
        if not completion_ids or not tail or completion_ids[-1] != tail[0]:
            return list(tail)
        return list(tail if self._is_said(completion_ids[-1], answer) else tail[1:])

    def _is_said(self, last_id: int, answer: Message | None) -> bool:
        """Whether the last token of an answer is blank text of the answer itself, as where it was cut off
        behind a line, and so does not end it."""
        content = None if answer is None else answer.get("content")
        # First, because hardly any answer ends so.
        if not isinstance(content, str) or not content[-1:].isspace():
            return False
        text = self.tokenizer.decode([last_id])
        return text.isspace() and content.endswith(text)

    def appends(self, new_messages: Sequence[Message], tools: Tools = ()) -> bool:
        """Whether `continuation` says what a whole rendering would: whether all text before stays as it is.

        A template may keep to that while tools answer and not when a user speaks again, because then it drops
        earlier thoughts or lists the tools elsewhere. So this is tried out for each order of roles.
        """
        roles: list[str] = []
        for message in new_messages:
            role = str(message.get("role"))
            if roles[-2:] != [role, role]:  # a third of a kind is no other case
                roles.append(role)
        if not tools and roles == ["user"]:
            return self.incremental
        return self._appends(tuple(roles), bool(tools))

    # ---- ids -------------------------------------------------------------------------------------------

    # Arrays, because a list or tuple of ids takes up to nine times the memory.

    def _plain_uncached(self, plain: Plain) -> "array[int]":
        return array("i", self._encode(self._say(_messages(plain))))

    def _tail_uncached(self, plain: Plain) -> "array[int]":
        return array("i", self._encode(self._text_after_answer(_STUB, _messages(plain))))

    def _encode(self, text: str) -> list[int]:
        return encode_guarded(self.tokenizer.encode, text)

    # ---- text ------------------------------------------------------------------------------------------

    def text(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """A whole conversation as the template prints it, without asking for another answer.

        Raises ConfigError where the template refuses it.
        """
        return self._say(messages, tools, asks=False).replace(GUARD, "")

    def text_that_asks(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The text of `render`."""
        return self._say(messages, tools).replace(GUARD, "")

    def _say(self, messages: Sequence[Message], tools: Tools = (), *, asks: bool = True) -> str:
        with_calls = any("tool_calls" in message or "tool_call_id" in message for message in messages)
        short_ids = with_calls and self._short_ids
        text_arguments = with_calls and self._text_arguments
        takes_images = self._images is not None
        template_messages = [
            self._with_guards(
                as_template_sees(
                    message, short_ids=short_ids, text_arguments=text_arguments, takes_images=takes_images
                )
            )
            for message in messages
        ]
        if not tools:
            return self.tokenizer.apply_template(template_messages, add_generation_prompt=asks)
        return self.tokenizer.apply_template(
            template_messages,
            add_generation_prompt=asks,
            tools=[guard(dict(tool), self._outer_guard) for tool in tools],
        )

    def _with_guards(self, message: Message) -> Message:
        """The message, with no control token in it; an answer is the model's own."""
        role = message.get("role")
        if role == "assistant":
            return message
        pattern = self._system_guard if role in ("system", "developer") else self._outer_guard
        return cast(Message, {key: guard(value, pattern) for key, value in message.items()})

    def _new_text(self, new_messages: Sequence[Message], tools: Tools = ()) -> str:
        """The text behind an answer. Tools are listed far ahead of it, so a short list stands for theirs."""
        if not tools:
            return self._text_after_answer(_STUB, new_messages)
        text = self._text_after_answer(_STUB, new_messages, PROBE_TOOLS)
        # Some templates list the tools behind the last answer: there the real list has to stand.
        return text if PROBE_NAME not in text else self._text_after_answer(_STUB, new_messages, tools)

    def _text_after_answer(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools = ()
    ) -> str:
        text = self._say([*history, _answer(_MARK), *new_messages], tools)
        position = text.find(_MARK)
        if position < 0:
            raise ConfigError(
                "The model's chat template drops or rewrites assistant messages, so a conversation cannot "
                "be continued; use a template that prints the `content` of every assistant message."
            )
        return text[position + len(_MARK) :]

    # ---- what the template does ------------------------------------------------------------------------

    @cached_property
    def _short_ids(self) -> bool:
        """Whether the template takes no other ids of calls than nine letters and digits."""
        messages = [
            _STUB[0],
            {**_answer(""), "tool_calls": [{**probe_call(), "id": "call_of_another_length"}]},
        ]
        try:
            self.tokenizer.apply_template(messages, add_generation_prompt=False, tools=PROBE_TOOLS)
        except ConfigError:
            return True
        return False

    @cached_property
    def _text_arguments(self) -> bool:
        """Whether the template takes the arguments of calls as JSON text alone."""
        return self.tool_format is not None and self.tool_format.text_arguments

    def _is_incremental(self) -> bool:
        self._say(_STUB)  # a template that refuses the plainest conversation is refused here
        return self._appends_uncached(("user",), False)

    def _appends_uncached(self, roles: tuple[str, ...], with_tools: bool) -> bool:
        """Whether text once rendered stays as it is, whatever follows: tried on conversations of several
        shapes."""
        new = [_probe_message(role, with_tools=with_tools) for role in roles]
        tools = PROBE_TOOLS if with_tools else ()
        try:
            tail = self._text_after_answer(_STUB, new, tools)
        except ConfigError:
            return False
        histories = _PROBES_WITH_TOOLS if with_tools else _PROBES
        return all(self._stays(history, new, tools, tail) for history in histories)

    def _stays(self, history: list[Message], new: list[Message], tools: Tools, tail: str) -> bool:
        try:
            before = self._say(history, tools)
            for answer in _probe_answers(before):
                if not self._say([*history, _answer(answer), *new], tools).startswith(before + answer):
                    return False
            if tools and new and new[0]["role"] == "tool":  # the answer before it is a call
                with_call = self._say([*history, _PROBE_CALL, *new], tools)
                if not with_call.startswith(_without_thought(before)) or not with_call.endswith(tail):
                    return False
            return self._text_after_answer(history, new, tools) == tail
        except ConfigError:
            return True  # a template that knows no system message will not see one


class _LongTexts:
    """Ids of texts that are too long to be kept by the thousand; forgets the oldest."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._entries: OrderedDict[Hashable, tuple[int, array[int]]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_characters = 0

    def __len__(self) -> int:
        return len(self._entries)

    def ids(self, key: Hashable, size: int, text: Callable[[], str]) -> list[int]:
        """`text` is asked for its text when the key, of `size` characters, is not known."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry[1].tolist()
        # Not under the lock, because encoding takes long: two threads may both encode one text.
        ids = self._encode(text())
        with self._lock:
            if key not in self._entries:
                self._entries[key] = size, array("i", ids)
                self.num_characters += size
            while self.num_characters > MAX_LONG:
                _, (oldest_size, _) = self._entries.popitem(last=False)
                self.num_characters -= oldest_size
        return ids


_MARK = "\u2063answer\u2063"
"""Stands for an assistant's answer while the text after it is cut out of a rendered template."""


def _answer(content: str) -> Message:
    return {"role": "assistant", "content": content}


_STUB: list[Message] = [{"role": "user", "content": "x"}]
_RULES: Message = {"role": "system", "content": "rules"}
_FIRST: Message = {"role": "user", "content": "first"}
_SECOND: Message = {"role": "user", "content": "second"}
_PROBES: list[list[Message]] = [
    _STUB,
    [*_STUB, _answer("one"), _SECOND],
    [_RULES, _FIRST],
    [_RULES, _FIRST, _answer("one"), _SECOND],
]
_PROBE_CALL: Message = {**_answer(""), "tool_calls": [probe_call()]}
_PROBE_RESULT: Message = {
    "role": "tool",
    "tool_call_id": probe_call()["id"],
    "name": PROBE_NAME,
    "content": "r",
}
_PROBES_WITH_TOOLS: list[list[Message]] = [
    *_PROBES,
    [*_STUB, _PROBE_CALL, _PROBE_RESULT],
    [_RULES, _FIRST, _PROBE_CALL, _PROBE_RESULT, _answer("one"), _SECOND],
]


def _probe_message(role: str, *, with_tools: bool) -> Message:
    if role == "tool" and with_tools:
        return dict(_PROBE_RESULT)
    return {"role": role, "content": "now"}


def _probe_answers(prompt: str) -> list[str]:
    """Answers as models write them, with and without reasoning, behind a prompt that may have begun it."""
    thought = f"idea\n{CLOSE_THINK}\n\n{_MARK}"
    if prompt.rstrip().endswith(OPEN_THINK):
        return [thought]
    return [_MARK, f"{OPEN_THINK}\n{thought}"]


def _without_thought(prompt: str) -> str:
    return prompt.rstrip().removesuffix(OPEN_THINK) if prompt.rstrip().endswith(OPEN_THINK) else prompt


def _plain_of(messages: Sequence[Message]) -> tuple[Plain | None, int]:
    """The messages as a key, where they are text by role alone, and its length in characters."""
    plain: list[tuple[str, str]] = []
    size = 0
    for message in messages:
        content = message.get("content")
        if len(message) != 2 or type(content) is not str or "role" not in message:
            return None, 0
        plain.append((message["role"], content))
        size += len(content)
    return tuple(plain), size


def _messages(plain: Plain) -> list[Message]:
    return [{"role": role, "content": content} for role, content in plain]


@dataclass(kw_only=True, slots=True)
class Conversation:
    """The token view of one conversation. `prompt` then `record`, turn by turn."""

    renderer: ChatRenderer
    ids: Prefix[int] = field(default_factory=lambda: Prefix[int]([]))
    """Everything sent and sampled so far in the current segment: each turn a view of one row, so that a turn
    costs what is new in it."""
    segment_reason: SegmentReason = SegmentReason.FIRST
    num_segments: int = 0
    _messages: list[Message] = field(default_factory=list[Message])
    _tools: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """Offered with the last prompt."""
    _answers: tuple[Message, ...] = ()
    """The messages in which the recorded answer may be said again; none while it is awaited."""
    _completion_ids: list[int] = field(default_factory=list[int])
    _trial: "Conversation | None" = None
    """This conversation after the prompt that was measured last."""

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        """The length of what `prompt` would give, which takes over the work that is done here."""
        trial = copy.copy(self)
        trial.prompt(messages, tools)
        self._trial = trial
        return len(trial.ids)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """[P] ids to send for `messages`: the ids so far plus what is new, or a fresh rendering where that is
        impossible.

        Asked again without an answer in between, as after a failed request, the prompt is the same.
        """
        tool_list = self._tools if tools is self._tools else list(tools)
        trial, self._trial = self._trial, None
        if trial is not None and tool_list == trial._tools and list(messages) == trial._messages:
            for name in self.__dataclass_fields__:
                setattr(self, name, getattr(trial, name))
            return cast("list[int]", self.ids)
        same_tools = tool_list == self._tools
        if self.num_segments and not self._answers and same_tools and list(messages) == self._messages:
            return cast("list[int]", self.ids)
        new = self._new_messages(messages)
        if new is not None and same_tools and self._appends(new, tool_list):
            answer = messages[len(self._messages)]
            new_ids = self.renderer.continuation(self._completion_ids, new, tool_list, answer=answer)
            self.ids = self.ids.followed_by(new_ids)
        else:
            if self.num_segments:
                self.segment_reason = (
                    SegmentReason.HISTORY_REWRITTEN
                    if new is None
                    else SegmentReason.TEMPLATE_NOT_INCREMENTAL
                    if same_tools
                    else SegmentReason.TOOLS_CHANGED
                )
            self.num_segments += 1
            self.ids = Prefix(self.renderer.render(messages, tool_list))
        self._messages = list(messages)
        self._tools = tool_list
        self._answers = ()
        return cast("list[int]", self.ids)

    def record(self, completion_ids: Sequence[int], *answers: str | Message) -> None:
        """Append what the model answered to the last prompt.

        `answers`: how the agent may say it again, as the text that it sees or as an assistant message.
        """
        self.ids = self.ids.followed_by(completion_ids)
        self._trial = None
        self._completion_ids = list(completion_ids)
        self._answers = tuple(_answer(each) if isinstance(each, str) else each for each in answers)

    def _appends(self, new: Sequence[Message], tools: Tools) -> bool:
        return self.renderer.appends(new, tools) if tools else self.renderer.incremental

    def _new_messages(self, messages: Sequence[Message]) -> list[Message] | None:
        """The messages after the recorded answer, or None when `messages` do not go on from it word for
        word."""
        # The answer and at least one message behind it.
        if not self._answers or len(messages) < len(self._messages) + 2:
            return None
        if list(messages[: len(self._messages)]) != self._messages:
            return None
        if messages[len(self._messages)] not in self._answers:
            return None
        return list(messages[len(self._messages) + 1 :])
