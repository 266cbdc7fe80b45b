"""A pattern that comes from outside is matched in time that grows with the text, wherever there is one."""

import ast
import time
from pathlib import Path

from rllm.tools.values import problem_of

SOURCE = Path(__file__).parents[2] / "src" / "rllm"
SEARCHES = {"compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "subn", "split"}
OURS = {
    "environments/reasoning_gym_scoring.py": "a table of this library",
    "rewards/programs/stand_ins.py": "inside the sandbox of a program that may loop in any other way",
    "rewards/programs/swe_tests.py": "names of files, listed in swe_grading",
}
"""File that gives `re` a variable -> the place that it comes from."""


def test_a_pattern_of_a_tool_that_backtracks_for_hours_takes_no_time() -> None:
    started_s = time.process_time()
    problem = problem_of("a" * 40 + "!", {"type": "string", "pattern": "^(a+)+$"})
    assert problem is not None
    assert "^(a+)+$" in problem
    assert problem_of("a" * 40, {"type": "string", "pattern": "^(a+)+$"}) is None
    assert time.process_time() - started_s < 5.0


def test_no_other_place_searches_with_a_pattern_that_it_was_given() -> None:
    places = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _takes_a_variable(node)
    }
    assert places == set(OURS)


def _takes_a_variable(call: ast.Call) -> bool:
    """Whether a call of `re` gets its whole pattern from a variable; constants are written in capitals."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and function.attr in SEARCHES and call.args):
        return False
    if not (isinstance(function.value, ast.Name) and function.value.id == "re"):
        return False
    pattern = call.args[0]
    if isinstance(pattern, ast.Name):
        return not pattern.id.isupper()
    return isinstance(pattern, ast.Attribute | ast.Subscript)
