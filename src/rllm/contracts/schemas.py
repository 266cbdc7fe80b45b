"""A JSON Schema (2020-12) and what a value does against it.

schema ──Schema──► first_violation(value) ──► None, or where and why
"""

import difflib
import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.contracts.references import SchemaFault, pointer_part, require_references, subschemas
from rllm.errors import ConfigError

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_VOCABULARIES = (
    *("core", "applicator", "unevaluated", "validation"),
    *("meta-data", "format-annotation", "content"),
)
_BOUNDS = (
    *((f"min{name}", f"max{name}", True) for name in ("imum", "Length", "Items", "Properties", "Contains")),
    ("exclusiveMinimum", "maximum", False),
    ("minimum", "exclusiveMaximum", False),
    ("exclusiveMinimum", "exclusiveMaximum", False),
)
"""Keywords of the least and the most, and whether a value may be both."""
_MAX_MESSAGE = 300
_MAX_VIOLATIONS = 64
"""The nearest to the top is chosen of so many: a long list of wrong values has a million."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Where a value breaks its schema, and how."""

    path: str
    """As in `$.context.name`."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, slots=True)
class Schema:
    """A checked schema. Raises ConfigError for one that is none, or that refers to another place."""

    document: Mapping[str, Any]
    _validator: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dialect = self.document.get("$schema", DIALECT)
        if not isinstance(dialect, str) or dialect.rstrip("#") != DIALECT:
            text = f"`$schema` is {dialect!r:.100}; contracts are written in {DIALECT}."
            raise SchemaFault(text, "/$schema")
        validator = _validator_class()
        try:
            # Patterns are judged below: `format` would have Python read them.
            validator.check_schema(dict(self.document), format_checker=_no_format_checker())
        except _schema_error() as error:
            where = "".join(f".{each}" for each in error.absolute_path)
            pointer = "".join(f"/{pointer_part(each)}" for each in error.absolute_path)
            text = f"it is no JSON Schema at ${where}: {error.message[:_MAX_MESSAGE]}"
            raise SchemaFault(text, pointer) from error
        except RecursionError as error:
            raise ConfigError(
                "it is nested too deep to be checked; write parts of it under `$defs`."
            ) from error
        _require_known_keywords(self.document)
        _require_patterns(self.document)
        require_references(self.document)
        # Where a part names its dialect, jsonschema takes that one's own class for it.
        document = {name: value for name, value in self.document.items() if name != "$schema"}
        object.__setattr__(self, "_validator", validator(document))
        _require_agreement(document, self._validator)

    def __reduce__(self) -> tuple[type["Schema"], tuple[Mapping[str, Any]]]:
        """It travels to other processes as what it was made of."""
        return Schema, (self.document,)

    @property
    def properties(self) -> Mapping[str, Any]:
        return self.document.get("properties") or {}

    @property
    def required(self) -> list[str]:
        return list(self.document.get("required") or ())

    def accepts(self, name: str, value: Any) -> bool:
        """Whether the property `name` may have this value."""
        return next(self._validator.descend(value, self.properties[name]), None) is None

    def first_violation(self, value: Any) -> Violation | None:
        """The violation nearest to the top of the value. Raises nothing for any JSON value."""
        try:
            error = min(
                itertools.islice(self._validator.iter_errors(value), _MAX_VIOLATIONS),
                key=lambda each: (len(each.absolute_path), str(list(each.absolute_path))),
                default=None,
            )
        except RecursionError:
            return Violation("$", "it is nested too deep to be checked")
        except OverflowError:
            return Violation("$", "it holds a number too large to be checked")
        if error is None:
            return None
        path = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in error.absolute_path)
        return Violation(f"${path}", _short(error.message))

    def without(self, *names: str) -> dict[str, Any]:
        """The same schema without some properties: what is left for others to fill."""
        document = json.loads(json.dumps(self.document))
        document["properties"] = {name: value for name, value in self.properties.items() if name not in names}
        document["required"] = [name for name in self.required if name not in names]
        return document


def _require_known_keywords(document: Mapping[str, Any]) -> None:
    """Raises ConfigError for a keyword that checks nothing, such as one that is misspelt."""
    for pointer, schema in subschemas(document):
        for keyword in schema:
            if keyword not in _keywords() and not keyword.startswith("x-"):
                nearest = difflib.get_close_matches(keyword, _keywords(), n=1)
                hint = f"did you mean `{nearest[0]}`?" if nearest else "call a note of your own `x-…`."
                raise SchemaFault(
                    f"`{keyword:.80}` at {pointer or '/':.100} is no keyword of {DIALECT}; {hint}",
                    f"{pointer}/{pointer_part(keyword)}",
                )


def _require_agreement(document: Mapping[str, Any], validator: Any) -> None:
    """Raises ConfigError for keywords of one part that no value can fit together. `validator`: of the
    document."""
    for pointer, schema in subschemas(document):
        place = f"at {pointer or '/':.100}: nothing fits"
        for least, most, can_be_equal in _BOUNDS:
            low, high = schema.get(least), schema.get(most)
            if low is not None and high is not None and not (low < high or (can_be_equal and low == high)):
                text = f"`{least}` {low} leaves no room below `{most}` {high} {place}."
                raise SchemaFault(text, f"{pointer}/{least}")
        for keyword in ("const", "enum"):
            values = [schema[keyword]] if keyword == "const" and keyword in schema else schema.get(keyword)
            part = validator.evolve(schema=schema)
            if isinstance(values, list) and not any(_may_fit(part, value) for value in values):
                text = f"`{keyword}` holds no value that the other keywords allow {place}."
                raise SchemaFault(text, f"{pointer}/{keyword}")
        _require_allowed_names(pointer, schema)


def _may_fit(validator: Any, value: Any) -> bool:
    try:
        return validator.is_valid(value)
    except (OverflowError, RecursionError):  # no check comes to an end
        return True


def _require_allowed_names(pointer: str, schema: Mapping[str, Any]) -> None:
    """Raises ConfigError for a required property that may not be there."""
    from rllm.contracts.patterns import is_match  # brings jsonschema

    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    names = schema.get("required", ())
    if len(names) > schema.get("maxProperties", len(names)):
        text = f"`maxProperties` {schema['maxProperties']} is below the {len(names)} names of `required`"
        raise SchemaFault(f"{text} at {pointer or '/':.100}: nothing fits.", f"{pointer}/maxProperties")
    for name in names:
        is_named = name in properties or any(is_match(pattern, name) for pattern in patterns)
        if properties.get(name) is False:
            place = f"{pointer}/properties/{pointer_part(name)}"
        elif not is_named and schema.get("additionalProperties") is False:
            place = f"{pointer}/required"
        else:
            continue
        text = f"`{name:.80}` is required and allowed no value at {pointer or '/':.100}: nothing fits."
        raise SchemaFault(text, place)


@functools.cache
def _keywords() -> frozenset[str]:
    """Those of the dialect, and what some generators write that checks nothing and hides nothing."""
    from jsonschema_specifications import REGISTRY

    place = DIALECT.removesuffix("schema")
    vocabularies: list[Any] = [REGISTRY.contents(f"{place}meta/{name}") for name in _VOCABULARIES]
    names = (name for each in vocabularies for name in each["properties"])
    return frozenset((*names, "definitions", "discriminator"))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 1]}…"


@functools.cache
def _validator_class() -> Any:
    from rllm.contracts.patterns import PatternValidator  # brings jsonschema: not for who reads no contract

    return PatternValidator


def _require_patterns(document: Mapping[str, Any]) -> None:
    from rllm.contracts.patterns import require_patterns

    require_patterns(document)


def _no_format_checker() -> Any:
    from jsonschema import FormatChecker

    return FormatChecker(())


@functools.cache
def _schema_error() -> Any:
    from jsonschema.exceptions import SchemaError

    return SchemaError
