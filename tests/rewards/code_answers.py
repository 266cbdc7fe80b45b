"""What the tests of graded programs answer with, and the sandbox that they use."""

from rllm.errors import ConfigError
from rllm.sandbox.backends import require_backend


def backend_here() -> str:
    for name in ("bubblewrap", "unshare"):
        try:
            require_backend(name)
        except ConfigError:
            continue
        return name
    return ""


def fenced(code: str) -> str:
    return f"Here is my program:\n```python\n{code}\n```\nIt works."


ADD = "def add(a, b=0):\n    return a + b"
SUBTRACT = "def add(a, b=0):\n    return a - b"
