"""Runs a task's tests on values that a program gave elsewhere; asks for the calls that are still to be made.

    tests, calls made so far, what came of them  ──►  {"verdict": "passed" | "failed" | "open", "calls": […]}

Appended to `wire.py` and `stand_ins.py`, and run in a sandbox of its own: expected values are here, the
program is not. A call of the program is looked up among those that were made. From the first that is not
there on, calls give dummies that agree with everything, so that one run finds most of the calls that tests
will make. Open means that some were not there yet: run the program with the calls told, and come again.
"""

import ast
import builtins
import os
import random
import sys
import types
from json import dumps, loads
from typing import Any

from rllm.rewards.programs.stand_ins import Missing, numpy_stand_in, pytest_stand_in
from rllm.rewards.programs.wire import NoPlainValueError, decode, encode, quoted

MAX_CALLS = 20_000
SEED = 20_261_122


class Enough(BaseException):
    """More calls than anybody should make."""


class Exam:
    """Which calls the tests make, in order, and what is known of them.

    Calls that were made for dummies may be ones that the tests do not make: those are passed over. Or they
    hold a reference where the tests, by now, hold the value: what came of them is believed until the end, and
    then the tests are run once more on exactly the calls that they made (`must_confirm`).
    """

    def __init__(self, earlier_calls: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
        self.earlier_calls = earlier_calls
        self.results = results
        self.calls: list[dict[str, Any]] = []
        self.places: list[int] = []
        """The place of each known call in `earlier_calls`."""
        self.is_known = True
        """Whether every call so far was there."""
        self.must_confirm = False
        self.is_weak = False
        """Whether the program compared objects of its own."""

    def make(self, call: dict[str, Any], args: "list[Any] | tuple[Any, ...]") -> Any:
        """The result of a call: a value, an object behind a reference, an exception, or a dummy."""
        number = len(self.calls)
        if number >= MAX_CALLS:
            raise Enough
        place = self._find(call) if self.is_known else -1
        self.calls.append(call)
        if place < 0:
            self.is_known = False
            return Dummy(self, number)
        self.places.append(place)
        result = self.results[place]
        for arg_place, node in result.get("m", {}).items():
            _replace(args[int(arg_place)], decode(node))
        if "e" in result:
            raise _exception_of(result["e"])
        return decode(result["v"]) if "v" in result else Held(self, number)

    def _find(self, call: dict[str, Any]) -> int:
        """The place of the next call in `earlier_calls` that is this one; -1 where there is none."""
        begin = self.places[-1] + 1 if self.places else 0
        for place in range(begin, len(self.earlier_calls)):
            likeness = self._likeness(self.earlier_calls[place], call)
            if likeness:
                passed_over = self.earlier_calls[begin:place]
                self.must_confirm |= likeness == CLOSE or not all(map(self._is_of_value, passed_over))
                return place
        return -1

    def _likeness(self, earlier: Any, call: Any) -> int:
        """EXACT, CLOSE where a reference stands for the value that it gave, or 0."""
        if isinstance(earlier, dict) and earlier.keys() == {"r"}:
            if isinstance(call, dict) and call.keys() == {"r"}:
                return EXACT if self.places[call["r"]] == earlier["r"] else 0
            return CLOSE if self.results[earlier["r"]].get("v", _NOTHING) == call else 0
        if isinstance(earlier, dict) and isinstance(call, dict):
            if earlier.keys() != call.keys() or (
                "ref" in earlier and self.places[call["ref"]] != earlier["ref"]
            ):
                return 0
            return min(
                (self._likeness(earlier[key], call[key]) for key in earlier if key != "ref"), default=EXACT
            )
        if isinstance(earlier, list) and isinstance(call, list):
            if len(earlier) != len(call):
                return 0
            return min(map(self._likeness, earlier, call), default=EXACT)
        return EXACT if type(earlier) is type(call) and earlier == call else 0

    def _is_of_value(self, call: dict[str, Any]) -> bool:
        """A method of what is a plain value: the tests called the value's own, here."""
        return "ref" in call and "v" in self.results[call["ref"]]


CLOSE, EXACT = 1, 2
_NOTHING: Any = object()


def _replace(container: Any, new: Any) -> None:
    container.clear()
    container.extend(new) if isinstance(container, list) else container.update(new)


def _exception_of(description: list[Any]) -> Exception:
    """The exception as the nearest class that both sides know."""
    name, message, bases = description
    for each in bases:
        kind = getattr(builtins, each, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(message)
            except TypeError:  # UnicodeDecodeError and its like want more than a message
                continue
    return Exception(f"{name}: {message}")


class Held:
    """An object that lives with the program: its methods and attributes are calls."""

    def __init__(self, exam: Exam, number: int, attr: str = "") -> None:
        # Past `__setattr__`, which is a call of the program.
        self.__dict__.update(_exam=exam, _number=number, _attr=attr)

    def _here(self) -> int:
        """The reference: to the object itself, or to the attribute once it is looked at."""
        if not self._attr:
            return self._number
        exam = self._exam
        exam.make({"do": "get", "ref": self._number, "attr": self._attr}, [])
        return len(exam.calls) - 1

    def _value(self) -> Any:
        """The value of an attribute; an object has none."""
        if not self._attr:
            raise AssertionError("the program gave no plain value")
        return self._exam.make({"do": "get", "ref": self._number, "attr": self._attr}, [])

    def _own(self, name: str, *others: Any) -> Any:
        """The result of a method such as `__len__` or `__add__`: the value's, or the program's own.

        The program is told nothing but objects of its own by that, so that no expected value gets to it; that
        it compares them itself makes the verdict a weak one.
        """
        if self._attr:
            return getattr(self._value(), name)(*others)
        if not all(isinstance(each, (Held, Named)) for each in others):
            raise AssertionError("the program gave no plain value")
        self._exam.is_weak |= bool(others)
        return self._exam.make(
            {"do": "call", "ref": self._number, "attr": name, **_call_arguments(others, {})}, others
        )

    def __getattr__(self, name: str) -> Any:
        # Python itself asks objects for such names; the tests call nothing by that.
        if name.startswith("__"):
            raise AttributeError(name)
        number = self._number if not self._attr else self._here()
        return Held(self._exam, number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        number = self._number if not self._attr else self._here()
        call = {"do": "set", "ref": number, "attr": name, "args": [_node(value)]}
        self._exam.make(call, [value])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {"do": "call", "ref": self._number, "attr": self._attr, **_call_arguments(args, kwargs)}
        return self._exam.make(call, args)

    def __getitem__(self, key: Any) -> Any:
        number = self._number if not self._attr else self._here()
        return self._exam.make({"do": "item", "ref": number, "args": [_node(key)]}, [key])

    def __eq__(self, other: object) -> bool:
        return other is self or bool(self._own("__eq__", other) if not self._attr else self._value() == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return True if not self._attr else bool(self._value())

    def __iter__(self) -> Any:
        if self._attr:
            return iter(self._value())
        listing = self._exam.make({"do": "list", "ref": self._number}, [])
        if isinstance(listing, Dummy):
            return iter(())
        if isinstance(listing, Held):
            raise AssertionError("the program gave no plain values")
        return _read(*listing)

    def __float__(self) -> float:
        return float(self._own("__float__"))

    def __int__(self) -> int:
        return int(self._own("__int__"))

    def __str__(self) -> str:
        return str(self._own("__str__"))

    def __repr__(self) -> str:
        return f"<what call {self._number} gave>"

    __hash__ = object.__hash__


def _read(items: "list[Any]", is_whole: bool) -> Any:
    yield from items
    if not is_whole:
        raise AssertionError(f"more than the {len(items)} elements that are read")


def length(value: Any) -> int:
    """`len`, for tests. A method would be asked whenever a list is made of an object."""
    if isinstance(value, Dummy):
        value._exam.make(
            {"do": "call", "ref": value._number, "attr": "__len__", **_call_arguments((), {})}, ()
        )
        return 0
    return int(value._own("__len__")) if isinstance(value, Held) else len(value)


def _of_value(name: str) -> Any:
    def method(self: Held, *others: Any) -> Any:
        return self._own(name, *others)

    return method


_ARITHMETIC = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]
_ORDER = ["lt", "le", "gt", "ge"]
for _name in [
    *_ARITHMETIC,
    *("r" + each for each in _ARITHMETIC),
    *_ORDER,
    "neg",
    "abs",
    "contains",
    "round",
    "next",
]:
    setattr(Held, f"__{_name}__", _of_value(f"__{_name}__"))


class Dummy(Held):
    """The result of a call that was not made yet. It agrees with everything and is nothing."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        if not self._attr:
            self._exam.make({"do": "list", "ref": self._number}, [])
        return iter(())

    def __next__(self) -> Any:
        raise StopIteration

    def __float__(self) -> float:
        return 0.0

    def __int__(self) -> int:
        return 0

    __index__ = __int__

    def __str__(self) -> str:
        return ""

    def __getitem__(self, key: Any) -> Any:
        return Dummy(self._exam, self._number)

    def __contains__(self, item: object) -> bool:
        return True

    __hash__ = object.__hash__


def _same(self: Held, *others: Any) -> "Dummy":
    return Dummy(self._exam, self._number)


def _agree(self: Held, *others: Any) -> bool:
    return True


for _name in [*_ARITHMETIC, *("r" + each for each in _ARITHMETIC), "neg", "abs", "round"]:
    setattr(Dummy, f"__{_name}__", _same)
for _name in _ORDER:
    setattr(Dummy, f"__{_name}__", _agree)


class Named:
    """A name of the program."""

    def __init__(self, exam: Exam, name: str) -> None:
        self.__dict__.update(_exam=exam, _name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {"do": "call", "name": self._name, **_call_arguments(args, kwargs)}
        return self._exam.make(call, args)

    def __instancecheck__(self, value: Any) -> bool:
        return bool(self._exam.make({"do": "isinstance", "args": [_node(value), _node(self)]}, [value, self]))

    def __getattr__(self, attr: str) -> Any:
        if attr.startswith("__"):
            raise AttributeError(attr)
        return Named(self._exam, f"{self._name}.{attr}")


def _call_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"args": [_node(each) for each in args], "kwargs": {key: _node(kwargs[key]) for key in kwargs}}


def _node(value: Any) -> Any:
    return loads(encode(value, _reference))


def _reference(value: Any) -> "str | None":
    """The program's own name for an object, where that is not its value."""
    if isinstance(value, Held):
        return f'{{"r":{value._here()}}}'
    if isinstance(value, Named):
        return f'{{"n":{quoted(value._name)}}}'
    name = getattr(value, "__name__", "")
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return f'{{"n":{quoted(name)}}}'
    return None


class Asserts(ast.NodeTransformer):
    """`assert x` as a statement that fails only on what is known, so that dummies end no test."""

    def visit_Assert(self, node: ast.Assert) -> "list[ast.stmt]":
        self.generic_visit(node)
        message = node.msg or ast.Constant(ast.unparse(node.test)[:200])
        assignment = ast.Try(
            body=[ast.Assign(targets=[ast.Name("__held", ast.Store())], value=node.test)],
            handlers=[
                ast.ExceptHandler(
                    type=ast.Name("Exception", ast.Load()),
                    name=None,
                    body=ast.parse("if __exam.is_known:\n    raise\n__held = True").body,
                )
            ],
            orelse=[],
            finalbody=[],
        )
        failed = ast.If(
            test=ast.parse("not __held and __exam.is_known", mode="eval").body,
            body=[ast.Assert(test=ast.Constant(False), msg=message)],
            orelse=[],
        )
        statements: list[ast.stmt] = [assignment, failed]
        for each in statements:
            ast.copy_location(each, node)
            ast.fix_missing_locations(each)
        return statements


def _program_module(exam: Exam) -> types.ModuleType:
    """The module that tests import as `solution`: any name of it may be the program's."""
    module: Any = types.ModuleType("solution")

    def attribute_of(name: str) -> Named:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(exam, name)

    module.__getattr__ = attribute_of
    return module


def examine(job: str) -> None:
    work = loads(job)
    channel = int(os.environ["RLLM_RESULT_FD"])
    exam = Exam(work["made"], work["results"])
    # Tests are run again and again on more results, and have to draw the same inputs each time.
    random.seed(SEED)
    names = {"__name__": "tests", "__exam": exam}
    report = {"verdict": "passed", "reason": ""}
    solution = _program_module(exam)
    sys.modules["solution"] = solution
    missing = Missing()
    sys.meta_path.append(missing)  # type: ignore[arg-type]
    sys.modules["pytest"] = pytest_stand_in(missing, lambda: exam.is_known)
    if not work["has_numpy"]:
        sys.modules["numpy"] = numpy_stand_in(missing)
    try:
        exec(compile(work["setup"], "<setup>", "exec", dont_inherit=True), names)
        program_names = {name: Named(exam, name) for name in work["names"]}
        solution.__dict__.update(program_names)
        names.update(program_names)
        names.setdefault("len", length)
        exec(compile(Asserts().visit(ast.parse(work["test"])), "<tests>", "exec", dont_inherit=True), names)
        if work["check"]:
            names["check"](Named(exam, work["entry"]))
        for name in [each for each in names if each.startswith("test_") and callable(names[each])]:
            names[name]()
    except NoPlainValueError as error:
        report = {"verdict": "impossible", "reason": f"the tests pass the program a value {error}"}
    except AssertionError as error:
        report = {"verdict": "failed", "reason": f"assert {error}"}
    except Enough:
        report = {"verdict": "impossible", "reason": f"the tests make more than {MAX_CALLS} calls"}
    except BaseException as error:  # noqa: BLE001 tests fail by raising what they like
        is_tests_own = isinstance(error, (ImportError, NameError, SyntaxError))
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        report = {"verdict": "broken" if is_tests_own else "failed", "reason": reason}
    if (exam.must_confirm or not exam.is_known) and report["verdict"] in ("passed", "failed"):
        report["verdict"] = "open"
    data = dumps({**report, "calls": exam.calls, "missing": missing.names, "weak": exam.is_weak}).encode()
    while data:
        data = data[os.write(channel, data) :]
