"""Calls that model families write as tags: readers from text to calls with arguments in JSON.

    Qwen3-Coder   <tool_call><function=name><parameter=x>value</parameter></function></tool_call>
    GLM-4.5       <tool_call>name<arg_key>x</arg_key><arg_value>value</arg_value></tool_call>

A parameter becomes a member of the arguments once its closing tag is there: only then its type is known.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rllm.rendering.answers import CallSink, ReadVerdict, longest_overlap
from rllm.rendering.calls import MAX_NAME, close_tag

_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>")
_NAMED = re.compile(r"([\w.\-]+)\s*(?=<arg_key>|</tool_call>)")
_NAME_BEGINNING = re.compile(r"[\w.\-]*\s*")
_OPEN_KEY, _CLOSE_KEY, _OPEN_VALUE = "<arg_key>", "</arg_key>", "<arg_value>"


class TagCallReader:
    """One `<function=…>` with its parameters; they become JSON, one parameter at a time.

    Values are text in this form. `parameters`, the schemas of each tool's parameters by tool name, say what a
    value is; without them a value that reads as JSON is that, and any other is a string.
    """

    end_function: ClassVar[str] = "</function>"
    end_value: ClassVar[str] = "</parameter>"
    value_has_lines: ClassVar[bool] = True
    """A line end on both sides of a value is no part of it."""

    def __init__(self, closer: str, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self.rest = ""
        self._closer = closer
        self._parameters_of = parameters
        self._schemas: Mapping[str, Any] | None = None
        self._has_begun = False
        self._has_ended = False
        self._key: str | None = None
        self._num_parameters = 0
        self._value: list[str] = []

    def read(self, sink: CallSink, *, final: bool) -> ReadVerdict:
        while not self._has_ended:
            if not self._has_begun:
                verdict = self._begin(sink)
            elif self._key is None:
                verdict = self._next_parameter(sink)
            else:
                verdict = self._read_value(sink, final=final)
            if verdict is not None:
                return verdict
        return close_tag(self, self._closer, sink, final=final)

    def _begin(self, sink: CallSink) -> ReadVerdict | None:
        match = _FUNCTION.match(self.rest)
        if match is None:
            return self._at_end("<function=")
        name = match.group(1).strip()
        if not name or not name.isprintable() or len(match.group().lstrip()) > MAX_NAME:
            return ReadVerdict.FAILED
        self._begin_call(sink, name, match.end())
        return None

    def _begin_call(self, sink: CallSink, name: str, end: int) -> None:
        self._has_begun, self._schemas = True, self._parameters_of.get(name)
        self.rest = self.rest[end:]
        sink.begin(name, "{")

    def _next_parameter(self, sink: CallSink) -> ReadVerdict | None:
        start = self.rest.lstrip()
        if start.startswith(self.end_function):
            self.rest = start[len(self.end_function) :]
            sink.more("}")
            sink.end()
            self._has_ended = True
            return None
        if self.end_function.startswith(start):
            return ReadVerdict.MORE
        return self._begin_parameter()

    def _begin_parameter(self) -> ReadVerdict | None:
        match = _PARAMETER.match(self.rest)
        if match is None:
            return self._at_end("<parameter=")
        if len(match.group().lstrip()) > MAX_NAME:
            return ReadVerdict.FAILED
        self._key = match.group(1).strip()
        self.rest = self.rest[match.end() :]
        return None

    def _read_value(self, sink: CallSink, *, final: bool) -> ReadVerdict | None:
        value, end_tag, after = self.rest.partition(self.end_value)
        if not end_tag:
            num_pending = 0 if final else longest_overlap(self.rest, self.end_value)
            self._value.append(self.rest[: len(self.rest) - num_pending])
            self.rest = self.rest[len(self.rest) - num_pending :]
            if final:  # cut off: so is the JSON
                sink.more(self._name_of(json.dumps("".join(self._value), ensure_ascii=False)[:-1]))
            return ReadVerdict.MORE
        self._value.append(value)
        text = "".join(self._value)
        if self.value_has_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        schema = None if self._schemas is None else self._schemas.get(self._key or "")
        sink.more(self._name_of(json.dumps(_as_type(text, schema), ensure_ascii=False)))
        self._num_parameters += 1
        self._key, self._value, self.rest = None, [], after
        return None

    def _name_of(self, value: str) -> str:
        comma = ", " if self._num_parameters else ""
        return f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {value}"

    def _at_end(self, tag: str) -> ReadVerdict:
        start = self.rest.lstrip()
        is_beginning = tag.startswith(start) or start.startswith(tag)
        could_go_on = len(start) <= MAX_NAME and not set(start[len(tag) :]) & set("<>\n")
        return ReadVerdict.MORE if is_beginning and could_go_on else ReadVerdict.FAILED


class ArgumentCallReader(TagCallReader):
    """One name with its `<arg_key>` and `<arg_value>` pairs, up to the closing tag."""

    end_function = "</tool_call>"
    end_value = "</arg_value>"
    value_has_lines = False

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__("", parameters)

    def _begin(self, sink: CallSink) -> ReadVerdict | None:
        """A call has begun once a tag follows its name: until then it may be any text."""
        start = self.rest.lstrip()
        match = _NAMED.match(start)
        if match is None:
            word, mark, tag = start.partition("<")
            is_beginning = not mark or any(
                each.startswith(f"<{tag}") for each in (_OPEN_KEY, self.end_function)
            )
            could_go_on = len(word) <= MAX_NAME and _NAME_BEGINNING.fullmatch(word)
            return ReadVerdict.MORE if is_beginning and could_go_on else ReadVerdict.FAILED
        if match.end() > MAX_NAME:
            return ReadVerdict.FAILED
        self._begin_call(sink, match.group(1), len(self.rest) - len(start) + match.end())
        return None

    def _begin_parameter(self) -> ReadVerdict | None:
        """All of `<arg_key>x</arg_key><arg_value>`, or nothing."""
        start = self.rest.lstrip()
        if not start.startswith(_OPEN_KEY):
            return ReadVerdict.MORE if _OPEN_KEY.startswith(start) else ReadVerdict.FAILED
        key, end_tag, after = start[len(_OPEN_KEY) :].partition(_CLOSE_KEY)
        num_pending = 0 if end_tag else longest_overlap(key, _CLOSE_KEY)
        if len(key) - num_pending > MAX_NAME or set(key[: len(key) - num_pending]) & set("<>\n"):
            return ReadVerdict.FAILED
        after = after.lstrip()
        if not end_tag or not after.startswith(_OPEN_VALUE):
            return ReadVerdict.MORE if _OPEN_VALUE.startswith(after) else ReadVerdict.FAILED
        self._key, self.rest = key.strip(), after[len(_OPEN_VALUE) :]
        return None


_CONSTANTS = {"True": True, "False": False, "None": None}
"""Templates that print values with Jinja teach models Python's names."""
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def _as_type(text: str, schema: Any) -> Any:
    """The value that a parameter's text stands for."""
    kinds = allowed_types(schema)
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if kinds is None or text.strip() not in _CONSTANTS:
            return text
        value = _CONSTANTS[text.strip()]
    if isinstance(value, str) and (kinds is None or "string" in kinds):
        return text  # quotes are part of a string in this form
    if kinds is None:
        return value
    fits = any(_is_a(value, kind) for kind in kinds)
    return value if fits or "string" not in kinds else text


def _is_a(value: Any, kind: str) -> bool:
    # In Python a truth value is an int as well.
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, ()))


def allowed_types(schema: Any) -> set[str] | None:
    """The JSON types that a schema admits; None when it does not say."""
    if not isinstance(schema, Mapping):
        return None
    if "type" in schema:
        kinds = schema["type"]
        return {kinds} if isinstance(kinds, str) else {str(kind) for kind in kinds}
    if "enum" in schema or "const" in schema:
        values: Sequence[Any] = schema.get("enum", [schema.get("const")])
        return {kind for value in values for kind in _TYPES if _is_a(value, kind)}
    for word in ("anyOf", "oneOf"):
        if word in schema:
            each = [allowed_types(option) for option in schema[word]]
            alternatives = [kinds for kinds in each if kinds is not None]
            return set[str]().union(*alternatives) if len(alternatives) == len(each) else None
    return None
