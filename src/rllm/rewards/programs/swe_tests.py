"""Runs hidden tests on a patch, in a world where nobody was before: runs inside, from /tests, which it reads.

    plan.json ──► patch ──► test files and what steers a test run as they were ──► hidden tests
                    ──► a tree whose tests have run already: nothing more is run
                    ──► pytest, unittest or Django's runner, in a process of its own ──┐
                    ──► another runner ──► its log ────────────────────────────────────┴─► report.json

The report is sealed with a secret that comes on stdin and that the tests' process reads before anything of
the patch is imported, and keeps in no variable; what a program prints, or writes in its place, has no seal.
Of a runner that is no Python program the secret stays here, and its log is sealed. Standard library alone,
but for pytest.
"""

import hashlib
import json
import os
import random
import re
import runpy
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


def main() -> None:
    with open(f"{TESTS}/plan.json", encoding="utf-8") as stream:
        plan = json.load(stream)
    os.chdir(REPOSITORY)
    # It names the hidden tests, so it is gone before anything of the patch runs.
    os.unlink(f"{TESTS}/plan.json")
    if len(sys.argv) > 1:
        # The hash is on the interpreter's stack alone until the tests have ended: a patch finds it neither
        # among the variables of its callers nor among the objects that `gc` lists. `json.dumps` is looked up
        # before the patch is imported as well.
        mac, text = keyed_hash(sys.stdin.readline().strip()), json.dumps(run(plan)).encode()
        mac.update(text)
        write_sealed(text.decode(), mac.hexdigest())
        sys.stdout.flush()
        os._exit(0)  # threads and exit functions of the patch are not waited for
    secret = sys.stdin.readline().strip()
    fault = prepare(plan)
    if fault:
        write_report({"fault": fault}, secret)
        return
    tree = "" if plan["known_trees"] is None else tree_hash()
    if tree and tree in plan["known_trees"]:
        write_report({"known_tree": tree}, secret)
        return
    if plan["runner"] == "pytest" and plan["hidden"]:
        plan["canary"] = place_canary(plan)
    elif plan["canary"]:
        write(plan["canary"]["path"], canary_text(plan["canary"]))
    if not plan["is_python"]:
        write_report({**run_command(plan["words"]), "tree": tree}, secret)
        return
    with open(f"{TESTS}/plan.json", "w", encoding="utf-8") as stream:
        parts = {name: plan[name] for name in ("runner", "words", "canary")}
        json.dump({**parts, "files": plan["run"], "tree": tree}, stream)
    command = [sys.executable, os.path.abspath(__file__), "run"]
    subprocess.run(command, input=f"{secret}\n", text=True, check=False)


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


def place_canary(plan: dict) -> str:
    """A test that must fail, beside one of the others and named like it: where it passes, pytest itself was
    changed."""
    draw = random.SystemRandom()
    folder, file = os.path.split(draw.choice(plan["run"] or ["test_.py"]))
    letters = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9)))
    name = "test_" + "_".join(filter(None, [file.removesuffix(".py").removeprefix("test_"), letters]))
    path = os.path.join(folder, f"{name}.py")
    low, high = draw.sample(range(100), 2)
    write(path, f"def {name}():\n    assert {low} == {high}\n")
    plan["run"].append(path)
    return f"{path}::{name}"


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


def run(plan: dict) -> dict:
    """A report of how every test ended. This process imports what was patched."""
    report = (run_pytest if plan["runner"] == "pytest" else run_unittest)(plan)
    return {**report, "tree": plan["tree"]}


def run_unittest(plan: dict) -> dict:
    """unittest, or a program that runs tests of unittest's as Django's does."""
    import unittest

    collector = UnittestCollector(plan["canary"] and plan["canary"]["name"])
    collector.watch(unittest.TestResult)
    first, *rest = plan["words"]
    sys.argv = [first, *rest]
    code = 0
    try:
        if first.endswith(".py"):
            sys.path.append(os.path.dirname(os.path.abspath(first)))
            runpy.run_path(first, run_name="__main__")
        else:
            runpy.run_module(first, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    report = {"code": code, "canary": collector.canary_status, "tests": collector.statuses}
    return {**report, "names": collector.names}


UNITTEST_EVENTS = {
    "addSuccess": "PASSED",
    "addFailure": "FAILED",
    "addError": "ERROR",
    "addSkip": "SKIPPED",
    "addExpectedFailure": "XFAIL",
    "addUnexpectedSuccess": "FAILED",
}


class UnittestCollector:
    """The status of every test, and the names that it goes by."""

    def __init__(self, canary):
        self.statuses = {}
        self.names = {}
        self.canary_status = ""
        self._canary = canary

    def watch(self, results):
        """See what every result of that class, or of one made of it, is told."""
        for event, status in UNITTEST_EVENTS.items():
            setattr(results, event, self._with_status(getattr(results, event), status))
        add_subtest = results.addSubTest

        def add_failed_subtest(result, test, subtest, error):
            if error is not None:
                self._add(test, "FAILED")
            add_subtest(result, test, subtest, error)

        results.addSubTest = add_failed_subtest

    def _with_status(self, add, status):
        def add_with_status(result, test, *about):
            self._add(test, status)
            return add(result, test, *about)

        return add_with_status

    def _add(self, test, status):
        name = test.id()
        if self._canary and name.endswith(f".test_{self._canary}"):
            self.canary_status = status
            return
        if self.statuses.get(name) not in ("FAILED", "ERROR"):
            self.statuses[name] = status
        where, _, method = name.rpartition(".")
        display_names = [f"{method} ({where})", f"{method} ({name})", test.shortDescription()]
        self.names[name] = [each for each in display_names if each]


def run_pytest(plan: dict) -> dict:
    """pytest over the files."""
    import pytest

    collector = Collector(plan["canary"])
    words = [
        *plan["words"],
        "--rootdir",
        REPOSITORY,
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
    ]
    code = pytest.main([*words, *plan["files"]], plugins=[collector])
    return {"code": int(code), "canary": collector.canary_status, "tests": collector.statuses}


class Collector:
    """The status of every test: the worst of its phases and subtests."""

    def __init__(self, canary):
        self.statuses = {}
        self.canary_status = ""
        self._canary = canary

    def pytest_runtest_logreport(self, report):
        status = status_of(report)
        if report.nodeid == self._canary:
            self.canary_status = status or self.canary_status
        elif status:
            status_before = self.statuses.get(report.nodeid)
            if status_before not in ("FAILED", "ERROR"):
                self.statuses[report.nodeid] = status

    def pytest_collectreport(self, report):
        if report.failed:
            self.statuses[report.nodeid] = "ERROR"


def status_of(report):
    """As `pytest -rA` names it; nothing for a phase that says nothing of its own."""
    if report.failed:
        return "FAILED" if report.when == "call" else "ERROR"
    if report.skipped:
        return "XFAIL" if hasattr(report, "wasxfail") else "SKIPPED"
    if report.when == "call" and type(report).__name__ != "SubtestReport":
        return "PASSED"
    return None


def keyed_hash(secret: str) -> "hashlib.blake2b":
    """The hash whose digest is a seal. Its type is fixed and its methods are C, so no patch replaces them."""
    return hashlib.blake2b(key=secret.encode())


def write_report(report: dict, secret: str) -> None:
    mac, text = keyed_hash(secret), json.dumps(report)
    mac.update(text.encode())
    write_sealed(text, mac.hexdigest())


def write_sealed(text: str, seal: str) -> None:
    part = f"{REPORT}.part"
    with open(part, "w", encoding="ascii") as stream:
        json.dump({"seal": seal, "report": text}, stream)
    os.replace(part, REPORT)


if __name__ == "__main__":
    main()
