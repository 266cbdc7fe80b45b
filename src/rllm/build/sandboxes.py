"""One Python program behind walls, the walls that this machine has, and what killed owners left."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rllm.errors import ConfigError, RllmError
from rllm.sandbox import ExecResult, Limits, PythonRunner, open_sandbox, require_backend
from rllm.sandbox.docker import reap_containers
from rllm.sandbox.docker_api import engine
from rllm.sandbox.leftovers import reap
from rllm.sandbox.types import DEFAULT_LIMITS


def default_limits() -> dict[str, Any]:
    return asdict(DEFAULT_LIMITS)


@dataclass(kw_only=True, slots=True, frozen=True)
class ProgramRun:
    """A program, what it may read and import, and the walls around it."""

    source: str
    stdin: str
    backend: str
    limits: Mapping[str, Any]
    packages: Sequence[str] = ()
    image: str | None = None
    allow_root: bool = False

    def require_usable(self) -> None:
        """Raises ConfigError for limits that are none, and for a backend that is not here or does not honour
        the options."""
        Limits(**self.limits)
        require_backend(self.backend)
        if self.image is not None and self.backend != "docker":
            raise ConfigError(
                f"`--image` is for docker; `{self.backend}` shows this machine's own system, read-only."
            )
        if self.backend == "subprocess":
            if os.geteuid() == 0 and not self.allow_root:
                raise ConfigError(
                    "The backend `subprocess` has no walls, and you are root: the program could do anything "
                    "to this machine. Use bubblewrap or unshare, run as another user, or add --allow-root on "
                    "a machine that may be lost."
                )
        elif self.allow_root:
            raise ConfigError(
                f"`--allow-root` is for subprocess; `{self.backend}` has walls and needs no leave."
            )

    def run(self) -> ExecResult:
        limits = Limits(**self.limits)
        if self.backend != "docker":
            with PythonRunner(self.backend, limits, workers=1, packages=self.packages) as runner:
                return runner.run(self.source, stdin=self.stdin)
        with open_sandbox(self.backend, limits=limits, image=self.image, packages=self.packages) as sandbox:
            sandbox.write("main.py", self.source)
            return sandbox.exec(["python3", "-s", "-B", "main.py"], stdin=self.stdin)


def why_unusable(backend: str) -> str | None:
    """The reason that a backend does not work on this machine; None where it does: it is started once."""
    try:
        open_sandbox(backend).close()
    except RllmError as error:
        return str(error)
    return None


def remove_leftovers() -> int:
    """Remove what owners left that were killed; how many processes, directories and containers."""
    num_removed = reap()
    with contextlib.suppress(ConfigError):  # no engine, so no containers
        num_removed += reap_containers(engine())
    return num_removed
