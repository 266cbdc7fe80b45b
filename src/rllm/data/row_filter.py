"""Which rows: a small language over their fields, such as `status == "ok" and score >= 0.5`.

Names are fields, `inputs.task` is a field within. There are comparisons, `in`, `and`, `or`, `not`, texts,
numbers, lists, `true`, `false` and `null`. A field that is not there is null; null is neither above nor below
anything. Nothing is called or computed.
"""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rllm.errors import ConfigError

EXAMPLE = """status == "ok" and score >= 0.5"""
MAX_CHARACTERS = 2000
MAX_DEPTH = 50
"""The depth of a filter's parts within parts."""
_CONSTANTS = {"true": True, "false": False, "null": None}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}


class RowFilter:
    """A filter that was read. Raises ConfigError for what the language does not have, with the place."""

    def __init__(self, text: str, fields: Collection[str]) -> None:
        """`fields` are those that it may name."""
        self.text = text
        self._fields = fields
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(f"The filter has {len(text)} characters; it has at most {MAX_CHARACTERS}.")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError) as error:
            place = getattr(error, "offset", None)
            where = f" at character {place}" if place else ""
            hint = f"; it may be nested {MAX_DEPTH} deep" if place is None else ""
            raise ConfigError(
                f"The filter {text!r:.200} cannot be read{where}{hint}; write one like {EXAMPLE}."
            ) from error
        self._require(self._tree, MAX_DEPTH)

    def __call__(self, row: Mapping[str, Any]) -> bool:
        return bool(self._value(self._tree, row))

    def _require(self, node: ast.expr, depth: int) -> None:
        if not depth:
            raise ConfigError(f"The filter {self.text!r:.100} is nested more than {MAX_DEPTH} deep.")
        children: list[ast.expr] = []
        match node:
            case ast.BoolOp():
                children = node.values
            case ast.UnaryOp(op=ast.Not()):
                children = [node.operand]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
                pass
            case ast.Compare() if all(type(each) in _COMPARISONS for each in node.ops):
                children = [node.left, *node.comparators]
            case ast.List() | ast.Tuple():
                children = node.elts
            case ast.Attribute():
                children = [node.value]
                if not isinstance(node.value, ast.Name | ast.Attribute):
                    raise self._unknown(node)
            case ast.Name():
                if node.id not in self._fields and node.id not in _CONSTANTS:
                    raise ConfigError(
                        f"The filter names `{node.id}`; there are {', '.join(self._fields)}. "
                        "Texts stand in quotes."
                    )
            case ast.Constant(value=str() | int() | float() | None):
                pass
            case _:
                raise self._unknown(node)
        for child in children:
            self._require(child, depth - 1)

    def _unknown(self, node: ast.expr) -> ConfigError:
        part = ast.get_source_segment(self.text.strip(), node) or self.text
        return ConfigError(
            f"The filter has {part!r:.100}, which it cannot; there are fields, comparisons, in, and, or, not."
        )

    def _value(self, node: ast.expr, row: Mapping[str, Any]) -> Any:
        match node:
            case ast.BoolOp(op=ast.And()):
                return all(self._value(each, row) for each in node.values)
            case ast.BoolOp():
                return any(self._value(each, row) for each in node.values)
            case ast.UnaryOp(op=ast.Not()):
                return not self._value(node.operand, row)
            case ast.UnaryOp(operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Compare():
                return self._compare(node, row)
            case ast.List() | ast.Tuple():
                return [self._value(each, row) for each in node.elts]
            case ast.Attribute():
                whole = self._value(node.value, row)
                return whole.get(node.attr) if isinstance(whole, Mapping) else None
            case ast.Name():
                return _CONSTANTS[node.id] if node.id in _CONSTANTS else row.get(node.id)
            case ast.Constant():
                return node.value
        raise AssertionError(f"`_require` lets no {type(node).__name__} pass")

    def _compare(self, node: ast.Compare, row: Mapping[str, Any]) -> bool:
        left = self._value(node.left, row)
        for kind, comparator in zip(node.ops, node.comparators, strict=True):
            right = self._value(comparator, row)
            if not _holds(kind, left, right):
                return False
            left = right
        return True


def _holds(kind: ast.cmpop, left: Any, right: Any) -> bool:
    """Values of two kinds are unequal, and in no order."""
    try:
        return _COMPARISONS[type(kind)](left, right)
    except TypeError:
        return isinstance(kind, ast.NotEq | ast.NotIn)
