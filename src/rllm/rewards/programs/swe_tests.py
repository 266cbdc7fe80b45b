"""Runs hidden tests on a patch, in a world where nobody was before: runs inside, from /tests, which it reads.

    plan.json ──► patch ──► test files and what steers a test run as they were ──► hidden tests, their twins
                    ──► a tree whose tests have run already: nothing more is run
                    ──► pytest, unittest or Django's runner, in its own process ── a pipe ──┐
                    ──► another runner ──► its log ─────────────────────────────────────────┴─► report.json

This process imports nothing of the patch, no other process may read its memory, and it seals the report with
a secret that comes on stdin; what a program prints, or writes in its place, has no seal. The process of the
tests knows neither the secret nor which tests are twins: what it says of a test counts if its twin agrees,
which runs in another process.
Standard library alone, but for pytest.
"""

import ast
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import random
import re
import runpy
import select
import stat
import string
import subprocess
import sys
import tempfile

TESTS, REPOSITORY, REPORT = "/tests", "/testbed", "/logs/verifier/report.json"
PATCH, TEST_PATCH = f"{TESTS}/model.patch", f"{TESTS}/test.patch"
TEST_FOLDERS = ("test", "tests", "testing", "__tests__")
TEST_FILE = re.compile(
    r"(?:test_.*|.*_test|tests?|conftest)\.py|.*_test\.go|(?:.*[.-])?(?:test|spec)\.[cm]?[jt]sx?"
)
INSTALLED = re.compile(r".*\.(?:dist|egg)-info|node_modules|\.cargo", re.IGNORECASE)
"""Folders of packages that are there already, and of cargo's settings."""
MOST_LOG_BYTES = 16 << 20


PR_SET_DUMPABLE = 4
MOST_TWINS = 20
"""Tests that get a twin, drawn among those that have to pass."""
STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
FIELD, END = "\x1f", "\x1e"
"""End a field, and an event, of what the process of the tests writes."""


def main() -> None:
    with open(f"{TESTS}/plan.json", encoding="utf-8") as stream:
        plan = json.load(stream)
    os.chdir(REPOSITORY)
    # It names the hidden tests, so it is gone before anything of the patch runs.
    os.unlink(f"{TESTS}/plan.json")
    if len(sys.argv) > 1:
        run(plan, int(sys.argv[2]))
        sys.stdout.flush()
        os._exit(0)  # threads and exit functions of the patch are not waited for
    # No process of the patch reads the secret through /proc, or by ptrace.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot be made non-dumpable")
    sys.path.insert(0, TESTS)
    # Before the patch, which may bring a module of the same name.
    make_twins = importlib.import_module("swe_twins").make_twins
    sys.path.remove(TESTS)
    secret = sys.stdin.readline().strip()
    fault = prepare(plan)
    if fault:
        write_report({"fault": fault}, secret)
        return
    tree = "" if plan["known_trees"] is None else tree_hash()
    if tree and tree in plan["known_trees"]:
        write_report({"known_tree": tree}, secret)
        return
    draw = random.Random(plan["draw"])
    canary = ""
    if plan["runner"] == "pytest" and plan["hidden"]:
        canary = place_canary(plan, draw)
    elif plan["canary"]:
        write(plan["canary"]["path"], canary_text(plan["canary"]))
        canary = f".test_{plan['canary']['name']}"
    if not plan["is_python"]:
        write_report({**run_command(plan["words"]), "tree": tree}, secret)
        return
    # Before the tests, which may write to the files that are copied.
    copies = copies_of_tests(plan, make_twins, draw) if plan["hidden"] else []
    write_report({**test_report(plan, canary, copies, draw), "tree": tree}, secret)


# ---- the tree ----------------------------------------------------------------------------------------------


def git(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["git", *words], capture_output=True, text=True, errors="surrogateescape", check=False
    )


def prepare(plan: dict) -> str:
    """Apply the patch; for hidden tests, undo what it does to tests, and bring them. The reason where that
    fails."""
    others = set(git_paths("ls-files", "-z", "--others"))
    fault = apply_patch(plan["apply"]) if os.path.getsize(PATCH) else ""
    if fault:
        return fault
    if not plan["hidden"]:
        plan["words"] = [word for word in plan["words"] if not is_hidden(word, plan)]
        plan["run"] = []
        return ""
    undone = restore(others, plan)
    if os.path.getsize(TEST_PATCH):
        done = git("apply", "--whitespace=nowarn", TEST_PATCH)
        if done.returncode:
            return f"the row's test patch does not apply: {done.stderr.strip()[-300:]}"
    for path, text in plan["files"].items():
        write(path, text)
    plan["run"] = sorted({each.partition("::")[0] for each in plan["ids"] if "::" in each})
    plan["run"] = [path for path in plan["run"] if os.path.exists(path)] or [
        path for path in plan["files"] if os.path.basename(path).startswith("test")
    ]
    print("put back as they were:", ", ".join(undone) or "nothing")
    return ""


def is_hidden(word: str, plan: dict) -> bool:
    """Whether a word of the test command names a file of hidden tests that is not there without them."""
    path = word.partition("::")[0].removeprefix("./")
    hidden_files = [each for each in plan["tests"] if not os.path.exists(each)]
    modules = [each.removesuffix(".py").replace("/", ".") for each in hidden_files]
    return path in hidden_files or any(word == each or word.startswith(f"{each}.") for each in modules)


def apply_patch(commands: "list[str]") -> str:
    """Try one after the other. The reason where none applies it, or where one that is not git's writes to
    what git reads its settings from: no git is run after that."""
    for command in commands:
        files_before = None if command.startswith("git ") else guarded_files()
        done = subprocess.run(command, shell=True, check=False)
        if files_before is not None and guarded_files() != files_before:
            return "the patch reaches into .git"
        if done.returncode == 0:
            return ""
        git("reset", "-q", "--hard")
        git("clean", "-fdq")
    return "the patch does not apply"


def guarded_files() -> "set[tuple]":
    """Every file of the tests and of each `.git`, with what changes where it is written to."""
    files = set()
    for top in (".", TESTS):
        for folder, folders, names in os.walk(top, onerror=fail):
            is_guarded = top == TESTS or ".git" in folder.split("/")
            for name in [*folders, *names]:
                if is_guarded or name == ".git":
                    path = os.path.join(folder, name)
                    about = os.lstat(path)
                    files.add((path, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
    return files


def fail(error: OSError) -> None:
    """For os.walk, which leaves out folders that it cannot read."""
    raise error


def git_paths(*words: str) -> "list[str]":
    done = git(*words)
    if done.returncode:  # no list is not an empty one
        raise OSError(f"git {words[0]} failed with code {done.returncode}: {done.stderr.strip()[-300:]}")
    return [each for each in done.stdout.split("\0") if each]


def restore(others: "set[str]", plan: dict) -> "list[str]":
    """Files that the patch changed and that say how tests run, or are tests: as they were, or gone."""
    exempt, tests = set(plan["exempt"]), set(plan["tests"])
    named_files = set(map(file_of, plan["ids"]))
    # attributes first: they say what git takes for a change
    attributes = [path for path in changed_files(others) if os.path.basename(path) == ".gitattributes"]
    undo(attributes)
    undone = sorted(
        path
        for path in changed_files(others)
        if path in tests or (path not in exempt and (path in named_files or is_protected(path, plan)))
    )
    undo(undone)
    return sorted([*attributes, *undone])


def changed_files(others: "set[str]") -> "set[str]":
    new = set(git_paths("ls-files", "-z", "--others")) - others
    return new | set(git_paths("diff", "-z", "--name-only", "--no-renames", "HEAD"))


def file_of(test: str) -> str:
    """The file that the id of a test of pytest's names; none for a doctest, which is in the source."""
    path, _, name = test.partition("::")
    return "" if "." in name.partition("[")[0] else path


def undo(paths: "list[str]") -> None:
    for path in paths:
        if git("cat-file", "-e", f"HEAD:{path}").returncode == 0:
            git("checkout", "-q", "HEAD", "--", path)
        elif os.path.lexists(path):
            os.unlink(path)


def is_protected(path: str, plan: dict) -> bool:
    *folders, name = path.split("/")
    if any(re.fullmatch(pattern, name) for pattern in plan["steering"]):
        return True
    if any(INSTALLED.fullmatch(each) for each in folders):
        return True
    return bool(TEST_FILE.fullmatch(name)) or any(each in TEST_FOLDERS for each in folders)


def tree_hash() -> str:
    """A hash of all paths of the repository with kind, mode and content, but for `.git` at its top."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(".", onerror=fail):
        folders[:] = sorted(each for each in folders if (folder, each) != (".", ".git"))
        for name in sorted([*folders, *names]):
            path = os.path.join(folder, name)
            mode, content = os.lstat(path).st_mode, b""
            if stat.S_ISLNK(mode):
                content = os.fsencode(os.readlink(path))
            elif stat.S_ISREG(mode):
                with open(path, "rb") as stream:
                    content = hashlib.sha256(stream.read()).digest()
            digest.update(b"%d %d %s\0" % (mode, len(content), os.fsencode(path)) + content)
    return digest.hexdigest()


def write(path: str, text: str) -> None:
    """A file of the repository, through no link."""
    here = "."
    for part in path.split("/")[:-1]:
        here = f"{here}/{part}"
        # The patch may have put a link in place of a folder, and a file written through it lands elsewhere.
        if os.path.islink(here):
            os.unlink(here)
        os.makedirs(here, exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        stream.write(text)


def place_canary(plan: dict, draw: random.Random) -> str:
    """A test that must fail, beside one of the others and named like it: where it passes, pytest itself was
    changed."""
    path = new_path(draw.choice(plan["run"] or ["test_.py"]), draw)
    name = os.path.basename(path).removesuffix(".py")
    low, high = draw.sample(range(100), 2)
    write(path, f"def {name}():\n    assert {low} == {high}\n")
    plan["run"].append(path)
    return f"{path}::{name}"


def new_path(path: str, draw: random.Random) -> str:
    """Path of one more file of tests, beside another and named like it."""
    folder, file = os.path.split(path)
    letters = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9)))
    name = "test_" + "_".join(filter(None, [file.removesuffix(".py").removeprefix("test_"), letters]))
    return os.path.join(folder, f"{name}.py")


class Copies:
    """A file of tests, a plain copy of it and one with twins: a patch has to read both to tell them apart."""

    def __init__(self, path: str, functions: "list[str]", texts: "tuple[str, str]", draw: random.Random):
        self.path, self.functions = path, functions
        self.paths = (new_path(path, draw), new_path(path, draw))
        """The places of the plain copy and of the twins."""
        self._texts = texts

    def write(self) -> None:
        for path, text in zip(self.paths, self._texts, strict=False):
            write(path, text)


def copies_of_tests(plan: dict, make_twins, draw: random.Random) -> "list[Copies]":
    """Copies of the files of some of the tests that have to pass; none before Python 3.9, which cannot write
    a syntax tree."""
    if not hasattr(ast, "unparse"):
        return []
    names_by_path: dict[str, set[str]] = {}
    tests = plan["fail_to_pass"] or plan["ids"]
    for test in draw.sample(tests, min(len(tests), MOST_TWINS)):
        for path, name in functions_named(test, plan):
            names_by_path.setdefault(path, set()).add(name)
    copies = []
    for path, names in sorted(names_by_path.items()):
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            source = stream.read()
        try:
            twins, plain, functions = make_twins(source, sorted(names), draw)
        except SyntaxError:  # it is an error of the tests as well
            continue
        if functions:
            copies.append(Copies(path, functions, (plain, twins), draw))
    return copies


def functions_named(test: str, plan: dict) -> "list[tuple[str, str]]":
    """(path, `Class::function`) of the functions that a name of a test may mean."""
    if plan["runner"] == "pytest":
        path, _, name = test.partition("::")
        name = name.partition("[")[0]
        return [(path, name)] if name and path.endswith(".py") and os.path.isfile(path) else []
    match = re.fullmatch(r"(\w+) \([\w.]*?(\w+)(?:\.\1)?\)", test)
    parts = [match[2], match[1]] if match else test.split(".")[-2:]
    paths = [path for path in plan["tests"] if path.endswith(".py") and os.path.isfile(path)]
    return [(path, "::".join(parts)) for path in paths]


def with_labels(plan: dict, paths: "list[str]") -> "list[str]":
    """The words of unittest, with these files where the words name files."""
    words = plan["words"]
    label, module = words[-1], plan["canary"]["path"].removesuffix(".py").replace("/", ".")
    if not module.endswith(label):  # the files are found by their names
        return words
    start = len(module) - len(label)  # the canary is the last that they name
    return [*words, *(path.removesuffix(".py").replace("/", ".")[start:] for path in paths)]


def canary_text(canary: dict) -> str:
    """The text of a canary beside one of the tests; in Go it is of that test's package."""
    package = ""
    if "{package}" in canary["text"]:
        with open(canary["beside"], encoding="utf-8") as stream:
            package = next((line.split()[1] for line in stream if line.startswith("package ")), "main")
    return canary["text"].replace("{package}", package)


# ---- the tests ---------------------------------------------------------------------------------------------


def run_command(words: "list[str]") -> dict:
    """The log of a runner: the file that its words name, or what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "".join(random.SystemRandom().choices(string.ascii_lowercase, k=16)))
        output_path = f"{path}.out"
        has_file = any("{results}" in word for word in words)
        with open(output_path, "wb") as stream:
            process = subprocess.run(
                [word.replace("{results}", path) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if has_file and (os.path.islink(path) or not os.path.isfile(path)):
            log = b""
        else:
            with open(path if has_file else output_path, "rb") as stream:
                log = stream.read(MOST_LOG_BYTES + 1)
        with open(output_path, "rb") as stream:
            stream.seek(max(os.path.getsize(output_path) - 2000, 0))
            print(stream.read().decode("utf-8", "replace"))
    if len(log) > MOST_LOG_BYTES:
        return {"fault": f"the log of the tests has more than {MOST_LOG_BYTES:,} bytes"}
    return {"code": process.returncode, "log": log.decode("utf-8", "replace")}


def test_report(plan: dict, canary: str, copies: "list[Copies]", draw: random.Random) -> dict:
    """Run the tests, and copies of those that passed; return how each of them ended."""
    statuses, names = watch_tests(plan["runner"], plan["words"], plan["run"])
    canary_status = ""
    for test in [*statuses] if canary else []:
        if test == canary or (canary[0] == "." and test.endswith(canary)):
            canary_status = statuses.pop(test)
    names = {test: others for test, others in names.items() if test in statuses and others}
    twins = run_copies(plan, statuses, copies, draw)
    return {"canary": canary_status, "tests": statuses, "names": names, "twins": twins}


def run_copies(
    plan: dict, statuses: "dict[str, str]", copies: "list[Copies]", draw: random.Random
) -> "dict[str, list[str]]":
    """Test that passed and has copies -> its status, that of its plain copy, and that of its twin.

    The copies run behind the tests and in another process: a module that is there twice may change what the
    others see.
    """
    is_pytest = plan["runner"] == "pytest"
    copy_of_test = {
        test: copy
        for test, status in statuses.items()
        for copy in copies
        if status == "PASSED"
        and has_file(test, copy.path, is_pytest)
        and function_name(test, is_pytest)[0] in copy.functions
    }
    if not copy_of_test:
        return {}
    # By hash: of the reference solution the same are drawn, also where others passed beside them.
    tests = sorted(copy_of_test, key=lambda test: hashlib.sha256(f"{plan['draw']} {test}".encode()).digest())
    tests = tests[:MOST_TWINS]
    for copy in copies:
        copy.write()
    if is_pytest:
        # What a twin says of its failure is not read, and takes most of its time.
        words = [*plan["words"], "--tb=no"]
        files = [
            "".join((path, "::", *function_name(test, True)))
            for test in tests
            for path in copy_of_test[test].paths
        ]
        draw.shuffle(files)
    else:
        paths = [path for copy in copies for path in copy.paths]
        words, files = with_labels(plan, draw.sample(paths, len(paths))), []
    copy_statuses, _ = watch_tests(plan["runner"], words, files)

    def copy_status(path, name):
        ends = (
            status
            for test, status in copy_statuses.items()
            if has_file(test, path, is_pytest) and function_name(test, is_pytest) == name
        )
        return next(ends, "missing")

    return {
        test: [
            statuses[test],
            *(copy_status(path, function_name(test, is_pytest)) for path in copy_of_test[test].paths),
        ]
        for test in tests
    }


def function_name(test: str, is_pytest: bool) -> "tuple[str, str]":
    """(`Class::function`, parameters in brackets)"""
    if is_pytest:
        name, bracket, parameters = test.partition("::")[2].partition("[")
        return name, bracket + parameters
    return "::".join(test.split(".")[-2:]), ""


def has_file(test: str, path: str, is_pytest: bool) -> bool:
    """Whether a file has a test. unittest names its module, from some folder on."""
    if is_pytest:
        return test.partition("::")[0] == path
    module, path_module = ".".join(test.split(".")[:-2]), path.removesuffix(".py").replace("/", ".")
    return f".{path_module}".endswith(f".{module}")


def watch_tests(
    runner: str, words: "list[str]", files: "list[str]"
) -> "tuple[dict[str, str], dict[str, list[str]]]":
    """(status of each test, its other names), as the process of the tests says while they run."""
    with open(f"{TESTS}/plan.json", "w", encoding="utf-8") as stream:
        json.dump({"runner": runner, "words": words, "files": files}, stream)
    ours, theirs = os.pipe()
    command = [sys.executable, os.path.abspath(__file__), "run", str(theirs)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs])
    os.close(theirs)
    try:
        text = b"".join(read_until_end(process, ours)).decode("utf-8", "replace")
    finally:
        os.close(ours)  # else a process that writes without end would never be refused
    process.wait()
    statuses: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for event in text.split(END)[:-1]:
        test, _, rest = event.partition(FIELD)
        status, *others = rest.split(FIELD)
        if status not in STATUSES:  # written by the patch: no test of ours ends so
            continue
        names[test] = others
        if statuses.get(test) not in ("FAILED", "ERROR"):
            statuses[test] = status
    return statuses, names


def read_until_end(process: "subprocess.Popen[bytes]", descriptor: int) -> "list[bytes]":
    """Read MOST_LOG_BYTES, or until the process ends: programs that it leaves may hold the pipe open."""
    parts, size = [], 0
    while size <= MOST_LOG_BYTES:
        has_ended = process.poll() is not None
        ready, _, _ = select.select([descriptor], [], [], 0.0 if has_ended else 0.05)
        part = os.read(descriptor, 65536) if ready else b""
        if not part and (has_ended or ready):
            break
        parts.append(part)
        size += len(part)
    return parts


def run(plan: dict, descriptor: int) -> None:
    """Run the tests in this process, which imports what was patched, and write how each ends."""
    (run_pytest if plan["runner"] == "pytest" else run_unittest)(plan, descriptor)


def run_unittest(plan: dict, descriptor: int) -> None:
    """unittest, or a program that runs tests of unittest's as Django's does."""
    import unittest

    watch_unittest(unittest.TestResult, descriptor)
    first, *rest = plan["words"]
    sys.argv = [first, *rest]
    with contextlib.suppress(SystemExit):  # its code says less than the events
        if first.endswith(".py"):
            sys.path.append(os.path.dirname(os.path.abspath(first)))
            runpy.run_path(first, run_name="__main__")
        else:
            runpy.run_module(first, run_name="__main__", alter_sys=True)


def write_event(descriptor: int, test: str, status: str, names: "tuple[str, ...]" = ()) -> None:
    fields = [field.replace(FIELD, " ").replace(END, " ") for field in (test, status, *names)]
    data = (FIELD.join(fields) + END).encode("utf-8", "replace")
    while data:
        data = data[os.write(descriptor, data) :]


UNITTEST_EVENTS = {
    "addSuccess": "PASSED",
    "addFailure": "FAILED",
    "addError": "ERROR",
    "addSkip": "SKIPPED",
    "addExpectedFailure": "XFAIL",
    "addUnexpectedSuccess": "FAILED",
}


def watch_unittest(results: type, descriptor: int) -> None:
    """Write what every result of that class, or of one made of it, is told."""

    def tell(test, status):
        name = test.id()
        where, _, method = name.rpartition(".")
        display_names = (f"{method} ({where})", f"{method} ({name})", test.shortDescription() or "")
        write_event(descriptor, name, status, tuple(filter(None, display_names)))

    def with_status(add, status):
        def add_with_status(result, test, *about):
            tell(test, status)
            return add(result, test, *about)

        return add_with_status

    for event, status in UNITTEST_EVENTS.items():
        setattr(results, event, with_status(getattr(results, event), status))
    add_subtest = results.addSubTest

    def add_failed_subtest(result, test, subtest, error):
        if error is not None:
            tell(test, "FAILED")
        add_subtest(result, test, subtest, error)

    results.addSubTest = add_failed_subtest


def run_pytest(plan: dict, descriptor: int) -> None:
    """pytest over the files."""
    import pytest

    words = [
        *plan["words"],
        "--rootdir",
        REPOSITORY,
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
    ]
    pytest.main([*words, *plan["files"]], plugins=[Reporter(descriptor)])


class Reporter:
    """Writes every phase of a test that says how the test ended."""

    def __init__(self, descriptor):
        self._descriptor = descriptor

    def pytest_runtest_logreport(self, report):
        status = status_of(report)
        if status:
            write_event(self._descriptor, report.nodeid, status)

    def pytest_collectreport(self, report):
        if report.failed:
            write_event(self._descriptor, report.nodeid, "ERROR")


def status_of(report):
    """As `pytest -rA` names it; nothing for a phase that says nothing of its own."""
    if report.failed:
        return "FAILED" if report.when == "call" else "ERROR"
    if report.skipped:
        return "XFAIL" if hasattr(report, "wasxfail") else "SKIPPED"
    if report.when == "call" and type(report).__name__ != "SubtestReport":
        return "PASSED"
    return None


def write_report(report: dict, secret: str) -> None:
    text = json.dumps(report)
    seal = hashlib.blake2b(text.encode(), key=secret.encode()).hexdigest()
    part = f"{REPORT}.part"
    with open(part, "w", encoding="ascii") as stream:
        json.dump({"seal": seal, "report": text}, stream)
    os.replace(part, REPORT)


if __name__ == "__main__":
    main()
