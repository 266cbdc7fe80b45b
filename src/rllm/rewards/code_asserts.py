"""Tests written as Python ──► calls with expected values, or an exam for the sandbox.

    assert f(2) == 4        ──► CallCheck("f(2)", expected 4): the call goes in, its value comes out
    assert not f([1])       ──► CallCheck("f([1])", truth False)
    anything else           ──► AssertExam: the tests run in a sandbox of their own, on values that came out

Nothing but a call of the program ever goes to the program: never the other side of a comparison.
"""

import ast
import builtins
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.errors import RewardError
from rllm.rewards.code_values import as_node
from rllm.rewards.foreign_python import UNREADABLE, foreign_tree

PROGRAM = "solution"
"""The module that tests may import the program as."""
_BUILTINS = frozenset(dir(builtins))


@dataclass(kw_only=True, slots=True, frozen=True)
class CallCheck:
    """One call of the program, and what it must give."""

    call: dict[str, Any]
    """As the driver takes it."""
    expected: tuple[Any, ...] = ()
    """Nodes (`code_values.as_node`), any of which is right."""
    truth: bool | None = None
    """Where only that is asked: whether the value counts as true."""
    is_identity: bool = False
    """`is`, of True, False or None: 1 is not True here."""
    tuples_are_lists: bool = False
    tolerance: float = 0.0
    display_text: str = ""
    """For people."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AssertExam:
    """Tests that are more than calls and values."""

    setup: str
    """Run first: what the tests need and the program has no part in."""
    test: str
    names: tuple[str, ...]
    """The names of the program's that the tests call."""
    entry: str
    has_check: bool = False
    """Whether `check(candidate)` is to be called."""


def parse_python(source: str, what: str) -> ast.Module:
    """Raises RewardError: tests that are no Python are the data's mistake."""
    try:
        return foreign_tree(source)
    except UNREADABLE as error:
        raise RewardError(f"The task's {what} is no Python: {error}: {source!r:.200}") from error


def is_python(source: str) -> bool:
    """Whether a text parses."""
    try:
        foreign_tree(source)
    except UNREADABLE:
        return False
    return True


def closed(prompt: str) -> str:
    """The beginning of a program made whole: a function that it opens at its end gets an empty body. Nothing
    where that makes no Python."""
    for whole in (prompt, f"{prompt.rstrip()}\n    pass\n"):
        if is_python(whole):
            return whole
    return ""


def calls_of(statements: Sequence[ast.stmt], program_names: Iterable[str]) -> list[CallCheck] | None:
    """The statements as calls with expected values; None where one of them is more than that.

    `program_names` are those that the program is known to define; of others, names that neither Python nor
    the tests define are taken for the program's.
    """
    own = set(program_names)
    calls: list[CallCheck] = []
    for statement in statements:
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant):
            continue  # `assert True`, as HumanEval has it
        try:
            call = _call_of(statement, own) if isinstance(statement, ast.Assert) else None
        except ValueError:  # a number with more digits than Python writes out
            return None
        if call is None:
            return None
        calls.append(call)
    return calls


def _call_of(statement: ast.Assert, own: set[str]) -> CallCheck | None:
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth(test.operand, False, own)
    if not isinstance(test, ast.Compare):
        return _truth(test, True, own)
    if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.Is):
        return None
    left, right = test.left, test.comparators[0]
    if not _is_of_program(left, own):
        left, right = right, left
    if not _is_of_program(left, own):
        return None
    try:
        expected = ast.literal_eval(right)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    is_identity = isinstance(test.ops[0], ast.Is)
    if is_identity and not (expected is None or isinstance(expected, bool)):
        return None
    return CallCheck(
        call={"do": "eval", "source": ast.unparse(left)},
        expected=(as_node(expected),),
        is_identity=is_identity,
        display_text=ast.unparse(test),
    )


def _truth(node: ast.expr, truth: bool, own: set[str]) -> CallCheck | None:
    if not _is_of_program(node, own):
        return None
    source = ast.unparse(node)
    return CallCheck(
        call={"do": "eval", "source": source}, truth=truth, display_text=source if truth else f"not {source}"
    )


def _is_of_program(node: ast.expr, own: set[str]) -> bool:
    """A call of one of the program's functions by its name, with arguments that hold no more than values,
    functions and calls of the program."""
    if not (isinstance(node, ast.Call) and _is_own(node.func, own)):
        return False
    bound_names = _bound_names(node)
    return all(
        each.id in own or each.id in _BUILTINS or each.id in bound_names or _may_be_own(each, node)
        for each in ast.walk(node)
        if isinstance(each, ast.Name)
    )


def _is_own(function: ast.expr, own: set[str]) -> bool:
    while isinstance(function, ast.Attribute | ast.Call):  # Solution().f
        function = function.value if isinstance(function, ast.Attribute) else function.func
    return isinstance(function, ast.Name) and function.id in own


def _may_be_own(name: ast.Name, inside: ast.Call) -> bool:
    """A class of the program that is called for an argument, such as `Pair(1, 2)`."""
    return any(isinstance(each, ast.Call) and each.func is name for each in ast.walk(inside))


def unknown_names(*trees: ast.AST) -> list[str]:
    """Names that are read and that neither the code nor Python defines, in the order in which they stand."""
    bound_names: set[str] = set()
    for tree in trees:
        bound_names |= _bound_names(tree)
    read = {
        each.id: None
        for tree in trees
        for each in ast.walk(tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }
    return [name for name in read if name not in bound_names and name not in _BUILTINS and name != "__file__"]


def _bound_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for each in ast.walk(tree):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            names.add(each.id)
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(each.name)
        elif isinstance(each, ast.arg):
            names.add(each.arg)
        # What is imported from the program is the program's to define.
        elif isinstance(each, ast.ImportFrom) and each.module == PROGRAM:
            continue
        elif isinstance(each, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in each.names}
        elif isinstance(each, ast.ExceptHandler) and each.name:
            names.add(each.name)
    return names


def defined_names(source: str) -> list[str]:
    """Functions and classes at the top level of a program; none where it is no Python."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    body = foreign_tree(source).body if is_python(source) else []
    return [each.name for each in body if isinstance(each, kinds)]


def called_first(statements: Sequence[ast.stmt]) -> list[str]:
    """Names of what assertions call on the side that is no literal: functions that nobody named."""
    names: dict[str, None] = {}
    for statement in statements:
        test = statement.test if isinstance(statement, ast.Assert) else None
        if isinstance(test, ast.UnaryOp):
            test = test.operand
        sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]
        for side in sides:
            if isinstance(side, ast.Call) and isinstance(side.func, ast.Name):
                names.setdefault(side.func.id)
    return list(names)


@dataclass(kw_only=True, slots=True, frozen=True)
class CodeTests:
    """The tests of a task for a program: calls, an exam, or runs with input."""

    calls: tuple[CallCheck, ...] = ()
    exam: AssertExam | None = None
    runs: tuple["AssertRun", ...] = ()
    checker: str = ""
    """Source of a program that judges runs whose right output is not the only one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AssertRun:
    """One run of the program: what it reads and what it must write."""

    stdin: str
    stdout: str
