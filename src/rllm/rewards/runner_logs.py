"""Runners of tests other than pytest: which one a command calls, how it is made to report, what its log says.

    test command ──runner_of──► Runner ──reporting_words──► the command that is run
    its log ──results_of──► (names of a test, status); None for a log that was cut off

A test has failed of which a log says both. Every test is there under the names that published rows give it:
with its file or package and parents, and alone where no other test has that name.

unittest and Django's runner report from inside, as pytest does (`programs/swe_tests.py`): no log is read.
"""

import json
import re
import secrets
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from rllm.errors import ConfigError
from rllm.rewards.swebench import CaseStatus

RESULTS = "{results}"
"""In a command, the path of the file that the runner writes its log to."""
SEPARATOR = " > "
"""Between the names of a test and of those that it is part of."""


class Runner(StrEnum):
    PYTEST = "pytest"
    UNITTEST = "unittest"
    DJANGO = "django"
    NODE = "node"
    JEST = "jest"
    VITEST = "vitest"
    GO = "go"
    CARGO = "cargo"
    TAP = "tap"


PYTHON_RUNNERS = (Runner.PYTEST, Runner.UNITTEST, Runner.DJANGO)
"""Those that report from inside of their process."""
_BY_PROGRAM = {
    "pytest": Runner.PYTEST,
    "py.test": Runner.PYTEST,
    "unittest": Runner.UNITTEST,
    "runtests.py": Runner.DJANGO,
    "jest": Runner.JEST,
    "vitest": Runner.VITEST,
    **dict.fromkeys(("prove", "tap", "tape"), Runner.TAP),
}
_BY_WORDS = {
    ("manage.py", "test"): Runner.DJANGO,
    ("django", "test"): Runner.DJANGO,
    ("node", "--test"): Runner.NODE,
    ("go", "test"): Runner.GO,
    ("cargo", "test"): Runner.CARGO,
}

_PYTHON_PROGRAMS = ("unittest", "runtests.py", "manage.py", "django")
_SWITCHES = (
    "--noinput",
    "--no-input",
    "--keepdb",
    "--failfast",
    "--reverse",
    "--verbose",
    "--quiet",
    "-v",
    "-q",
    "-f",
    "-b",
)
"""Options of unittest and of Django's runner that no value follows."""


def runner_of(words: Sequence[str], where: str) -> Runner:
    """The runner that a test command calls. Raises ConfigError, naming `where`, for an unknown one."""
    programs = [word.rsplit("/")[-1] for word in words]
    for pair, runner in _BY_WORDS.items():
        if pair in pairwise(programs):
            return runner
    for program in programs:
        if program in _BY_PROGRAM:
            return _BY_PROGRAM[program]
    raise ConfigError(
        f"{where}: its `test_command` is {' '.join(words)!r:.200}, which calls none of the runners that are "
        f"known here: {', '.join(Runner)}. Write the command that a script such as `npm test` calls."
    )


def reporting_words(runner: Runner, words: Sequence[str], canary: str = "") -> list[str]:
    """The command, made to report every test; `canary` is the path of one more file of tests to run.

    RESULTS in it stands for the file that is read then; without it, what is printed is.
    """
    if runner is Runner.NODE:
        options = ["--test-reporter=tap", f"--test-reporter-destination={RESULTS}"]
        return _with_options(words, "--test", options) + _path_beside_others(words, "--test", canary)
    if runner is Runner.JEST:
        paths = _path_beside_others(words, "jest", canary)
        return [*words, "--ci", "--json", f"--outputFile={RESULTS}", *paths]
    if runner is Runner.VITEST:
        paths = _path_beside_others(words, "vitest", canary)
        return [*words, "--run", "--reporter=json", f"--outputFile={RESULTS}", *paths]
    if runner is Runner.GO:
        return _with_options(words, "test", ["-json"])
    if runner in (Runner.UNITTEST, Runner.DJANGO):
        return _labels(runner, words, canary)
    if runner is Runner.CARGO:
        is_selected = any(each in ("--test", "--lib", "--bin", "--bins", "--doc") for each in words)
        name = canary.rsplit("/", 1)[-1].removesuffix(".rs")
        return _with_options(words, "test", ["--no-fail-fast", *(["--test", name] if is_selected else [])])
    return list(words)


def _labels(runner: Runner, words: Sequence[str], canary: str) -> list[str]:
    """The module or script that runs the tests, and its arguments; with the canary, where they name tests."""
    names = [word.rsplit("/")[-1] for word in words]
    first = next(place for place, name in enumerate(names) if name in _PYTHON_PROGRAMS)
    program, arguments = words[first], list(words[first + 1 :])
    labels = [
        word
        for before, word in pairwise(["", *(arguments[1:] if "test" in arguments[:1] else arguments)])
        if not word.startswith("-") and (not before.startswith("-") or "=" in before or before in _SWITCHES)
    ]
    if canary and labels and "discover" not in arguments:
        folder = program.rpartition("/")[0].removeprefix("./")
        is_beside = runner is Runner.DJANGO and bool(folder)
        path = canary.removeprefix(f"{folder}/") if is_beside else canary
        arguments.append(path.removesuffix(".py").replace("/", "."))
    return [program, *arguments]


def _with_options(words: Sequence[str], after: str, options: Sequence[str]) -> list[str]:
    place = list(words).index(after) + 1
    return [*words[:place], *options, *words[place:]]


def _path_beside_others(words: Sequence[str], program: str, path: str) -> list[str]:
    """`path`, where the command names the files to run."""
    names = [word.rsplit("/")[-1] for word in words]
    rest = [each for each in words[names.index(program) + 1 :] if each not in ("run", "watch", "--")]
    return [path] if path and any(not each.startswith("-") for each in rest) else []


# ---- a test that must fail ---------------------------------------------------------------------------------

_SUFFIXES = {
    Runner.UNITTEST: (".py",),
    Runner.DJANGO: (".py",),
    Runner.NODE: (".js", ".mjs", ".cjs"),
    Runner.JEST: (".js", ".jsx", ".ts", ".tsx", ".mjs", ".cjs"),
    Runner.VITEST: (".js", ".jsx", ".ts", ".tsx", ".mjs", ".cjs"),
    Runner.GO: (".go",),
    Runner.CARGO: (".rs",),
}
"""The suffixes of files of tests."""
_CANARIES = {
    Runner.UNITTEST: ("test_{name}.py", "{unittest}"),
    Runner.DJANGO: ("test_{name}.py", "{unittest}"),
    Runner.NODE: ("{name}.test.cjs", "require('node:test')('{name}', () => {{ throw new Error('no'); }});\n"),
    Runner.JEST: ("{name}.test.js", "test('{name}', () => {{ throw new Error('no'); }});\n"),
    Runner.VITEST: (
        "{name}.test.js",
        "import {{ test }} from 'vitest';\ntest('{name}', () => {{ throw new Error('no'); }});\n",
    ),
    Runner.GO: (
        "{name}_test.go",
        'package {{package}}\n\nimport "testing"\n\nfunc Test_{name}(t *testing.T) {{ t.Fail() }}\n',
    ),
    Runner.CARGO: ("{name}.rs", "#[test]\nfn {name}() {{ panic!(); }}\n"),
}
_UNITTEST = (
    "import unittest\n\n\nclass {name}(unittest.TestCase):\n    def test_{name}(self):\n        self.fail()\n"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class FailingTest:
    """A test that must fail, named as nobody can guess: where it passes, or is not in the log, the patch has
    changed how tests are run."""

    name: str
    path: str
    text: str
    beside: str
    """One of the row's files of tests; empty where it has none of the runner's."""

    def is_named(self, test: str) -> bool:
        return test.removeprefix("Test_") == self.name  # of Go, which wants no small letter after `Test`


def canary_of(runner: Runner, test_paths: Sequence[str]) -> FailingTest | None:
    """A new one, beside one of the paths; None for a runner of which only the log is known."""
    if runner not in _CANARIES:
        return None
    name = "".join(secrets.choice(string.ascii_lowercase) for _ in range(12))
    beside = next((each for each in test_paths if each.endswith(_SUFFIXES[runner])), "")
    folder = "tests" if runner is Runner.CARGO else beside.rpartition("/")[0]
    file, text = _CANARIES[runner]
    text = (_UNITTEST if text == "{unittest}" else text).format(name=name)
    path = f"{folder}/{file.format(name=name)}".removeprefix("/")
    return FailingTest(name=name, path=path, text=text, beside=beside)


# ---- logs --------------------------------------------------------------------------------------------------


Names = tuple[str, ...]
"""The names of one test: the whole id first, then others that it may go by."""
Results = list[tuple[Names, CaseStatus]]


def results_of(runner: Runner, log: str, root: str = "") -> Results | None:
    """The tests of a whole log; None for one that was cut off.

    `root` is the repository's folder, which paths in the log begin with.
    """
    return _READERS[runner](log, root)


def with_short_names(results: Iterable[tuple[Names, CaseStatus]]) -> dict[str, CaseStatus]:
    statuses: dict[str, CaseStatus] = {}
    owners: dict[str, set[str]] = {}
    for names, status in results:
        whole = names[0]
        statuses[whole] = worse_of(statuses.get(whole), status)
        for name in names[1:]:
            owners.setdefault(name, set()).add(whole)
    short = {name: min(ids) for name, ids in owners.items() if len(ids) == 1}
    return {name: statuses[whole] for name, whole in short.items()} | statuses


def worse_of(previous: CaseStatus | None, status: CaseStatus) -> CaseStatus:
    """The status of a test that is reported twice: a failure, if one of the two is."""
    return previous if previous is CaseStatus.FAILED or previous is CaseStatus.ERROR else status


_TAP_RESULT = re.compile(r"^( *)(not ok|ok)\b(?: (\d+))?(.*)$")
_TAP_DIRECTIVE = re.compile(r"(?<!\\)#\s*(SKIP|TODO)\b", re.IGNORECASE)
_TAP_PLAN = re.compile(r"^1\.\.(\d+)")
_TAP_INDENT = 4


_PROVE_FILE = re.compile(r"^(\S.*?) \.{2,} *$")
_PROVE_END = re.compile(r"^(?:ok|skipped: .*|Dubious, .*|No subtests run.*|Failed \d+/\d+ subtests.*)\s*$")


def _tap(log: str, root: str) -> Results | None:
    """One document, or what `prove -v` prints: several, each between the name of its file and a verdict."""
    lines = log.splitlines()
    if not any(line.startswith("Result: ") for line in lines[-3:]):
        return _tap_document(lines, root)
    files: list[tuple[str, list[str]]] = []
    for line in lines:
        if header := _PROVE_FILE.match(line):
            files.append((header[1], []))
        elif files:
            files[-1][1].append(line)
    results: Results = []
    for file, body in files:
        ends = [place for place, line in enumerate(body) if _PROVE_END.match(line)]
        tests = _tap_document(body[: ends[-1]], root) if ends else None
        if tests is None:
            results.append(((file,), CaseStatus.ERROR))
        else:
            results += [((f"{file}{SEPARATOR}{names[0]}", *names), status) for names, status in tests]
    return results


def _tap_document(lines: Sequence[str], root: str) -> Results | None:
    """TAP 13 and 14: subtests are indented, and stand before the line of what they are part of."""
    cases_by_level: dict[int, list[tuple[tuple[str, ...], CaseStatus]]] = {}
    """Depth -> paths of tests whose parent has not ended yet."""
    num_planned, num_top, end_of_block = None, 0, ""
    for line in lines:
        if end_of_block:
            end_of_block = "" if line == end_of_block else end_of_block
        elif line.strip() == "---":
            end_of_block = line.replace("---", "...")
        elif result := _TAP_RESULT.match(line):
            depth = len(result[1]) // _TAP_INDENT
            num_top += depth == 0
            directive = _TAP_DIRECTIVE.search(result[4])
            title = result[4][: directive.start()] if directive else result[4]
            name = title.strip().removeprefix("- ").replace("\\#", "#").removeprefix(f"{root}/") or result[3]
            inner = [((name, *path), status) for path, status in cases_by_level.pop(depth + 1, [])]
            status = _tap_status(result[2], directive[1] if directive else "")
            cases_by_level.setdefault(depth, []).extend([*inner, ((name,), status)])
        elif plan := _TAP_PLAN.match(line):
            num_planned = int(plan[1])
        elif line.startswith("Bail out!"):
            return None
    if num_planned is None or num_planned != num_top or set(cases_by_level) - {0}:
        return None
    return [((SEPARATOR.join(path), path[-1]), status) for path, status in cases_by_level.get(0, [])]


def _tap_status(word: str, directive: str) -> CaseStatus:
    if directive.upper() == "SKIP":
        return CaseStatus.SKIPPED
    if word.lower() == "ok":
        return CaseStatus.PASSED
    return CaseStatus.XFAIL if directive.upper() == "TODO" else CaseStatus.FAILED


_JEST_STATUSES = {
    "passed": CaseStatus.PASSED,
    "failed": CaseStatus.FAILED,
    **dict.fromkeys(("pending", "skipped", "todo", "disabled"), CaseStatus.SKIPPED),
}


def _jest(log: str, root: str) -> Results | None:
    """The JSON of Jest, which Vitest writes as well."""
    try:
        report = json.loads(log)
        files: list[dict[str, Any]] = report["testResults"]
        results: Results = []
        for file in files:
            path = str(file["name"]).removeprefix(f"{root}/")
            tests = file["assertionResults"]
            if file.get("status") == "failed" and not tests:
                results.append(((path,), CaseStatus.ERROR))
            for test in tests:
                titles = SEPARATOR.join([*test["ancestorTitles"], test["title"]])
                names = (f"{path}{SEPARATOR}{titles}", titles, str(test["fullName"]), str(test["title"]))
                results.append((tuple(dict.fromkeys(names)), _JEST_STATUSES[test["status"]]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return results


_GO_STATUSES = {"pass": CaseStatus.PASSED, "fail": CaseStatus.FAILED, "skip": CaseStatus.SKIPPED}


def _go(log: str, root: str) -> Results | None:
    """`go test -json`: one event a line. A package whose tests did not all end was cut off."""
    results: Results = []
    open_tests: Counter[tuple[str, str]] = Counter()
    is_ended = False
    for line in log.splitlines():
        try:
            event = json.loads(line)
            action, package, test = event["Action"], event.get("Package", ""), event.get("Test", "")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # of the build, or of the go command itself
        if action == "run":
            open_tests[package, test] += 1
        elif action in _GO_STATUSES and test:
            open_tests.pop((package, test), None)
            results.append(((f"{package}/{test}", test), _GO_STATUSES[action]))
        elif action in _GO_STATUSES:
            is_ended = True
            if action == "fail":
                results.append(((package,), CaseStatus.ERROR))
    # The process may end before its tests do: such a test is an error, not one that never ran.
    results += [((f"{package}/{test}", test), CaseStatus.ERROR) for package, test in open_tests]
    return results if is_ended else None


_CARGO_START = re.compile(r"^running (\d+) tests?$")
_CARGO_TEST = re.compile(r"^test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)\b")
_CARGO_STATUSES = {"ok": CaseStatus.PASSED, "FAILED": CaseStatus.FAILED, "ignored": CaseStatus.SKIPPED}


def _cargo(log: str, root: str) -> Results | None:
    """The results in the output of `cargo test`: `running N tests`, N lines, and the output of the tests that
    failed."""
    results: Results = []
    left, has_run = 0, False
    for line in log.splitlines():
        if not left:
            start = _CARGO_START.match(line)
            left, has_run = (int(start[1]), True) if start else (0, has_run)
        elif test := _CARGO_TEST.match(line):
            left -= 1
            results.append(((test[1],), _CARGO_STATUSES[test[2]]))
        # The summary came before as many results as were announced, so some of them cannot be read.
        elif line.startswith("test result:"):
            return None
    return results if has_run and not left else None


_READERS: dict[Runner, Callable[[str, str], Results | None]] = {
    Runner.NODE: _tap,
    Runner.TAP: _tap,
    Runner.JEST: _jest,
    Runner.VITEST: _jest,
    Runner.GO: _go,
    Runner.CARGO: _cargo,
}
