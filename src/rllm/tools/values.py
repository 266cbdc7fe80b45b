"""Does a JSON value keep to a JSON schema? The first thing that is wrong, in words for the model.

    arguments, schema ──problem_of──► None | "`days` must be an integer, not the string "three""

Checked is what tool schemas say: types, choices, required and unknown keys, lists, bounds, lengths, patterns,
`anyOf`, `oneOf`, `allOf`, `not` and references into the schema itself. What else a schema says is left to the
tool.
"""

import json
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

JSON_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": Mapping,
    "null": type(None),
}
_MAX_DEPTH = 64
_MAX_SHOWN = 80
_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def problem_of(value: Any, schema: Any, *, at: str = "", root: Any = None, depth: int = 0) -> str | None:
    """The fault of `value`, None when there is none. `at` is where it stands, "" for the whole."""
    root = schema if root is None else root
    # The depth has a limit because references of a schema may lead in a circle.
    if schema is True or schema is None or depth > _MAX_DEPTH:
        return None
    if schema is False:
        return f"{_place(at)} is not allowed"
    if not isinstance(schema, Mapping):
        return None
    if "$ref" in schema:
        target = _resolve(schema["$ref"], root)
        problem = problem_of(value, target, at=at, root=root, depth=depth + 1)
        if problem:
            return problem
    checks = (_type_problem, _choice_problem, _number_problem, _text_problem)
    for check in checks:
        if problem := check(value, schema, at):
            return problem
    for check in (_object_problem, _list_problem, _combined_problem):
        if problem := check(value, schema, at, root, depth):
            return problem
    return None


def short_repr(value: Any) -> str:
    """A value in a message, short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def is_kind(value: Any, kind: str) -> bool:
    """Whether a value is of a JSON type. True and false are no numbers; 3.0 is an integer."""
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, JSON_KINDS.get(kind, object))


def _place(at: str) -> str:
    return f"`{at}`" if at else "the value"


def _type_problem(value: Any, schema: Mapping[str, Any], at: str) -> str | None:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, Sequence) or any(is_kind(value, str(kind)) for kind in kinds):
        return None
    type_names = " or ".join(_NAMES.get(str(kind), str(kind)) for kind in kinds)
    return f"{_place(at)} must be {type_names}, not {_description(value)}"


def _description(value: Any) -> str:
    kind = next((kind for kind in JSON_KINDS if is_kind(value, kind)), "")
    if kind in ("boolean", "null"):
        return short_repr(value)
    noun = _NAMES.get(kind, type(value).__name__).split(" ", 1)[-1]
    return f"the {noun} {short_repr(value)}"


def _choice_problem(value: Any, schema: Mapping[str, Any], at: str) -> str | None:
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(choices, Sequence) or any(_same(value, each) for each in choices):
        return None
    choices_text = ", ".join(short_repr(each) for each in choices)
    return f"{_place(at)} must be one of {choices_text}, not {short_repr(value)}"


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _number_problem(value: Any, schema: Mapping[str, Any], at: str) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{_place(at)} must be a finite number, not {value}"
    for word, holds, words in (
        ("minimum", lambda limit: value >= limit, "at least"),
        ("maximum", lambda limit: value <= limit, "at most"),
        ("exclusiveMinimum", lambda limit: value > limit, "above"),
        ("exclusiveMaximum", lambda limit: value < limit, "below"),
    ):
        limit = schema.get(word)
        if isinstance(limit, (int, float)) and not isinstance(limit, bool) and not holds(limit):
            return f"{_place(at)} must be {words} {limit}, not {value}"
    step = schema.get("multipleOf")
    if isinstance(step, int) and step > 0 and value % step:
        return f"{_place(at)} must be a multiple of {step}, not {value}"
    return None


def _text_problem(value: Any, schema: Mapping[str, Any], at: str) -> str | None:
    if not isinstance(value, str):
        return None
    if (problem := _count_problem(len(value), schema, "Length", "characters")) is not None:
        return f"{_place(at)} {problem}"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _matches(pattern, value):
        return f"{_place(at)} must match the pattern {pattern}, which {short_repr(value)} does not"
    return None


def _matches(pattern: str, value: str) -> bool:
    """Whether it fits, in time that grows with the text; what no automaton can do is left to the tool."""
    from rllm.contracts.patterns import is_match  # brings jsonschema_rs, which few tools need

    try:
        return is_match(pattern, value)
    except ValueError:
        return True


def _count_problem(count: int, schema: Mapping[str, Any], word: str, noun: str) -> str | None:
    least, most = schema.get(f"min{word}"), schema.get(f"max{word}")
    if isinstance(least, int) and count < least:
        return f"must have at least {least} {noun}, not {count}"
    if isinstance(most, int) and count > most:
        return f"must have at most {most} {noun}, not {count}"
    return None


def _object_problem(value: Any, schema: Mapping[str, Any], at: str, root: Any, depth: int) -> str | None:
    if not isinstance(value, Mapping):
        return None
    known_properties = schema.get("properties")
    properties: Mapping[str, Any] = known_properties if isinstance(known_properties, Mapping) else {}
    missing = [key for key in schema.get("required") or () if key not in value]
    unknown = [key for key in value if key not in properties]
    extra = schema.get("additionalProperties", True)
    if unknown and extra is False and not schema.get("patternProperties"):
        # Told before what is missing: a misspelt parameter is both, and the name that was meant says more.
        nearest = get_close_matches(unknown[0], list(properties), n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there is {_names_text(properties)}"
        return f"there is no parameter `{_key(at, unknown[0])}`; {hint}"
    if missing:
        return f"`{_key(at, missing[0])}` is missing"
    if (problem := _count_problem(len(value), schema, "Properties", "keys")) is not None:
        return f"{_place(at)} {problem}"
    for key, each in value.items():
        below = properties.get(key, extra if not schema.get("patternProperties") else True)
        if problem := problem_of(each, below, at=_key(at, key), root=root, depth=depth + 1):
            return problem
    return None


def _key(at: str, key: str) -> str:
    return f"{at}.{key}" if at else str(key)


def _names_text(properties: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}`" for key in properties) or "none"


def _list_problem(value: Any, schema: Mapping[str, Any], at: str, root: Any, depth: int) -> str | None:
    if not isinstance(value, list):
        return None
    if (problem := _count_problem(len(value), schema, "Items", "items")) is not None:
        return f"{_place(at)} {problem}"
    if schema.get("uniqueItems") is True and len({_whole(each) for each in value}) < len(value):
        return f"{_place(at)} must not hold the same item twice"
    first = schema.get("prefixItems") or ()
    for place, each in enumerate(value):
        below = first[place] if place < len(first) else schema.get("items", True)
        if problem := problem_of(each, below, at=f"{at}[{place}]", root=root, depth=depth + 1):
            return problem
    return None


def _whole(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _combined_problem(value: Any, schema: Mapping[str, Any], at: str, root: Any, depth: int) -> str | None:
    def problems(word: str) -> list[str | None]:
        return [problem_of(value, each, at=at, root=root, depth=depth + 1) for each in schema.get(word) or ()]

    for problem in problems("allOf"):
        if problem:
            return problem
    for word in ("anyOf", "oneOf"):
        each = problems(word)
        if each and None not in each:
            return f"{_place(at)} fits none of what is allowed: {'; '.join(str(one) for one in each)}"
        if word == "oneOf" and each.count(None) > 1:
            return f"{_place(at)} fits {each.count(None)} of the forms of which it must fit one"
    if "not" in schema and problem_of(value, schema["not"], at=at, root=root, depth=depth + 1) is None:
        return f"{_place(at)} has a value that is not allowed: {short_repr(value)}"
    return None


def _resolve(reference: Any, root: Any) -> Any:
    """The part of the schema that `#/…` points to; other references are not ours to check."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    target = root
    for part in reference[1:].strip("/").split("/") if reference != "#" else ():
        # In this order (RFC 6901): the other way round, `~01` would become a slash and not `~1`.
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or part not in target:
            return True
        target = target[part]
    return target
