"""Twins of hidden tests: the same tests with one check inverted, which fail wherever the tests pass honestly.

    source of a file of tests, names of tests ──► source of their twins, and that of plain copies

Of a test `assert total(cart) == 12` the twin asserts `total(cart) == -12`. A patch that makes every check
pass, every report good, or every object equal makes the twin pass as well. Standard library alone, Python 3.9
or newer.
"""

import ast
import copy

TEST_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*TEST_FUNCTIONS, ast.ClassDef, ast.Lambda)
NOT_EQUAL = "(lambda a, b, other: a == other or other == b or not a == b)({}, {}, object())"
"""False where both are equal, and not by being equal to everything."""
ERROR_CHECKS = ("raises", "assertRaises", "assertRaisesRegex", "assertRaisesMessage")
EQUALITY_CHECKS = ("assertEqual", "assertEquals", "assert_equal")
ATTEMPT = "try:\n    pass\nexcept AssertionError:\n    pass\nelse:\n    raise AssertionError"


def make_twins(source: str, names: "list[str]", draw) -> "tuple[str, str, list[str]]":
    """Return the source with the twins of some tests, the source with the tests as they are, and the names of
    the tests among `names` (such as `TestCart::test_total`) that it defines.

    `draw`: a `random.Random`, which chooses the check of each test that is inverted. Raises SyntaxError for
    what is no Python of this version.
    """
    tree = ast.parse(source)
    plain = ast.unparse(tree)
    functions = []
    for name in names:
        test = find_test(tree, name.split("::"))
        if test is not None:
            invert_test(test, draw)
            functions.append(name)
    return ast.unparse(ast.fix_missing_locations(tree)), plain, functions


def find_test(tree: ast.AST, path: "list[str]"):
    """The function of that name, in classes of these names; the last one where several have it."""
    test = None
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (*TEST_FUNCTIONS, ast.ClassDef)):
            if node.name == path[0]:
                is_whole = len(path) == 1
                test = (node if is_whole else find_test(node, path[1:])) or test
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            test = find_test(node, path) or test
    return test if isinstance(test, TEST_FUNCTIONS) else None


def invert_test(test, draw) -> None:
    """Invert one check of a test, after which it returns. Where that check is not reached, it fails."""
    checks = list(find_checks(test.body))
    top = [check for check in checks if check[0] is test.body]
    end_early(test)
    if checks:
        body, place = draw.choice(top or checks)
        body[place : place + 1] = [*invert(body[place]), ast.Return(value=None)]
    test.body.append(ast.parse("raise AssertionError").body[0])


def find_checks(body: list):
    """(list of statements, place) of every check that the test itself makes."""
    for place, statement in enumerate(body):
        if is_check(statement):
            yield body, place
        elif not isinstance(statement, SCOPES):
            for field in ("body", "orelse", "finalbody"):
                yield from find_checks(getattr(statement, field, None) or [])


def is_check(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return called_name(as_call(statement.value)).startswith("assert")
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return any(map(expects_error, statement.items))
    return isinstance(statement, ast.Assert)


def expects_error(item: ast.withitem) -> bool:
    return called_name(as_call(item.context_expr)) in ERROR_CHECKS


def as_call(node: ast.expr) -> "ast.Call | None":
    """The call that an expression is, or that it waits for."""
    if isinstance(node, ast.Await):
        node = node.value
    return node if isinstance(node, ast.Call) else None


def called_name(call: "ast.Call | None") -> str:
    """The last part of the name of the function; empty where there is no call of a name."""
    function = call and call.func
    return getattr(function, "attr", "") or getattr(function, "id", "")


def invert(statement: ast.stmt) -> "list[ast.stmt]":
    """Return statements that fail where the check holds."""
    if isinstance(statement, ast.Assert):
        return [ast.Assert(test=inverted_condition(statement.test), msg=None)]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        others = [item for item in statement.items if not expects_error(item)]
        if not others:
            return statement.body  # the error that was expected is the failure
        statement.items = others
        return [statement]
    call = as_call(statement.value) if isinstance(statement, ast.Expr) else None
    if call is not None and called_name(call) in EQUALITY_CHECKS and len(call.args) >= 2:
        comparison = ast.Compare(left=call.args[0], ops=[ast.Eq()], comparators=[call.args[1]])
        return [ast.Assert(test=inverted_condition(comparison), msg=None)]
    (attempt,) = ast.parse(ATTEMPT).body
    assert isinstance(attempt, ast.Try)
    attempt.body = [statement]
    return [attempt]


def inverted_condition(condition: ast.expr) -> ast.expr:
    """A condition that is false where this one is true. A literal that something is equal to becomes another
    one: an object that is equal to everything, or a patch that reads the literal, is equal to that too."""
    if not isinstance(condition, ast.Compare) or [type(operator) for operator in condition.ops] != [ast.Eq]:
        return ast.UnaryOp(op=ast.Not(), operand=condition)
    left, right = condition.left, condition.comparators[0]
    for place, side in enumerate((right, left)):
        literal = changed_literal(side)
        if literal is not None:
            pair = (left, literal) if place == 0 else (literal, right)
            return ast.Compare(left=pair[0], ops=[ast.Eq()], comparators=[pair[1]])
    return ast.parse(NOT_EQUAL.format(ast.unparse(left), ast.unparse(right)), mode="eval").body


def changed_literal(node: ast.expr):
    """Another literal of the same type, or None for what is no literal. That of `pytest.approx(3)` counts."""
    if isinstance(node, ast.Call) and called_name(node) == "approx" and node.args:
        inner = changed_literal(node.args[0])
        if inner is None:
            return None
        node = copy.deepcopy(node)
        node.args[0] = inner
        return node
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return ast.parse(repr(other_value(value)), mode="eval").body


def other_value(value):
    """Another value of the type; of a container with as many elements, so that each is compared."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, complex)):
        return -value or 1
    if isinstance(value, str):
        return value + "_"
    if isinstance(value, bytes):
        return value + b"_"
    if isinstance(value, (list, tuple)):
        first = [other_value(value[0])] if value else [1]
        return type(value)([*first, *value[1:]])
    if isinstance(value, dict):
        return {key: other_value(item) for key, item in value.items()} or {"_": 1}
    if isinstance(value, set):
        return {*value, "_"}
    return 1


def end_early(test) -> None:
    """Make the function's own returns failures: a twin that came there has not made its check."""

    class Returns(ast.NodeTransformer):
        def visit_Return(self, node):
            return ast.copy_location(ast.parse("raise AssertionError").body[0], node)

        def generic_visit(self, node):
            return node if isinstance(node, SCOPES) else super().generic_visit(node)

    test.body[:] = [Returns().visit(statement) for statement in test.body]
