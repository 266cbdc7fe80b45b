"""An issue about a bug, made of what the bug does: no line of a test is in it.

calls of the project by failing tests, plain and with the bug ──► the first that ends otherwise ──► Example
    no such call: what a comparison had on its sides, or the last line of the traceback

Calls are those that come from outside of the project's sources, so that the issue speaks of what a user calls
and not of where the bug is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

MAX_EXAMPLES = 3
MAX_NAMES = 3
"""The number of functions that a failing test called last."""
SHORTEST_LINE = 12
"""Shorter lines of a test, such as `x = 1`, say nothing."""


@dataclass(slots=True, frozen=True)
class FailureExample:
    """One thing that goes wrong."""

    title: str
    text: str
    is_call: bool
    """Whether it shows a call, and not only how a test failed."""


def statement(
    failures: Mapping[str, Mapping[str, Any]],
    plain: Mapping[str, Sequence[Mapping[str, Any]]],
    with_bug: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    paths: Sequence[str],
    test_texts: Iterable[str],
) -> str:
    """Markdown; empty where nothing can be said without showing a test.

    `failures`: test -> how it fails; `plain`, `with_bug`: test -> its calls without and with the bug;
    `paths`: where packages are imported from.
    """
    secrets = {each.strip() for text in test_texts for each in text.splitlines()}
    secrets = {each for each in secrets if len(each) >= SHORTEST_LINE}
    examples: dict[str, FailureExample] = {}
    for name in sorted(failures):
        calls = with_bug.get(name, ())
        example = _of_calls(plain.get(name, ()), calls, paths) or _of_failure(failures[name], calls, paths)
        if example is not None and not any(each in example.text or each in example.title for each in secrets):
            examples.setdefault(example.text, example)
    if not examples:
        return ""
    best_examples = sorted(examples.values(), key=_rank)
    parts = [f"# {best_examples[0].title}", *(each.text for each in best_examples[:MAX_EXAMPLES])]
    return "\n\n".join(parts) + "\n"


def _rank(example: FailureExample) -> tuple[bool, bool, int, str]:
    """Calls first; of those, values that can be typed before `<… object>`, and short ones."""
    is_vague = "<" in example.text or "…" in example.text
    return not example.is_call, is_vague, len(example.text), example.text


def _of_calls(
    plain: Sequence[Mapping[str, Any]], with_bug: Sequence[Mapping[str, Any]], paths: Sequence[str]
) -> FailureExample | None:
    """The first call that ends otherwise; after it nothing can be compared."""
    for expected, actual in zip(plain, with_bug, strict=False):
        if any(expected[each] != actual[each] for each in ("file", "function", "arguments")):
            return None
        if _ending(expected) != _ending(actual):
            return _example(expected, actual, paths)
    return None


def _ending(call: Mapping[str, Any]) -> tuple[Any, ...]:
    is_constructor = call["function"].endswith("__init__")
    return (call.get("raises"), None if is_constructor else call.get("returns"), call.get("yields"))


def _example(expected: Mapping[str, Any], actual: Mapping[str, Any], paths: Sequence[str]) -> FailureExample:
    name = _name(expected, paths)
    if "raises" in actual:
        kind = actual["raises"].partition(":")[0]
        title = f"`{name}` raises {kind}" + (" instead of another error" if "raises" in expected else "")
    elif "raises" in expected:
        title = f"`{name}` does not raise {expected['raises'].partition(':')[0]}"
    else:
        title = f"`{name}` gives a wrong result"
    lines = f"Expected: {_call_line(expected)}\n\nActual: {_call_line(actual)}"
    text = f"```\n{_call_text(expected)}\n```\n\n{lines}"
    return FailureExample(title, text, True)


def _name(call: Mapping[str, Any], paths: Sequence[str]) -> str:
    """The name that a user calls: the class of a constructor, the class of an object that is called."""
    name = f"{_module(call['file'], paths)}.{call['function']}"
    return name.removesuffix(".__init__").removesuffix(".__call__")


def _call_text(call: Mapping[str, Any]) -> str:
    arguments = list(call["arguments"])
    owner, _, method = call["function"].rpartition(".")
    if arguments and arguments[0][0] == "self" and method != "__init__":
        (_, itself), *arguments = arguments
        head = itself if method == "__call__" else f"{itself}.{method}"
    else:
        arguments = arguments[1:] if arguments and arguments[0][0] in ("self", "cls") else arguments
        head = owner if method == "__init__" else call["function"]
    return f"{head}({', '.join(_argument(*each) for each in arguments)})"


def _argument(name: str, value: str) -> str:
    return f"{name[: name.count('*')]}{value}" if name.startswith("*") else f"{name}={value}"


def _call_line(call: Mapping[str, Any]) -> str:
    if "raises" in call:
        return f"raises `{call['raises']}`"
    if "yields" in call:
        return f"yields `{', '.join(call['yields'])}`"
    return f"`{call['returns']}`" if "returns" in call else "yields nothing"


def _of_failure(
    failure: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], paths: Sequence[str]
) -> FailureExample | None:
    """The facts of a failed test without its own text: values that were compared, an error from elsewhere;
    and the functions that it called last."""
    names = dict.fromkeys(_name(each, paths) for each in reversed(calls))
    name_list = ", ".join(f"`{each}`" for each in list(names)[:MAX_NAMES])
    behind = f"\n\nBefore it {name_list} {'was' if len(names) == 1 else 'were'} called." if name_list else ""
    comparison = failure.get("comparison")
    if comparison is not None:
        operator, left, right = comparison
        relation = "be equal to" if operator == "==" else f"hold `{operator}` to"
        return FailureExample(
            "Wrong result", f"A value is `{left}`; it should {relation} `{right}`.{behind}", False
        )
    if failure["where"] == "test":
        return None
    kind = failure["kind"]
    title = {"AssertionError": "Wrong result", "Failed": "Something expected does not happen"}.get(
        kind, f"{kind} where there should be none"
    )
    return FailureExample(title, f"```\n{failure['line']}\n```{behind}", False)


def _module(path: str, paths: Sequence[str]) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    if parts and parts[0] in paths:
        parts = parts[1:]
    return ".".join(each for each in parts if each != "__init__")
