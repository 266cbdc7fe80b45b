"""Python programs at the price of a fork: warm interpreters that never run a program themselves.

    run(source) ──► an idle warden ──fork──► a cell: fresh namespaces, uid, files, limits ──► ExecResult
                     (one program at a time; as many wardens as `workers`)

Nothing of one program is there for the next: files, processes and memory go with the cell, and the warden
that forks it never saw what was in it.
"""

import atexit
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox.backends import require_backend
from rllm.sandbox.interpreter import Interpreter, interpreter
from rllm.sandbox.leftovers import Register
from rllm.sandbox.outcomes import exec_result
from rllm.sandbox.packages import package_names
from rllm.sandbox.process import Job, WardenDied, WardenProcess
from rllm.sandbox.types import DEFAULT_LIMITS, ExecResult, Limits


class PythonRunner:
    """Runs Python programs, each in a fresh sandbox. Any thread may call; `workers` run at one time.

    Programs see the standard library of `version`, their own `files` and `packages`, nothing else. `packages`
    are names of distributions that are installed where this runs: they and what they require are there to
    import, read-only. `python` is the path of another interpreter than the system's.
    """

    def __init__(
        self,
        backend: str = "bubblewrap",
        limits: Limits = DEFAULT_LIMITS,
        workers: int = 2,
        *,
        python: str | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        if workers < 1:
            raise ConfigError(f"`workers` is {workers}; a runner needs 1 or more.")
        if backend == "docker":
            raise ConfigError(
                "PythonRunner needs a backend that can fork: bubblewrap, unshare or subprocess. "
                'For docker use open_sandbox("docker").exec(["python3", ...]).'
            )
        require_backend(backend)
        self.backend = backend
        self.limits = limits
        self.packages = package_names(packages)
        self._path = python
        self._python = interpreter(python, self.packages)
        self._idle: list[tuple[Interpreter, WardenProcess | None]] = [(self._python, None)] * workers
        """Those that nobody uses, the longest idle first; one that is None is started when it is needed."""
        self._some_idle = threading.Condition()
        self._turns: deque[object] = deque()
        """The turns of the threads that wait for a worker, the first first: a thread that gives a worker back
        and takes one again at once would otherwise be faster than the one it woke, every time."""
        self._all: set[WardenProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def version(self) -> str:
        """The version of the Python that programs run on, such as "3.11.2"."""
        return self._python.version

    def warm(self) -> None:
        """Start all workers now instead of with the first programs."""
        with self._some_idle:
            self._idle = [(python, warden or self._start_warden(python)) for python, warden in self._idle]

    def run(
        self,
        source: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] = {},
        limits: Limits | None = None,
        wants_result: bool = False,
        packages: Sequence[str] | None = None,
    ) -> ExecResult:
        """Run `source` as a script would be. `files` are put beside it, by relative path.

        With `wants_result` the program finds in RLLM_RESULT_FD the number of a descriptor that is its own
        channel to the caller; what it writes there is `ExecResult.result`. `packages` are the runner's, or
        those of this program alone: a worker that has others is started anew. Raises SandboxError where the
        sandbox itself fails, twice; ConfigError for a file outside the working directory, or a package that
        is not there.
        """
        for path in files:
            if os.path.isabs(path) or os.path.normpath(path).startswith("..") or "\0" in path:
                raise ConfigError(f"File `{path}` is outside the program's directory; use a relative path.")
            if os.path.normpath(path) == "main.py":
                raise ConfigError("File `main.py` is the program itself; give the file another name.")
        limits = limits or self.limits
        job = Job(
            kind="python",
            payload={"source": source, "files": dict(files)},
            stdin=stdin.encode("utf-8", "surrogatepass"),
            limits=limits,
            output_bytes=limits.output_kb * 1024,
            wants_result=wants_result,
        )
        python = self._python if packages is None else interpreter(self._path, package_names(packages))
        warden = self._take_warden(python)
        try:
            if warden is None or not warden.is_alive:
                warden = self._replace_warden(warden, python)
            try:
                end = warden.run(job)
            except WardenDied:
                warden = self._replace_warden(warden, python)
                end = warden.run(job)
        except BaseException:
            if warden is not None:
                self._drop(warden)
            warden = None
            raise
        finally:
            with self._some_idle:
                # Also without a warden, because the number of entries is the number of workers.
                self._idle.append((python, warden))
                self._some_idle.notify_all()
        return exec_result(end, limits, wants_result=wants_result)

    def _take_warden(self, python: Interpreter) -> WardenProcess | None:
        """An idle worker with these packages; None in place of the longest idle one, where none has them."""
        turn = object()
        with self._some_idle:
            self._turns.append(turn)
            try:
                self._some_idle.wait_for(lambda: self._idle and self._turns[0] is turn)
            finally:
                self._turns.remove(turn)
                self._some_idle.notify_all()
            # `interpreter` is cached, so the same path and packages are the same object.
            mine = [place for place, (of, warden) in enumerate(self._idle) if of is python and warden]
            if mine:
                return self._idle.pop(mine[0])[1]
            places_without_one = [place for place, (_, warden) in enumerate(self._idle) if warden is None]
            _, other = self._idle.pop(places_without_one[0] if places_without_one else 0)
        if other is not None:
            self._drop(other)
        return None

    def _start_warden(self, python: Interpreter) -> WardenProcess:
        if self._closed:
            raise SandboxError("This PythonRunner is closed.")
        warden = WardenProcess(self.backend, python, keeps_files=False, disk_mb=self.limits.disk_mb)
        with self._lock:
            self._all.add(warden)
            # A `close` that came after the look above has not seen this warden.
            late = self._closed
        if late:
            warden.close()
            raise SandboxError("This PythonRunner is closed.")
        return warden

    def _replace_warden(self, warden: WardenProcess | None, python: Interpreter) -> WardenProcess:
        if warden is not None:
            self._drop(warden)
        return self._start_warden(python)

    def _drop(self, warden: WardenProcess) -> None:
        with self._lock:
            self._all.discard(warden)
        warden.close()

    def close(self) -> None:
        """End every worker, and with it what it is running. Closing twice is harmless."""
        with self._lock:
            self._closed = True
            wardens, self._all = list(self._all), set()
        for warden in wardens:
            warden.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_shared_runners: dict[tuple[int, str], PythonRunner] = {}
_shared_lock = threading.Lock()


def shared_runner(backend: str = "bubblewrap") -> PythonRunner:
    """The runner that everything in this process shares, one for each backend; closed when the process
    ends."""
    require_backend(backend)
    # Of this process: a forked one would talk to its parent's wardens over the same sockets.
    key = (os.getpid(), backend)
    with _shared_lock:
        if key not in _shared_runners:
            Register.of_this_process()  # first, so that it is closed last
            runner = PythonRunner(backend, workers=max(len(os.sched_getaffinity(0)), 1))
            atexit.register(runner.close)
            _shared_runners[key] = runner
        return _shared_runners[key]
