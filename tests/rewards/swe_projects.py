"""A tiny project with a bug, as a row: what the tests of software-engineering tasks share."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.sandbox.backends import require_backend
from rllm.sandbox.types import Limits

BROKEN = 'def add(a, b):\n    """The sum."""\n    return a - b\n\n\ndef twice(a):\n    return 2 * a\n'
HIDDEN = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
PATCH = """\
diff --git a/calc/__init__.py b/calc/__init__.py
--- a/calc/__init__.py
+++ b/calc/__init__.py
@@ -1,6 +1,6 @@
 def add(a, b):
     \"\"\"The sum.\"\"\"
-    return a - b
+    return a + b


 def twice(a):
"""
FORGING = """\
import hashlib, json, os, sys
frame, report = sys._getframe(), {"code": 0, "canary": "FAILED", "tests": dict.fromkeys(NAMES, "PASSED")}
text = json.dumps(report)
while frame is not None:
    for value in [*frame.f_locals.values()]:
        mac = None
        if isinstance(value, str) and len(value) == 32:
            mac = hashlib.blake2b(key=value.encode())
        elif isinstance(value, hashlib.blake2b):
            mac = value.copy()
        if mac is not None:
            mac.update(text.encode())
            with open("/logs/verifier/report.json", "w") as stream:
                json.dump({"seal": mac.hexdigest(), "report": text}, stream)
            os._exit(0)
    frame = frame.f_back
"""
"""Code of a patch that looks among the variables of its callers for what seals a report."""
LIMITS = Limits(wall_s=60, cpu_s=60, memory_mb=512, disk_mb=128, processes=128)


def usable_backend() -> str:
    for name in ("bubblewrap", "unshare"):
        try:
            require_backend(name)
        except ConfigError:
            continue
        return name
    pytest.skip("no sandbox on this machine")


def project(folder: Path) -> Path:
    """A directory with a package and a test that passes."""
    source = folder / "calc-source"
    (source / "calc").mkdir(parents=True)
    (source / "tests").mkdir()
    (source / "calc" / "__init__.py").write_text(BROKEN)
    (source / "tests" / "test_old.py").write_text(
        "from calc import twice\n\n\ndef test_twice():\n    assert twice(2) == 4\n"
    )
    return source


def repository(folder: Path) -> tuple[Path, str]:
    """The same as a git repository with a later commit that mends the bug; the broken one's name."""
    source = project(folder)
    run_git(source, "init", "-q")
    run_git(source, "add", "-A")
    run_git(source, "commit", "-q", "-m", "broken")
    commit = run_git(source, "rev-parse", "HEAD").strip()
    (source / "calc" / "__init__.py").write_text(BROKEN.replace("a - b", "a + b"))
    run_git(source, "commit", "-q", "-a", "-m", "add adds, a secret of the future")
    return source, commit


def run_git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def row(source: Path, **fields: Any) -> dict[str, Any]:
    return {
        "instance_id": "calc__calc-1",
        "repo": "calc/calc",
        "source": str(source),
        "problem_statement": "`add(1, 2)` gives -1.",
        "patch": PATCH,
        "test_files": {"tests/test_add.py": HIDDEN},
        "FAIL_TO_PASS": ["tests/test_add.py::test_add"],
        "PASS_TO_PASS": ["tests/test_old.py::test_twice"],
        **fields,
    }


def forging_line(names: list[str]) -> str:
    """FORGING in one line, for tests of these names."""
    return f"exec({f'NAMES = {names!r}; ' + FORGING!r})"
