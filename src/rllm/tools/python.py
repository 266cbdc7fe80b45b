"""Python that a model writes, run in a sandbox.

    python(code) ──► PythonRunner: fresh, isolated, limited ──► what it printed, the last value, the traceback

In a session, what earlier calls defined is there: they are run again before each new call, unseen. Random
numbers begin alike each time, so that they come out alike.
"""

import threading
from collections.abc import Sequence

from rllm.errors import ConfigError
from rllm.sandbox import ExecResult, Limits, PythonRunner, Status, shared_runner
from rllm.sandbox.interpreter import interpreter
from rllm.sandbox.packages import package_names
from rllm.tools.base import Tool, ToolError, ToolOutput
from rllm.tools.cells import program_of
from rllm.tools.walls import require_walls

MAX_CODE_CHARS = 100_000
"""The length of one call's code, and of that of all calls of a session together."""

DEFAULT_LIMITS = Limits()


class PythonInterpreter(Tool):
    """`python(code)`: runs the code and says what it printed.

    Safe from several threads; calls of one session take turns.
    """

    name = "python"

    def __init__(
        self,
        backend: str = "bubblewrap",
        *,
        session: bool = False,
        limits: Limits = DEFAULT_LIMITS,
        packages: Sequence[str] = (),
        runner: PythonRunner | None = None,
        allow_root: bool = False,
    ) -> None:
        """`session`: definitions stay from call to call of this tool, so give each rollout its own.

        `packages` are distributions installed here that the code may import, beside the standard library.
        `runner` is the caller's to close, and brings its own packages; without it the process's shared one
        for `backend` is used. Raises ConfigError where the backend or a package is not there, and where
        `subprocess`, which has no walls, would run code as root without `allow_root`.
        """
        if runner is None:
            require_walls(self.name, backend, allow_root=allow_root)
            interpreter(packages=package_names(packages))  # says what is not installed before anything is run
        elif packages:
            raise ConfigError("Both `runner` and `packages` are given; give the packages to the runner.")
        if backend == "docker" and runner is None:
            raise ConfigError("The tool `python` has no docker backend; use bubblewrap or unshare.")
        self._backend = backend
        self._runner = runner
        self._limits = limits
        self._packages = package_names(packages) if runner is None else runner.packages
        self._cells: list[str] | None = [] if session else None
        self._turn = threading.Lock()
        self.description = _environment_text(self._packages, session=session)
        super().__init__(timeout_s=2 * limits.wall_s + 60.0)  # the sandbox is the one to stop it

    def forward(self, code: str) -> ToolOutput:
        """Run Python code.

        Args:
            code: A whole program; print what you want to see. The value of a last expression is shown too.
        """
        code = without_fence(code)
        if not code.strip():
            raise ToolError("`code` is empty; write a program.")
        if self._cells is None:
            return self._output(self._run([], code))
        with self._turn:
            result = self._run(self._cells, code)
            if result.result and result.status in (Status.OK, Status.ERROR):
                self._cells.append(code)
        return self._output(result)

    def _run(self, cells: list[str], code: str) -> ExecResult:
        length = len(code) + sum(map(len, cells))
        if length > MAX_CODE_CHARS:
            of = "The session's calls have together" if cells else "The code has"
            raise ToolError(f"{of} {length:,} characters; at most {MAX_CODE_CHARS:,} are run.")
        runner = self._runner or shared_runner(self._backend)
        source = program_of(cells, code)
        return runner.run(source, limits=self._limits, wants_result=True, packages=self._packages)

    def _output(self, result: ExecResult) -> ToolOutput:
        return output_of(self.name, result, self._limits)


def _environment_text(packages: Sequence[str], *, session: bool) -> str:
    """The description of the tool for the model."""
    library = f"the standard library and {', '.join(packages)}" if packages else "the standard library"
    if session:
        return f"Run Python code with {library}. What you define stays for the next call."
    return f"Run Python code in a fresh interpreter with {library}: nothing stays for the next call."


def without_fence(code: str) -> str:
    """Code that stands in a Markdown fence, without it."""
    lines = code.strip().split("\n")
    if len(lines) >= 2 and lines[0].strip() in ("```", "```python", "```py") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1])
    return code


def output_of(name: str, result: ExecResult, limits: Limits) -> ToolOutput:
    """The output and the end of a program, in words for the model."""
    metadata = {"status": result.status.value, "exit_code": result.exit_code, "wall_s": result.wall_s}
    stdout = result.stdout.rstrip("\n")
    stderr = result.stderr.strip("\n")
    if result.truncated and result.status is not Status.OUTPUT_LIMIT:
        stdout += f"\n[output beyond {limits.output_kb} KiB left out]"
    if result.status is Status.OK:
        text = "\n".join(part for part in (stdout, stderr) if part)
        return ToolOutput(name=name, output=text or "(no output)", metadata=metadata)
    reason = ending(result, limits)
    error = f"{stderr}\n{reason}" if stderr and reason else stderr or reason
    return ToolOutput(name=name, output=stdout or None, error=error, metadata=metadata)


def ending(result: ExecResult, limits: Limits) -> str:
    """The reason that a program was stopped, or its death; nothing where its own words say enough."""
    match result.status:
        case Status.TIMEOUT:
            return f"Stopped: it ran longer than {limits.wall_s:g} s, or computed for {limits.cpu_s:g} s."
        case Status.OUT_OF_MEMORY:
            return f"Stopped: it needed more than {limits.memory_mb} MiB of memory."
        case Status.OUTPUT_LIMIT:
            return f"Stopped: it wrote more than {limits.output_kb} KiB."
        case Status.KILLED | Status.CRASHED:
            return f"It died: exit code {result.exit_code}."
        case _:
            return "" if result.stderr.strip() else f"It ended with exit code {result.exit_code}."
