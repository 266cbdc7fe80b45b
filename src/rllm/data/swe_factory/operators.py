"""Bugs by syntax tree: what people get wrong, one small change of the text at a time.

    source of a module ──► every function ──► operators ──► Mutation(operator, function, line, edit)

Nothing outside of functions is changed, nor decorators, annotations, docstrings, assertions or f-strings. An
edit replaces characters in place: formatting and comments stay.
"""

import ast
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rllm.data.swe_factory.edits import Edit, SourceText

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

COMPARISONS = {"==": "!=", "!=": "==", "in": "not in", "not in": "in", "is": "is not", "is not": "is"}
ORDERINGS = {"<": (">", "<="), "<=": (">=", "<"), ">": ("<", ">="), ">=": ("<=", ">")}
"""The other direction, and the other boundary."""
ARITHMETIC = {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "/",
    "%": "//",
    "**": "*",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
    "^": "|",
    "@": "*",
}
SIBLINGS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "startswith": "endswith",
    "endswith": "startswith",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "find": "rfind",
    "rfind": "find",
    "append": "extend",
    "upper": "lower",
    "lower": "upper",
    "keys": "values",
    "values": "keys",
    "bisect_left": "bisect_right",
    "bisect_right": "bisect_left",
    "appendleft": "append",
    "floor": "ceil",
    "ceil": "floor",
    "split": "rsplit",
    "partition": "rpartition",
}
"""Names of functions and methods that are taken for each other."""
LARGEST_CONSTANT = 1000
"""Larger integers are masks, sizes and dates; one more or less of them is seldom a bug that anybody sees."""


@dataclass(slots=True, frozen=True)
class Mutation:
    """One bug in one module."""

    operator: str
    function: str
    """Qualified name within the module, as `Class.method`."""
    line: int
    """Where the changed text begins, counted from 1."""
    edit: Edit


@dataclass(slots=True, frozen=True)
class Function:
    """A function of a module and the lines that it has, decorators left out."""

    name: str
    node: FunctionNode
    first: int
    last: int


def functions_of(tree: ast.Module) -> list[Function]:
    """Functions and methods; what is defined inside of a function belongs to that one."""
    return list(_functions(tree, ""))


def _functions(node: ast.AST, prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            assert child.end_lineno is not None
            yield Function(f"{prefix}{child.name}", child, child.lineno, child.end_lineno)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _functions(child, prefix)


def mutations(text: str) -> list[Mutation]:
    """Every bug that the operators know in a module's source, in the order of the text; a few of them do not
    compile (`changes_meaning`).

    Raises SyntaxError for a source that Python cannot read.
    """
    source = SourceText(text)
    mutations_by_edit: dict[Edit, Mutation] = {}
    for function in functions_of(source.tree):
        for operator, edit in _edits(source, function):
            line = source.line_at(edit.start)
            mutations_by_edit.setdefault(edit, Mutation(operator, function.name, line, edit))
    return sorted(
        mutations_by_edit.values(), key=lambda each: (each.edit.start, each.edit.end, each.edit.text)
    )


def changes_meaning(mutated_source: str, plain: str) -> bool:
    """Whether a changed source compiles, and to another syntax tree than the plain one."""
    with _COMPILING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a literal compared by `is`, and the like: that is the bug
        try:
            compile(mutated_source, "<changed>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
        return ast.dump(ast.parse(mutated_source)) != ast.dump(ast.parse(plain))


_COMPILING = threading.Lock()
"""A lock around compiling: filters of warnings hold for all threads."""


def _edits(source: SourceText, function: Function) -> Iterator[tuple[str, Edit]]:
    parameters = _parameters(function.node)
    yield from _defaults(source, function.node)
    for node, parents in _inside(function.node):
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                yield from operator(source, node, parents)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not _is_called(node, parents):
            yield from _variable(source, node, parameters)


def _inside(function: FunctionNode) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """The nodes of a body that may be changed, each with those around it, the nearest last."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    waiting: list[tuple[ast.AST, list[ast.AST]]] = [(each, [function]) for each in reversed(body)]
    while waiting:
        node, parents = waiting.pop()
        if isinstance(node, ast.JoinedStr | ast.Assert):
            continue
        yield node, parents
        inner = list(ast.iter_child_nodes(node))
        if isinstance(node, FunctionNode | ast.ClassDef):
            inner = list(node.body)
        elif isinstance(node, ast.AnnAssign):
            inner = [each for each in inner if each is not node.annotation]
        waiting += [(each, [*parents, node]) for each in reversed(inner)]


def _parameters(function: FunctionNode) -> list[str]:
    parameters = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return [each.arg for each in parameters if each.arg not in ("self", "cls")]


def _is_called(node: ast.Name, parents: list[ast.AST]) -> bool:
    return isinstance(parents[-1], ast.Call) and parents[-1].func is node


# ---- operators: a node and those around it in, edits out ---------------------------------------------------

Made = Iterator[tuple[str, Edit]]


def _variable(source: SourceText, node: ast.Name, parameters: list[str]) -> Made:
    if node.id in parameters and len(parameters) > 1:
        other = parameters[(parameters.index(node.id) + 1) % len(parameters)]
        yield "wrong_variable", Edit(*source.span(node), other)


def _compare(source: SourceText, node: ast.Compare, parents: list[ast.AST]) -> Made:
    for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
        tokens = source.gap(left, right)
        text = " ".join(each.text for each in tokens)
        start, end = tokens[0].start, tokens[-1].end
        if text in COMPARISONS:
            yield "wrong_comparison", Edit(start, end, COMPARISONS[text])
        elif text in ORDERINGS:
            direction, boundary = ORDERINGS[text]
            yield "wrong_comparison", Edit(start, end, direction)
            yield "boundary", Edit(start, end, boundary)


def _arithmetic(source: SourceText, node: ast.BinOp, parents: list[ast.AST]) -> Made:
    if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
        return  # text is formatted with %
    (token,) = source.gap(node.left, node.right)
    yield "wrong_operator", Edit(token.start, token.end, ARITHMETIC[token.text])


def _change_augmented(source: SourceText, node: ast.AugAssign, parents: list[ast.AST]) -> Made:
    (token,) = source.gap(node.target, node.value)
    yield "wrong_operator", Edit(token.start, token.end, f"{ARITHMETIC[token.text[:-1]]}=")


def _logic(source: SourceText, node: ast.BoolOp, parents: list[ast.AST]) -> Made:
    for left, right in zip(node.values, node.values[1:], strict=False):
        (token,) = source.gap(left, right)
        yield "wrong_operator", Edit(token.start, token.end, "or" if token.text == "and" else "and")
    yield "dropped_condition", Edit(*source.span(node), source.text_of(node.values[0]))


def _negation(source: SourceText, node: ast.UnaryOp, parents: list[ast.AST]) -> Made:
    start, _ = source.span(node)
    inner, _ = source.span(node.operand)
    if isinstance(node.op, ast.Not):
        token = source.tokens_in(start, inner)[0]
        yield "negated_condition", Edit(token.start, token.end + (source.text[token.end] == " "), "")
    elif isinstance(node.op, ast.USub):
        yield "wrong_operator", Edit(start, start + 1, "")


def _condition(source: SourceText, node: ast.If | ast.While | ast.IfExp, parents: list[ast.AST]) -> Made:
    if not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)):
        text = source.text_of(node.test)
        simple = isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        yield "negated_condition", Edit(*source.span(node.test), f"not {text}" if simple else f"not ({text})")


def _swapped_values(source: SourceText, node: ast.IfExp, parents: list[ast.AST]) -> Made:
    first, last = source.span(node.body), source.span(node.orelse)
    middle = source.text[first[1] : last[0]]
    text = source.text_of(node.orelse) + middle + source.text_of(node.body)
    yield "swapped_branches", Edit(first[0], last[1], text)


def _dropped_branch(source: SourceText, node: ast.If, parents: list[ast.AST]) -> Made:
    """The `else` goes; or all of an `if` that guards what follows, where something is left of its block."""
    if node.orelse and not _is_elif(source, node.orelse[0]):
        behind = node.body[-1].end_lineno
        last = node.orelse[-1].end_lineno
        assert behind is not None
        assert last is not None
        yield "dropped_branch", Edit(*source.line_span(behind + 1, last), "")
    elif not node.orelse and not _is_elif(source, node):
        yield from _without(source, node, parents, "dropped_branch")


def _is_elif(source: SourceText, node: ast.stmt) -> bool:
    start, _ = source.span(node)
    return isinstance(node, ast.If) and source.text.startswith("elif", start)


def _delete_statement(
    source: SourceText, node: ast.Expr | ast.AugAssign | ast.Assign, parents: list[ast.AST]
) -> Made:
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call):
        return
    if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        return  # a name that is used later would not be there: seen at once
    yield from _without(source, node, parents, "deleted_statement")


def _without(source: SourceText, node: ast.stmt, parents: list[ast.AST], operator: str) -> Made:
    if not source.has_lines_alone(node) or node.end_lineno is None:
        return
    first, last = source.line_span(node.lineno, node.end_lineno)
    if _is_alone(node, parents[-1]):
        start, end = source.span(node)
        yield operator, Edit(start, end, "pass")
    else:
        yield operator, Edit(first, last, "")


def _is_alone(node: ast.stmt, parent: ast.AST) -> bool:
    """Whether a statement is all that its block has."""
    blocks = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    return any(isinstance(each, list) and each == [node] for each in blocks)


def _return(source: SourceText, node: ast.Return, parents: list[ast.AST]) -> Made:
    if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
        start, _ = source.span(node)
        inner, _ = source.span(node.value)
        lead = source.text[start:inner]
        # Where a bracket stands before the value, the edit would leave its partner alone.
        if lead.strip() == "return":
            yield "removed_return", Edit(start, inner, "")


def _await(source: SourceText, node: ast.Await, parents: list[ast.AST]) -> Made:
    start, _ = source.span(node)
    yield "removed_await", Edit(start, source.span(node.value)[0], "")


def _constant(source: SourceText, node: ast.Constant, parents: list[ast.AST]) -> Made:
    for operator, text in _other_constants(node.value):
        yield operator, Edit(*source.span(node), text)


def _other_constants(value: object) -> list[tuple[str, str]]:
    if isinstance(value, bool):
        return [("wrong_constant", str(not value))]
    if isinstance(value, int) and abs(value) <= LARGEST_CONSTANT:
        fewer = [("off_by_one", str(value - 1))] if value > 0 else []
        return [("off_by_one", str(value + 1)), *fewer]
    if isinstance(value, float) and value:
        return [("wrong_constant", repr(value * 2))]
    return []


def _defaults(source: SourceText, function: FunctionNode) -> Made:
    for node in (*function.args.defaults, *function.args.kw_defaults):
        if isinstance(node, ast.Constant):
            for _, text in _other_constants(node.value):
                yield "changed_default", Edit(*source.span(node), text)


def _arguments(source: SourceText, node: ast.Call, parents: list[ast.AST]) -> Made:
    for one, other in zip(node.args, node.args[1:], strict=False):
        has_star = isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
        if not has_star and source.text_of(one) != source.text_of(other):
            first, last = source.span(one), source.span(other)
            text = source.text_of(other) + source.text[first[1] : last[0]] + source.text_of(one)
            yield "swapped_arguments", Edit(first[0], last[1], text)
    if isinstance(node.func, ast.Name | ast.Attribute):
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if name in SIBLINGS:
            _, end = source.span(node.func)
            yield "wrong_function", Edit(end - len(name), end, SIBLINGS[name])


def _slice(source: SourceText, node: ast.Slice, parents: list[ast.AST]) -> Made:
    for bound in (node.lower, node.upper):
        if bound is not None:
            yield "dropped_bound", Edit(*source.span(bound), "")


def _loop_exit(source: SourceText, node: ast.Break | ast.Continue, parents: list[ast.AST]) -> Made:
    yield "wrong_exit", Edit(*source.span(node), "continue" if isinstance(node, ast.Break) else "break")


OPERATORS: tuple[tuple[type[ast.AST] | tuple[type[ast.AST], ...], Callable[..., Made]], ...] = (
    (ast.Compare, _compare),
    (ast.BinOp, _arithmetic),
    (ast.AugAssign, _change_augmented),
    (ast.BoolOp, _logic),
    (ast.UnaryOp, _negation),
    ((ast.If, ast.While, ast.IfExp), _condition),
    (ast.IfExp, _swapped_values),
    (ast.If, _dropped_branch),
    ((ast.Expr, ast.AugAssign, ast.Assign), _delete_statement),
    (ast.Return, _return),
    (ast.Await, _await),
    (ast.Constant, _constant),
    (ast.Call, _arguments),
    (ast.Slice, _slice),
    ((ast.Break, ast.Continue), _loop_exit),
)
OPERATOR_NAMES = (
    *("boundary", "changed_default", "deleted_statement", "dropped_bound", "dropped_branch"),
    *("dropped_condition", "negated_condition", "off_by_one", "removed_await", "removed_return"),
    *("swapped_arguments", "swapped_branches", "wrong_comparison", "wrong_constant", "wrong_exit"),
    *("wrong_function", "wrong_operator", "wrong_variable"),
)
