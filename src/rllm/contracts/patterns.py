"""Patterns of a JSON Schema, matched in time that grows with the text and no faster.

    pattern (ECMA 262) ──require_patterns──► an automaton, or ConfigError for what no automaton can do
    value ──PatternValidator──► jsonschema's own checks, but for the keywords that have patterns

jsonschema searches with Python's `re`, by backtracking: `^(a+)+$` would hold the whole process for hours at
40 characters. And `re` is not ECMA 262: its `$` fits before a line end, its `\\d` any script's digits.

https://json-schema.org/draft/2020-12/json-schema-core#name-regular-expressions
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from rllm.contracts.references import SchemaFault, subschemas
from rllm.errors import MissingExtraError

try:
    import jsonschema_rs
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "jsonschema", "worker") from error


def require_patterns(document: Mapping[str, Any]) -> None:
    """Raises ConfigError for a pattern that cannot be matched in such time."""
    parts = list(subschemas(document))
    for pointer, schema in parts:
        for pattern in (*([schema["pattern"]] if "pattern" in schema else ()), *_by_name(schema)):
            try:
                _automaton(pattern)
            except ValueError as error:
                raise SchemaFault(
                    f"the pattern {pattern!r:.100} at {pointer or '/':.100} is none of ECMA 262, or one "
                    "whose time has no bound; write it without lookaround and back references, and with "
                    "fewer repetitions.",
                    f"{pointer}/pattern{'Properties' * (pattern in _by_name(schema))}",
                ) from error
    # To know which names others judged, jsonschema searches with `re`.
    places = [pointer for pointer, schema in parts if "unevaluatedProperties" in schema]
    if places and any(_by_name(schema) for _, schema in parts):
        raise SchemaFault(
            f"`unevaluatedProperties` at {places[0] or '/':.100} cannot be checked in a schema with "
            "`patternProperties`; write `additionalProperties`.",
            f"{places[0]}/unevaluatedProperties",
        )


def is_match(pattern: str, text: str) -> bool:
    """Whether the pattern fits somewhere in the text."""
    try:
        return _automaton(pattern).is_valid(text)
    except UnicodeEncodeError:  # half a surrogate pair: a character that belongs to no class
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return _automaton(pattern).is_valid(text)


@functools.lru_cache(maxsize=1024)
def _automaton(pattern: str) -> jsonschema_rs.Draft202012Validator:
    """Raises ValueError."""
    return jsonschema_rs.Draft202012Validator(
        {"pattern": pattern}, pattern_options=jsonschema_rs.RegexOptions()
    )


def _by_name(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema.get("patternProperties") or {}


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not is_match(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, by_name: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if isinstance(instance, Mapping):
        for pattern, part in by_name.items():
            for name, value in instance.items():
                if is_match(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, part: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    """jsonschema's, on the properties whose names fit no pattern."""
    if isinstance(instance, Mapping) and (patterns := _by_name(schema)):
        schema = {name: value for name, value in schema.items() if name != "patternProperties"}
        instance = {
            name: value
            for name, value in instance.items()
            if not any(is_match(pattern, name) for pattern in patterns)
        }
    yield from Draft202012Validator.VALIDATORS["additionalProperties"](validator, part, instance, schema)


PatternValidator = extend(
    Draft202012Validator,
    {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    },
)
