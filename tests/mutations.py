"""Changes of a line that mutants are made of.

Not drawn: types, methods of protocols, errors that are raised and their words, assertions, decorators, what
IGNORED_KEYWORDS names, lines of a log below warnings, and the number of a constant or a default that is a
limit, a time or a tolerance (`MAX_FRAMES = 12`, `timeout_s: float = 600.0`): that it is kept to is tested,
and is drawn where it is compared; whether it is 12 or 13 is a choice, which a test could only repeat. Nor a
seed that is a number (`default_rng(0)`): the draws are others, and as good. Nor whether two numbers that are
apart by exactly a tolerance are close enough.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
IGNORED_KEYWORDS = ("strict", "exist_ok", "maxsize", "indent", "digest_size", "repr")
"""What they change is a check of ours (`zip`), a race, speed (`lru_cache`), looks, or how many bits tell two
texts apart: no promise."""
GENERATORS = ("default_rng", "manual_seed", "Random")
SWAPPED_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "minimum": "maximum",
    "maximum": "minimum",
}


def changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Apply one change after another to `tree`, each taken back before the next: (line, change)."""
    for node in _living(tree):
        match node:
            case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS and not _is_tolerance(node):
                new = COMPARISONS[type(op)]()
                yield from _swapped(node.ops, 0, new, node.lineno, f"{_name(op)} to {_name(new)}")
            case ast.BinOp(op=op) if type(op) in OPERATORS and not _is_text(node) and not _is_type(node):
                new = OPERATORS[type(op)]()
                yield from _replaced(node, "op", new, f"{_name(op)} to {_name(new)}")
            case ast.BoolOp(op=op):
                new = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield from _replaced(node, "op", new, f"{_name(op)} to {_name(new)}")
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield from _replaced(
                    node, "test", ast.UnaryOp(ast.Not(), test), "condition negated", test.lineno
                )
            case ast.Constant(value=bool() as value):
                yield from _replaced(node, "value", not value, f"{value} to {not value}")
            case ast.Constant(value=int() as value):
                yield from _replaced(node, "value", value + 1, f"{value} to {value + 1}")
            case ast.Constant(value=float() as value):
                yield from _replaced(node, "value", value * 2 + 1, f"{value} to {value * 2 + 1}")
            case ast.Return(value=ast.expr() as value) if not _is_none_or_false(value):
                yield from _replaced(node, "value", ast.Constant(None), "returns None")
            case ast.Call(func=ast.Name(id=name)) if name in SWAPPED_NAMES:
                yield from _replaced(node.func, "id", SWAPPED_NAMES[name], f"{name} to {SWAPPED_NAMES[name]}")
            case ast.Call(func=ast.Attribute(attr=name)) if name in SWAPPED_NAMES:
                yield from _replaced(
                    node.func, "attr", SWAPPED_NAMES[name], f"{name} to {SWAPPED_NAMES[name]}"
                )
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield from _replaced(node, "value", ast.Constant(None), "call left out")


_LIMIT = re.compile(r"_?(MAX|MOST)(_\w+)?|_?[A-Z]\w*_S|(\w+_)?TOLERANCE")


def _living(tree: ast.Module) -> Iterator[Any]:
    """Nodes that run and decide something: no annotations, errors, assertions or imports for types."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "msg", "keywords") and isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.arg | ast.AnnAssign | ast.ClassDef
            ):
                continue
            if name == "args" and isinstance(node, ast.Call) and _is_generator(node):
                continue
            if isinstance(node, ast.arguments) and name in ("defaults", "kw_defaults"):
                value = _deciding_defaults(node)[name]
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _decides_nothing(child):
                    stack.append(child)


def _decides_nothing(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return True
    if isinstance(node, ast.keyword) and (
        node.arg in IGNORED_KEYWORDS or (_is_time(node.arg) and isinstance(node.value, ast.Constant))
    ):
        return True
    if isinstance(node, ast.Assign) and _is_limit(node):
        return True
    if isinstance(node, ast.AnnAssign) and _is_chosen(getattr(node.target, "id", ""), node.value):
        return True
    if isinstance(node, ast.Expr) and _is_log_line(node.value):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and all(map(_is_constant, node.body)):
        return True  # a protocol's, which nobody runs
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def _deciding_defaults(arguments: ast.arguments) -> dict[str, list[ast.expr | None]]:
    """Its defaults without those that are a choice of a limit or a time."""
    positional = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) or None :]
    return {
        name: [each for arg, each in zip(args, defaults, strict=False) if not _is_chosen(arg.arg, each)]
        for name, args, defaults in (
            ("defaults", positional, arguments.defaults),
            ("kw_defaults", arguments.kwonlyargs, arguments.kw_defaults),
        )
    }


def _is_chosen(name: str, default: ast.expr | None) -> bool:
    """`timeout_s: float = 600.0`, `max_steps: int = 5`; 0 mostly means that there is none, which is more."""
    is_number = isinstance(default, ast.Constant) and type(default.value) in (int, float) and default.value
    return bool(is_number) and (_is_time(name) or name.startswith("max_"))


def _is_log_line(node: ast.expr) -> bool:
    """`log.info(…)`: for whoever looks for it. Warnings and errors are read, and drawn."""
    call = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(call, ast.Attribute) and call.attr in ("debug", "info") and "log" in ast.dump(call.value)
    )


def _is_generator(node: ast.Call) -> bool:
    """`default_rng(0)`, with a seed that nobody chooses."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in GENERATORS and all(isinstance(each, ast.Constant) for each in node.args)


def _is_time(name: str | None) -> bool:
    """`timeout_s=600.0`: a number that is chosen, as that of a constant is."""
    return name is not None and name.endswith("_s")


def _is_constant(node: ast.stmt) -> bool:
    """A docstring, or the dots of a body that is none."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_limit(node: ast.Assign) -> bool:
    """`MAX_FRAMES = 12`, `MAX_BYTES = 1 << 20` or `WITHIN_S = 30.0`: nothing but numbers and constants."""
    names = [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    parts = (ast.Constant, ast.Name, ast.Tuple, ast.Load, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    return any(map(_LIMIT.fullmatch, names)) and all(isinstance(each, parts) for each in ast.walk(node.value))


def _is_tolerance(node: ast.Compare) -> bool:
    """`gap <= 1e-8`, `gap <= TOLERANCE`: whether exactly that much is close enough."""
    (*_, right) = node.comparators
    right = right.operand if isinstance(right, ast.UnaryOp) else right
    is_small = isinstance(right, ast.Constant) and isinstance(right.value, float) and 0.0 < right.value < 1e-2
    is_named = isinstance(right, ast.Name) and (right.id == "SAME" or right.id.endswith("TOLERANCE"))
    return isinstance(node.ops[-1], ast.Lt | ast.LtE | ast.Gt | ast.GtE) and (is_small or is_named)


def _replaced(node: Any, field: str, new: Any, change: str, line: int = 0) -> Iterator[tuple[int, str]]:
    old = getattr(node, field)
    setattr(node, field, new)
    yield line or node.lineno, change
    setattr(node, field, old)


def _swapped(values: list[Any], index: int, new: Any, line: int, change: str) -> Iterator[tuple[int, str]]:
    old, values[index] = values[index], new
    yield line, change
    values[index] = old


def _name(op: ast.AST) -> str:
    return type(op).__name__


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_none_or_false(node: ast.AST) -> bool:
    """Whoever asks for a truth takes None as False, which becomes True by a change of its own."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(each, ast.JoinedStr | ast.List | ast.Tuple) for each in sides) or any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) for each in sides
    )


def _is_type(node: ast.BinOp) -> bool:
    """`int | None` where it is a value, as in a cast."""
    return isinstance(node.op, ast.BitOr) and _is_none(node.right)
