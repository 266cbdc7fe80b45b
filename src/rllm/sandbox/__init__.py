"""Programs that nobody vouches for, run behind walls: see docs/sandbox.md."""

from rllm.sandbox.backends import BACKENDS, open_sandbox, require_backend
from rllm.sandbox.base import Sandbox
from rllm.sandbox.pool import SandboxPool
from rllm.sandbox.python_runner import PythonRunner, shared_runner
from rllm.sandbox.types import ExecResult, FileState, Limits, Root, Scope, Snapshot, Status

__all__ = [
    "BACKENDS",
    "ExecResult",
    "FileState",
    "Limits",
    "PythonRunner",
    "Root",
    "Sandbox",
    "SandboxPool",
    "Scope",
    "Snapshot",
    "Status",
    "open_sandbox",
    "require_backend",
    "shared_runner",
]
