"""As much of pytest and numpy as the tests of code data sets use: the sandbox has the standard library alone.

Appended to `wire.py`, before `examiner.py`.
"""

import math
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any


class Raises:
    """`with pytest.raises(ValueError, match=…):`; `is_known` says whether what happens inside is real yet."""

    def __init__(self, kinds: Any, match: "str | None", is_known: Callable[[], bool]) -> None:
        self.kinds, self.match, self.is_known = kinds, match, is_known
        self.value: BaseException | None = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        if kind is None:
            if self.is_known():
                raise AssertionError(f"did not raise {self.kinds}")
            return True
        self.value = value
        if not issubclass(kind, self.kinds):
            return False
        if self.match is not None and not re.search(self.match, str(value)):
            raise AssertionError(f"{str(value)!r:.100} does not match {self.match!r}")
        return True


class Approx:
    """`pytest.approx(1.0)`, with pytest's tolerances; also of lists and dicts."""

    def __init__(self, expected: Any, rel: "float | None" = None, abs: "float | None" = None) -> None:
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, got: object) -> bool:
        return self._is_near(got, self.expected)

    __hash__ = None  # type: ignore[assignment]

    def _is_near(self, got: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return (
                isinstance(got, dict)
                and got.keys() == expected.keys()
                and all(self._is_near(got[key], expected[key]) for key in expected)
            )
        if isinstance(expected, (list, tuple)):
            return (
                isinstance(got, (list, tuple))
                and len(got) == len(expected)
                and all(map(self._is_near, got, expected))
            )
        if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
            rel = (0.0 if self.abs is not None else 1e-6) if self.rel is None else self.rel
            return math.isclose(got, expected, rel_tol=rel, abs_tol=1e-12 if self.abs is None else self.abs)
        return bool(got == expected)


def parametrize(names: Any, values: Iterable[Any], **_: Any) -> Callable[[Any], Any]:
    """The test as one that runs all of its cases."""
    parameters = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)

    def decorate(test: Any) -> Any:
        def all_cases(**others: Any) -> None:
            for value in cases:
                test(**others, **dict(zip(parameters, value if len(parameters) > 1 else (value,))))  # noqa: B905 3.9

        return all_cases

    cases = list(values)
    return decorate


class Missing:
    """Names that tests need and this machine lacks: modules that are not of the standard library, and names
    that stand-ins lack. Tests that fail with something missing have said nothing about the program."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """As the last finder of `sys.meta_path`: asked when nobody else has the module."""
        standard_names = getattr(sys, "stdlib_module_names", None)  # of Python 3.10 and newer
        if standard_names is not None and name.partition(".")[0] not in standard_names:
            self.names.append(name)

    def module(self, name: str) -> Any:
        """An empty module that notes what is looked for in it."""
        empty_module: Any = types.ModuleType(name)

        def look(attribute: str) -> Any:
            if not attribute.startswith("__"):
                self.names.append(f"{name}.{attribute}")
            raise AttributeError(f"{name}.{attribute} is not here")

        empty_module.__getattr__ = look
        return empty_module


def pytest_stand_in(missing: Missing, is_known: Callable[[], bool]) -> types.ModuleType:
    """A module that can be imported as `pytest`."""
    module = missing.module("pytest")
    module.raises = lambda kinds, match=None: Raises(kinds, match, is_known)
    module.approx = Approx
    module.mark = types.SimpleNamespace(parametrize=parametrize)
    module.param = _param
    module.fail = _fail
    return module


class _NoArray:
    """The class of what nobody has here."""


def allclose(got: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """As numpy's, of numbers and of lists of them."""
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(
            allclose(mine, theirs, rtol, atol)
            for mine, theirs in zip(got, expected)  # noqa: B905 Python 3.9
        )
    if isinstance(got, (list, tuple)) or isinstance(expected, (list, tuple)):
        return False
    return bool(got == expected) or bool(abs(got - expected) <= atol + rtol * abs(expected))


def numpy_stand_in(missing: Missing) -> types.ModuleType:
    """A module that can be imported as `numpy`: what EvalPlus compares floats with."""
    module = missing.module("numpy")
    module.ndarray, module.allclose = _NoArray, allclose
    module.float64 = module.float32 = float
    module.isclose = allclose
    return module


def _param(*values: Any, **_: Any) -> Any:
    return values if len(values) != 1 else values[0]


def _fail(reason: str = "") -> None:
    raise AssertionError(reason)
