"""Calls that model families write as tags: a reader from text to calls with arguments in JSON.

    Qwen3-Coder   <tool_call><function=name><parameter=x>value</parameter></function></tool_call>

A parameter becomes a member of the arguments once its closing tag is there: only then its type is known.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.rendering.answers import CallSink, Verdict, longest_overlap
from rllm.rendering.calls import MAX_NAME, close_tag

_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>")
_END_PARAMETER = "</parameter>"
_END_FUNCTION = "</function>"


class TagCallReader:
    """One `<function=…>` with its parameters; they become JSON, one parameter at a time.

    Values are text in this form. `parameters`, the schemas of each tool's parameters by tool name, say what a
    value is; without them a value that reads as JSON is that, and any other is a string.
    """

    def __init__(self, closer: str, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self.rest = ""
        self._closer = closer
        self._parameters_of = parameters
        self._schemas: Mapping[str, Any] | None = None
        self._begun = False
        self._ended = False
        self._key: str | None = None
        self._num_parameters = 0
        self._value: list[str] = []

    def read(self, sink: CallSink, *, final: bool) -> Verdict:
        while not self._ended:
            if not self._begun:
                verdict = self._begin(sink)
            elif self._key is None:
                verdict = self._next_parameter(sink)
            else:
                verdict = self._read_value(sink, final=final)
            if verdict is not None:
                return verdict
        return close_tag(self, self._closer, sink, final=final)

    def _begin(self, sink: CallSink) -> Verdict | None:
        found = _FUNCTION.match(self.rest)
        if found is None:
            return self._unfinished("<function=")
        name = found.group(1).strip()
        if not name or not name.isprintable() or len(found.group().lstrip()) > MAX_NAME:
            return Verdict.FAILED
        self._begun, self._schemas = True, self._parameters_of.get(name)
        self.rest = self.rest[found.end() :]
        sink.begin(name, "{")
        return None

    def _next_parameter(self, sink: CallSink) -> Verdict | None:
        begun = self.rest.lstrip()
        if begun.startswith(_END_FUNCTION):
            self.rest = begun[len(_END_FUNCTION) :]
            sink.more("}")
            sink.end()
            self._ended = True
            return None
        if _END_FUNCTION.startswith(begun):
            return Verdict.MORE
        found = _PARAMETER.match(self.rest)
        if found is None:
            return self._unfinished("<parameter=")
        if len(found.group().lstrip()) > MAX_NAME:
            return Verdict.FAILED
        self._key = found.group(1).strip()
        self.rest = self.rest[found.end() :]
        return None

    def _read_value(self, sink: CallSink, *, final: bool) -> Verdict | None:
        value, found, after = self.rest.partition(_END_PARAMETER)
        if not found:
            kept = 0 if final else longest_overlap(self.rest, _END_PARAMETER)
            self._value.append(self.rest[: len(self.rest) - kept])
            self.rest = self.rest[len(self.rest) - kept :]
            if final:  # cut off: so is the JSON
                sink.more(self._named(json.dumps("".join(self._value), ensure_ascii=False)[:-1]))
            return Verdict.MORE
        self._value.append(value)
        text = "".join(self._value).removeprefix("\n").removesuffix("\n")
        schema = None if self._schemas is None else self._schemas.get(self._key or "")
        sink.more(self._named(json.dumps(_typed(text, schema), ensure_ascii=False)))
        self._num_parameters += 1
        self._key, self._value, self.rest = None, [], after
        return None

    def _named(self, value: str) -> str:
        comma = ", " if self._num_parameters else ""
        return f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {value}"

    def _unfinished(self, tag: str) -> Verdict:
        begun = self.rest.lstrip()
        is_beginning = tag.startswith(begun) or begun.startswith(tag)
        could_go_on = len(begun) <= MAX_NAME and not set(begun[len(tag) :]) & set("<>\n")
        return Verdict.MORE if is_beginning and could_go_on else Verdict.FAILED


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


def _typed(text: str, schema: Any) -> Any:
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
            known = [kinds for kinds in each if kinds is not None]
            return set[str]().union(*known) if len(known) == len(each) else None
    return None
