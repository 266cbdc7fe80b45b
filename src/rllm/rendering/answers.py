"""A model's answer, taken apart while it is written: reasoning, text and tool calls.

    text, as it comes ──► AnswerReader ──► reasoning | text | call (name first, then argument text)
                              │ after an opening tag
                              └──► CallReader of the model family (rllm.rendering.calls, .tag_calls)

Nothing is emitted that might still become a markup tag, and nothing that was emitted is taken back: so the
pieces of a streamed answer, put together, are the parsed answer, however the text was cut.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rllm.types.messages import Message

OPEN_THINK = "<think>"
CLOSE_THINK = "</think>"


def without_thoughts(message: Message) -> Message:
    """An assistant's message as it is when what it thought first is forgotten; any other as it is."""
    content = message.get("content")
    if message.get("role") != "assistant":
        return message
    fields = {name: value for name, value in message.items() if name not in _THOUGHTS}
    if isinstance(content, str) and CLOSE_THINK in content:
        fields["content"] = content.rpartition(CLOSE_THINK)[2].lstrip("\n")
    return fields


_THOUGHTS = ("reasoning", "reasoning_content")
"""Fields in which servers tell a thought apart from its answer."""


@dataclass(kw_only=True, slots=True)
class ParsedCall:
    """One tool call."""

    name: str
    arguments: str
    """The text that the model wrote: JSON if the model kept to its format."""


@dataclass(kw_only=True, slots=True)
class ParsedAnswer:
    """An answer taken apart."""

    content: str
    """The text that is neither reasoning nor a call."""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list[ParsedCall])
    unparsed_markup: bool = False
    """Something looked like a tool call and was none, broke off, or has arguments that are no JSON object."""


@dataclass(kw_only=True, slots=True)
class StreamEvent:
    """The news in a streamed answer."""

    kind: str
    """`text`, `reasoning` or `call`."""
    text: str
    """For a call, the next part of its arguments."""
    index: int = 0
    """Which call of the answer."""
    name: str = ""
    """Set in the first event of a call."""


class AnswerStream(Protocol):
    """Takes an answer apart while it is written."""

    @property
    def unparsed_markup(self) -> bool: ...

    def feed(self, text: str) -> list[StreamEvent]: ...

    def finish(self) -> list[StreamEvent]:
        """The events held back, now that nothing follows."""
        ...


class ReadVerdict(StrEnum):
    """A CallReader's verdict on the text behind an opening tag."""

    MORE = "more"
    """The text so far is not enough to tell."""
    DONE = "done"
    """The markup is closed; `rest` is what follows."""
    FAILED = "failed"
    """This is no call, or no longer one; `rest` is all that no call came of."""


class CallReader(Protocol):
    """Reads the calls between an opening and a closing tag, in the form of one model family."""

    rest: str
    """Given text that has not been used."""

    def read(self, sink: "CallSink", *, final: bool) -> ReadVerdict:
        """Use as much of `rest` as can be. With `final`, nothing follows."""
        ...


class CallSink:
    """Where readers put calls; numbers them and keeps the argument text until a call ends."""

    def __init__(self) -> None:
        self.events: list[StreamEvent] = []
        self.num_calls = 0
        self.is_malformed = False
        self._arguments: list[str] | None = None

    def begin(self, name: str, arguments: str = "") -> None:
        self._arguments = [arguments]
        self.events.append(StreamEvent(kind="call", text=arguments, index=self.num_calls, name=name))
        self.num_calls += 1

    def more(self, arguments: str) -> None:
        assert self._arguments is not None, "a call begins before its arguments go on"
        if arguments:
            self._arguments.append(arguments)
            self.events.append(StreamEvent(kind="call", text=arguments, index=self.num_calls - 1))

    def end(self) -> None:
        assert self._arguments is not None, "a call begins before it ends"
        self.is_malformed = self.is_malformed or not _is_json_object("".join(self._arguments))
        self._arguments = None

    def take(self) -> list[StreamEvent]:
        events, self.events = self.events, []
        return events


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class Channel:
    """Text of one kind with the space around it trimmed as it flows.

    Space is held until something follows it: what it is worth is known only then.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.has_text = False
        self._pending = ""
        self._trim = False
        self._separator = ""

    def begin(self, *, separator: str = "") -> None:
        """Something else came in between: space on both sides of it goes."""
        self._pending = ""
        self._trim = True
        self._separator = separator if self.has_text else ""

    def say(self, text: str) -> list[StreamEvent]:
        text = self._pending + text
        if self._trim:
            text = text.lstrip()
        solid = text.rstrip()
        self._pending = text[len(solid) :]
        if not solid:
            return []
        solid = self._separator + solid
        self._trim, self._separator, self.has_text = False, "", True
        return [StreamEvent(kind=self.kind, text=solid)]

    def flush(self) -> list[StreamEvent]:
        """Space at the end of an answer is part of it, unless markup stands before it."""
        pending, self._pending = self._pending, ""
        return [StreamEvent(kind=self.kind, text=pending)] if pending and not self._trim else []


class _At(StrEnum):
    START = "start"
    REASONING = "reasoning"
    BEFORE_ANSWER = "before_answer"
    TEXT = "text"
    CALL = "call"


class AnswerReader:
    """Implements AnswerStream for any family of models.

    `new_reader` makes what reads the text behind `opener`, the tag before a call; "" where an answer that
    begins with a brace is one. None looks for no calls.
    """

    def __init__(
        self, new_reader: Callable[[], CallReader] | None, opener: str, *, in_reasoning: bool
    ) -> None:
        self._new_reader = new_reader
        self._opener = opener
        self._sink = CallSink()
        self._reader: CallReader | None = None
        self._before_call = ""
        self._num_calls_before = 0
        self._text = Channel("text")
        self._reasoning = Channel("reasoning")
        self._reasoning.begin()
        self._rest = ""
        self._events: list[StreamEvent] = []
        self._at = _At.REASONING if in_reasoning else _At.START
        self._has_unparsed = False

    @property
    def unparsed_markup(self) -> bool:
        return self._has_unparsed or self._sink.is_malformed

    def feed(self, text: str) -> list[StreamEvent]:
        self._rest += text
        return self._run(final=False)

    def finish(self) -> list[StreamEvent]:
        return self._run(final=True) + self._text.flush()

    def _run(self, *, final: bool) -> list[StreamEvent]:
        steps = {
            _At.START: self._start,
            _At.REASONING: self._think,
            _At.BEFORE_ANSWER: self._before_answer,
            _At.TEXT: self._say,
            _At.CALL: self._call,
        }
        while steps[self._at](final):
            pass
        events, self._events = self._events, []
        return events

    # Each step uses what it can of the text, and says whether another step can go on.

    def _start(self, final: bool) -> bool:
        start = self._rest.lstrip()
        if start.startswith(OPEN_THINK):
            self._rest = start[len(OPEN_THINK) :]
            self._at = _At.REASONING
        elif not final and OPEN_THINK.startswith(start):
            return False
        else:
            self._at = _At.BEFORE_ANSWER
        return True

    def _think(self, final: bool) -> bool:
        thought, close_tag, after = self._rest.partition(CLOSE_THINK)
        if close_tag:
            self._events += self._reasoning.say(thought)
            self._rest = after
            self._text.begin()
            self._at = _At.BEFORE_ANSWER
            return True
        num_pending = 0 if final else longest_overlap(self._rest, CLOSE_THINK)
        self._events += self._reasoning.say(self._rest[: len(self._rest) - num_pending])
        self._rest = self._rest[len(self._rest) - num_pending :]
        return False

    def _before_answer(self, final: bool) -> bool:
        """Where a whole answer may be a call, or the next call follows."""
        if self._new_reader is None or self._opener:
            self._at = _At.TEXT
            return True
        # Llama writes `; ` between two calls.
        start = self._rest.lstrip(" \t\r\n;" if self._sink.num_calls else None)
        if not start and not final:
            return False
        if start.startswith("{"):
            self._begin_call(self._rest[: len(self._rest) - len(start)], start)
        else:
            self._rest = self._rest if start or not self._sink.num_calls else ""
            self._at = _At.TEXT
        return True

    def _say(self, final: bool) -> bool:
        opener = self._opener
        if opener:
            content, call_opener, after = self._rest.partition(opener)
            if call_opener:
                self._events += self._text.say(content)
                self._begin_call(opener, after)
                return True
        num_pending = longest_overlap(self._rest, opener) if opener and not final else 0
        self._events += self._text.say(self._rest[: len(self._rest) - num_pending])
        self._rest = self._rest[len(self._rest) - num_pending :]
        return False

    def _begin_call(self, before: str, after: str) -> None:
        assert self._new_reader is not None, "calls are looked for"
        self._reader = self._new_reader()
        self._before_call = before
        self._num_calls_before = self._sink.num_calls
        self._rest = after
        self._at = _At.CALL

    def _call(self, final: bool) -> bool:
        reader = self._reader
        assert reader is not None, "a reader is there while a call is read"
        reader.rest, self._rest = reader.rest + self._rest, ""
        verdict = reader.read(self._sink, final=final)
        self._events += self._sink.take()
        if verdict is ReadVerdict.MORE and not final:
            return False
        has_call = self._sink.num_calls > self._num_calls_before
        self._has_unparsed = self._has_unparsed or verdict is not ReadVerdict.DONE or not has_call
        if has_call:
            self._text.begin(separator="\n")
            if verdict is ReadVerdict.MORE:
                reader.rest = ""  # a tag of the call that was cut off is no text
        else:  # what looked like a call is text
            self._events += self._text.say(self._before_call)
        self._rest, self._reader = reader.rest, None
        another = has_call and verdict is ReadVerdict.DONE
        self._at = _At.BEFORE_ANSWER if another else _At.TEXT
        return True


def longest_overlap(text: str, tag: str) -> int:
    """The number of characters at the end of `text` that are a beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def gather(events: Iterable[StreamEvent], *, unparsed_markup: bool) -> ParsedAnswer:
    """The answer that the events of its stream amount to."""
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        if event.kind != "call":
            texts[event.kind].append(event.text)
            continue
        if event.name:
            names.append(event.name)
            arguments.append([])
        arguments[event.index].append(event.text)
    return ParsedAnswer(
        content="".join(texts["text"]),
        reasoning="".join(texts["reasoning"]),
        calls=_calls(names, arguments),
        unparsed_markup=unparsed_markup,
    )


def _calls(names: Sequence[str], arguments: Sequence[Sequence[str]]) -> list[ParsedCall]:
    return [
        ParsedCall(name=name, arguments="".join(parts)) for name, parts in zip(names, arguments, strict=True)
    ]
