"""Calls as DeepSeek V3.2 writes them: a reader from its markup to calls with arguments in JSON.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

`string` says whether a value is text as it stands or JSON, so that it is read without the tool's schema and
as it comes.
"""

import json
import re
from enum import StrEnum

from rllm.rendering.answers import CallSink, ReadVerdict, longest_overlap
from rllm.rendering.calls import MAX_NAME

DSML = "｜DSML｜"
"""One token in the model's vocabulary; what stands around it in a tag is ordinary text."""
DSML_OPENER, DSML_CLOSER = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
INVOKE, END_INVOKE = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, END_PARAMETER = f"<{DSML}parameter", f"</{DSML}parameter>"

_NAME = ' name="'
_INVOKE_ENDS = ('">',)
_PARAMETER_ENDS = ('" string="true">', '" string="false">')
_TAG_NAME = re.compile(r'[^"<>\n]+')


class _At(StrEnum):
    BETWEEN = "between"
    PARAMETERS = "parameters"
    VALUE = "value"


class DsmlCallReader:
    """Calls up to the tag that ends them all."""

    _num_parameters: int
    """Those of the call that is being read."""

    def __init__(self) -> None:
        self.rest = ""
        self._at = _At.BETWEEN
        self._has_calls = False
        self._is_text = False
        self._json: list[str] = []
        """The JSON of the value that is being read, where it is no text."""

    def read(self, sink: CallSink, *, final: bool) -> ReadVerdict:
        verdict = None
        while verdict is None:
            match self._at:
                case _At.BETWEEN:
                    verdict = self._between(sink, final=final)
                case _At.PARAMETERS:
                    verdict = self._next_parameter(sink)
                case _At.VALUE:
                    verdict = self._read_value(sink, final=final)
        return verdict

    def _between(self, sink: CallSink, *, final: bool) -> ReadVerdict | None:
        start = self.rest.lstrip()
        if start.startswith(DSML_CLOSER):
            if not self._has_calls:
                return ReadVerdict.FAILED
            self.rest = start[len(DSML_CLOSER) :]
            return ReadVerdict.DONE
        # An answer may be cut off within the last tag: the calls before it are whole.
        if self._has_calls and final and DSML_CLOSER.startswith(start):
            self.rest = ""
            return ReadVerdict.DONE
        tag = _tag(start, INVOKE, _INVOKE_ENDS)
        if tag is None or isinstance(tag, ReadVerdict):
            return ReadVerdict.MORE if tag is None or DSML_CLOSER.startswith(start) else tag
        name, _, self.rest = tag
        sink.begin(name, "{")
        self._has_calls, self._num_parameters, self._at = True, 0, _At.PARAMETERS
        return None

    def _next_parameter(self, sink: CallSink) -> ReadVerdict | None:
        start = self.rest.lstrip()
        if start.startswith(END_INVOKE):
            self.rest = start[len(END_INVOKE) :]
            sink.more("}")
            sink.end()
            self._at = _At.BETWEEN
            return None
        tag = _tag(start, PARAMETER, _PARAMETER_ENDS)
        if tag is None or isinstance(tag, ReadVerdict):
            return ReadVerdict.MORE if tag is None or END_INVOKE.startswith(start) else tag
        key, end, self.rest = tag
        self._is_text = end == _PARAMETER_ENDS[0]
        comma = ", " if self._num_parameters else ""
        quote = '"' if self._is_text else ""
        sink.more(f"{comma}{json.dumps(key, ensure_ascii=False)}: {quote}")
        self._num_parameters += 1
        self._at = _At.VALUE
        return None

    def _read_value(self, sink: CallSink, *, final: bool) -> ReadVerdict | None:
        value, end_tag, after = self.rest.partition(END_PARAMETER)
        if not end_tag:
            num_pending = 0 if final else longest_overlap(self.rest, END_PARAMETER)
            self._say(sink, self.rest[: len(self.rest) - num_pending])
            self.rest = self.rest[len(self.rest) - num_pending :]
            return ReadVerdict.MORE
        self._say(sink, value)
        if self._is_text:
            sink.more('"')
        elif not _is_json("".join(self._json)):
            sink.is_malformed = True
        self._json, self.rest, self._at = [], after, _At.PARAMETERS
        return None

    def _say(self, sink: CallSink, value: str) -> None:
        if self._is_text:
            # Characters are escaped one by one, so a value may be escaped in pieces.
            sink.more(json.dumps(value, ensure_ascii=False)[1:-1])
        else:
            self._json.append(value)
            sink.more(value)


def _tag(text: str, head: str, ends: tuple[str, ...]) -> tuple[str, str, str] | ReadVerdict | None:
    """The name in a tag, what ends the tag, and what follows; None while it may become one, else FAILED."""
    head += _NAME
    if not text.startswith(head):
        return None if head.startswith(text) else ReadVerdict.FAILED
    name_match = _TAG_NAME.match(text, len(head))
    if name_match is None:
        return None if len(text) == len(head) else ReadVerdict.FAILED
    name, after = name_match.group(), text[name_match.end() :]
    if len(name) > MAX_NAME or not name.isprintable():
        return ReadVerdict.FAILED
    for end in ends:
        if after.startswith(end):
            return name, end, after[len(end) :]
    return None if any(end.startswith(after) for end in ends) else ReadVerdict.FAILED


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
