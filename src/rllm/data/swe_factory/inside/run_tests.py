"""Runs a project's tests again and again behind the walls of a sandbox, each time with other files.

    plan.json ──► job ── fork ──► its files written, tests run ──► one line of results.jsonl
                   ▲                                                  │
                   └────────── every file as it was before ◄──────────┘

It is one file that imports nothing of rLLM: it is copied into the sandbox and runs on the interpreter there.
A job is a process of its own with limits of its own, so that what a bug loops, eats or breaks ends with it.
pytest, which runs the suites of unittest as well, is imported once, before the first fork.
"""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
import traceback

MOST_CALLS = 400
"""Recorded of one test; later ones are not looked at."""
MOST_CHARS = 240
"""The length of one value that is written out."""
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Book:
    """The facts about the tests of one job."""

    def __init__(self, plan, job):
        self.root = os.path.realpath(plan["root"])
        self.sources = {os.path.join(self.root, each) for each in plan["sources"]}
        self.tests = {os.path.join(self.root, each) for each in plan["test_files"]}
        self.trace = job["trace"]
        self.outcomes = {}
        self.failures = {}
        self.errors = {}
        self.random = []
        self.lines = {}
        self.calls = {}
        self.cpu_s = {}
        self.comparison = None
        self._places = {}
        self._all_lines = {}
        self._here = {}
        self._record = []
        self._generators = {}
        self._began = 0.0
        self._quiet = False

    # ---- tests ----

    def begin(self, name):
        self._here, self._record, self.comparison = {}, [], None
        self._began = time.process_time()

    def end(self, name):
        self.cpu_s[name] = round(time.process_time() - self._began, 3)
        if self.trace == "lines":
            self.lines[name] = self._lines_here()
        elif self.trace == "calls":
            self.calls[name] = self._record
        self._here, self._record, self._generators = {}, [], {}

    def outcome(self, name, status):
        """The worst of what is reported of a test counts."""
        order = ("passed", "skipped", "failed")
        before = self.outcomes.get(name, "passed")
        self.outcomes[name] = max(before, status, key=order.index)

    def failure(self, name, kind, value, trace):
        if name in self.failures:
            return
        frames = [each.f_code.co_filename for each, _ in traceback.walk_tb(trace)]
        last = os.path.realpath(frames[-1]) if frames else ""
        line = traceback.format_exception_only(kind, value)
        where = "source" if last in self.sources else "test" if last in self.tests else "elsewhere"
        self.failures[name] = {
            "kind": kind.__name__,
            "where": where,
            "line": ADDRESS.sub("", "".join(line).strip().split("\n")[0])[: 2 * MOST_CHARS],
            "comparison": self.comparison if issubclass(kind, AssertionError) else None,
        }

    def _lines_here(self):
        lines_by_path = {}
        for code, lines in self._here.items():
            lines_by_path.setdefault(self._places[code], set()).update(lines)
        return {path: sorted(lines) for path, lines in lines_by_path.items()}

    # ---- traces ----

    def start_tracing(self):
        tracer = {"lines": self._enter_lines, "calls": self._enter_call}.get(self.trace)
        if tracer is not None:
            threading.settrace(tracer)
            sys.settrace(tracer)

    def _place(self, code):
        """The path of a source, relative to the project; None for all other code."""
        try:
            return self._places[code]
        except KeyError:
            path = os.path.realpath(code.co_filename)
            place = os.path.relpath(path, self.root) if path in self.sources else None
            self._places[code] = place
            return place

    def _enter_lines(self, frame, event, arg):
        code = frame.f_code
        if self._place(code) is None:
            return None
        lines = self._here.get(code)
        if lines is None:
            lines = self._here[code] = set()
        every = self._all_lines.get(code)
        if every is None:
            every = self._all_lines[code] = {line for _, _, line in code.co_lines() if line}
        # All its lines are known. Further calls need no trace, which is the expensive part.
        if len(lines) >= len(every):
            return None
        lines.add(frame.f_lineno)

        def step(frame, event, arg):
            lines.add(frame.f_lineno)
            return step

        return step

    def _enter_call(self, frame, event, arg):
        """Calls from outside of the project's sources into them. A generator that goes on is no new call."""
        if frame in self._generators:
            return self._generators[frame]
        if self._quiet or len(self._record) >= MOST_CALLS or self._place(frame.f_code) is None:
            return None
        code = frame.f_code
        caller = frame.f_back
        if caller is None or self._place(caller.f_code) is not None or code.co_name.startswith("<"):
            return None
        call = {
            "function": getattr(code, "co_qualname", code.co_name),
            "file": self._place(code),
            "line": code.co_firstlineno,
            "arguments": self._arguments(frame),
        }
        self._record.append(call)
        is_generator = bool(code.co_flags & 0x20)
        exception = [None]

        def step(frame, event, arg):
            frame.f_trace_lines = False
            if event == "exception":
                exception[0] = arg
            elif event == "return":
                if exception[0] is not None and arg is None:
                    kind, value = exception[0][0], exception[0][1]
                    call["raises"] = self._shown_error(kind, value)
                elif is_generator:
                    if arg is not None:
                        call.setdefault("yields", []).append(self._text_of(arg))
                else:
                    call["returns"] = self._text_of(arg)
                exception[0] = None
            return step

        frame.f_trace_lines = False
        if is_generator:
            self._generators[frame] = step
        return step

    def _arguments(self, frame):
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        defaults = self._defaults(frame)
        arguments = []
        for name in code.co_varnames[:count]:
            value = frame.f_locals.get(name)
            if name not in defaults or defaults[name] is not value:
                arguments.append([name, self._text_of(value)])
        place = count
        for flag, stars in ((0x04, "*"), (0x08, "**")):
            if code.co_flags & flag:
                name = code.co_varnames[place]
                place += 1
                value = frame.f_locals.get(name)
                if value:
                    arguments.append([stars + name, self._text_of(value)])
        return arguments

    def _defaults(self, frame):
        """Default values by name, where the function of a frame can be reached by its name."""
        code = frame.f_code
        parts = getattr(code, "co_qualname", code.co_name).split(".")
        function = frame.f_globals.get(parts[0])
        for part in parts[1:]:
            function = vars(function).get(part) if isinstance(function, type) else None
        function = getattr(function, "__func__", function)
        if function is None or getattr(function, "__code__", None) is not code:
            return {}
        values = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
        return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}

    def _text_of(self, value):
        """A value as text. Its own code may run for that, untraced."""
        self._quiet = True
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            text = repr(value)
        except Exception as error:  # noqa: BLE001  it is the project's code
            text = "<" + type(value).__name__ + " whose repr raises " + type(error).__name__ + ">"
        finally:
            sys.settrace(tracer)
            self._quiet = False
        text = ADDRESS.sub("", text)
        return text if len(text) <= MOST_CHARS else text[:MOST_CHARS] + "…"

    def _shown_error(self, kind, value):
        self._quiet = True
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            line = "".join(traceback.format_exception_only(kind, value)).strip().split("\n")[-1]
        except Exception:  # noqa: BLE001  it is the project's code
            line = getattr(kind, "__name__", str(kind))
        finally:
            sys.settrace(tracer)
            self._quiet = False
        return ADDRESS.sub("", line)[:MOST_CHARS]

    def results(self):
        return {
            "outcomes": self.outcomes,
            "failures": self.failures,
            "errors": self.errors,
            "random": sorted(set(self.random)),
            "lines": self.lines,
            "calls": self.calls,
            "cpu_s": self.cpu_s,
        }


def run_pytest(book, plan, job):
    import pytest

    tests = None if job["tests"] is None else set(job["tests"])

    class Plugin:
        def pytest_collection_modifyitems(self, config, items):
            if tests is not None:
                items[:] = [each for each in items if each.nodeid in tests]
            if job["reverse"]:
                items.reverse()

        def pytest_collectreport(self, report):
            if report.failed:
                lines = [each for each in str(report.longrepr).split("\n") if each.startswith("E  ")]
                last = lines[-1][1:].strip() if lines else str(report.longrepr).strip().split("\n")[-1]
                book.errors[report.nodeid] = last[: 2 * MOST_CHARS]

        def pytest_collection_finish(self, session):
            book.start_tracing()

        def pytest_runtest_logstart(self, nodeid, location):
            book.begin(nodeid)

        def pytest_runtest_logfinish(self, nodeid, location):
            book.end(nodeid)

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(self, item, call):
            yield  # pytest puts the exception of a unittest case into `call` only there
            if call.excinfo is not None and not isinstance(call.excinfo.value, pytest.skip.Exception):
                book.failure(item.nodeid, call.excinfo.type, call.excinfo.value, call.excinfo.tb)
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                book.random.append(item.nodeid)

        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                status = "skipped" if hasattr(report, "wasxfail") else report.outcome
                book.outcome(report.nodeid, status)

        def pytest_assertrepr_compare(self, config, op, left, right):
            book.comparison = [op, book._text_of(left), book._text_of(right)]

    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist", "--tb=short"]
    arguments += ["--continue-on-collection-errors", *plan["options"]]
    arguments += ["--collect-only"] * bool(job.get("compiles"))
    files = plan["test_files"]
    if tests is not None:
        files_of_tests = {each.split("::")[0] for each in tests}
        files = [each for each in files if each in files_of_tests]
    code = pytest.main([*arguments, *files], plugins=[Plugin()])
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise RunnerError(code.name)


class RunnerError(Exception):
    """pytest itself gave up: its options, its plug-ins, a conftest.py. Its output says why."""


# ---- jobs --------------------------------------------------------------------------------------------------


class Tree:
    """The project's files, which are put back after every job."""

    def __init__(self, root, pristine):
        self.root, self.pristine = root, pristine
        self._num_writes = 0
        if not os.path.isdir(pristine):
            shutil.copytree(root, pristine, symlinks=True)
        self.before = self._files()

    def _files(self):
        facts = {}
        for folder, folders, names in os.walk(self.root):
            folders[:] = [each for each in folders if each != "__pycache__"]
            for name in names:
                path = os.path.join(folder, name)
                about = os.lstat(path)
                facts[os.path.relpath(path, self.root)] = (about.st_size, about.st_mtime_ns, about.st_mode)
        return facts

    def write(self, files):
        for path, text in files.items():
            target = os.path.join(self.root, path)
            if text is None:
                if os.path.lexists(target):
                    os.unlink(target)
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "w", encoding="utf-8", newline="") as stream:
                stream.write(text)
            # another time than any compiled file was made for: those know a source by its time and size
            self._num_writes += 1
            os.utime(target, (self._num_writes, self._num_writes))

    def put_back(self):
        now = self._files()
        for path in now.keys() - self.before.keys():
            os.unlink(os.path.join(self.root, path))
        for path, about in self.before.items():
            if now.get(path) != about:
                target = os.path.join(self.root, path)
                if os.path.lexists(target):
                    os.unlink(target)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy2(os.path.join(self.pristine, path), target, follow_symlinks=False)


def child(plan, job, out):
    """One job in a process of its own: never returns."""
    os.setsid()
    bytes_ = job["memory_mb"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))
    sys.dont_write_bytecode = not job.get("compiles")
    if sys.dont_write_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # of what the tests start
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(out + ".log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for descriptor, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.chdir(plan["root"])
    sys.path[:0] = [os.path.join(plan["root"], each) for each in plan["paths"]]
    sys.argv[:] = ["tests"]
    book = Book(plan, job)
    owner = os.getpid()

    def over(number, frame):
        # A process that a test has forked has this handler too, and must not write the result.
        if os.getpid() == owner:
            finish({"why": "timeout"})
        os._exit(1)

    def finish(results):
        sys.settrace(None)
        with open(out + ".tmp", "w", encoding="utf-8") as stream:
            json.dump(results, stream)
        os.replace(out + ".tmp", out)
        os._exit(0)

    signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, job["cpu_s"])
    try:
        run_pytest(book, plan, job)
        results = {"why": "", **book.results()}
    except MemoryError:
        results = {"why": "out_of_memory"}
    except RunnerError as error:
        results = {"why": "runner_failed", "line": f"pytest: {error}: {last_error(out + '.log')}"}
    except BaseException as error:  # noqa: BLE001  written down for who waits outside
        line = "".join(traceback.format_exception_only(type(error), error)).strip()
        results = {"why": "runner_failed", "line": line[:480]}
    signal.setitimer(signal.ITIMER_PROF, 0)
    finish(results)


COMPILE = {"name": "compile", "files": {}, "tests": None, "trace": "", "reverse": False, "compiles": True}


def run_job(plan, job, tree, folder):
    out = os.path.join(folder, "out.json")
    temporary = os.path.join(folder, "tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    for path in (out, out + ".tmp"):
        if os.path.exists(path):
            os.unlink(path)
    os.environ["TMPDIR"] = temporary
    tree.write(job["files"])
    process = os.fork()
    if process == 0:
        try:
            child(plan, job, out)
        finally:
            os._exit(1)
    status = wait_for(process, job["wall_s"])
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and all it started
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    tree.put_back()
    if os.path.exists(out):
        with open(out, encoding="utf-8") as stream:
            return json.load(stream)
    if status is None:
        return {"why": "timeout"}
    return {"why": "crashed", "line": last_error(out + ".log")}


def wait_for(process, seconds):
    """The exit status of a process; None where it has not ended after so many seconds.

    Those in which it was ready and had no processor do not count: a busy machine says nothing of a bug.
    """
    began = time.monotonic()
    deadline = began + seconds
    while True:
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() >= deadline:
            deadline = began + seconds + seconds_without_processor(process)
            if time.monotonic() >= deadline:
                return None
        time.sleep(0.01)


def seconds_without_processor(process):
    """Linux counts them for the first thread of a process, in nanoseconds; a kernel may be built without."""
    try:
        with open(f"/proc/{process}/schedstat", encoding="utf-8") as stream:
            return int(stream.read().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


def last_error(log):
    """The line of an output that says most about why it ended."""
    sys.stdout.flush()
    with open(log, encoding="utf-8", errors="replace") as stream:
        lines = [each for each in stream.read()[-20_000:].split("\n") if each.strip()]
    errors = [each for each in lines if each.startswith("ERROR") or "Error: " in each]
    return (errors or lines or ["no message"])[-1].strip()[: 2 * MOST_CHARS]


def warm_up(folder):
    """Import pytest and its plug-ins once, for all jobs: a session over an empty directory does."""
    import pytest

    empty = os.path.join(folder, "empty")
    os.makedirs(empty, exist_ok=True)
    stdout = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    before = os.getcwd()
    os.chdir(empty)
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", empty, empty])
    os.chdir(before)
    os.dup2(stdout, 1)


def main():
    with open(sys.argv[1], encoding="utf-8") as stream:
        plan = json.load(stream)
    folder = plan["folder"]
    warm_up(folder)
    tree = Tree(plan["root"], os.path.join(folder, "pristine"))
    mark = os.path.join(folder, "compiled")
    if not os.path.exists(mark):
        # of the project as it is, once for all jobs: else each would compile, and rewrite the asserts of, all
        limits = {name: plan["jobs"][0][name] for name in ("cpu_s", "wall_s", "memory_mb")}
        run_job(plan, {**COMPILE, **limits}, tree, folder)
        os.mkdir(mark)
    with open(os.path.join(folder, "results.jsonl"), "w", encoding="utf-8") as stream:
        for job in plan["jobs"]:
            stream.write(json.dumps({"name": job["name"], **run_job(plan, job, tree, folder)}) + "\n")
            stream.flush()


if __name__ == "__main__":
    main()
