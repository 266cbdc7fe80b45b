"""`make mutate`: does some test notice when a line is wrong?

    each room ──► its tests once, with coverage ──► line ──► the tests that run it, and their seconds
    a seed ──► mutants drawn among all places of a room ──► in a fork: the changed module, its quickest tests
           ──► killed | survived | not reached (no quick test of the room runs the line) | equivalent (marked)

A fork begins with the heavy libraries imported and none of rllm: a mutant costs what its tests cost. One
that runs out of time is killed, if its tests without the change do not. One that lives is tried with further
tests that run its line before it counts as survived.

Which changes are made, and which are not, is in `mutations`.

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

from mutations import changes

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
NO_TESTS = 5
"""Exit code of pytest where all tests are deselected."""
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
        if code not in (0, NO_TESTS):  # a file may hold nothing but slow tests
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
    of_signatures = set[str]()
    if first > mutant.line:  # a default, which a test may read without a call
        of_signatures = {each for each in seconds if "inspect.signature(" in text_of_test(each)}
        candidates |= of_signatures
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
    ranks |= dict.fromkeys(of_signatures, -1)
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
