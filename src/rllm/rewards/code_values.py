"""A program's values beside the expected ones: compared outside of the sandbox, as parsed JSON.

    lines of the result channel ──► results_of ──► [{"v": …} | {"o": …} | {"e": …}] ──► same(got, wanted)
    stdout ──────────────────────────────────────────────────────────────────────► same_output(got, wanted)

The lines were written by a process that ran a model's code: anything may stand there. What is not in the form
is no result, and nothing here takes longer than reading it.
"""

import contextlib
import json
import math
from collections.abc import Sequence
from typing import Any

from rllm.rewards.programs import wire

_MAX_LEVELS = 3 * wire.MAX_DEPTH + 10
"""The depth of JSON: a dict in a dict is three levels further down."""
LOADING = -1
"""Number of the line that says that the program could not be loaded."""


class MalformedError(ValueError):
    """The channel holds what no driver writes."""


def results_of(text: str | None, num_calls: int) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """(why the program could not be loaded, the results of the first calls).

    Ends at the first line that is cut off. Raises MalformedError for lines out of order or form.
    """
    results: list[dict[str, Any]] = []
    lines = (text or "").split("\n")
    for line in lines[:-1]:  # behind the last line end is what was cut off, or nothing
        try:
            number, result = json.loads(line, parse_constant=_refuse)
        except (ValueError, TypeError, RecursionError) as error:
            raise MalformedError(f"the result channel holds {line!r:.80}") from error
        if not isinstance(result, dict) or not _is_result(result) or _is_too_deep(line, result):
            raise MalformedError(f"the result channel holds {line!r:.80}")
        if number == LOADING and not results:
            return result, []
        if number != len(results) or number >= num_calls:
            raise MalformedError("the result channel holds more results than calls, or not in their order")
        results.append(result)
    return None, results


def _is_result(result: dict[str, Any]) -> bool:
    kinds = {"v", "o", "e"} & set(result)
    if len(kinds) != 1 or set(result) - kinds - {"m"}:
        return False
    changes = result.get("m", {})
    if not isinstance(changes, dict) or not all(each.isdecimal() and len(each) < 4 for each in changes):
        return False
    if "e" in kinds:
        error = result["e"]
        return (
            isinstance(error, list)
            and len(error) == 3
            and all(isinstance(each, str) for each in error[:2])
            and isinstance(error[2], list)
            and all(isinstance(each, str) for each in error[2])
        )
    return True


def _is_too_deep(line: str, result: Any) -> bool:
    """Deeper than any value that a driver writes; who walks it later should not run out of stack."""
    if line.count("[") + line.count("{") <= _MAX_LEVELS:
        return False
    level, depth = [result], 0
    while level and depth <= _MAX_LEVELS:
        # Level by level, because a recursion would itself run out of stack.
        children = [each.values() if isinstance(each, dict) else each for each in level]
        level = [node for each in children for node in each if isinstance(node, dict | list)]
        depth += 1
    return bool(level)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def as_node(value: Any) -> Any:
    """A plain value as the parsed JSON that a program's value is compared with."""
    return json.loads(wire.encode(value))


def same(got: Any, expected: Any, *, tuples_are_lists: bool = True, tolerance: float = 0.0) -> bool:
    """Whether two nodes hold equal values, as Python's `==` has it: 1 is 1.0 and True.

    `tolerance` is relative and absolute, for numbers of which one is a float. Where a nan is wanted, a nan is
    the same. Raises MalformedError where `got` is no node.
    """
    try:
        return _same(got, expected, tuples_are_lists, tolerance)
    except _NO_NODE as error:
        raise MalformedError("a value is not in the form of one") from error


def _same(got: Any, expected: Any, loose: bool, tolerance: float) -> bool:
    got_number, wanted_number = _number(got), _number(expected)
    if got_number is not None and wanted_number is not None:
        return _same_number(got_number, wanted_number, tolerance)
    got_items, wanted_items = _items(got, loose), _items(expected, loose)
    if got_items is not None and wanted_items is not None:
        return (
            got_items[0] == wanted_items[0]
            and len(got_items[1]) == len(wanted_items[1])
            and all(
                _same(mine, theirs, loose, tolerance)
                for mine, theirs in zip(got_items[1], wanted_items[1], strict=True)
            )
        )
    if _tag(got) == _tag(expected) == "d":
        mine, theirs = _by_key(got, loose), _by_key(expected, loose)
        return mine.keys() == theirs.keys() and all(
            _same(mine[key], theirs[key], loose, tolerance) for key in mine
        )
    return _normal(got, loose) == _normal(expected, loose)


def _tag(node: Any) -> str:
    if not isinstance(node, dict):
        return ""
    if len(node) != 1:
        raise MalformedError("a value is not in the form of one")
    return next(iter(node))


def _number(node: Any) -> int | float | None:
    if isinstance(node, int | float):  # True and False are 1 and 0, as in Python
        return node
    if _tag(node) == "i":
        return int(node["i"], 16)
    return float(node["f"]) if _tag(node) == "f" else None


def _same_number(got: int | float, expected: int | float, tolerance: float) -> bool:
    if isinstance(expected, float) and math.isnan(expected):
        return isinstance(got, float) and math.isnan(got)
    if tolerance and (isinstance(got, float) or isinstance(expected, float)):
        try:
            # An int beyond every float raises OverflowError here, and is near to no float.
            return math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:
            return False
    return got == expected


def _items(node: Any, loose: bool) -> tuple[str, list[Any]] | None:
    """Kind and items of a list or tuple: which of the two, where that matters, and what it holds."""
    if isinstance(node, list):
        return "list", node
    if _tag(node) == "t":
        return "list" if loose else "tuple", _list(node["t"])
    return None


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise MalformedError("a value is not in the form of one")
    return value


def _by_key(node: Any, loose: bool) -> dict[str, Any]:
    return {_normal(key, loose): value for key, value in _list(node["d"])}


def _normal(node: Any, loose: bool) -> str:
    """A text that is equal for equal values. Sets are compared by it: no hash of a chosen value is taken."""
    number = _number(node)
    if number is not None:
        if isinstance(number, float):
            return hex(int(number)) if number.is_integer() else repr(number)
        # Not in decimal: that takes quadratic time, and Python refuses more than 4,300 digits.
        return hex(number)
    if node is None or isinstance(node, str):
        return json.dumps(node)
    items = _items(node, loose)
    if items is not None:
        return f"{items[0]}[{','.join(_normal(each, loose) for each in items[1])}]"
    tag = _tag(node)
    if tag == "s":
        return f"set[{','.join(sorted({_normal(each, loose) for each in _list(node['s'])}))}]"
    if tag == "d":
        pairs = [f"{key}:{_normal(value, loose)}" for key, value in _by_key(node, loose).items()]
        return f"dict[{','.join(sorted(pairs))}]"
    if tag == "c":
        real, imaginary = node["c"]
        return _normal(real, loose) if _number(imaginary) == 0 else f"complex{node['c']}"
    if tag == "q" and node["q"][1] == "0x1":
        return hex(int(node["q"][0], 16))
    return json.dumps(node, sort_keys=True)


def same_output(got: str, expected: str, *, tolerance: float = 1e-6) -> bool:
    """Whether two outputs are the same line by line, blanks at line ends and empty lines at the end aside.

    A number that is wanted with a decimal point may differ by `tolerance`, relative or absolute.
    """
    got_lines, wanted_lines = _lines(got), _lines(expected)
    return len(got_lines) == len(wanted_lines) and all(
        mine == theirs or _same_words(mine.split(), theirs.split(), tolerance)
        for mine, theirs in zip(got_lines, wanted_lines, strict=True)
    )


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_words(got: Sequence[str], expected: Sequence[str], tolerance: float) -> bool:
    return len(got) == len(expected) and all(
        mine == theirs or _same_decimal(mine, theirs, tolerance)
        for mine, theirs in zip(got, expected, strict=True)
    )


def _same_decimal(got: str, expected: str, tolerance: float) -> bool:
    if "." not in expected or max(len(got), len(expected)) > 400:
        return False
    try:
        mine, theirs = float(got), float(expected)
    except ValueError:
        return False
    return math.isclose(mine, theirs, rel_tol=tolerance, abs_tol=tolerance)


def truth_of(node: Any) -> bool:
    """The value of `bool` for the node. Raises MalformedError where it is no node."""
    try:
        return _truth_of(node)
    except _NO_NODE as error:
        raise MalformedError("a value is not in the form of one") from error


def _truth_of(node: Any) -> bool:
    number = _number(node)
    if number is not None:
        return number != 0
    tag = _tag(node)
    if not tag:
        return bool(node)
    if tag in "cqmR":
        return bool(wire.decode(node))
    return bool(node[tag])


def display_text(node: Any, limit: int = 200) -> str:
    """The value as Python writes it, cut short."""
    text = json.dumps(node)
    if len(text) < _DECODED_CHARS:
        with contextlib.suppress(*_NO_NODE):
            text = repr(wire.decode(node))
    return text if len(text) <= limit else f"{text[:limit]}…"


_DECODED_CHARS = 4_000
"""The length of a value that is decoded to be shown: a large one could be chosen to take long."""
_NO_NODE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, ArithmeticError)
"""The exceptions for a value that is no node."""
