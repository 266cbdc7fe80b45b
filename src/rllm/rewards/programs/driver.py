"""Loads a program, makes the calls that it is told, and writes what comes back, one line of JSON a call.

    {"program", "prelude", "calls": […]}  ──►  {"v": value} | {"o": class} | {"e": [class, message, bases]}
                                                         + {"m": {"0": argument as it is afterwards}}

Appended to `wire.py` and run in a sandbox. Its builtins are a copy made before the program is loaded, and
`os.write` is at hand by then, so what the program patches patches nothing here. It knows no expected value.
"""

import builtins
import os
import sys
import types
from json import loads
from time import monotonic
from typing import Any

from rllm.rewards.programs.wire import NoPlainValueError, decode, encode, quoted

MAX_MESSAGE_CHARS = 300
MAX_LISTED, LISTING_S = 10_000, 1.0
LOADING = -1
_UNTOUCHED = dict(builtins.__dict__)
"""Builtins as they are before any program could change them."""


def run(job: str) -> None:
    """Ends the process."""
    channel, write, leave = int(os.environ.pop("RLLM_RESULT_FD")), os.write, os._exit

    def tell(number: int, text: str) -> None:
        data = f"[{number},{text}]\n".encode()
        while data:
            data = data[write(channel, data) :]

    work = loads(job)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    names = module.__dict__
    names["__builtins__"] = builtins
    calls: list[dict[str, Any]] = work["calls"]
    values: list[Any] = []
    try:
        if work["prelude"]:
            exec(compile(work["prelude"], "<prelude>", "exec"), names)
        exec(compile(work["program"], "<solution>", "exec", dont_inherit=True), names)
    except BaseException as error:  # noqa: BLE001 the program may raise what it likes
        tell(LOADING, _told_error(error))
        leave(0)
    for number, call in enumerate(calls):
        # Told one by one: what came before a crash or a limit counts.
        tell(number, _call_result(call, names, values))
    # `os._exit`: exit handlers and threads of the program have no part in the results.
    leave(0)


def _call_result(call: dict[str, Any], names: dict[str, Any], values: list[Any]) -> str:
    """Makes one call and says what came of it."""
    before: dict[int, str] = {}
    try:
        args = [_value(each, names, values) for each in call.get("args", ())]
        kwargs = {key: _value(each, names, values) for key, each in call.get("kwargs", {}).items()}
        before = {
            place: encode(each, _refer_to_nothing)
            for place, each in enumerate(args)
            if isinstance(each, (list, dict, set))
        }
        value = _done(call, args, kwargs, names, values)
    except BaseException as error:  # noqa: BLE001 the program may raise what it likes
        values.append(None)
        return _told_error(error)
    values.append(value)
    try:
        text = f'{{"v":{encode(value)}'
        mutations = [
            f'"{place}":{after}'
            for place, was in before.items()
            if (after := encode(args[place], _refer_to_nothing)) != was
        ]
    except NoPlainValueError as error:
        return f'{{"o":{quoted(str(error))}}}'
    except BaseException:  # noqa: BLE001 the value may do what it likes
        return '{"o":"that cannot be looked at"}'
    return text + (f',"m":{{{",".join(mutations)}}}}}' if mutations else "}")


def _done(
    call: dict[str, Any], args: list[Any], kwargs: dict[str, Any], names: dict[str, Any], values: list[Any]
) -> Any:
    do = call["do"]
    if do == "eval":
        return eval(compile(call["source"], "<call>", "eval", dont_inherit=True), names)
    if do == "call":
        return _callee(call, names, values)(*args, **kwargs)
    if do == "get":
        return getattr(values[call["ref"]], call["attr"])
    if do == "set":
        return setattr(values[call["ref"]], call["attr"], args[0])
    if do == "item":
        return values[call["ref"]][args[0]]
    if do == "list":
        return _items(values[call["ref"]])
    if do == "isinstance":
        return isinstance(args[0], args[1])
    return _weak(call, names)


def _items(value: Any) -> tuple[list[Any], bool]:
    """The items of an iterable, and whether they are all: some iterables never end."""
    items: list[Any] = []
    until = monotonic() + LISTING_S
    for each in value:
        if len(items) >= MAX_LISTED or monotonic() > until:
            return items, False
        items.append(each)
    return items, True


def _callee(call: dict[str, Any], names: dict[str, Any], values: list[Any]) -> Any:
    if "ref" in call:
        target = values[call["ref"]]
        return getattr(target, call["attr"]) if call.get("attr") else target
    return _object_named(call["name"], names)


def _object_named(name: str, names: dict[str, Any]) -> Any:
    """The object that tests call by this name: a function, a method of `class Solution`, or an expression."""
    if name in names:
        return names[name]
    if name.isidentifier() and hasattr(names.get("Solution"), name):
        return getattr(names["Solution"](), name)
    return eval(compile(name, "<name>", "eval", dont_inherit=True), names)


def _value(node: Any, names: dict[str, Any], values: list[Any]) -> Any:
    return decode(
        node, lambda tag, reference: values[reference] if tag == "r" else _object_named(reference, names)
    )


def _refer_to_nothing(value: Any) -> str:
    return '{"f":"nan"}'  # an object among the arguments: whether it changed is nobody's business


def _weak(call: dict[str, Any], names: dict[str, Any]) -> str:
    """The tests themselves, in the program's own process; what they call gives plain values back."""

    def candidate(*args: Any, **kwargs: Any) -> Any:
        value = _object_named(call["entry"], names)(*args, **kwargs)
        return value if _is_of_package(value) else decode(loads(encode(value)))

    tests: dict[str, Any] = {"__builtins__": dict(_UNTOUCHED), "__name__": "tests"}
    exec(compile(call["setup"], "<setup>", "exec", dont_inherit=True), tests)
    for name in call["names"]:
        tests[name] = candidate if name == call["entry"] else _object_named(name, names)
    exec(compile(call["test"], "<tests>", "exec", dont_inherit=True), tests)
    if call["check"]:
        tests["check"](candidate)
    for name in [each for each in tests if each.startswith("test_") and callable(tests[each])]:
        tests[name]()
    return call["nonce"]


def _is_of_package(value: Any) -> bool:
    """Whether the value's class is one of an installed package, such as an array, and no program's own."""
    kind = type(value)
    module = sys.modules.get(kind.__module__)
    path = os.environ.get("PYTHONPATH", "")
    is_there = bool(path) and str(getattr(module, "__file__", None)).startswith(f"{path}/")
    return is_there and getattr(module, kind.__name__, None) is kind


def _told_error(error: BaseException) -> str:
    kind = type(error)
    try:
        message = str(error)[:MAX_MESSAGE_CHARS]
    except BaseException:  # noqa: BLE001 its text is the program's as well
        message = ""
    bases = ",".join(quoted(each.__name__) for each in kind.__mro__)
    return f'{{"e":[{quoted(kind.__name__)},{quoted(message)},[{bases}]]}}'
