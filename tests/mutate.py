"""`make mutate`: does some test notice when a line is wrong?

    each room ──► its tests once, with coverage ──► line ──► the tests that run it, and their seconds
    a seed ──► mutants drawn among all places of a room ──► in a fork: the changed module, its quickest tests
           ──► killed | survived | not reached (no quick test of the room runs the line) | equivalent (marked)

A fork begins with the heavy libraries imported and none of rllm: a mutant costs what its tests cost. One
that runs out of time is killed, if its tests without the change do not. One that lives is tried with further
tests that run its line before it counts as survived.

Not drawn: types, methods of protocols, errors that are raised and their words, assertions, decorators, what
IGNORED_KEYWORDS names, lines of a log below warnings, and the number of a constant or a default that is a
limit, a time or a tolerance (`MAX_FRAMES = 12`, `timeout_s: float = 600.0`): that it is kept to is tested,
and is drawn where it is compared; whether it is 12 or 13 is a choice, which a test could only repeat. Nor a
seed that is a number (`default_rng(0)`): the draws are others, and as good. Nor whether two numbers that are
apart by exactly a tolerance are close enough.

    python tests/mutate.py --seed 7 --count 300
    python tests/mutate.py --room algorithms --seed 7 --count 40 --show
"""

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import re
import signal
import sys
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
ROOMS = {
    "algorithms": ("src/rllm/algorithms",),
    "trainer": ("src/rllm/trainer",),
    "rendering": ("src/rllm/rendering",),
    "engine": ("src/rllm/engine",),
    "inference": ("src/rllm/inference",),
    "store": ("src/rllm/store", "src/rllm/files"),
    "gateway": ("src/rllm/gateway/ledger",),
}
"""Room -> what is mutated. Files and locks are tested by what keeps runs."""
FURTHER_TESTS = {
    "engine": (
        "tests/workflows/test_built_in_workflows.py",
        "tests/workflows/test_worker_steps.py",
        "tests/workflows/test_workflow.py",
    ),
    "inference": (
        "tests/models/test_attention_wishes.py",
        "tests/vision/test_vision_models.py",
        "tests/vision/test_vision_servers.py",
    ),
    "rendering": ("tests/data/test_chat.py",),
    "trainer": (
        "tests/cli/test_distill_command.py",
        "tests/cli/test_doctor_algorithm.py",
        "tests/cli/test_dpo_command.py",
        "tests/cli/test_sft_command.py",
        "tests/data/test_chat.py",
        "tests/data/test_preferences.py",
        "tests/distributed/test_cards.py",
        "tests/distributed/test_heartbeat.py",
        "tests/distributed/test_programs.py",
        "tests/distributed/test_rank_memory.py",
        "tests/distributed/test_ranks_in_threads.py",
        "tests/integrations/test_backend_ranks.py",
        "tests/integrations/test_ray.py",
        "tests/vision/test_image_fetch.py",
        "tests/vision/test_vision_servers.py",
        "tests/vision/test_vision_training.py",
    ),
}
"""Room -> files that test it too, beside all of tests/ROOM."""
HEAVY = (
    "torch",
    "transformers",
    "safetensors.torch",
    "numpy",
    "hypothesis",
    "pytest",
    "pytest_asyncio",
    "orjson",
)
TESTS_S = 4.0
"""Seconds of tests a mutant is tried with: the quickest that reach its line. A second of a processor counts
whole, one of waiting a fifth, so that what else the machine does changes little."""
FURTHER_TESTS_S = 40.0
"""And of the next quickest, where it lives."""
MOST_NAMED = 20
"""Tests that name a word of the line: where more do, it is no word of their own."""
TIMES_LONGER = 5.0
QUIET = (
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
COVERAGE = CHECKOUT / ".mutate"
EQUIVALENT = CHECKOUT / "tests" / "equivalent_mutants.toml"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    room: str
    path: str
    line: int
    number: int
    """Which of the module's changes, in the order of `changes`."""
    change: str

    @property
    def module(self) -> str:
        return self.path.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def text(self) -> str:
        return (CHECKOUT / self.path).read_text().splitlines()[self.line - 1].strip()

    def statement(self) -> tuple[int, int, bool, set[str]]:
        """First and last line of the smallest statement around it, whether that runs at import, and the names
        that it then gives something, with those of the classes around it."""
        tree = ast.parse((CHECKOUT / self.path).read_text())
        around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and self._is_in(node)]
        inner = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):  # a default: of who runs the function
            return inner.body[0].lineno, inner.end_lineno or self.line, False, {inner.name}
        functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        in_body = any(self._is_in(part) for function in functions for part in function.body)
        has_block = bool(getattr(inner, "body", None))  # the head of an if or a loop: its own line alone
        last = self.line if has_block else inner.end_lineno or self.line
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        classes = [node for node in around if isinstance(node, ast.ClassDef)]
        return inner.lineno, last, not in_body, names | {each.name for each in (*functions, *classes)}

    def _is_in(self, node: ast.stmt) -> bool:
        return node.lineno <= self.line <= (node.end_lineno or node.lineno)


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
IGNORED_KEYWORDS = ("strict", "exist_ok", "maxsize", "indent", "digest_size", "repr")
"""What they change is a check of ours (`zip`), a race, speed (`lru_cache`), looks, or how many bits tell two
texts apart: no promise."""
GENERATORS = ("default_rng", "manual_seed", "Random")
SWAPPED_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "minimum": "maximum",
    "maximum": "minimum",
}


def changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Apply one change after another to `tree`, each taken back before the next: (line, change)."""
    for node in _living(tree):
        match node:
            case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS and not _is_tolerance(node):
                new = COMPARISONS[type(op)]()
                yield from _swapped(node.ops, 0, new, node.lineno, f"{_name(op)} to {_name(new)}")
            case ast.BinOp(op=op) if type(op) in OPERATORS and not _is_text(node) and not _is_type(node):
                new = OPERATORS[type(op)]()
                yield from _replaced(node, "op", new, f"{_name(op)} to {_name(new)}")
            case ast.BoolOp(op=op):
                new = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield from _replaced(node, "op", new, f"{_name(op)} to {_name(new)}")
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield from _replaced(
                    node, "test", ast.UnaryOp(ast.Not(), test), "condition negated", test.lineno
                )
            case ast.Constant(value=bool() as value):
                yield from _replaced(node, "value", not value, f"{value} to {not value}")
            case ast.Constant(value=int() as value):
                yield from _replaced(node, "value", value + 1, f"{value} to {value + 1}")
            case ast.Constant(value=float() as value):
                yield from _replaced(node, "value", value * 2 + 1, f"{value} to {value * 2 + 1}")
            case ast.Return(value=ast.expr() as value) if not _is_none_or_false(value):
                yield from _replaced(node, "value", ast.Constant(None), "returns None")
            case ast.Call(func=ast.Name(id=name)) if name in SWAPPED_NAMES:
                yield from _replaced(node.func, "id", SWAPPED_NAMES[name], f"{name} to {SWAPPED_NAMES[name]}")
            case ast.Call(func=ast.Attribute(attr=name)) if name in SWAPPED_NAMES:
                yield from _replaced(
                    node.func, "attr", SWAPPED_NAMES[name], f"{name} to {SWAPPED_NAMES[name]}"
                )
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield from _replaced(node, "value", ast.Constant(None), "call left out")


_LIMIT = re.compile(r"_?(MAX|MOST)(_\w+)?|_?[A-Z]\w*_S|(\w+_)?TOLERANCE")


def _living(tree: ast.Module) -> Iterator[Any]:
    """Nodes that run and decide something: no annotations, errors, assertions or imports for types."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "msg", "keywords") and isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.arg | ast.AnnAssign | ast.ClassDef
            ):
                continue
            if name == "args" and isinstance(node, ast.Call) and _is_generator(node):
                continue
            if isinstance(node, ast.arguments) and name in ("defaults", "kw_defaults"):
                value = _deciding_defaults(node)[name]
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _decides_nothing(child):
                    stack.append(child)


def _decides_nothing(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return True
    if isinstance(node, ast.keyword) and (
        node.arg in IGNORED_KEYWORDS or (_is_time(node.arg) and isinstance(node.value, ast.Constant))
    ):
        return True
    if isinstance(node, ast.Assign) and _is_limit(node):
        return True
    if isinstance(node, ast.AnnAssign) and _is_chosen(getattr(node.target, "id", ""), node.value):
        return True
    if isinstance(node, ast.Expr) and _is_log_line(node.value):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and all(map(_is_constant, node.body)):
        return True  # a protocol's, which nobody runs
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def _deciding_defaults(arguments: ast.arguments) -> dict[str, list[ast.expr | None]]:
    """Its defaults without those that are a choice of a limit or a time."""
    positional = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) or None :]
    return {
        name: [each for arg, each in zip(args, defaults, strict=False) if not _is_chosen(arg.arg, each)]
        for name, args, defaults in (
            ("defaults", positional, arguments.defaults),
            ("kw_defaults", arguments.kwonlyargs, arguments.kw_defaults),
        )
    }


def _is_chosen(name: str, default: ast.expr | None) -> bool:
    """`timeout_s: float = 600.0`, `max_steps: int = 5`; 0 mostly means that there is none, which is more."""
    is_number = isinstance(default, ast.Constant) and type(default.value) in (int, float) and default.value
    return bool(is_number) and (_is_time(name) or name.startswith("max_"))


def _is_log_line(node: ast.expr) -> bool:
    """`log.info(…)`: for whoever looks for it. Warnings and errors are read, and drawn."""
    call = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(call, ast.Attribute) and call.attr in ("debug", "info") and "log" in ast.dump(call.value)
    )


def _is_generator(node: ast.Call) -> bool:
    """`default_rng(0)`, with a seed that nobody chooses."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in GENERATORS and all(isinstance(each, ast.Constant) for each in node.args)


def _is_time(name: str | None) -> bool:
    """`timeout_s=600.0`: a number that is chosen, as that of a constant is."""
    return name is not None and name.endswith("_s")


def _is_constant(node: ast.stmt) -> bool:
    """A docstring, or the dots of a body that is none."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_limit(node: ast.Assign) -> bool:
    """`MAX_FRAMES = 12`, `MAX_BYTES = 1 << 20` or `WITHIN_S = 30.0`: nothing but numbers and constants."""
    names = [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    parts = (ast.Constant, ast.Name, ast.Tuple, ast.Load, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    return any(map(_LIMIT.fullmatch, names)) and all(isinstance(each, parts) for each in ast.walk(node.value))


def _is_tolerance(node: ast.Compare) -> bool:
    """`gap <= 1e-8`, `gap <= TOLERANCE`: whether exactly that much is close enough."""
    (*_, right) = node.comparators
    right = right.operand if isinstance(right, ast.UnaryOp) else right
    is_small = isinstance(right, ast.Constant) and isinstance(right.value, float) and 0.0 < right.value < 1e-2
    is_named = isinstance(right, ast.Name) and (right.id == "SAME" or right.id.endswith("TOLERANCE"))
    return isinstance(node.ops[-1], ast.Lt | ast.LtE | ast.Gt | ast.GtE) and (is_small or is_named)


def _replaced(node: Any, field: str, new: Any, change: str, line: int = 0) -> Iterator[tuple[int, str]]:
    old = getattr(node, field)
    setattr(node, field, new)
    yield line or node.lineno, change
    setattr(node, field, old)


def _swapped(values: list[Any], index: int, new: Any, line: int, change: str) -> Iterator[tuple[int, str]]:
    old, values[index] = values[index], new
    yield line, change
    values[index] = old


def _name(op: ast.AST) -> str:
    return type(op).__name__


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_none_or_false(node: ast.AST) -> bool:
    """Whoever asks for a truth takes None as False, which becomes True by a change of its own."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(each, ast.JoinedStr | ast.List | ast.Tuple) for each in sides) or any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) for each in sides
    )


def _is_type(node: ast.BinOp) -> bool:
    """`int | None` where it is a value, as in a cast."""
    return isinstance(node.op, ast.BitOr) and _is_none(node.right)


def mutants_of(room: str) -> list[Mutant]:
    return [
        Mutant(room, str(path.relative_to(CHECKOUT)), line, number, change)
        for path in sorted(path for source in ROOMS[room] for path in (CHECKOUT / source).rglob("*.py"))
        for number, (line, change) in enumerate(changes(ast.parse(path.read_text())))
    ]


def code_of(mutant: Mutant) -> CodeType:
    tree = ast.parse((CHECKOUT / mutant.path).read_text())
    for number, _ in enumerate(changes(tree)):
        if number == mutant.number:
            return compile(ast.fix_missing_locations(copy.deepcopy(tree)), mutant.path, "exec")
    raise ValueError(f"{mutant.path} has no change number {mutant.number}.")


class _OneModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from code that is given, everything else as ever."""

    def __init__(self, name: str, code: CodeType) -> None:
        self._name, self._code = name, code

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        assert found is not None
        spec = importlib.machinery.ModuleSpec(name, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        spec.has_location = True
        return spec

    def exec_module(self, module: Any) -> None:
        exec(self._code, module.__dict__)


def in_fork(work: Any, limit_s: float, log: Path) -> int | None:
    """Run `work` in a fork, its output in `log`: its exit code, None where it ran out of time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 70
        try:
            code = work()
        except BaseException:  # noqa: BLE001  the fork ends here, and the log says why
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_pytest(arguments: list[str], plugins: list[Any] | None = None) -> int:
    import pytest

    return int(pytest.main([*QUIET, *arguments], plugins=plugins))


class _Recorder:
    """Which lines each test runs, and how long it takes; written down after each file of tests."""

    def __init__(self, room: str, path: Path, known: dict[str, Any]) -> None:
        from coverage import Coverage

        self._path, self._known = path, known
        self._coverage = Coverage(
            source=[str(CHECKOUT / each) for each in ROOMS[room]], data_file=None, config_file=False
        )
        self._coverage.start()
        self._file, self._file_began_at = "", 0.0
        self._began = (0.0, 0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        if file != self._file:
            if self._file:
                self.save()
            self._file, self._file_began_at = file, time.time()
            _forget(self._known, file)
        self._coverage.switch_context(nodeid)
        self._began = (sum(os.times()[:4]), time.monotonic())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        cpu_s = sum(os.times()[:4]) - self._began[0]
        waited_s = (time.monotonic() - self._began[1]) / TIMES_LONGER
        self._known["seconds"][nodeid] = max(cpu_s, waited_s)

    def save(self) -> None:
        self._coverage.switch_context("")
        data = self._coverage.get_data()
        data.set_query_contexts([re.escape(f"{self._file}::")])
        for file in data.measured_files():
            of_file = self._known["lines"].setdefault(str(Path(file).relative_to(CHECKOUT)), {})
            for line, tests in data.contexts_by_lineno(file).items():
                of_file.setdefault(str(line), []).extend(tests)
        self._known["ran"][self._file] = self._file_began_at
        self._path.write_text(json.dumps(self._known))


def _forget(known: dict[str, Any], file: str) -> None:
    for of_file in known["lines"].values():
        for line, tests in of_file.items():
            of_file[line] = [each for each in tests if each.partition("::")[0] != file]
    known["seconds"] = {each: s for each, s in known["seconds"].items() if each.partition("::")[0] != file}


def reached(room: str) -> dict[str, Any]:
    """What the room's tests reach, kept; a file of tests runs again when it or what it reaches changes."""
    COVERAGE.mkdir(exist_ok=True)
    path = COVERAGE / f"{room}.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    known = {"seconds": {}, "lines": {}, "ran": {}} | known
    helpers, tests = list[str](), list[str]()
    further = [CHECKOUT / each for each in FURTHER_TESTS.get(room, ())]
    for each in [*sorted((CHECKOUT / "tests" / room).rglob("*.py")), *further]:
        (tests if each.name.startswith("test_") else helpers).append(str(each.relative_to(CHECKOUT)))
    needs: dict[str, set[str]] = {test: {test, *helpers} for test in tests}
    for source, of_file in known["lines"].items():
        for test in {each.partition("::")[0] for ids in of_file.values() for each in ids} & {*tests}:
            needs[test].add(source)
    for file in {*known["ran"]} - {*tests}:
        _forget(known, file)
    stale = [
        test
        for test in tests
        if any((CHECKOUT / each).stat().st_mtime > known["ran"].get(test, 0.0) for each in needs[test])
    ]
    if stale:
        print(f"{room}: which test reaches which line …", file=sys.stderr, flush=True)

        def record() -> int:
            recorder = _Recorder(room, path, known)
            code = run_pytest([*stale, "--maxfail=1000"], [recorder])
            recorder.save()
            return code

        code = in_fork(record, 3600.0, COVERAGE / f"{room}.log")
        if code != 0:
            path.unlink(missing_ok=True)
            sys.exit(f"the tests of {room} do not pass unchanged ({code}); see {COVERAGE / f'{room}.log'}")
    return json.loads(path.read_text())


@cache
def uses_in(path: str) -> dict[str, set[int]]:
    """Name -> lines of the file that read it, as a name of its own or as an attribute."""
    uses: dict[str, set[int]] = {}
    for node in ast.walk(ast.parse((CHECKOUT / path).read_text())):
        read = node.target if isinstance(node, ast.AugAssign) else node
        name = read.id if isinstance(read, ast.Name) else getattr(read, "attr", None)
        if isinstance(name, str) and (read is not node or isinstance(getattr(read, "ctx", None), ast.Load)):
            uses.setdefault(name, set()).add(read.lineno)
    return uses


@cache
def text_of_test(test: str) -> str:
    """The file that holds it."""
    return (CHECKOUT / test.partition("::")[0]).read_text()


def tests_of(mutant: Mutant, known: dict[str, Any]) -> list[tuple[list[str], float]]:
    """The quickest tests that run the mutant's statement, with their seconds, and further ones: first those
    whose names name something of its line, then those of files that import its module, and one of each
    function before a second case of it.

    What runs at import is tried with the tests that read, anywhere in the room, the name that it gives
    something; with those that run anything of its module where there is none.
    """
    seconds, lines = known["seconds"], known["lines"].get(mutant.path, {})
    first, last, at_import, names = mutant.statement()
    tried = [lines.get(str(line), []) for line in range(first, last + 1)]
    if at_import:
        readers = [
            of_file.get(str(line), [])
            for path, of_file in known["lines"].items()
            for name in names
            for line in uses_in(path).get(name, ())
        ]
        tried = readers if any(readers) else list(lines.values())
    candidates = {test for tests in tried for test in tests if test in seconds}
    if at_import:  # a test may read an attribute that no line of the room reads
        candidates |= {
            each for each in seconds if any(name in text_of_test(each) for name in names if name[0].isupper())
        }
    cases = Counter[str]()
    ranks: dict[
        str, int
    ] = {}  # of a case among those of its function: each function is tried before a second case
    for test in sorted(candidates, key=lambda each: (seconds[each], each)):
        function = test.partition("[")[0]
        ranks[test] = cases[function] + 1000 * (mutant.module not in text_of_test(test))
        cases[function] += 1
    for word in set(re.findall(r"[a-z_]{4,}", mutant.text())):
        named = [test for test in candidates if word in test]
        if len(named) <= MOST_NAMED:
            ranks |= dict.fromkeys(named, -1)
    left = sorted(candidates, key=lambda each: (ranks[each], seconds[each], each))
    rounds = list[tuple[list[str], float]]()
    for most_s in (TESTS_S, FURTHER_TESTS_S):
        chosen, total = list[str](), 0.0
        for test in left:
            if total + seconds[test] <= most_s:
                chosen.append(test)
                total += seconds[test]
        left = [each for each in left if each not in chosen]
        rounds.append((chosen, total))
    return rounds


def fate(known: dict[str, Any], mutant: Mutant) -> str:
    rounds = [(chosen, seconds) for chosen, seconds in tests_of(mutant, known) if chosen]
    if not rounds:
        return "not reached"
    lives = all(_lives(mutant, chosen, seconds) for chosen, seconds in rounds)
    return "survived" if lives else "killed"


def _lives(mutant: Mutant, chosen: list[str], seconds: float) -> bool:
    """Whether the tests pass with the mutant."""

    def work() -> int:
        sys.meta_path.insert(0, _OneModule(mutant.module, code_of(mutant)))
        return run_pytest(chosen)

    log = COVERAGE / f"mutant-{os.getpid()}-{mutant.module}-{mutant.number}.log"
    limit_s = max(20.0, TIMES_LONGER * seconds)
    code = in_fork(work, limit_s, log)
    while code is None and in_fork(partial(run_pytest, chosen), limit_s / 2, log) is None:
        limit_s *= 2  # a busy machine: the code as it is needs more than half of that as well
        code = in_fork(work, limit_s, log)
    log.unlink(missing_ok=True)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--count", type=int, default=300, help="mutants in all, as many of each room")
    parser.add_argument("--room", choices=ROOMS, action="append")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants at once")
    parser.add_argument("--show", action="store_true", help="every mutant, not only those that live")
    asked = parser.parse_args()
    os.chdir(CHECKOUT)
    sys.path.insert(0, str(CHECKOUT / "src"))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in HEAVY:
        importlib.import_module(name)
    marks = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", []) if EQUIVALENT.is_file() else []
    equivalent = {(each["path"], each["line"], each["change"]) for each in marks}
    rooms = asked.room or list(ROOMS)
    print(f"seed {asked.seed}, {asked.count} mutants of {', '.join(rooms)}")
    fates: Counter[str] = Counter()
    began = time.process_time() + sum(os.times()[2:4])
    for room in rooms:
        known = reached(room)
        drawn = random.Random(f"{asked.seed}/{room}").sample(mutants_of(room), asked.count // len(rooms))
        with ThreadPoolExecutor(asked.jobs) as pool:
            for mutant, end in zip(drawn, pool.map(partial(fate, known), drawn), strict=True):
                if end == "survived" and (mutant.path, mutant.text(), mutant.change) in equivalent:
                    end = "equivalent"
                fates[end] += 1
                if asked.show or end in ("survived", "not reached"):
                    print(
                        f"{end:11}  {mutant.path}:{mutant.line}  {mutant.change}:  {mutant.text()}",
                        flush=True,
                    )
    cpu_s = time.process_time() + sum(os.times()[2:4]) - began
    print(", ".join(f"{number} {end}" for end, number in fates.most_common()), f"({cpu_s:.0f} s of CPU)")
    tried = sum(fates.values()) - fates["not reached"]
    too_many = {
        "survived": 0.02 * tried,
        "equivalent": 0.10 * tried,
        "not reached": 0.05 * sum(fates.values()),
    }
    sys.exit(any(fates[end] > most for end, most in too_many.items()))


if __name__ == "__main__":
    main()
