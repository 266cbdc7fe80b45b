"""Calls that model families write as JSON: readers from the text behind an opening tag to calls.

    Hermes, Qwen2.5, Qwen3   <tool_call>{"name": …, "arguments": {…}}</tool_call>
    Mistral                  [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
    Llama 3.1                {"name": …, "parameters": {…}}

A reader uses its text as soon as it can and waits for a name at most. When no call comes of what it used, it
gives all of it back.
"""

import json
import re
from enum import StrEnum

from rllm.rendering.answers import CallReader, CallSink, ReadVerdict

MAX_NAME = 256
"""Characters of a tool's or parameter's name, quotes and escapes included. What goes on longer is no call."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SIGN_IN_STRING = re.compile(r'["\\]')
_SIGN_OUTSIDE = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[,}\]\s]")


class JsonValue:
    """Finds where a JSON value ends, across any cuts."""

    def __init__(self) -> None:
        self.has_begun = False
        self._is_scalar = False
        self._depth = 0
        self._in_string = False
        self._in_escape = False

    def end_in(self, text: str) -> int:
        """Where the value ends in `text`, which goes on from the text before; -1 when it does not."""
        if not self.has_begun:
            self.has_begun = True
            self._is_scalar = text[0] not in '{["'
        if self._is_scalar:
            after = _AFTER_SCALAR.search(text)
            return after.start() if after else -1
        place = 0
        while place < len(text):
            if self._in_escape:
                self._in_escape = False
                place += 1
                continue
            sign = (_SIGN_IN_STRING if self._in_string else _SIGN_OUTSIDE).search(text, place)
            if sign is None:
                return -1
            place = sign.end()
            self._pass(sign.group())
            if self._depth <= 0 and not self._in_string:
                return place
        return -1

    def _pass(self, sign: str) -> None:
        if sign == "\\":
            self._in_escape = True
        elif sign == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if sign in "{[" else -1


class _Expect(StrEnum):
    OPEN = "open"
    KEY = "key"
    COLON = "colon"
    NAME = "name"
    ARGUMENTS = "arguments"
    OTHER = "other"
    COMMA = "comma"


class JsonCallReader:
    """One `{"name": …, "arguments": {…}}`, its keys in any order, its argument text kept as it is written.

    `strict` is for families whose call has no tag around it: an object with other keys than a call's, or
    without an object of arguments, is an answer in JSON.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.rest = ""
        self.has_begun = False
        self._strict = strict
        self._expect = _Expect.OPEN
        self._read_so_far: list[str] = []
        """Until the call has begun: given back if none comes of it."""
        self._name = ""
        self._arguments: str | None = None
        """The arguments that came before the name; None while there was no such key."""
        self._value = JsonValue()
        self._value_of_key = _Expect.OTHER

    def read(self, sink: CallSink, *, final: bool) -> ReadVerdict:
        text_before, verdict = self.rest, None
        while verdict is None:
            # Space within a value belongs to it.
            if not self._value.has_begun:
                self.rest = self.rest.lstrip()
            verdict = self._step(sink) if self.rest else ReadVerdict.MORE
        if not self.has_begun:
            self._read_so_far.append(text_before[: len(text_before) - len(self.rest)])
            if verdict is ReadVerdict.FAILED or final:
                self.rest = "".join(self._read_so_far) + self.rest
        return verdict

    def _step(self, sink: CallSink) -> ReadVerdict | None:
        match self._expect:
            case _Expect.OPEN:
                return self._sign("{", _Expect.KEY)
            case _Expect.KEY:
                return self._key()
            case _Expect.COLON:
                return self._sign(":", self._value_of_key)
            case _Expect.NAME:
                return self._read_name(sink)
            case _Expect.ARGUMENTS | _Expect.OTHER:
                return self._read_value(sink)
            case _Expect.COMMA:
                return self._close(sink) if self.rest[0] == "}" else self._sign(",", _Expect.KEY)

    def _sign(self, sign: str, then: _Expect) -> ReadVerdict | None:
        if self.rest[0] != sign:
            return ReadVerdict.FAILED
        self.rest, self._expect = self.rest[1:], then
        return None

    def _key(self) -> ReadVerdict | None:
        key = self._string()
        if isinstance(key, ReadVerdict):
            return key
        self._expect = _Expect.COLON
        if key == "name" and not self._name:
            self._value_of_key = _Expect.NAME
        # The first of them alone: what was handed out of it cannot be taken back.
        elif key in ("arguments", "parameters") and self._arguments is None and not self.has_begun:
            self._value_of_key = _Expect.ARGUMENTS
        elif self._strict and key not in ("type", "id"):
            return ReadVerdict.FAILED
        else:
            self._value_of_key = _Expect.OTHER
        return None

    def _read_name(self, sink: CallSink) -> ReadVerdict | None:
        name = self._string()
        if isinstance(name, ReadVerdict):
            return name
        if not name or not name.isprintable():
            return ReadVerdict.FAILED
        self._name, self._expect = name, _Expect.COMMA
        if self._arguments is not None:
            self._begin(sink, self._arguments)
        return None

    def _read_value(self, sink: CallSink) -> ReadVerdict | None:
        is_arguments = self._expect is _Expect.ARGUMENTS
        if is_arguments and self._strict and not self._value.has_begun and self.rest[0] != "{":
            return ReadVerdict.FAILED
        end = self._value.end_in(self.rest)
        value = self.rest if end < 0 else self.rest[:end]
        if is_arguments:
            self._say(sink, value)
        self.rest = self.rest[len(value) :]
        if end < 0:
            return ReadVerdict.MORE
        self._value, self._expect = JsonValue(), _Expect.COMMA
        return None

    def _say(self, sink: CallSink, arguments: str) -> None:
        if self.has_begun:
            sink.more(arguments)
        elif self._name:
            self._begin(sink, arguments)
        else:
            self._arguments = (self._arguments or "") + arguments

    def _begin(self, sink: CallSink, arguments: str) -> None:
        sink.begin(self._name, arguments)
        self.has_begun = True

    def _close(self, sink: CallSink) -> ReadVerdict:
        if not self.has_begun:
            # Markup around an object with a name says that it is a call, so it is one without arguments.
            if not self._name or self._strict:
                return ReadVerdict.FAILED
            self._begin(sink, "{}")
        self.rest = self.rest[1:]
        sink.end()
        return ReadVerdict.DONE

    def _string(self) -> str | ReadVerdict:
        if self.rest[0] != '"':
            return ReadVerdict.FAILED
        match = _STRING.match(self.rest)
        # Also while it is open: text that never closes its quote is not held back for ever.
        if (match.end() if match else len(self.rest)) > MAX_NAME:
            return ReadVerdict.FAILED
        if match is None:
            return ReadVerdict.MORE
        try:
            text = json.loads(match.group(), strict=False)
        except ValueError:
            return ReadVerdict.FAILED
        self.rest = self.rest[match.end() :]
        return text


class TaggedJsonReader:
    """One JSON call and its closing tag."""

    def __init__(self, closer: str) -> None:
        self.rest = ""
        self._closer = closer
        self._call = JsonCallReader()
        self._call_done = False

    def read(self, sink: CallSink, *, final: bool) -> ReadVerdict:
        if not self._call_done:
            self._call.rest = self.rest
            verdict = self._call.read(sink, final=final)
            self.rest = self._call.rest
            if verdict is not ReadVerdict.DONE:
                return verdict
            self._call_done = True
        return close_tag(self, self._closer, sink, final=final)


class JsonListReader:
    """`[{…}, {…}]`: calls in one list."""

    def __init__(self) -> None:
        self.rest = ""
        self._call: JsonCallReader | None = None
        self._signs = ""
        """The signs since the last call: given back if no other comes."""
        self._is_open = False

    def read(self, sink: CallSink, *, final: bool) -> ReadVerdict:
        verdict = None
        while verdict is None:
            verdict = (
                self._between() if self._call is None else self._read_call(self._call, sink, final=final)
            )
        if (verdict is ReadVerdict.FAILED or final) and verdict is not ReadVerdict.DONE:
            self.rest = self._signs + self.rest
        return verdict

    def _read_call(self, call: JsonCallReader, sink: CallSink, *, final: bool) -> ReadVerdict | None:
        call.rest = self.rest
        verdict = call.read(sink, final=final)
        self.rest = call.rest
        if call.has_begun:
            self._signs = ""
        if verdict is not ReadVerdict.DONE:
            return verdict
        self._call = None
        return None

    def _between(self) -> ReadVerdict | None:
        start = self.rest.lstrip()
        if not start:
            return ReadVerdict.MORE
        closes = start[0] == "]" and self._is_open
        if not closes and start[0] != ("," if self._is_open else "["):
            return ReadVerdict.FAILED
        self._signs += self.rest[: len(self.rest) - len(start) + 1]
        self.rest = start[1:]
        if closes:
            return ReadVerdict.DONE
        self._is_open, self._call = True, JsonCallReader()
        return None


def close_tag(reader: CallReader, closer: str, sink: CallSink, *, final: bool) -> ReadVerdict:
    """The call is whole already: a closing tag that is cut off or missing changes nothing about it."""
    start = reader.rest.lstrip()
    if start.startswith(closer):
        reader.rest = start[len(closer) :]
    elif closer.startswith(start):
        if not final:
            return ReadVerdict.MORE
        reader.rest = ""
    else:
        sink.is_malformed = True
    return ReadVerdict.DONE
