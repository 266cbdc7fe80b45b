"""A JSON Schema (2020-12) and what a value does against it.

schema ──Schema──► first_violation(value) ──► None, or where and why
"""

import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.contracts.references import require_references
from rllm.errors import ConfigError, MissingExtraError

DIALECT = "https://json-schema.org/draft/2020-12/schema"
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
        if (dialect := self.document.get("$schema", DIALECT)).rstrip("#") != DIALECT:
            raise ConfigError(f"`$schema` is {dialect!r}; contracts are written in {DIALECT}.")
        validator = _validator_class()
        try:
            validator.check_schema(dict(self.document))
        except _schema_error() as error:
            where = "".join(f".{each}" for each in error.absolute_path)
            raise ConfigError(f"it is no JSON Schema at ${where}: {error.message[:_MAX_MESSAGE]}") from error
        except RecursionError as error:
            raise ConfigError(
                "it is nested too deep to be checked; write parts of it under `$defs`."
            ) from error
        require_references(self.document)
        object.__setattr__(self, "_validator", validator(dict(self.document)))

    @property
    def properties(self) -> Mapping[str, Any]:
        return self.document.get("properties") or {}

    @property
    def required(self) -> list[str]:
        return list(self.document.get("required") or ())

    @property
    def is_closed(self) -> bool:
        """No property beside the named ones is allowed."""
        return self.document.get("additionalProperties") is False

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


def _short(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 1]}…"


@functools.cache
def _validator_class() -> Any:
    try:
        from jsonschema import Draft202012Validator
    except ModuleNotFoundError as error:
        raise MissingExtraError("jsonschema", "worker") from error
    return Draft202012Validator


@functools.cache
def _schema_error() -> Any:
    from jsonschema.exceptions import SchemaError

    return SchemaError
