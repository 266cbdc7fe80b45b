"""Makes `worker_files` importable, also in processes that tests start: tests are imported by their paths."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
