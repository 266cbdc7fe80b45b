"""A shell in a sandbox of its own: files, the directory and exported variables stay from call to call.

    shell(command) ──► one process per call ──► output, exit code
                          └── at its end it says where it is and what it exports: the next begins there

Nothing runs on behind a call: what it leaves in the background is ended with it.
"""

import secrets
import shlex
import threading

from rllm.sandbox import ExecResult, Limits, Sandbox, Status, open_sandbox
from rllm.tools.base import Tool, ToolError, ToolOutput
from rllm.tools.python import DEFAULT_LIMITS, ending
from rllm.tools.walls import require_walls

MAX_COMMAND_CHARS = 100_000
_MAX_STATE_CHARS = 32_768
"""The size of exported variables that are carried on."""
_NOT_CARRIED = frozenset({"PWD", "OLDPWD", "SHLVL", "_", "LINES", "COLUMNS"})


class Shell(Tool):
    """`shell(command)`: runs a command line. Each rollout wants its own; close it. Calls take turns."""

    name = "shell"

    def __init__(
        self,
        backend: str = "bubblewrap",
        *,
        sandbox: Sandbox | None = None,
        limits: Limits = DEFAULT_LIMITS,
        allow_root: bool = False,
    ) -> None:
        """Runs in `sandbox`, which stays the caller's to close, or in one that is opened with the first call.

        Raises ConfigError where the backend is not there, and where `subprocess`, which has no walls, would
        run commands as root without `allow_root`.
        """
        if sandbox is None:
            require_walls(self.name, backend, allow_root=allow_root)
        self._backend = backend
        self._sandbox = sandbox
        self._is_own = sandbox is None
        self._limits = limits
        self._turn = threading.Lock()
        self._directory = ""
        self._exported: dict[str, str] = {}
        super().__init__(timeout_s=2 * limits.wall_s + 60.0)  # the sandbox is the one to stop it

    def forward(self, command: str) -> ToolOutput:
        """Run a shell command. Files, the working directory and exported variables stay for the next call.

        Args:
            command: One or more lines for the shell. Nothing can be typed into it while it runs.
        """
        if not command.strip() or "\0" in command:
            raise ToolError("`command` is empty; write a command line.")
        if len(command) > MAX_COMMAND_CHARS:
            raise ToolError(
                f"The command has {len(command):,} characters; at most {MAX_COMMAND_CHARS:,} are run. "
                "Write long text into a file piece by piece."
            )
        with self._turn:
            return self._run(command)

    @property
    def sandbox(self) -> Sandbox:
        """The shell's sandbox, for whoever grades what is in it."""
        if self._sandbox is None:
            self._sandbox = open_sandbox(self._backend, limits=self._limits)
        return self._sandbox

    def close(self) -> None:
        if self._is_own and self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def _run(self, command: str) -> ToolOutput:
        # Drawn for each call, so that no output of a command passes for its end.
        mark = f"[{secrets.token_hex(12)}]"
        go = f"cd -- {shlex.quote(self._directory)} 2>/dev/null || cd\n" if self._directory else ""
        script = f"exec 2>&1\ntrap {shlex.quote(_END.format(mark=mark))} EXIT\n{go}{command}\n"
        result = self.sandbox.exec(["sh", "-c", _BASH, "sh", script], env=self._exported, limits=self._limits)
        text, mark_in_output, state = result.stdout.rpartition(mark)
        if mark_in_output:
            self._keep(state)
        else:
            text = result.stdout
        return self._output(result, text.rstrip("\n"))

    def _keep(self, state: str) -> None:
        directory, *variables = state.split("\0")
        if not directory.startswith("/") or len(state) > _MAX_STATE_CHARS:
            return
        self._directory = directory
        pairs = [each.partition("=") for each in variables if each]
        self._exported = {name: value for name, _, value in pairs if name not in _NOT_CARRIED}

    def _output(self, result: ExecResult, output_text: str) -> ToolOutput:
        metadata = {"status": result.status.value, "exit_code": result.exit_code, "wall_s": result.wall_s}
        if result.status is Status.OK:
            return ToolOutput(name=self.name, output=output_text or "(no output)", metadata=metadata)
        if result.status is Status.ERROR:
            text = f"{output_text}\n[exit code {result.exit_code}]".lstrip("\n")
            return ToolOutput(name=self.name, output=text, metadata=metadata)
        reason = ending(result, self._limits)
        return ToolOutput(name=self.name, output=output_text or None, error=reason, metadata=metadata)


_BASH = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'
_END = "printf '%s' '{mark}'; pwd | tr '\\n' '\\0'; env -0"
"""The last command of a shell."""
