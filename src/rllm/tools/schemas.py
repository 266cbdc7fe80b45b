"""From a typed function to a JSON schema, and from JSON arguments back to what the function takes.

    signature, docstring ──function_schema──► FunctionSchema.parameters ──► the model
    arguments of a call ──python_values──► dataclasses, enums, tuples, sets ──► the function

An annotation that JSON cannot carry is refused when the tool is made, not when it is called.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, is_typeddict

from rllm.errors import ConfigError
from rllm.tools.docstrings import read_docstring
from rllm.tools.values import problem_of

_SCALARS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_LISTS = (list, Sequence, set, frozenset, typing.Iterable, typing.Collection)
_MAPPINGS = (dict, Mapping, typing.MutableMapping)


@dataclass(kw_only=True, slots=True, frozen=True)
class FunctionSchema:
    """The description of a function for a model."""

    description: str
    parameters: dict[str, Any]
    annotations: Mapping[str, Any]
    """By parameter."""

    def python_values(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that keep to `parameters`, as the function takes them."""
        return {name: _python_value(self.annotations.get(name), value) for name, value in arguments.items()}


def function_schema(function: Callable[..., Any]) -> FunctionSchema:
    """Raises ConfigError for a parameter that has no JSON schema or cannot be given by name."""
    name = getattr(function, "__name__", type(function).__name__)
    docstring = read_docstring(inspect.getdoc(function) or "")
    hints = _hints(function, name)
    properties: dict[str, Any] = {}
    required_names: list[str] = []
    extra = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = True
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"`{parameter.name}` of the tool `{name}` is positional; a model gives arguments by name."
            )
        where = f"`{parameter.name}` of the tool `{name}`"
        schema = schema_of(hints.get(parameter.name, Any), where)
        description = docstring.parameters.get(parameter.name)
        properties[parameter.name] = ({"description": description} if description else {}) | schema
        if parameter.default is parameter.empty:
            required_names.append(parameter.name)
        elif (default := _json_default(parameter.default)) is not MISSING:
            properties[parameter.name]["default"] = default
    parameters = {"type": "object", "properties": properties, "required": required_names}
    parameters["additionalProperties"] = extra
    return FunctionSchema(description=docstring.description, parameters=parameters, annotations=hints)


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    of = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(of, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"The annotations of the tool `{name}` cannot be read: {error}") from error


def schema_of(annotation: Any, where: str) -> dict[str, Any]:
    """The JSON schema of one annotation; `where` names it in errors."""
    if annotation in (Any, object, inspect.Parameter.empty):
        return {}
    if isinstance(annotation, type) and annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    if annotation is None:
        return {"type": "null"}
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        notes = [note for note in inner[1:] if isinstance(note, str)]
        return schema_of(inner[0], where) | ({"description": notes[0]} if notes else {})
    if origin in (Required, NotRequired):
        return schema_of(inner[0], where)
    if origin is Literal:
        return _choice(list(inner), where)
    if origin in (Union, types.UnionType):
        return _any_of([schema_of(each, where) for each in inner])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _choice([member.value for member in annotation], where)
    if is_typeddict(annotation):
        return _typed_dict(annotation, where)
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass(annotation, where)
    kind = origin or annotation
    if kind is tuple:
        return _tuple(inner, where)
    if kind in _LISTS or _is_among(kind, _LISTS):
        unique = {"uniqueItems": True} if kind in (set, frozenset) else {}
        return {"type": "array"} | ({"items": schema_of(inner[0], where)} if inner else {}) | unique
    if kind in _MAPPINGS or _is_among(kind, _MAPPINGS):
        if inner and inner[0] not in (str, Any):
            raise ConfigError(f"{where} is {annotation}; keys of a JSON object are str.")
        values = schema_of(inner[1], where) if len(inner) > 1 else {}
        return {"type": "object"} | ({"additionalProperties": values} if values else {})
    raise ConfigError(
        f"{where} is annotated {annotation!r}, which has no JSON schema; use str, int, float, bool, Literal, "
        "an Enum, list, dict, a dataclass or a TypedDict."
    )


def _is_among(kind: Any, those: tuple[Any, ...]) -> bool:
    return kind in {get_origin(each) for each in those}


def _choice(values: list[Any], where: str) -> dict[str, Any]:
    kinds = sorted({_SCALARS[type(value)] for value in values if type(value) in _SCALARS})
    if any(type(value) not in _SCALARS for value in values):
        raise ConfigError(
            f"{where} may be one of {values!r}; choices are text, numbers, true, false and null."
        )
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Several plain types are one list of types, which every server and grammar understands."""
    if {} in schemas:
        return {}
    if all(set(each) == {"type"} and isinstance(each["type"], str) for each in schemas):
        return {"type": list(dict.fromkeys(each["type"] for each in schemas))}
    return {"anyOf": schemas}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _typed_dict(annotation: Any, where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(annotation, include_extras=True)
    required_keys: frozenset[str] = annotation.__required_keys__
    return _object(
        {key: schema_of(hint, f"`{key}` in {where}") for key, hint in hints.items()},
        [key for key in hints if key in required_keys],
    )


def _dataclass(annotation: type, where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(annotation, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for each in fields(annotation):
        if not each.init:
            continue
        properties[each.name] = schema_of(hints[each.name], f"`{each.name}` in {where}")
        if each.default is MISSING and each.default_factory is MISSING:
            required.append(each.name)
        elif (default := _json_default(each.default)) is not MISSING:
            properties[each.name]["default"] = default
    return _object(properties, required)


def _tuple(inner: tuple[Any, ...], where: str) -> dict[str, Any]:
    if not inner:
        return {"type": "array"}
    if len(inner) == 2 and inner[1] is Ellipsis:
        return {"type": "array", "items": schema_of(inner[0], where)}
    each = [schema_of(one, where) for one in inner]
    return {"type": "array", "prefixItems": each, "minItems": len(each), "maxItems": len(each)}


def _json_default(value: Any) -> Any:
    """The default as JSON; MISSING where the model cannot be told it."""
    if isinstance(value, Enum):
        value = value.value
    return value if isinstance(value, (str, int, float, bool, type(None), list, dict)) else MISSING


def _python_value(annotation: Any, value: Any) -> Any:
    """A JSON value as its annotation wants it; what needs no change stays as it is."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Annotated, Required, NotRequired):
        return _python_value(inner[0], value)
    if origin in (Union, types.UnionType):
        fitting = next((each for each in inner if _fits(each, value)), None)
        return _python_value(fitting, value)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation(value)
    if is_typeddict(annotation) and isinstance(value, Mapping):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return {key: _python_value(hints.get(key), each) for key, each in value.items()}
    if is_dataclass(annotation) and isinstance(annotation, type) and isinstance(value, Mapping):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return annotation(**{key: _python_value(hints.get(key), each) for key, each in value.items()})
    kind = origin or annotation
    if isinstance(value, list):
        return _python_list(kind, inner, value)
    if isinstance(value, Mapping) and len(inner) == 2:
        return {key: _python_value(inner[1], each) for key, each in value.items()}
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 3.0 is an integer in JSON
    # From 2 ** 53 on, not every integer is a float.
    return float(value) if kind is float and type(value) is int and abs(value) < 2**53 else value


def _python_list(kind: Any, inner: tuple[Any, ...], value: list[Any]) -> Any:
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return tuple(_python_value(one, each) for one, each in zip(inner, value, strict=True))
    items = [_python_value(inner[0], each) for each in value] if inner else value
    return kind(items) if kind in (tuple, set, frozenset) else items


def _fits(annotation: Any, value: Any) -> bool:
    """Whether a member of a union is the one that a JSON value was meant for."""
    return problem_of(value, schema_of(annotation, "a union")) is None
