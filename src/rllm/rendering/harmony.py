"""Answers of gpt-oss (the harmony form), in which every message says its channel and whom it is for.

    <|channel|>analysis<|message|>…<|end|>                                       reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>                     text

A template may say whom a call is for behind the role or behind the channel: both are read. Commentary that is
for nobody is text, as is a channel that there is not.
"""

import re
from enum import StrEnum

from rllm.rendering.answers import CallSink, Channel, StreamEvent, longest_overlap
from rllm.rendering.calls import MAX_NAME

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY_MARKUP = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

MAX_HEADER = 512
"""Characters before `<|message|>`. What goes on longer is no header."""

_BODY_ENDS = (START, CHANNEL, END, CALL, RETURN)
_BODY_END = re.compile("|".join(map(re.escape, _BODY_ENDS)))
_HEADER_END = re.compile("|".join(map(re.escape, (MESSAGE, START, END, CALL, RETURN))))
_LONGEST_TAG = max(map(len, HARMONY_MARKUP))
_BEGINNINGS = (START, CHANNEL, MESSAGE, "to=functions.")
"""The beginnings of a header. A prompt ends with `<|start|>assistant`, so an answer may go on with whom it is
for."""
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]*)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_NOBODY = ("", "assistant", "user", "all")


class _In(StrEnum):
    BETWEEN = "between"
    HEADER = "header"
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class HarmonyReader:
    """Implements AnswerStream. Without `calls`, what would be one is text."""

    def __init__(self, *, calls: bool = True) -> None:
        self._with_calls = calls
        self._sink = CallSink()
        self._text = Channel("text")
        self._reasoning = Channel("reasoning")
        self._reasoning.begin()
        self._rest = ""
        self._in = _In.BETWEEN
        self._call_has_begun = False
        self._events: list[StreamEvent] = []
        self._has_unparsed = False

    @property
    def unparsed_markup(self) -> bool:
        return self._has_unparsed or self._sink.is_malformed

    def feed(self, text: str) -> list[StreamEvent]:
        self._rest += text
        return self._run(final=False)

    def finish(self) -> list[StreamEvent]:
        events = self._run(final=True)
        if self._in is _In.CALL:
            self._sink.end()  # its end mark is the answer's end token
        return events + self._text.flush()

    def _run(self, *, final: bool) -> list[StreamEvent]:
        steps = {_In.BETWEEN: self._between, _In.HEADER: self._header}
        while steps.get(self._in, self._body)(final):
            pass
        events, self._events = self._events, []
        return events

    # Each step uses what it can of the text, and says whether another step can go on.

    def _between(self, final: bool) -> bool:
        """Before a message. Text without a header is what the model says."""
        start = self._rest.lstrip()
        if start.startswith(_BEGINNINGS):
            self._in = _In.HEADER
        elif not final and any(each.startswith(start) for each in (*_BEGINNINGS, END, CALL, RETURN)):
            return False
        elif start.startswith((END, CALL, RETURN)):  # of a message that is over
            self._rest = start[start.index("|>") + 2 :]
        else:
            self._in = _In.TEXT
        return bool(self._rest)

    def _header(self, final: bool) -> bool:
        start = self._rest.lstrip()
        # The mark that begins the header is also one that ends others.
        end = _HEADER_END.search(start, 1 if start.startswith(START) else 0)
        if end is None and not final and len(start) < MAX_HEADER + _LONGEST_TAG:
            return False
        if end is None or end.group() != MESSAGE or end.start() > MAX_HEADER:
            return self._no_header()
        header = start[: end.start()]
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL_NAME.search(header)
        if recipient and recipient.group(1) not in _NOBODY:
            if not self._with_calls or len(recipient.group(1)) > MAX_NAME:
                return self._no_header()
            self._sink.begin(recipient.group(1))
            self._events += self._sink.take()
            self._in, self._call_has_begun = _In.CALL, False
        else:
            self._in = _In.REASONING if channel and channel.group(1) == "analysis" else _In.TEXT
        self._rest = start[end.end() :]
        return True

    def _no_header(self) -> bool:
        """Emit the beginning of what was no header after all as text, tag by tag."""
        self._has_unparsed = self._with_calls
        start = self._rest.lstrip()
        length = (
            len(self._rest) - len(start) + len(next(each for each in _BEGINNINGS if start.startswith(each)))
        )
        self._events += self._text.say(self._rest[:length])
        self._rest, self._in = self._rest[length:], _In.TEXT
        return True

    def _body(self, final: bool) -> bool:
        end = _BODY_END.search(self._rest)
        if end is None:
            num_pending = 0 if final else max(longest_overlap(self._rest, each) for each in _BODY_ENDS)
            self._say(self._rest[: len(self._rest) - num_pending])
            self._rest = self._rest[len(self._rest) - num_pending :]
            return False
        self._say(self._rest[: end.start()])
        # A mark that begins the next message is left for it.
        self._rest = self._rest[end.start() if end.group() in (START, CHANNEL) else end.end() :]
        if self._in is _In.CALL:
            self._sink.end()
        self._text.begin(separator="\n")
        self._reasoning.begin(separator="\n")
        self._in = _In.BETWEEN
        return True

    def _say(self, text: str) -> None:
        match self._in:
            case _In.REASONING:
                self._events += self._reasoning.say(text)
            case _In.CALL:
                text = text if self._call_has_begun else text.lstrip()
                self._call_has_begun = self._call_has_begun or bool(text)
                self._sink.more(text)
                self._events += self._sink.take()
            case _:
                self._events += self._text.say(text)
