"""Faults of a machine at each system call of what copies, runs and reads the work of an agent.

    source ──ast──► fault points: calls of os, shutil, socket, subprocess, tempfile, kernel, and open
        ├── modules of this process ──► their `os` is a stand-in that fails on the line of the point
        └── modules that run inside, and the program of hidden tests ──► `os.open(…)` becomes
                `__fault__("files:12:8", os.open)(…)` in the text that is sent there

Found in the syntax tree, so a new call is a new point.
"""

import ast
import contextlib
import errno
import marshal
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.rewards import swe_grading
from rllm.sandbox import bundle

ROOTS = ("os", "shutil", "socket", "subprocess", "tempfile", "kernel", "open")
HERE = (
    *("archive", "bundle", "interpreter", "launch", "leftovers", "packages", "process", "session", "spawner"),
    "verifier",
)
"""Modules of `rllm.sandbox` that run in this process."""
TESTS_PROGRAM = "swe_tests"
DEATH = 0
"""In place of an errno: the process that comes to the point is killed."""
ERRNOS = (errno.EMFILE, errno.ENOSPC, errno.ENOMEM, errno.EINTR)
FREE_OF_CALLS = (
    *("os._exit", "os.strerror", "os.uname", "os.fsencode", "os.fsdecode", "os.getpid", "os.geteuid"),
    *("os.WIFSTOPPED", "os.WSTOPSIG", "os.waitstatus_to_exitcode", "os.sysconf", "socket.CMSG_SPACE"),
    *("kernel.landlock_version",),
)
"""Calls that cannot fail so; all of `os.path` but `getsize` answers without an error."""
FAULT = """
import os as _os, signal as _signal, sys as _sys
def __fault__(point, function):
    if point == {point!r} and getattr(_sys, "rllm_armed", False):
        if not {number}:
            _os.kill(_os.getpid(), _signal.SIGKILL)
            _os._exit(137)  # the first process of a namespace cannot kill itself
        raise OSError({number}, _os.strerror({number}))
    return function
"""
ARMING = """
_receive_unarmed = receive
def receive(control):
    order, descriptors = _receive_unarmed(control)
    if order is not None and order.get("job") in {jobs!r}:
        import sys
        sys.rllm_armed = True
    return order, descriptors
"""


@dataclass(frozen=True)
class Point:
    """A call in a module, by its line and column."""

    module: str
    line: int
    column: int
    call: str

    @property
    def key(self) -> str:
        return f"{self.module}:{self.line}:{self.column}"


def source_of(module: str) -> str:
    if module == TESTS_PROGRAM:
        return (resources.files("rllm.rewards.programs") / "swe_tests.py").read_text("utf-8")
    folder = "rllm.sandbox" if module in HERE else bundle.PACKAGE
    return (resources.files(folder) / f"{module}.py").read_text("utf-8")


def points_of(module: str) -> list[Point]:
    calls = [node for node in ast.walk(ast.parse(source_of(module))) if isinstance(node, ast.Call)]
    points: list[Point] = []
    for call in calls:
        name = ast.unparse(call.func)
        is_query = name.startswith("os.path.") and name != "os.path.getsize"
        if name.partition(".")[0] in ROOTS and "(" not in name and not is_query and name not in FREE_OF_CALLS:
            points.append(Point(module, call.func.lineno, call.func.col_offset, name))
    return points


class _Injection(ast.NodeTransformer):
    def __init__(self, point: Point) -> None:
        self._point = point

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if (node.func.lineno, node.func.col_offset) == (self._point.line, self._point.column) and ast.unparse(
            node.func
        ) == self._point.call:
            node.func = ast.Call(
                ast.Name("__fault__", ast.Load()), [ast.Constant(self._point.key), node.func], []
            )
        return node


def faulty_source(point: Point, number: int) -> str:
    """The source of a point's module in which its call fails once the process is armed."""
    tree = _Injection(point).visit(ast.parse(source_of(point.module)))
    text = ast.unparse(ast.fix_missing_locations(tree))
    assert "__fault__(" in text
    # After `from __future__`, which has to come first.
    head, future, rest = text.partition("from __future__ import annotations\n")
    return (
        f"{head}{future}{FAULT.format(point=point.key, number=number)}{rest}"
        if future
        else (FAULT.format(point=point.key, number=number) + text)
    )


def faulty_modules(modules: bytes, point: Point, number: int, jobs: tuple[str, ...]) -> bytes:
    """`modules` of a sandbox's inside with a fault at one point: from the start, or from the first job of
    `jobs` on."""
    result: list[tuple[str, Any]] = [] if jobs else [("rllm_armed", "import sys; sys.rllm_armed = True")]
    for name, code in marshal.loads(modules):
        short = name.rpartition(".")[2]
        if name.startswith(bundle.PACKAGE + ".") and short in (point.module, "cell"):
            text = faulty_source(point, number) if short == point.module else source_of(short)
            text += ARMING.format(jobs=jobs) if short == "cell" else ""
            result.append((name, text))  # which the other side compiles
        else:
            result.append((name, code))
    return marshal.dumps(result)


@contextlib.contextmanager
def fault_inside(
    point: Point, number: int, *, jobs: tuple[str, ...] = (), worlds: int | None = None
) -> Iterator[None]:
    """Sandboxes that are opened meanwhile, or the first `worlds` of them, have the fault inside."""
    clean, count = bundle._modules, 0

    def modules(*, is_compiled: bool) -> bytes:
        nonlocal count
        count += 1
        code = clean(is_compiled=is_compiled)
        return faulty_modules(code, point, number, jobs) if worlds is None or count <= worlds else code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "_modules", modules)
        yield


@contextlib.contextmanager
def fault_in_tests_program(point: Point, number: int, *, worlds: int | None = None) -> Iterator[None]:
    """The program of hidden tests has the fault, or its first `worlds` runs do."""
    text = faulty_source(point, number)
    write_tests, count = swe_grading._write_tests, 0

    def write_faulty_tests(folder: Path, *arguments: Any) -> None:
        nonlocal count
        count += 1
        write_tests(folder, *arguments)
        if worlds is None or count <= worlds:
            armed = "import sys as _armed\n_armed.rllm_armed = True\n"
            (folder / "swe_tests.py").write_text(armed + text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swe_grading, "_write_tests", write_faulty_tests)
        yield


class _FaultyModule(ModuleType):
    """A module of the standard library whose functions fail when they are looked up on one line."""

    def __init__(self, module: ModuleType, fault: "_FaultHere") -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _fault=fault)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_module"], name)
        return self.__dict__["_fault"].of(value) if callable(value) else value


class _FaultHere:
    def __init__(self, point: Point, number: int, times: int | None) -> None:
        self.point, self.number, self.times, self.hits = point, number, times, 0

    def of(self, function: Any) -> Any:
        caller = sys._getframe(2)
        is_here = caller.f_lineno == self.point.line and caller.f_globals["__name__"] == module_name(
            self.point.module
        )
        if not is_here or function.__name__ != self.point.call.rpartition(".")[2]:
            return function
        if self.times is not None and self.hits >= self.times:
            return function
        self.hits += 1

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(self.number, os.strerror(self.number))

        return fail


def module_name(module: str) -> str:
    return f"rllm.sandbox.{module}"


@contextlib.contextmanager
def fault_here(point: Point, number: int, *, times: int | None = None) -> Iterator[_FaultHere]:
    """A module of this process has the fault, always or `times` times."""
    module = import_module(module_name(point.module))
    fault = _FaultHere(point, number, times)
    root = point.call.partition(".")[0]
    with pytest.MonkeyPatch.context() as patch:
        if root == "open":

            def open_here(*arguments: Any, **options: Any) -> Any:
                return fault.of(open)(*arguments, **options)

            patch.setattr(module, "open", open_here, raising=False)
        else:
            patch.setattr(module, root, _FaultyModule(sys.modules.get(root) or import_module(root), fault))
        yield fault
