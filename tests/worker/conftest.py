"""Makes `worker_files` importable: tests are imported by their paths, so what is beside them is not."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("worker_files", Path(__file__).parent / "worker_files.py")
assert _spec is not None
assert _spec.loader is not None
sys.modules["worker_files"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["worker_files"])
