"""The parts of a JSON Schema and the references between them.

schema ──subschemas──► every part with its JSON pointer
       ──require_references──► each reference leads to a part of the same schema, and none to itself
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rllm.errors import ConfigError

DATA_KEYWORDS = ("const", "enum", "default", "examples")
"""Their values are values: what looks like a reference in them is none."""
NAMING_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Their keys are names that the author chose."""
_REFERENCES = ("$ref", "$dynamicRef")
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""Parts that judge the value itself and not one within it."""


class SchemaFault(ConfigError):
    """A part of a schema that cannot stand. `pointer` leads to it from the whole schema."""

    def __init__(self, message: str, pointer: str) -> None:
        super().__init__(message)
        self.pointer = pointer


def subschemas(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schema and all within it, each with its JSON pointer."""
    waiting: list[tuple[str, Any, bool]] = [("", document, False)]
    while waiting:  # no recursion: there is no depth at which it ends
        pointer, value, is_by_name = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{pointer}/{number}", each, False) for number, each in enumerate(value)]
        elif isinstance(value, Mapping):
            if not is_by_name:
                yield pointer, value
            for name, each in value.items():
                place = f"{pointer}/{pointer_part(name)}"
                if is_by_name or name not in DATA_KEYWORDS:
                    waiting.append((place, each, not is_by_name and name in NAMING_KEYWORDS))


def pointer_part(name: object) -> str:
    """A key or an index as JSON pointers have it (RFC 6901)."""
    return str(name).replace("~", "~0").replace("/", "~1")


def require_references(document: Mapping[str, Any]) -> None:
    """Raises ConfigError for a reference to elsewhere, which would be fetched, to nothing, or in a circle."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    root = dict(document)
    resolver = Registry[Any]().resolver_with_root(DRAFT202012.create_resource(root))
    same_value: dict[int, list[Any]] = {}
    """By the identity of a part: those that judge the same value."""
    for pointer, schema in subschemas(root):
        if pointer and (name := next((each for each in ("$id", "$schema") if each in schema), "")):
            raise SchemaFault(
                f"`{name}` stands at {pointer:.100}; only the whole schema may have one.", f"{pointer}/{name}"
            )
        parts = same_value[id(schema)] = _parts_of_same_value(schema)
        for keyword in _REFERENCES:
            target = schema.get(keyword)
            if not isinstance(target, str):
                continue
            if not target.startswith("#"):
                raise SchemaFault(
                    f"`{keyword}` is {target!r}; a contract refers to itself alone (`#/$defs/…`).",
                    f"{pointer}/{keyword}",
                )
            try:
                parts.append(resolver.lookup(target).contents)
            except Unresolvable as error:
                text = f"`{keyword}` is {target!r:.100}, which leads to nothing in it."
                raise SchemaFault(text, f"{pointer}/{keyword}") from error
    _require_ends(same_value)


def _parts_of_same_value(schema: Mapping[str, Any]) -> list[Any]:
    parts: list[Any] = list((schema.get("dependentSchemas") or {}).values())
    for keyword in _SAME_VALUE:
        value = schema.get(keyword)
        parts += value if isinstance(value, list) else [] if value is None else [value]
    return parts


def _require_ends(same_value: Mapping[int, list[Any]]) -> None:
    """Raises ConfigError where a check would come back to itself with the same value."""
    is_checked: dict[int, bool] = {}
    """False while its parts are on the way."""
    for start in same_value:
        waiting = [(start, False)]
        while waiting:
            part, is_over = waiting.pop()
            if is_over:
                is_checked[part] = True
                continue
            if part in is_checked:
                if not is_checked[part]:
                    raise ConfigError(
                        "it refers to itself without end; let a reference go through a property or an item."
                    )
                continue
            is_checked[part] = False
            waiting.append((part, True))
            waiting += [(id(each), False) for each in same_value.get(part, ())]
