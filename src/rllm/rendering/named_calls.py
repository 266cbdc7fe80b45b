"""Calls whose name stands before their JSON: readers from the text behind an opening tag to calls.

    Mistral from 2025   [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]name[ARGS]{…}
    DeepSeek V3.1       <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…
    DeepSeek V3, R1     the same with `function`, the separator, the name and a fence of JSON in between

As everywhere, nothing is used before it is clear that a call begins, and what is none is given back.
"""

import re
from enum import StrEnum

from rllm.rendering.answers import CallSink, ReadVerdict
from rllm.rendering.calls import MAX_NAME, JsonValue

ARGUMENTS_TAG = "[ARGS]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"

MAX_HEAD = 2 * MAX_NAME
"""Characters between an opening tag and the JSON behind it."""

_NAME = r"[\w.\-]+"
_MISTRAL = re.compile(rf"\s*({_NAME})\s*(?:\[CALL_ID\]\w*\s*)?\[ARGS\]\s*(?=\{{)")
# Beginnings of what `_MISTRAL` matches: such a text is not given back yet.
_MISTRAL_BEGINNING = re.compile(r"\s*[\w.\-]*\s*(\[[A-Z_\]]{0,8}\w*\s*(\[[A-Z\]]{0,5}\s*)?)?")
_DIRECT = re.compile(rf"\s*({_NAME})\s*{re.escape(SEPARATOR)}\s*(?=\{{)")
_FENCED = re.compile(rf"\s*{_NAME}\s*{re.escape(SEPARATOR)}\s*({_NAME})\s*```(?:json)?\s*(?=\{{)")
_WORD = re.compile(r"\s*[\w.\-]*\s*")
# Beginnings of what `_FENCED` has behind the separator.
_AFTER_SEPARATOR = re.compile(r"\s*(?:[\w.\-]+\s*(?:`{1,2}|```(?:j|js|jso|json)?\s*)?)?")


class NamedCallReader:
    """`name[ARGS]{…}`: one call. The next has an opening tag of its own."""

    def __init__(self) -> None:
        self.rest = ""
        self._value: JsonValue | None = None

    def read(self, sink: CallSink, *, final: bool) -> ReadVerdict:
        if self._value is None:
            match = _MISTRAL.match(self.rest)
            if match is None:
                could_go_on = len(self.rest) <= MAX_HEAD and _MISTRAL_BEGINNING.fullmatch(self.rest)
                return ReadVerdict.MORE if could_go_on else ReadVerdict.FAILED
            if match.end() > MAX_HEAD:
                return ReadVerdict.FAILED
            self.rest, self._value = self.rest[match.end() :], JsonValue()
            sink.begin(match.group(1))
        return _read_value(self, self._value, sink) or ReadVerdict.DONE


class _At(StrEnum):
    BETWEEN = "between"
    HEAD = "head"
    VALUE = "value"
    TAIL = "tail"


class SeparatedCallReader:
    """Calls in begin and end marks, up to the mark that ends them all; with a fence in V3 and R1."""

    def __init__(self, *, has_fence: bool) -> None:
        self.rest = ""
        self._head_of_call = _FENCED if has_fence else _DIRECT
        self._has_fence = has_fence
        self._at = _At.BETWEEN
        self._read_so_far = ""
        """The signs since the last call: given back if no other comes."""
        self._value = JsonValue()
        self._in_fence = has_fence

    def read(self, sink: CallSink, *, final: bool) -> ReadVerdict:
        verdict = None
        while verdict is None:
            match self._at:
                case _At.BETWEEN:
                    verdict = self._between()
                case _At.HEAD:
                    verdict = self._head(sink)
                case _At.VALUE:
                    verdict = _read_value(self, self._value, sink)
                    self._at = _At.TAIL if verdict is None else _At.VALUE
                case _At.TAIL:
                    verdict = self._tail(sink)
        if verdict is ReadVerdict.FAILED or (
            final and verdict is ReadVerdict.MORE and self._at is not _At.VALUE
        ):
            self.rest, self._read_so_far = self._read_so_far + self.rest, ""
        # An answer may be cut off within its last mark: the calls before it are whole.
        if final and verdict is ReadVerdict.MORE and sink.num_calls and self._is_a_mark_cut_off():
            self.rest = ""
            return ReadVerdict.DONE
        return verdict

    def _between(self) -> ReadVerdict | None:
        start = self.rest.lstrip()
        if start.startswith(CALLS_END):
            self.rest = start[len(CALLS_END) :]
            return ReadVerdict.DONE
        if not start.startswith(CALL_BEGIN):
            could_go_on = CALL_BEGIN.startswith(start) or CALLS_END.startswith(start)
            return ReadVerdict.MORE if could_go_on else ReadVerdict.FAILED
        end = len(self.rest) - len(start) + len(CALL_BEGIN)
        self._read_so_far, self.rest, self._at = self.rest[:end], self.rest[end:], _At.HEAD
        return None

    def _head(self, sink: CallSink) -> ReadVerdict | None:
        match = self._head_of_call.match(self.rest)
        if match is None:
            return ReadVerdict.MORE if _may_be_a_head(self.rest, self._has_fence) else ReadVerdict.FAILED
        if match.end() > MAX_HEAD:
            return ReadVerdict.FAILED
        self._in_fence = self._has_fence
        self._read_so_far, self.rest = "", self.rest[match.end() :]
        self._value, self._at = JsonValue(), _At.VALUE
        sink.begin(match.group(1))
        return None

    def _tail(self, sink: CallSink) -> ReadVerdict | None:
        """Read the end of a call. Whole or not, the call is there already."""
        start = self.rest.lstrip()
        if self._in_fence and start.startswith(FENCE):
            start, self._in_fence = start[len(FENCE) :].lstrip(), False
            self.rest = start
        closing = FENCE if self._in_fence else CALL_END
        if closing.startswith(start) and start != closing:
            return ReadVerdict.MORE
        if start.startswith(closing):
            self.rest = start[len(closing) :]
        else:
            sink.is_malformed = True
        self._at = _At.BETWEEN
        return None

    def _is_a_mark_cut_off(self) -> bool:
        """Whether nothing but the beginning of a closing mark is left over."""
        start = self.rest.strip()
        if self._at is _At.TAIL:
            return FENCE.startswith(start) or CALL_END.startswith(start)
        return self._at is _At.BETWEEN and CALLS_END.startswith(start)


def _may_be_a_head(text: str, in_fence: bool) -> bool:
    """Whether what DeepSeek's forms have before a call's JSON may begin like this."""
    if len(text) > MAX_HEAD:
        return False
    _, mark, after = text.partition(SEPARATOR)
    if mark:
        return _AFTER_SEPARATOR.fullmatch(after) is not None if in_fence else not after.strip()
    word = _WORD.match(text)
    return word is not None and SEPARATOR.startswith(text[word.end() :])


def _read_value(
    reader: NamedCallReader | SeparatedCallReader, value: JsonValue, sink: CallSink
) -> ReadVerdict | None:
    """The JSON of a call's arguments. None once it is whole."""
    if not reader.rest:
        return ReadVerdict.MORE
    end = value.end_in(reader.rest)
    text = reader.rest if end < 0 else reader.rest[:end]
    sink.more(text)
    reader.rest = reader.rest[len(text) :]
    if end < 0:
        return ReadVerdict.MORE
    sink.end()
    return None
