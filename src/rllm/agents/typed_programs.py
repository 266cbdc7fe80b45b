"""Functions of typed inputs as the programs of workers: their signature is a contract's schemas.

def measure(text: str, unit: Unit = Unit.CHARACTERS) -> Length
    ──function_schema──► input properties      annotation of the result ──► output properties
    ──typed_flow──► a program of (task, config) that calls it with the inputs by name
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, get_type_hints, is_typeddict

from rllm.agents.flow import AgentFlow
from rllm.tools.schemas import function_schema, schema_of
from rllm.types.callables import is_async
from rllm.types.task import AgentConfig, Task

_PROGRAM = ("task", "config")
_PROGRAM_TYPES = (Task, AgentConfig, dict, Any, "Task", "AgentConfig", "dict", "Any", "dict[str, Any]")
_FUNCTION = "typed_function"
"""Attribute of a program that was made of a function."""
RESULT = "result"
"""The output of a function whose result is no object."""


def is_typed(target: object) -> bool:
    """Whether it is a function of inputs by name, each with a type: none of a task and a configuration."""
    if not inspect.isfunction(target):
        return False
    parameters = list(inspect.signature(target).parameters.values())
    names = tuple(each.name for each in parameters)
    by_name = all(each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) for each in parameters)
    has_types = all(each.annotation is not each.empty for each in parameters)
    if not (parameters and by_name and has_types) or set(_PROGRAM) & set(names):
        return False
    # By other names, a task and a configuration are still these.
    kinds = [each.annotation for each in parameters]
    return not (len(kinds) == 2 and all(kind in _PROGRAM_TYPES for kind in kinds))


def typed_flow(function: Callable[..., Any]) -> AgentFlow:
    """A program that calls it. Raises ConfigError for a parameter that JSON cannot carry."""
    schema = function_schema(function)

    takes = schema.parameters["properties"]

    def arguments(task: Any) -> dict[str, Any]:
        return schema.python_values({name: value for name, value in task.metadata.items() if name in takes})

    async def call_async(task: Any, config: Any) -> dict[str, Any]:
        return _outputs(await function(**arguments(task)))

    def call(task: Any, config: Any) -> dict[str, Any]:
        return _outputs(function(**arguments(task)))

    program = call_async if is_async(function) else call
    program.__doc__ = inspect.getdoc(function)
    # Not functools.wraps, after which `inspect.signature` would be the function's own.
    setattr(program, _FUNCTION, function)
    return AgentFlow(program, function.__name__)


def typed_function(source: object) -> Callable[..., Any] | None:
    """The function behind the program that `typed_flow` made; None for any other."""
    return getattr(source, _FUNCTION, None)


def input_schemas(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str]]:
    """Schemas by parameter, and the names of those that have no default."""
    parameters = function_schema(function).parameters
    return dict(parameters["properties"]), list(parameters["required"])


def output_schemas(function: Callable[..., Any], what: str) -> dict[str, Any] | None:
    """Schemas by property of what it returns; None where it does not say."""
    annotation = get_type_hints(function).get("return")
    if annotation is None:
        return None
    schema = schema_of(annotation, f"the result of {what}")
    if is_typeddict(annotation) or is_dataclass(annotation):
        return dict(schema["properties"])
    return {RESULT: schema}


def _outputs(value: Any) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else {RESULT: value}
